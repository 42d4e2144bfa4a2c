"""Computation in float64, so that only mistakes change the numbers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from looplib._core import trees
from looplib._core.mappings import fields_of, mapped
from looplib.state import copy_state
from looplib.testing._compare import copied
from looplib.types import TrainState


def in_float64(function: Callable[[TrainState, Any], Any], state: TrainState, batch: Any) -> tuple[Any, Any, Any]:
    """Copies of state and batch and the function's result for them, in float64 if supported, otherwise in their dtypes."""
    copy = copy_state(state)
    try:
        wide_trees = mapped(partial(trees.map_tensors, _wide), fields_of(copy, ("params", "buffers", "opt_state")))
        wide, rows = copy.replace(**wide_trees), trees.map_tensors(_wide, copied(batch))
        return wide, rows, function(wide, copied(rows))
    except (RuntimeError, TypeError):  # the code requires a dtype, or the device has no float64
        return copy, copied(batch), function(copy, copied(batch))


def _wide(tensor: Tensor) -> Tensor:
    floats = tensor.is_floating_point()
    return tensor.detach().double().requires_grad_(tensor.requires_grad) if floats else tensor
