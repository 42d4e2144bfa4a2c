"""Losses, which take tensors and return a scalar or a `Mean`, and wrappers, from one loss function to another."""

from looplib._core.hints import give_hints
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

give_hints(globals())
