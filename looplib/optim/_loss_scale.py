"""Dynamic loss scaling."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from looplib._core import torch_private
from looplib._core.checks import check
from looplib._core.updates import Decision
from looplib.optim._skipping import NonFiniteGradientsError, all_finite
from looplib.optim._wrap import kept_by_wrappers, wrap
from looplib.types import Grads, Metrics, Optimizer, Params


def _scale_of(opt_state: Any) -> Tensor:
    scale: Tensor | None = kept_by_wrappers(opt_state, "loss_scale")
    if scale is None:
        raise ValueError(
            "scale_loss found no loss scale in the state: wrap the optimizer as well, "
            "ll.optim.dynamic_loss_scale(ll.optimizer(...)), and make the state with it"
        )
    return scale


def dynamic_loss_scale(
    optimizer: Optimizer,
    init_scale: float = 2.0**16,
    *,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 2000,
    min_scale: float = 1e-4,
) -> Optimizer:
    """Dynamic loss scaling for float16: adapt the scale that `scale_loss` uses, and skip updates that overflow.

    >>> import looplib as ll, torch
    >>> optimizer = ll.optim.dynamic_loss_scale(ll.optimizer(torch.optim.SGD, lr=0.1))
    >>> params = {"w": torch.ones(1)}
    >>> opt_state = optimizer.init(params)
    >>> params, opt_state, applied = optimizer.update({"w": torch.tensor([torch.inf])}, opt_state, params, 0)
    >>> applied, opt_state["loss_scale"].item()
    (False, 32768.0)

    The scale changes as in `torch.amp.GradScaler`. A skipped step changes nothing else: parameters, buffers, averaged
    weights and `state.step` stay, so schedules do not advance, and `state.skipped` is True. All ranks decide alike.
    Each step waits for its gradients, because the host must know whether to skip.

    Args:
        optimizer: the optimizer that makes the updates when all gradients are finite.
        init_scale: initial scale.
        growth_factor: factor for the scale after `growth_interval` updates in a row.
        backoff_factor: factor for the scale after an overflow.
        growth_interval: number of updates in a row without overflow before the scale grows.
        min_scale: smallest scale. An overflow below it does not come from the scale, so it is an error.

    Raises:
        NonFiniteGradientsError: from the step, if the scale would fall below `min_scale`.
        ValueError: an argument is out of range.
    """
    check(
        all((growth_factor > 1, 0 < backoff_factor < 1, growth_interval >= 1, 0 < min_scale <= init_scale)),
        f"init_scale={init_scale}, growth_factor={growth_factor}, backoff_factor={backoff_factor}, "
        f"growth_interval={growth_interval}, min_scale={min_scale}: growth is above 1, backoff between 0 and 1, "
        "the interval at least 1, and the scale at least min_scale, above 0",
    )

    def init(params: Params, **extra: Any) -> dict[str, Any]:
        device = next(iter(params.values())).device
        return {
            "inner_state": optimizer.init(params, **extra),
            "loss_scale": torch.full((), init_scale, dtype=torch.float32, device=device),
            "growth_tracker": torch.zeros((), dtype=torch.int32, device=device),
        }

    def decide(flag: Any, opt_state: Any, grads: Grads, metrics: Metrics, step: int) -> tuple[Any, dict[str, Any]]:
        finite = all_finite(grads)
        scale, tracker = opt_state["loss_scale"].clone(), opt_state["growth_tracker"].clone()
        torch_private.amp_update_scale_(
            scale, tracker, (~finite).to(scale), growth_factor, backoff_factor, growth_interval
        )
        check = partial(_check_scale, min_scale), (~finite, scale, opt_state["loss_scale"], step)
        return Decision(finite, [check]) & flag, {**opt_state, "loss_scale": scale, "growth_tracker": tracker}

    factors = {"growth_factor": growth_factor, "backoff_factor": backoff_factor, "growth_interval": growth_interval}
    settings = {"init_scale": init_scale, **factors, "min_scale": min_scale}
    keeps = ("loss_scale", "growth_tracker")
    return wrap(optimizer, dynamic_loss_scale, settings, init, keeps=keeps, decide=decide)


def _check_scale(min_scale: float, overflowed: Tensor, scale: Tensor, before: Tensor, step: int) -> None:
    if overflowed and scale < min_scale:
        raise NonFiniteGradientsError(
            f"gradients are not finite at step {step} though the loss scale is down to "
            f"{before.item()} (min_scale={min_scale}), so the scale is not the cause: "
            "lower the learning rate, clip the gradients, or look at the batch"
        )
