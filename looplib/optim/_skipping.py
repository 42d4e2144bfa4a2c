"""Skipped updates: non-finite gradients, and the overflows of dynamic loss scaling.

An `Optimizer` around another one looks at the gradients of the step and decides whether the inner
optimizer updates. A skipped update is reported as not applied, so the step does not count it. Wrappers keep their
records in their own state.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import partial
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from looplib._core import torch_private
from looplib._core.checks import check, check_count, check_type, few, is_count
from looplib._core.mappings import stacked
from looplib._core.ranks import all_ranks, shards
from looplib._core.tracing import tracing
from looplib._core.updates import Decision
from looplib.optim._wrap import wrap, zero_count
from looplib.types import Grads, Metrics, Optimizer


class NonFiniteGradientsError(ArithmeticError):
    """Too many steps in a row had infinite or NaN gradients.

    >>> import looplib as ll, torch
    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = ll.optim.apply_if_finite(ll.optimizer(torch.optim.SGD, lr=0.1), max_consecutive=0)
    >>> train_step = ll.make_train_step(ll.make_grad_fn(model, lambda model, x: model(x).mean()), optimizer)
    >>> train_step(ll.init_state(model, optimizer), torch.full((4, 2), torch.inf))
    Traceback (most recent call last):
    ...
    looplib.optim.NonFiniteGradientsError: ...
    """

    __module__ = "looplib.optim"  # as tracebacks name it


def apply_if_finite(optimizer: Optimizer, max_consecutive: int = 5) -> Optimizer:
    """Non-finite gradients: skip updates with infinite or NaN gradients, and raise after too many in a row.

    >>> import looplib as ll, torch
    >>> safe = ll.optim.apply_if_finite(ll.optimizer(torch.optim.SGD, lr=0.1), max_consecutive=5)
    >>> params = {"w": torch.ones(1)}
    >>> opt_state = safe.init(params)
    >>> params, opt_state, applied = safe.update({"w": torch.tensor([torch.inf])}, opt_state, params, 0)
    >>> applied, opt_state["notfinite_count"].item()
    (False, 1)

    A skipped step leaves parameters, buffers, the optimizer's state and `state.step` unchanged, so schedules do not
    advance. `state.batch` and `state.samples` do, since the batch was consumed, and `state.skipped` is True. The
    optimizer's state becomes `{"inner_state", "notfinite_count", "total_notfinite"}`, where the counts are skips in a
    row and in total. Each step waits for its gradients, because the host must know whether to skip. If one rank has
    to skip, all do.

    A skipped update's metrics are returned like any others, and its loss or `grad_norm` is often not finite, which would
    make the mean of a whole window so. To leave them out, write `if not state.skipped:` before `window.add(metrics)` or
    `log_metrics(state, metrics)`.

    Args:
        optimizer: the optimizer that makes the updates when all gradients are finite.
        max_consecutive: number of skips in a row that are accepted, 0 or more.

    Raises:
        NonFiniteGradientsError: from the step, at one more skip in a row, with the parameters' names. The state
            passed to the step is unchanged.

    Source: `optax.apply_if_finite`.
    """
    check_count("max_consecutive", max_consecutive, 0, "give how many skips in a row to accept, 0 or more")

    def decide(flag: Any, opt_state: Any, grads: Grads, metrics: Metrics, step: int) -> tuple[Any, dict[str, Any]]:
        finite = all_finite(grads)
        count = torch.where(finite, 0, opt_state["notfinite_count"] + 1)
        total = opt_state["total_notfinite"] + ~finite
        check = partial(_check_row, max_consecutive), (count, step, {} if tracing() else grads)
        return Decision(finite, [check]) & flag, {**opt_state, "notfinite_count": count, "total_notfinite": total}

    keeps = {"notfinite_count": zero_count, "total_notfinite": zero_count}
    return wrap(optimizer, apply_if_finite, {"max_consecutive": max_consecutive}, keeps, decide=decide)


def _check_row(max_consecutive: int, count: Tensor, step: int, grads: Grads) -> None:
    if count <= max_consecutive:
        return
    bad = [name for name, grad in grads.items() if not _finite([grad])]
    where = (
        f"in {len(bad)} of {len(grads)} parameters: {few(bad, 5)}"
        if bad
        else "on another rank, or in a compiled step, which does not look where"
    )
    found = "gradients are not finite" if count == 1 else f"gradients were not finite {int(count)} times in a row"
    raise NonFiniteGradientsError(
        f"{found} (max_consecutive={max_consecutive}), at step {step} {where}. Lower the learning rate, clip the "
        "gradients, or look at the batch; the state is as it was before it"
    )


def all_finite(grads: Grads) -> Tensor:
    """True if all gradients are finite on all ranks, as a tensor, without waiting for the device."""
    return all_ranks(_finite(grads.values()))


def _finite(grads: Iterable[Tensor]) -> Tensor:
    dense = [grad.coalesce().values() if grad.is_sparse else grad for grad in shards(grads)]
    filled = [*filter(Tensor.numel, dense)]
    if not filled:
        return torch.tensor(True, device=dense[0].device if dense else None)
    return stacked(torch_private.foreach_norm(filled, ord=float("inf"))).isfinite().all()


def _scale_of(opt_state: Any) -> Tensor:
    """The loss scale that `dynamic_loss_scale` keeps, whatever wraps it."""
    while isinstance(opt_state, dict):
        if "loss_scale" in opt_state:
            scale: Tensor = opt_state["loss_scale"]
            return scale
        opt_state = opt_state.get("inner_state")
    raise ValueError(
        "scale_loss found no loss scale in the state: wrap the optimizer as well, "
        "ll.optim.dynamic_loss_scale(ll.optimizer(...)), and make the state with it"
    )


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

    A skipped update's metrics are returned like any others, and its loss or `grad_norm` is often not finite, which would
    make the mean of a whole window so. To leave them out, write `if not state.skipped:` before `window.add(metrics)` or
    `log_metrics(state, metrics)`.

    Args:
        optimizer: the optimizer that makes the updates when all gradients are finite.
        init_scale: initial scale.
        growth_factor: factor for the scale after `growth_interval` updates in a row.
        backoff_factor: factor for the scale after an overflow.
        growth_interval: number of updates in a row without overflow before the scale grows.
        min_scale: smallest scale. An overflow below it does not come from the scale, so it is an error.

    Raises:
        NonFiniteGradientsError: from the step, if the scale would fall below `min_scale`.
        ValueError: from the step, if its gradients are not those of `scale_loss`.
        TypeError: an argument is not a number.
        ValueError: an argument is out of range.
    """
    settings = {
        "init_scale": init_scale,
        "growth_factor": growth_factor,
        "backoff_factor": backoff_factor,
        "growth_interval": growth_interval,
        "min_scale": min_scale,
    }
    for name, value in settings.items():
        check_type(f"{name} is", value, Real, "give a number")
    check(
        growth_factor > 1
        and 0 < backoff_factor < 1
        and is_count(growth_interval)
        and 0 < min_scale <= init_scale < math.inf,
        f"init_scale={init_scale}, growth_factor={growth_factor}, backoff_factor={backoff_factor}, "
        f"growth_interval={growth_interval}, min_scale={min_scale}: growth is above 1, backoff between 0 and 1, "
        "the interval a count of at least 1, and the scale finite and at least min_scale, above 0",
    )

    def decide(flag: Any, opt_state: Any, grads: Grads, metrics: Metrics, step: int) -> tuple[Any, dict[str, Any]]:
        check(
            not metrics or "loss_scale" in metrics,
            "dynamic_loss_scale adapts a scale by which no loss was multiplied: wrap the gradient function in "
            "ll.grads.scale_loss, or report the scale of one of your own as the metric loss_scale",
        )
        finite = all_finite(grads)
        scale, tracker = opt_state["loss_scale"].clone(), opt_state["growth_tracker"].clone()
        torch_private.amp_update_scale_(
            scale, tracker, (~finite).to(scale), growth_factor, backoff_factor, growth_interval
        )
        floor = partial(_check_scale, min_scale), (scale, opt_state["loss_scale"], step)
        return Decision(finite, [floor]) & flag, {**opt_state, "loss_scale": scale, "growth_tracker": tracker}

    keeps = {
        "loss_scale": lambda params, **extra: zero_count(params).float() + init_scale,
        "growth_tracker": lambda params, **extra: zero_count(params).int(),
    }
    return wrap(optimizer, dynamic_loss_scale, settings, keeps, decide=decide)


def _check_scale(min_scale: float, scale: Tensor, before: Tensor, step: int) -> None:
    if scale < min_scale:  # by an overflow just now: a state with such a scale is never returned
        raise NonFiniteGradientsError(
            f"gradients are not finite at step {step} though the loss scale is down to "
            f"{before.item()} (min_scale={min_scale}), so the scale is not the cause: "
            "lower the learning rate, clip the gradients, or look at the batch"
        )
