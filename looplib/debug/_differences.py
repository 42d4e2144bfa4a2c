"""Fingerprints of states, and the differences between two states."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from looplib._core import trees
from looplib._core.ranks import is_sharded
from looplib.checkpoint._format import bytes_of, local
from looplib.log._sinks import read_jsonl
from looplib.metrics._mean import Mean

Fingerprint = Mapping[str, str]


def fingerprint(tree: Any) -> dict[str, str]:
    """A few characters for each leaf of a state, or of any tree, that are the same just where its bits are.

    >>> import looplib as ll, torch
    >>> state = ll.init_state(torch.nn.Linear(2, 1), seed=3)
    >>> found = fingerprint(state)
    >>> found["/seed"], len(found["/params/weight"]), found == fingerprint(ll.copy_state(state))
    ('3', 16, True)

    In a log, they tell where two runs part that never meet, on two machines or by two versions. On each:

        prints = ll.jsonl("prints.jsonl")
        ...
        if print_now(state):
            prints(state, ll.debug.fingerprint(state))

    and where both logs are: `first_difference(read_fingerprints("a.jsonl"), read_fingerprints("b.jsonl"))`.

    Args:
        tree: a state; or anything of tensors, NumPy arrays and plain values, such as a batch, or
            `{"state": state, "batch": batch}`.

    Of a tensor it is a hash of dtype, shape and bytes, wherever it lies and whatever its strides (of a DTensor, this
    process's part); a plain value stands for itself. So 0.0 and -0.0 differ, as two NaNs may. Each tensor is copied
    to the host.

    Raises TypeError for a leaf that is none of these, with its place.
    """
    return {place: _digest(place, leaf) for place, leaf in leaves_by_path(tree)}


def _digest(place: str, leaf: Any) -> str:
    if leaf is None or isinstance(leaf, (bool, int, float, complex, str, bytes, torch.dtype, torch.device)):
        text = repr(leaf)
        return text if len(text) <= 32 else hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
    if isinstance(leaf, Tensor):
        data = _bits(leaf).cpu()
        found, content = (leaf.dtype, tuple(leaf.shape)), bytes_of(data)
    elif hasattr(leaf, "tobytes") and hasattr(leaf, "shape"):  # NumPy's
        found, content = (leaf.dtype, tuple(leaf.shape)), memoryview(leaf.tobytes())
    else:
        raise TypeError(
            f"{place} is a {type(leaf).__name__}, which has no bytes to take a fingerprint of; give a tree of "
            "tensors, NumPy arrays and plain values"
        )
    digest = hashlib.blake2b(repr(found).encode(), digest_size=8)
    digest.update(content)
    return digest.hexdigest()


def _bits(tensor: Tensor) -> Tensor:
    """Its bytes, in the order of its numbers."""
    tensor = local(tensor) if is_sharded(tensor) else tensor.detach()
    tensor = tensor.to_dense() if tensor.layout != torch.strided else tensor
    return tensor.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def _same_bits(one: Tensor, other: Tensor) -> bool:
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(_bits(one), _bits(other).to(one.device))


def leaves_by_path(tree: Any) -> Iterator[tuple[str, Any]]:
    """The leaves of a tree by path, such as /params/0.weight; a `Mean` is its value, in however many parts it came."""
    for path, leaf in trees.leaves(tree, is_leaf=lambda node: isinstance(node, Mean)):
        yield trees.pointer(path) or "/", leaf.compute() if isinstance(leaf, Mean) else leaf


def read_fingerprints(path: str | os.PathLike[str]) -> dict[int, dict[str, str]]:
    """The fingerprints that were logged into a `jsonl` file, by step.

    >>> import looplib as ll, tempfile
    >>> path = tempfile.mkdtemp() + "/prints.jsonl"
    >>> for step in (0, 10):
    ...     ll.jsonl(path)(ll.TrainState(step=step), fingerprint({"x": step / 10}))
    >>> read_fingerprints(path)
    {0: {'/x': '0.0'}, 10: {'/x': '1.0'}}

    Other rows of the log are passed over. Where a run went back, what it had logged beyond is left out.

    Args:
        path: the log.

    Raises FileNotFoundError when nothing was logged yet.
    """
    found: dict[int, dict[str, str]] = {}
    for row in read_jsonl(path):
        if prints := {name: str(value) for name, value in row.items() if name.startswith("/")}:
            found = {step: kept for step, kept in found.items() if step < row["step"]}
            found[row["step"]] = prints
    return found


@dataclass(frozen=True, slots=True, repr=False)
class LeafDifference:
    """A leaf that is not the same in two trees.

    Attributes:
        place: where in the tree, such as "/params/0.weight".
        largest: the largest difference of two of its numbers; NaN where there are none to subtract.
        differing: how many numbers differ.
        numel: of how many.
        found: what was found, in words.
    """

    place: str
    largest: float
    differing: int
    numel: int
    found: str

    def __repr__(self) -> str:
        return f"{self.place}: {self.found}"


def differences(one: Any, other: Any, *, rtol: float = 0.0, atol: float = 0.0) -> list[LeafDifference]:
    """The leaves that are not the same in two states, two replayed steps, two batches, or any two trees.

    >>> import torch
    >>> differences({"x": torch.ones(3), "n": 1}, {"x": torch.tensor([1.0, 1.0, 1.5]), "n": 1})
    [/x: 1 of 3 numbers, by 0.5 at most]
    >>> differences(torch.ones(3), torch.ones(3) + 1e-6, rtol=1e-5)
    []

    They come in the order of the first tree: of `Replayed` steps that is the batch, metrics, gradients, and then the
    state after, so the first to be named is what parted first.

    Args:
        one, other: trees, on any devices; either may be a fingerprint, and then the other is taken for one.
        rtol, atol: floating-point numbers may differ by `atol + rtol * abs(other)`, as in `torch.allclose`, and NaN
            equals NaN. Both 0 compares bits.
    """
    if _is_fingerprint(one) or _is_fingerprint(other):
        first, second = (tree if _is_fingerprint(tree) else fingerprint(tree) for tree in (one, other))
    else:
        first, second = dict(leaves_by_path(one)), dict(leaves_by_path(other))
    nan, found = math.nan, []
    for place in {**first, **second}:
        if place not in first or place not in second:
            which = "first" if place in first else "second"
            found.append(LeafDifference(place, nan, 0, 0, f"is in the {which} alone"))
        elif difference := _difference(place, first[place], second[place], rtol, atol):
            found.append(difference)
    return found


def _is_fingerprint(tree: Any) -> bool:
    return isinstance(tree, Mapping) and bool(tree) and all(type(leaf) is str for leaf in tree.values())


def _difference(place: str, one: Any, other: Any, rtol: float, atol: float) -> LeafDifference | None:
    if (first := _tensor_of(one)) is not None and (second := _tensor_of(other)) is not None:
        return _difference_of_tensors(place, first, second, rtol, atol)
    if type(one) is type(other) and one == other:
        return None
    numbers = all(isinstance(leaf, (int, float)) for leaf in (one, other))
    largest = abs(float(one) - float(other)) if numbers else math.nan
    return LeafDifference(place, largest, 1, 1, f"{_in_words(one)} against {_in_words(other)}")


def _tensor_of(leaf: Any) -> Tensor | None:
    """The numbers of a tensor, of an array or scalar of NumPy, or of a float."""
    if isinstance(leaf, Tensor):
        return local(leaf) if is_sharded(leaf) else leaf.detach()
    if type(leaf) is float:
        return torch.tensor(leaf, dtype=torch.float64)
    return torch.as_tensor(leaf) if hasattr(leaf, "__array__") and leaf.dtype.kind in "biufc" else None


def _difference_of_tensors(place: str, one: Tensor, other: Tensor, rtol: float, atol: float) -> LeafDifference | None:
    exact = not (rtol or atol)
    if one.shape != other.shape or (exact and one.dtype != other.dtype):
        return LeafDifference(place, math.nan, 0, one.numel(), f"{_in_words(one)} against {_in_words(other)}")
    if _same_bits(one, other):
        return None
    one, other = one.cpu(), other.cpu()
    real = one.is_floating_point() or one.is_complex()
    wide = torch.complex128 if one.is_complex() or other.is_complex() else torch.float64
    a, b = one.to(wide), other.to(wide)
    same = (a == b) | (a.isnan() & b.isnan())
    gap = torch.where(same, 0.0, (a - b).abs()).nan_to_num(math.inf, math.inf)
    if exact:  # by their bytes: 0.0 and -0.0, and two NaNs, have no gap
        rows = torch.stack([_bits(one), _bits(other)]).reshape(2, one.numel(), -1)
        apart = (rows[0] != rows[1]).any(1).reshape(one.shape)
    elif real:
        apart = ~same & ~(gap.isfinite() & (gap <= atol + rtol * b.abs()))
    else:
        apart = one != other
    if not (differing := int(apart.sum())):
        return None
    largest = float(gap[apart].max())
    found = f"{differing} of {one.numel()} numbers, by {largest:.3g} at most"
    return LeafDifference(place, largest, differing, one.numel(), found)


def _in_words(leaf: Any) -> str:
    if isinstance(leaf, Tensor):
        return f"{str(leaf.dtype).removeprefix('torch.')} {tuple(leaf.shape)}"
    text = repr(leaf)
    return text if len(text) <= 60 else f"a {type(leaf).__name__}"
