"""Loss functions and wrappers: a loss function goes in and a loss function comes out."""

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
