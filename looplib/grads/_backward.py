"""The way back into a loop of your own: gradients in `.grad`, as `loss.backward()` leaves them."""

from __future__ import annotations

import operator
from typing import Any, SupportsIndex

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from looplib._core import modules as _modules
from looplib._core.checks import check, check_count, check_optional_count, check_type
from looplib._core.records import check_kind, records_of
from looplib.grads.wrapping import DROPPED, check_summed
from looplib.types import GradFn, Gradients, Metric, TrainState


def backward(
    grad_fn: GradFn,
    model: nn.Module,
    batch: Any,
    *,
    step: int,
    seed: int = 0,
    epoch: int | None = None,
    extra: Any = None,
    scaler: torch.amp.GradScaler | None = None,
) -> dict[str, Metric]:
    """Backward pass: compute a gradient function's gradients and add them to `.grad`, as `loss.backward()` does.

    >>> import looplib as ll, torch
    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.Dropout(0.1), torch.nn.Linear(8, 1))
    >>> adamw = torch.optim.AdamW(model.parameters(), lr=1e-3)
    >>> grad_fn = ll.accumulate(ll.make_grad_fn(model, lambda model, x: model(x).square().mean()), microbatches=4)
    >>> for step, x in enumerate(torch.randn(3, 64, 2)):
    ...     adamw.zero_grad()
    ...     metrics = ll.grads.backward(grad_fn, model, x, step=step)
    ...     adamw.step()

    This takes `accumulate`, per-sample and contrastive gradients and all other gradient functions into a loop that has its
    own `torch.optim`, and nothing else of looplib. Afterwards the module is as after `loss.backward()`: gradients are
    added to those that are in `.grad` already, parameters without one keep their `.grad`, and buffers have moved, such as
    BatchNorm's statistics. It works with DDP and FSDP2.

    Random draws depend on `(seed, step, rank, microbatch)` and leave torch's random streams as they were, so a resumed
    loop draws the same dropout masks. Two calls with the same `step` draw the same ones: if you call it twice in a step, give
    each a `seed` of its own. If it raises, `.grad` is as it was.

    Hooks of the module and of its parameters run in each pass, and see the gradient of that pass alone. A hook that updates
    a parameter in the backward pass and sets its `.grad` to None needs `make_grad_fn(..., allow_unused=True)`.

    Args:
        grad_fn: from `make_grad_fn`, with or without wrappers.
        model: the module of `grad_fn`, with or without torch's wrappers.
        batch: as the loss function takes it.
        step: number of updates that your loop has made, which differs from step to step.
        seed: seed of the run's random draws.
        epoch, extra: what the gradient function reads of `state.epoch` and `state.extra`, as `map_batch` may. The state that
            it gets has no other counts and no optimizer's state: they are None.
        scaler: torch's `GradScaler` of your loop. The loss is multiplied by its scale, as by
            `scaler.scale(loss).backward()`. Call `scaler.step(optimizer)` and `scaler.update()` afterwards, and clip between
            `scaler.unscale_(optimizer)` and these.

    Returns:
        The metrics: `loss`, and what the loss function and the wrappers report.

    Raises:
        ValueError: `grad_fn` was made of a different module; with `scaler`, it has no meaning for a scaled loss, such as
            per-sample gradients; or gradients do not fit the module's parameters. See also `make_grad_fn`.
        TypeError: an argument is something different, or a wrapper of yours drops what it is given by name and with it the scale.
    """
    grad_fn = check_summed(grad_fn, "backward")
    check_kind(model, "backward", "model")
    check_count("step", step, 0, "give the number of updates that your loop has made, such as step=step")
    check_type("seed is", seed, SupportsIndex, "give an int")
    check_optional_count("epoch", epoch, 0, "give the number of epochs completed, such as epoch=epoch")
    if scaler is not None:
        advice = "give scaler= what torch.amp.GradScaler() returns"
        check_type("scaler is", scaler, torch.amp.GradScaler, advice)
    slots = _modules.members(model)
    params, buffers = _modules.tensors(slots.params), _modules.tensors(slots.buffers)
    _check_model(grad_fn, model, params)
    counts: Any = {"epoch": epoch, **dict.fromkeys(("batch", "samples", "batch_samples", "batch_steps"))}
    state = TrainState(step=step, seed=operator.index(seed), params=params, buffers=buffers, extra=extra, **counts)
    scale = None if scaler is None or not scaler.is_enabled() else _scale_of(scaler, params)
    if any(isinstance(part, DistributedDataParallel) and part.gradient_as_bucket_view for part in model.modules()):
        # The pass writes into DDP's buckets, of which these gradients may be views.
        for param in params.values():
            param.grad = None if param.grad is None else param.grad.clone()
    try:
        out = grad_fn(state, batch, donate=True, scale=scale)
    except TypeError as error:
        if "NoneType" in str(error):
            error.add_note(_UNKNOWN)
        raise
    what = "gradients of a loss that was not multiplied by the scale of scaler="
    check(out.scale is scale, DROPPED.format(who="backward", what=what), TypeError)
    _check_fit(out, params)
    with torch.no_grad():
        for owner, key, name in slots.buffers:
            _move(owner, key, out.buffers.get(name, owner[key]))
        for name, grad in out.grads.items():
            _add(params[name], grad)
    return out.metrics


def _check_model(grad_fn: GradFn, model: nn.Module, params: dict[str, Tensor]) -> None:
    """Raise for another module of the same architecture than that of the gradient function, as far as that is known.

    One of a different architecture is refused by its names.
    """
    made_of = next((record.model for record in records_of(grad_fn) if record.model is not None), model)
    own = params if made_of is model else _modules.tensors(_modules.members(made_of).params)
    check(
        own.keys() != params.keys() or all(own[name] is param for name, param in params.items()),
        f"the grad_fn was made of another {type(made_of).__name__} than this {type(model).__name__}, and would run that one's "
        "forward pass, in its modes and with its hooks, on this one's parameters: give the model of the grad_fn, or make a "
        "grad_fn of this model, ll.make_grad_fn(model, loss_fn)",
    )


def _scale_of(scaler: torch.amp.GradScaler, params: dict[str, Tensor]) -> Tensor:
    device = next(iter(params.values())).device
    return scaler.scale(torch.ones((), device=device))


def _check_fit(out: Gradients, params: dict[str, Tensor]) -> None:
    """Raise if torch would not take these gradients, before one of them is in its place."""
    unknown = sorted(out.grads.keys() - params.keys())
    check(
        not unknown,
        f"gradients of {', '.join(unknown)}, which the model does not have: give the model of the grad_fn",
    )
    for name, grad in out.grads.items():
        param = params[name]
        if grad.shape != param.shape or grad.dtype is not param.dtype:
            raise ValueError(
                f"the gradient of {name} has shape {tuple(grad.shape)} and {grad.dtype}, the parameter {tuple(param.shape)} "
                f"and {param.dtype}: return gradients like the parameters from your wrapper"
            )


def _move(owner: dict[str, Any], key: str, value: Tensor) -> None:
    """Give a module's buffer this value, if the pass has not written it in place."""
    buffer = owner[key]
    if buffer is value:
        return
    if (buffer.shape, buffer.dtype, buffer.device) == (value.shape, value.dtype, value.device):
        buffer.copy_(value)
    else:
        owner[key] = value


def _add(param: Tensor, grad: Tensor) -> None:
    """Add to `.grad`, as torch does after a backward pass."""
    if param.grad is None:
        param.grad = grad
    elif param.grad.is_sparse and not grad.is_sparse:
        param.grad = grad + param.grad
    else:
        param.grad.add_(grad)


_UNKNOWN = (
    "ll.grads.backward gives the grad_fn a state with the tensors, step and seed. If it reads state.epoch or state.extra, "
    "give epoch= or extra=; all other counts and the optimizer's state are None there"
)
