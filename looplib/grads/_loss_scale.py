"""Loss scaling."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from looplib._core.records import with_repr
from looplib._objective import multiply
from looplib.grads._wrapper import check_scalable, joined, of_whole_step
from looplib.metrics._mean import Mean
from looplib.optim._skipping import _finite, _scale_of
from looplib.types import WHOLE, GradFn, Gradients, GradRequest, TrainState


def scale_loss(grad_fn: GradFn) -> GradFn:
    """Loss scaling for float16: multiply the loss before the backward pass, and divide the gradients afterwards.

    >>> import looplib as ll, torch
    >>> model = torch.nn.Linear(2, 1)
    >>> loss_fn = ll.autocast(lambda model, x: model(x).square().mean(), torch.float16)
    >>> grad_fn = ll.grads.scale_loss(ll.make_grad_fn(model, loss_fn))
    >>> optimizer = ll.optim.dynamic_loss_scale(ll.optimizer(torch.optim.SGD, lr=0.1))
    >>> state, metrics = ll.make_train_step(grad_fn, optimizer)(ll.init_state(model, optimizer), torch.ones(4, 2))
    >>> ll.compute(metrics)["loss_scale"]
    65536.0

    Gradients that are too small for float16 survive this way. The scale comes from the state, where
    `dynamic_loss_scale` keeps it, and is reported as `loss_scale`. If one gradient overflows, all become NaN and
    `dynamic_loss_scale` skips the update.

    Put clipping around `scale_loss`, because the gradients it returns are unscaled, and put `accumulate` inside it.

    Args:
        grad_fn: gradient function whose loss is scaled.

    Raises:
        ValueError: the state has no loss scale; the gradients are float16 because the weights are; or the wrapper is
            used inside `accumulate`.

    Source: Micikevicius et al., "Mixed precision training", 2018; `torch.amp.GradScaler`.
    """
    grad_fn = check_scalable(grad_fn, "scale_loss")

    def scaled(state: TrainState, batch: Any, request: GradRequest = WHOLE) -> Gradients:
        if request.scale is not None:
            raise ValueError("scale_loss within scale_loss: once is enough")
        scale = _scale_of(state.opt_state)
        out = grad_fn(state, batch, dataclasses.replace(request, scale=scale))
        if out.scale is not scale:
            raise TypeError(
                "scale_loss would divide gradients by a scale that their loss was not multiplied by: the grad_fn within "
                "must hand its third argument on to the one that it wraps, grad_fn(state, batch, request), and return "
                "out._replace(grads=...) (see ll.types.GradRequest)"
            )
        if half := [name for name, grad in out.grads.items() if grad.dtype is torch.float16]:
            raise ValueError(
                f"gradients of {', '.join(half)} are in float16, where small ones become 0 when divided by the "
                "scale: keep the weights in float32 and compute in float16, ll.autocast(loss_fn, torch.float16)"
            )
        factor = scale.double().reciprocal().float()
        # All are NaN after an overflow, so that clipping around this cannot turn infinite gradients into finite ones.
        multiply(out.grads, torch.where(_finite(out.grads.values()).to(factor.device), factor, torch.nan))
        return out._replace(metrics=joined(out.metrics, {"loss_scale": Mean(scale)}), scale=None)

    made = of_whole_step("scale_loss", scaled, grad_fn, scaled=True)
    return with_repr(made, scale_loss, grad_fn)
