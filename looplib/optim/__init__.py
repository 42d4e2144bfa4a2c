"""Optimizers: parts of an update, and `chain`, which puts them together."""

from typing import TYPE_CHECKING as _TYPE_CHECKING

from looplib._core.hints import in_room as _in_room
from looplib._core.tracing import where
from looplib.optim._averaging import average, ema, ema_warmup, eval_state, swa
from looplib.optim._clipping import clip_by_global_norm, clip_by_norm, clip_by_value
from looplib.optim._norms import global_norm
from looplib.optim._offload_state import offload_state
from looplib.optim._optimizer import hyperparameters, optimizer, set_hyperparameters
from looplib.optim._part import part
from looplib.optim._plateau import reduce_on_plateau
from looplib.optim._recipe import inject
from looplib.optim._rows import take_rows
from looplib.optim._scopes import every, own_steps, partition
from looplib.optim._skipping import NonFiniteGradientsError, dynamic_loss_scale, skip_nonfinite
from looplib.optim.chains import chain

__all__ = [
    "NonFiniteGradientsError",
    "average",
    "chain",
    "clip_by_global_norm",
    "clip_by_norm",
    "clip_by_value",
    "dynamic_loss_scale",
    "ema",
    "ema_warmup",
    "eval_state",
    "every",
    "global_norm",
    "hyperparameters",
    "inject",
    "offload_state",
    "optimizer",
    "own_steps",
    "part",
    "partition",
    "reduce_on_plateau",
    "set_hyperparameters",
    "skip_nonfinite",
    "swa",
    "take_rows",
    "where",
]

if not _TYPE_CHECKING:  # type checkers would take any name for one that there is
    __getattr__ = _in_room(__name__)
