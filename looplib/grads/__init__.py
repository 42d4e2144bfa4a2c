"""Gradient functions: how a gradient is computed (accumulation, ranks), and the way into a loop with torch's optimizer."""

from looplib._core.hints import give_hints
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

give_hints(globals())
