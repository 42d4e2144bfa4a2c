"""Results of steps as trees that can be compared by `looplib.debug.differences`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from looplib._core import trees
from looplib.debug._differences import differences
from looplib.metrics._mean import compute
from looplib.types import DonatedStateError, TrainState


def result_of(result: Any) -> dict[str, Any]:
    """Outputs of a step by name, with copies of its tensors, which later calls cannot overwrite."""
    match result:
        case (TrainState() as state, metrics):
            return {"metrics": compute(metrics), "state": copied(state)}
        case Mapping() if result and all(hasattr(value, "compute") for value in result.values()):
            return {"metrics": compute(result)}
    return {"output": copied(result)}


def copied(tree: Any) -> Any:
    """Copy a tree, such as a batch, including its tensors and arrays."""
    return trees.map_leaves(_copied_leaf, tree)


def _copied_leaf(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return leaf.detach().clone()
    return leaf.copy() if hasattr(leaf, "copy") and hasattr(leaf, "shape") else leaf


def is_spent(state: TrainState) -> bool:
    """True if a state was donated to a step."""
    try:
        copied(state)
    except DonatedStateError:
        return True
    return False


def differing(one: Any, other: Any, tolerance: float = 0.0) -> list[str]:
    """Leaves that differ, in words: bit by bit, or in trees by name, by more than a fraction of a tree's largest number."""
    if not tolerance:
        return [str(difference) for difference in differences(one, other)]
    lines = []
    for name, tree in one.items():
        found = differences({name: tree}, {name: other.get(name)}, atol=tolerance * largest(tree))
        lines += [str(difference) for difference in found]
    return lines


def largest(tree: Any) -> float:
    """Largest finite number in the tensors and floats of a tree; 0 if there is none."""
    numbers = (torch.as_tensor(leaf).detach() for _, leaf in trees.leaves(tree) if isinstance(leaf, (float, Tensor)))
    sizes = (tensor[tensor.isfinite()].abs().max() for tensor in numbers if tensor.isfinite().any())
    return max(map(float, sizes), default=0.0)
