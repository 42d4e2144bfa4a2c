"""Skipped updates: non-finite gradients, and the overflows of dynamic loss scaling.

These parts of an update look at the gradients of the step and decide whether it is made. A skipped update is reported as
not applied, so the step does not count it.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from functools import partial
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from looplib._core import torch_private
from looplib._core.checks import check, check_count, check_type, few, is_count
from looplib._core.mappings import stacked, without
from looplib._core.ranks import all_ranks, shards
from looplib._core.records import with_repr
from looplib._core.tracing import for_message
from looplib._objective import multiply
from looplib.metrics import Mean
from looplib.optim._part import made_of, wraps_nothing
from looplib.types import Grads, Optimizer, Params, Transformed


class NonFiniteGradientsError(ArithmeticError):
    """Too many steps in a row had infinite or NaN gradients.

    >>> import looplib as ll, torch
    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = ll.chain(ll.skip_nonfinite(max_consecutive=0), ll.optimizer(torch.optim.SGD, lr=0.1))
    >>> train_step = ll.make_train_step(ll.make_grad_fn(model, lambda model, x: model(x).mean()), optimizer)
    >>> train_step(ll.init_state(model, optimizer), torch.full((4, 2), torch.inf))
    Traceback (most recent call last):
    ...
    looplib.optim.NonFiniteGradientsError: ...
    """

    __module__ = "looplib.optim"  # as tracebacks name it


@wraps_nothing("skip_nonfinite()")
def skip_nonfinite(max_consecutive: int = 5) -> Optimizer:
    """Non-finite gradients: skip updates with infinite or NaN gradients, and raise after too many in a row.

    >>> import looplib as ll, torch
    >>> safe = ll.chain(ll.skip_nonfinite(max_consecutive=5), ll.optimizer(torch.optim.SGD, lr=0.1))
    >>> params = {"w": torch.ones(1)}
    >>> opt_state = safe.init(params)
    >>> params, opt_state, applied = safe.update({"w": torch.tensor([torch.inf])}, opt_state, params, 0)
    >>> applied, opt_state["skip_nonfinite"]["notfinite_count"].item()
    (False, 1)

    A skipped step leaves parameters, buffers, the states of the other parts and `state.step` unchanged, so schedules do not
    advance. `state.batch` and `state.samples` do, since the batch was consumed, and `state.skipped` is True. Its own
    state counts skips in a row (`notfinite_count`) and in total (`total_notfinite`). Each step waits for its gradients,
    because the host must know whether to skip. If one rank has to skip, all do.

    It is a part of an update (`ll.chain`), anywhere before the optimizer: it looks at the gradients as they entered the
    chain. In an optimizer of a `partition`, it looks at that one's gradients, and the others still update.

    A skipped update's metrics are returned like any others. What the update reports, such as a `grad_norm` that is infinite,
    has no weight then: alone it is NaN, and the mean of a window is that of the other steps. The loss is what it is: if it is
    NaN or infinite, so is the mean of its window. To leave such steps out, write `if not state.skipped:` before
    `window.add(metrics)` or `log_metrics(state, metrics)`.

    Args:
        max_consecutive: number of skips in a row that are accepted, 0 or more.

    Raises:
        NonFiniteGradientsError: from the step, at one more skip in a row, with the parameters' names. The state
            passed to the step is unchanged.

    Source: `optax.apply_if_finite`.
    """
    check_count("max_consecutive", max_consecutive, 0, "give how many skips in a row to accept, 0 or more")

    def init(params: Params, **extra: Any) -> dict[str, Tensor]:
        return {"notfinite_count": _zero_count(params), "total_notfinite": _zero_count(params)}

    def transform(grads: Grads, state: Any, params: Params, step: int, **info: Any) -> Transformed:
        finite = all_finite(grads)
        count = torch.where(finite, 0, state["notfinite_count"] + 1)
        total = state["total_notfinite"] + ~finite
        check = partial(_check_row, max_consecutive), (count, step, for_message(grads))
        return Transformed(grads, {"notfinite_count": count, "total_notfinite": total}, apply=finite, on_skip=[check])

    skipping = made_of(
        "skip_nonfinite", "judge", {"max_consecutive": max_consecutive}, init=init, transform=transform
    )
    return with_repr(skipping, skip_nonfinite, max_consecutive=max_consecutive)


def _zero_count(params: Params) -> Tensor:
    """A count from 0 on, on the device of the parameters, so that nothing waits for it."""
    return torch.zeros((), dtype=torch.int64, device=next(iter(params.values())).device)


def _check_row(max_consecutive: int, count: Tensor, step: int, grads: Grads) -> None:
    if count <= max_consecutive:
        return
    bad = [name for name, grad in grads.items() if not _finite([grad])]
    where = (
        f"in {len(bad)} of {len(grads)} parameters: {few(bad, 5)}"
        if bad
        else "on another rank, or in a compiled step, which does not look where"
    )
    event = "gradients are not finite" if count == 1 else f"gradients were not finite {int(count)} times in a row"
    raise NonFiniteGradientsError(
        f"{event} (max_consecutive={max_consecutive}), at step {step} {where}. Lower the learning rate, clip the "
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


@wraps_nothing("optim.dynamic_loss_scale()")
def dynamic_loss_scale(
    init_scale: float = 2.0**16,
    *,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 2000,
    min_scale: float = 1e-4,
) -> Optimizer:
    """Dynamic loss scaling for float16: multiply the loss before the backward pass, and divide the gradients afterwards.

    >>> import looplib as ll, torch
    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = ll.chain(ll.optim.dynamic_loss_scale(), ll.optimizer(torch.optim.SGD, lr=0.1))
    >>> loss_fn = ll.autocast(lambda model, x: model(x).square().mean(), torch.float16)
    >>> train_step = ll.make_train_step(ll.make_grad_fn(model, loss_fn), optimizer)
    >>> state, metrics = train_step(ll.init_state(model, optimizer), torch.ones(4, 2))
    >>> ll.compute(metrics)["loss_scale"]
    65536.0

    Gradients that are too small for float16 survive this way. The train step hands the scale, which is kept in the state, to
    the gradient function. The chain divides the gradients by it before any of its parts sees them. If one gradient
    overflows, all become NaN, so that clipping cannot turn infinite ones into finite ones, and the update is skipped.

    The scale changes as in `torch.amp.GradScaler`, and is reported as `loss_scale`. A skipped step changes nothing else:
    parameters, buffers, averaged weights and `state.step` stay, so schedules do not advance, and `state.skipped` is True.
    All ranks decide alike. Each step waits for its gradients, because the host must know whether to skip.

    It is a part of an update (`ll.chain`), the only one of its kind, and not within a `partition`. Gradients that you
    compute yourself say by what their loss was multiplied: `ll.apply_gradients(..., scale=optimizer.loss_scale(state.opt_state))`.

    A skipped update's metrics are returned like any others. What the update reports, such as a `grad_norm` that is infinite,
    has no weight then: alone it is NaN, and the mean of a window is that of the other steps. The loss is what it is: if it is
    NaN or infinite, so is the mean of its window. To leave such steps out, write `if not state.skipped:` before
    `window.add(metrics)` or `log_metrics(state, metrics)`.

    Args:
        init_scale: initial scale.
        growth_factor: factor for the scale after `growth_interval` updates in a row.
        backoff_factor: factor for the scale after an overflow.
        growth_interval: number of updates in a row without overflow before the scale grows.
        min_scale: smallest scale. An overflow below it does not come from the scale, so it is an error.

    Raises:
        NonFiniteGradientsError: from the step, if the scale would fall below `min_scale`.
        ValueError: from the step, if its gradients are not those of a scaled loss, or are float16 because the weights are.
        TypeError: an argument is not a number; from the step, a gradient function of your own has not handed the scale on.
        ValueError: an argument is out of range.

    Source: Micikevicius et al., "Mixed precision training", 2018; `torch.amp.GradScaler`.
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

    def init(params: Params, **extra: Any) -> dict[str, Tensor]:
        zero = _zero_count(params)
        return {"loss_scale": zero.float() + init_scale, "growth_tracker": zero.int()}

    def transform(grads: Grads, state: Any, params: Params, step: int, **info: Any) -> Transformed:
        finite = all_finite(grads)
        before = state["loss_scale"]
        scale, tracker = before.clone(), state["growth_tracker"].clone()
        torch_private.amp_update_scale_(
            scale, tracker, (~finite).to(scale), growth_factor, backoff_factor, growth_interval
        )
        floor = partial(_check_scale, min_scale), (scale, before, step)
        return Transformed(
            grads,
            {"loss_scale": scale, "growth_tracker": tracker},
            apply=finite,
            metrics={"loss_scale": Mean(before)},
            on_skip=[floor],
        )

    scaling = made_of(
        "dynamic_loss_scale",
        "judge",
        settings,
        init=init,
        transform=transform,
        loss_scale=operator.itemgetter("loss_scale"),
        unscale=_unscaled,
    )
    named_settings = without(settings, {"init_scale"})
    return with_repr(scaling, dynamic_loss_scale, init_scale, **named_settings)


def _unscaled(grads: Grads, scale: Tensor) -> None:
    """Divide gradients by the scale of their loss, in place. After an overflow, all become NaN."""
    if half := [name for name, grad in grads.items() if grad.dtype is torch.float16]:
        raise ValueError(
            f"gradients of {', '.join(half)} are in float16, where small ones become 0 when divided by the "
            "scale: keep the weights in float32 and compute in float16, ll.autocast(loss_fn, torch.float16)"
        )
    factor = scale.double().reciprocal().float()
    multiply(grads, torch.where(_finite(grads.values()).to(factor.device), factor, torch.nan))


def _check_scale(min_scale: float, scale: Tensor, before: Tensor, step: int) -> None:
    if scale < min_scale:  # by an overflow just now: a state with such a scale is never returned
        raise NonFiniteGradientsError(
            f"gradients are not finite at step {step} though the loss scale is down to "
            f"{before.item()} (min_scale={min_scale}), so the scale is not the cause: "
            "lower the learning rate, clip the gradients, or look at the batch"
        )
