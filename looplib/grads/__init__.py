"""Gradient wrappers: a `GradFn` goes in and a `GradFn` comes out (accumulation, clipping, loss scaling, ranks)."""

from looplib._core.hints import give_hints
from looplib.grads._accumulation import accumulate
from looplib.grads._backward import backward
from looplib.grads._clipping import clip_by_global_norm, clip_by_norm, clip_by_value, global_norm
from looplib.grads._loss_scale import scale_loss
from looplib.grads._map_batch import map_batch
from looplib.grads._over_ranks import reduce_gradients
from looplib.grads._wrapper import wrapper

__all__ = [
    "accumulate",
    "backward",
    "clip_by_global_norm",
    "clip_by_norm",
    "clip_by_value",
    "global_norm",
    "map_batch",
    "reduce_gradients",
    "scale_loss",
    "wrapper",
]

give_hints(globals())
