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
    """Leaves that differ bit by bit, or with a tolerance by more than a fraction of the largest number, in words."""
    margin = tolerance * largest(one) if tolerance else 0.0
    return [str(difference) for difference in differences(one, other, atol=margin)]


def differing_each(one: Mapping[str, Any], other: Mapping[str, Any], tolerance: float) -> list[str]:
    """The same for trees by name, with a tolerance relative to the largest number of each tree."""
    lines = (differing({name: tree}, {name: other.get(name)}, tolerance) for name, tree in one.items())
    return [line for of_tree in lines for line in of_tree]


def largest(tree: Any) -> float:
    """Largest finite number in the tensors and floats of a tree; 0 if there is none."""
    numbers = (torch.as_tensor(leaf).detach() for _, leaf in trees.leaves(tree) if isinstance(leaf, (float, Tensor)))
    sizes = (tensor[tensor.isfinite()].abs().max() for tensor in numbers if tensor.isfinite().any())
    return max(map(float, sizes), default=0.0)
