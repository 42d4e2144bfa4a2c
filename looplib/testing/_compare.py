"""Results of steps as trees that can be compared, in float64 where possible, and the messages of checks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

from torch import Tensor

from looplib._core import trees
from looplib._core.checks import as_tensor, check_number, few
from looplib._core.mappings import fields_of, mapped
from looplib.debug import differences
from looplib.metrics import compute
from looplib.state import copy_state
from looplib.types import DonatedStateError, TrainState


def fail(what: str, faults: Collection[str], why: str) -> None:
    """Raise an AssertionError that lists the faults. If there are none, the check has passed."""
    __tracebackhide__ = True
    if faults:
        raise AssertionError("\n".join([f"{what}:", "  " + few(faults, between="\n  "), why]))


def about_kernels(state: TrainState) -> str:
    if all(tensor.device.type == "cpu" for tensor in state.params.values()):
        return ""
    return (
        " On an accelerator some kernels add up in another order each time: torch.use_deterministic_algorithms(True) "
        "names those, or takes others."
    )


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


def check_tolerance(tolerance: float) -> None:
    """Raise TypeError or ValueError for what is no tolerance. By NaN, nothing would differ."""
    __tracebackhide__ = True
    check_number("tolerance", tolerance, lambda part: part >= 0, "give a part of the largest number, such as 1e-5")


def differing(one: Any, other: Any, tolerance: float = 0.0) -> list[str]:
    """Leaves that differ, in words: bit by bit, or in trees by name, by more than a fraction of a tree's largest number."""
    if not tolerance:
        return [str(difference) for difference in differences(one, other)]
    lines = []
    for name, tree in one.items():
        changed = differences({name: tree}, {name: other.get(name)}, atol=tolerance * largest(tree))
        lines += [str(difference) for difference in changed]
    return lines


def largest(tree: Any) -> float:
    """Largest finite number in the tensors and floats of a tree; 0 if there is none."""
    numbers = (as_tensor(leaf).detach() for _, leaf in trees.leaves(tree) if isinstance(leaf, (float, Tensor)))
    sizes = (tensor[tensor.isfinite()].abs().max() for tensor in numbers if tensor.isfinite().any())
    return max(map(float, sizes), default=0.0)


def in_float64(function: Callable[[TrainState, Any], Any], state: TrainState, batch: Any) -> tuple[Any, Any, Any]:
    """Copies of state and batch and the function's result for them, in float64 if supported, otherwise in their dtypes."""
    copy = copy_state(state)
    try:
        wide_trees = mapped(partial(trees.map_tensors, _wide), fields_of(copy, ("params", "buffers", "opt_state")))
        wide, rows = copy.replace(**wide_trees), trees.map_tensors(_wide, copied(batch))
        return wide, rows, function(wide, copied(rows))
    except (RuntimeError, TypeError):  # the code requires a dtype, or the device has no float64
        return in_its_dtype(function, copy, batch)


def in_its_dtype(function: Callable[[TrainState, Any], Any], state: TrainState, batch: Any) -> tuple[Any, Any, Any]:
    """Copies of state and batch and the function's result for them."""
    copy = copy_state(state)
    return copy, copied(batch), function(copy, copied(batch))


def _wide(tensor: Tensor) -> Tensor:
    floats = tensor.is_floating_point()
    return tensor.detach().double().requires_grad_(tensor.requires_grad) if floats else tensor
