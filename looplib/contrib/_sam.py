"""Sharpness-aware minimization."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from looplib._core.checks import check_number
from looplib._core.forward_writes import put_back
from looplib._core.mappings import mapped, pick
from looplib._core.records import with_repr
from looplib.grads.wrapping import as_wrapper, check_summed, check_whole_batch
from looplib.optim import global_norm
from looplib.types import BatchPart, GradFn, Gradients, Grads, Params, TrainState


def sam(grad_fn: GradFn, rho: float = 0.05, *, adaptive: bool = False) -> GradFn:
    """Sharpness-aware minimization (SAM): the gradient at the worst point nearby, to find flat minima.

    >>> import looplib as ll, torch
    >>> model = torch.nn.Linear(2, 1)
    >>> grad_fn = ll.contrib.sam(ll.make_grad_fn(model, lambda model, x: model(x).square().mean()), rho=0.05)
    >>> gradients = grad_fn(ll.init_state(model), torch.ones(4, 2))

    It makes two passes over the batch: one for the gradient at the weights, one at `weights + rho * gradient / norm`.
    Both draw the same random numbers. Metrics and buffers are those of the first pass. Put `accumulate` inside.
    Clipping is a part of the update (`ll.chain`).

    Args:
        grad_fn: gradient function.
        rho: distance of the second point, in the norm of all parameters together; above 0.
        adaptive: if True, measure the distance in units of the weights (ASAM). `rho` is then larger, such as 0.5.

    Raises:
        TypeError: `rho` is not a number.
        ValueError: `rho` is not above 0, or it is used inside `accumulate`, or on several ranks inside `reduce_gradients`.
        RuntimeError: the module is wrapped in DDP or FSDP2, which run only on their own parameters.

    Source: Foret, Kleiner, Mobahi and Neyshabur, "Sharpness-aware minimization for efficiently improving
    generalization", 2021; Kwon et al., "ASAM", 2021.
    """
    check_number("rho", rho, lambda rho: rho > 0, "give a distance above 0")
    grad_fn = check_summed(grad_fn, "sam")

    def sharp(state: TrainState, batch: Any, *, part: BatchPart | None = None, **request: Any) -> Gradients:
        check_whole_batch(part, "sam")
        first = grad_fn(state, batch, **request)
        params = mapped(Tensor.detach, pick(state.params, first.grads))
        away = _worst_nearby(params, first.grads, rho, adaptive)
        # A donated pass writes as well: to parameters of its own, and to the buffers, which then get their values back.
        nearby = state.replace(params={**state.params, **away}, buffers=first.buffers)
        second = grad_fn(nearby, batch, **{**request, "in_step": False})
        put_back(second.copies or ())
        return first._replace(grads=second.grads)

    return with_repr(as_wrapper(sharp, "sam", grad_fn), sam, grad_fn, rho, adaptive=adaptive)


@torch.no_grad()
def _worst_nearby(params: Params, grads: Grads, rho: float, adaptive: bool) -> Params:
    """Parameters at the distance `rho` along the gradient, both in units of the weights if `adaptive`."""
    units: dict[str, Any] = mapped(Tensor.abs, params) if adaptive else dict.fromkeys(params, 1.0)
    scaled = {name: grad * units[name] for name, grad in grads.items()} if adaptive else grads
    distance = rho / (global_norm(scaled.values()) + 1e-12)
    return {name: params[name] + g * units[name] * distance.to(g.device) for name, g in scaled.items()}
