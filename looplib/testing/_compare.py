"""Comparison of results leaf by leaf, with the names that users know.

Numbers are compared bit by bit, or up to a fraction of the largest one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from looplib._core import trees
from looplib.testing._report import kind_of
from looplib.types import DonatedStateError, TrainState


def leaves(tree: Any, root: str = "") -> Iterator[tuple[str, Any]]:
    """Leaves of a tree by name: `params['0.weight']`, `metrics['loss'].total`."""
    return ((trees.named(path, root), leaf) for path, leaf in trees.leaves(tree))


def recorded(result: Any, root: str = "") -> dict[str, Any]:
    """Leaves by name, with copies of the tensors, which later calls cannot overwrite."""
    match result:
        case (TrainState() as state, metrics) if not root:
            return {**recorded(metrics, "metrics"), **recorded(state, "state")}
    return {name: copied_leaf(leaf) for name, leaf in leaves(result, root or "output")}


def copied(batch: Any) -> Any:
    """Copy a batch, including its tensors and arrays."""
    return trees.map_leaves(copied_leaf, batch)


def copied_leaf(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return leaf.detach().clone()
    return leaf.copy() if hasattr(leaf, "copy") and hasattr(leaf, "shape") else leaf


def is_spent(state: TrainState) -> bool:
    """True if a state was donated to a step."""
    try:
        list(leaves(state))
    except DonatedStateError:
        return True
    return False


def same(one: Any, other: Any, margin: float = 0.0) -> bool:
    """True if two leaves are equal bit by bit, or are floats within a margin. NaN equals NaN."""
    if type(one) is type(other) is float:
        one, other = torch.tensor([one, other], dtype=torch.float64)
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return trees.same_kind(one, other) and (torch.equal(one, other) or not bool(beyond(one, other, margin).any()))
    if type(one) is type(other) and type(one).__eq__ is object.__eq__:  # type: ignore[comparison-overlap]
        return _plain_attributes(one) == _plain_attributes(other)  # objects without a definition of equality
    return trees.same(one, other)


def _plain_attributes(thing: Any) -> dict[str, Any]:
    values = getattr(thing, "__dict__", {})
    return {name: value for name, value in values.items() if isinstance(value, (bool, int, float, str))}


def differences(one: Mapping[str, Any], other: Mapping[str, Any], tolerance: float = 0.0) -> list[str]:
    """Leaves that differ, in words. Floats may differ by a fraction of the largest number of all."""
    margin = tolerance * max(map(_largest, one.values()), default=0.0) if tolerance else 0.0
    pairs = trees.paired(one.items(), other.items())
    return [f"{name}: {_difference(leaf, now)}" for name, leaf, now in pairs if not same(leaf, now, margin)]


def _difference(one: Any, other: Any) -> str:
    if one is trees.MISSING:
        return "is new"
    if other is trees.MISSING:
        return "is no longer there"
    kinds = kind_of(one), kind_of(other)
    if kinds[0] != kinds[1]:
        return f"{kinds[0]}, then {kinds[1]}"
    return _difference_of_numbers(one, other) if isinstance(one, Tensor) else f"{one!r}, then {other!r}"


def _difference_of_numbers(one: Tensor, other: Tensor) -> str:
    one, other = one.detach(), other.detach()
    if one.numel() == 1:
        return f"{one.item():.9g}, then {other.item():.9g}"
    differing = beyond(one, other, 0.0)
    gap = (other.double() - one.double()).abs() if not one.is_complex() else (other - one).abs()
    return f"{int(differing.sum())} of {one.numel()} numbers differ, by {float(gap[differing].max()):.3g} at most"


def _largest(leaf: Any) -> float:
    """Largest finite number of a floating-point tensor; 0 for anything else."""
    if not isinstance(leaf, Tensor) or not leaf.is_floating_point():
        return 0.0
    finite = leaf.detach()[leaf.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0


def gaps(expected: Mapping[str, Tensor], actual: Mapping[str, Tensor]) -> dict[str, float]:
    """Largest difference of the numbers of each tensor, infinite for one that is missing; none for empty tensors."""
    return {
        name: float((actual[name].to(tensor.dtype) - tensor).abs().max()) if name in actual else math.inf
        for name, tensor in expected.items()
        if tensor.numel()
    }


def above(limit: float, gaps: Mapping[str, float]) -> dict[str, float]:
    """The gaps that are larger than a limit, or NaN."""
    return {name: gap for name, gap in gaps.items() if not gap <= limit}


def beyond(expected: Tensor, actual: Tensor, margin: float) -> Tensor:
    """Mask of numbers that differ; for floats, by more than a margin."""
    apart = (expected != actual) & ~((expected != expected) & (actual != actual))
    if not margin or not expected.is_floating_point():
        return apart
    return apart & ~((expected.double() - actual.double()).abs() <= margin)


def beyond_part(expected: Tensor, actual: Tensor, tolerance: float) -> Tensor:
    """Mask of numbers that differ by more than a fraction of the largest one."""
    return beyond(expected, actual, tolerance * _largest(expected))
