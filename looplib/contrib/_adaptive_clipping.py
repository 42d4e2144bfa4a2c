"""Adaptive gradient clipping."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from looplib._core.checks import check
from looplib._core.records import with_repr
from looplib._wrapping import check_whole, of_whole_step
from looplib.types import WHOLE, GradFn, Gradients, GradRequest, TrainState


def adaptive_grad_clip(
    grad_fn: GradFn,
    clipping: float = 0.01,
    eps: float = 1e-3,
    *,
    applies: Callable[[str, Tensor], bool] = lambda name, tensor: True,
) -> GradFn:
    """Adaptive gradient clipping (AGC): clip each unit's gradient relative to the norm of its weights.

    >>> import looplib as ll, torch
    >>> model = torch.nn.Linear(2, 3)
    >>> grad_fn = ll.make_grad_fn(model, lambda model, x: model(x).square().mean())
    >>> clipped = ll.contrib.adaptive_grad_clip(grad_fn, 0.01)(ll.init_state(model), torch.full((4, 2), 100.0))
    >>> bool((clipped.grads["weight"].norm(dim=1) <= 0.0101 * model.weight.norm(dim=1)).all())
    True

    The gradient of a unit is scaled down to at most `clipping` times the norm of the unit's weights. A unit is a row
    of a matrix, a filter of a convolution, or a whole tensor with fewer than two dimensions.

    Args:
        grad_fn: gradient function of a whole step.
        clipping: largest ratio of the gradient's norm to the weights' norm, above 0.
        eps: lower bound for the weights' norm, above 0, so that weights at zero can grow.
        applies: `(name, parameter) -> bool`, selects the parameters to clip. The paper leaves out the last linear
            layer.

    Raises:
        ValueError: `clipping` or `eps` is not above 0, or the wrapper is used inside `accumulate`.

    Source: Brock, De, Smith and Simonyan, "High-performance large-scale image recognition without normalization",
    2021, and `timm.utils.adaptive_clip_grad`.
    """
    check(clipping > 0 and eps > 0, f"clipping is {clipping} and eps {eps}; give numbers above 0")
    grad_fn = check_whole(grad_fn, "adaptive_grad_clip")

    def clipped(state: TrainState, batch: Any, request: GradRequest = WHOLE) -> Gradients:
        out = grad_fn(state, batch, request)
        params = state.params
        with torch.no_grad():
            for name, grad in out.grads.items():
                if applies(name, params[name]):
                    most = _unit_norm(params[name].detach()).clamp(min=eps) * clipping
                    grad.mul_((most / _unit_norm(grad).clamp(min=1e-6)).clamp(max=1.0))
        return out

    made = of_whole_step("adaptive_grad_clip", clipped, grad_fn)
    return with_repr(made, adaptive_grad_clip, grad_fn, clipping, eps=eps, applies=applies)


def _unit_norm(tensor: Tensor) -> Tensor:
    axes = None if tensor.dim() < 2 else tuple(range(1, tensor.dim()))
    norm: Tensor = torch.linalg.vector_norm(tensor, dim=axes, keepdim=axes is not None)
    return norm
