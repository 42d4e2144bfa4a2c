"""Optimizers: a `torch.optim` class or an `Optimizer` goes in and an `Optimizer` comes out."""

from looplib._core.hints import give_hints
from looplib._core.tracing import where
from looplib.optim._averaging import ema, ema_warmup, eval_state, swa
from looplib.optim._optimizer import hyperparameters, optimizer, set_hyperparameters
from looplib.optim._recipe import injected
from looplib.optim._skipping import NonFiniteGradientsError, apply_if_finite, dynamic_loss_scale
from looplib.optim._wrap import own_steps, partition

__all__ = [
    "NonFiniteGradientsError",
    "apply_if_finite",
    "dynamic_loss_scale",
    "ema",
    "ema_warmup",
    "eval_state",
    "hyperparameters",
    "injected",
    "optimizer",
    "own_steps",
    "partition",
    "set_hyperparameters",
    "swa",
    "where",
]

give_hints(globals())
