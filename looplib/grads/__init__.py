"""Gradient functions: how a gradient is computed (accumulation, ranks), and the way into a loop with torch's optimizer."""

from typing import TYPE_CHECKING as _TYPE_CHECKING

from looplib._core.hints import in_room as _in_room
from looplib.grads._accumulation import accumulate
from looplib.grads._backward import backward
from looplib.grads._map_batch import map_batch
from looplib.grads._over_ranks import reduce_gradients

__all__ = [
    "accumulate",
    "backward",
    "map_batch",
    "reduce_gradients",
]

if not _TYPE_CHECKING:  # type checkers would take any name for one that there is
    __getattr__ = _in_room(__name__)
