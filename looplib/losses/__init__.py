"""Losses, which take tensors and return a scalar or a `Mean`, and wrappers, from one loss function to another."""

from typing import TYPE_CHECKING as _TYPE_CHECKING

from looplib._core.hints import in_room as _in_room
from looplib.losses._activations import offload, recompute
from looplib.losses._autocast import autocast
from looplib.losses._model_loss import model_inputs, model_loss
from looplib.losses._next_token import next_token_loss
from looplib.losses._restrict_grad import restrict_grad

__all__ = [
    "autocast",
    "model_inputs",
    "model_loss",
    "next_token_loss",
    "offload",
    "recompute",
    "restrict_grad",
]

if not _TYPE_CHECKING:  # type checkers would take any name for one that there is
    __getattr__ = _in_room(__name__)
