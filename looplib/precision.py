"""Arithmetic in fewer bits: where it happens, and what keeps it from losing small numbers.

`autocast` wraps what calls the model, so the backward pass is left outside, as torch asks. fp16 needs a loss scale:
`scale_loss` multiplies the loss and divides the gradients, and `dynamic_loss_scale` around the optimizer holds the
scale, grows it, and skips the updates that overflowed. Weights in bfloat16 need `master_weights` to move at all;
`cast` makes a state of such weights to evaluate and export with.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from looplib._tracing import afterwards, choose, like, tracing
from looplib.gradients import WHOLE, GradFn, Gradients, Part, multiply, of_whole
from looplib.metrics import Mean
from looplib.optimizer import Grads, Optimizer, Params, wrap
from looplib.skipping import NonFiniteGradientsError, _finite, all_finite
from looplib.state import TrainState

R = TypeVar("R")


def autocast(
    function: Callable[[Any, Any], R], dtype: torch.dtype = torch.bfloat16, *, enabled: bool = True
) -> Callable[[Any, Any], R]:
    """A `loss_fn`, `metric_fn` or `predict_fn` under `torch.autocast`, on the device of the model's parameters.

    >>> import looplib as ll, torch
    >>> model = torch.nn.Linear(2, 1)
    >>> predict_step = ll.make_predict_step(model, ll.autocast(lambda model, x: model(x), torch.bfloat16))
    >>> predict_step(ll.init_state(model), torch.zeros(4, 2)).dtype
    torch.bfloat16

    The parameters, and their gradients, stay in their own dtype. float16 needs `scale_loss` besides.

    Args:
        function: `function(model, batch)`.
        dtype: torch.bfloat16 or torch.float16.
        enabled: False for no effect, so that a setting can choose.

    Raises ValueError for another dtype.
    """
    if dtype not in (torch.bfloat16, torch.float16):
        plain = "; float32 is what there is without autocast: leave it out, or give enabled=False"
        raise ValueError(
            f"autocast to {dtype}: give torch.bfloat16 or torch.float16{plain if dtype is torch.float32 else ''}"
        )

    def casted(model: nn.Module, batch: Any) -> R:
        device = next(model.parameters()).device.type
        with torch.autocast(device, dtype=dtype, enabled=enabled):
            return function(model, batch)

    return casted


def cast(state: TrainState, dtype: torch.dtype) -> TrainState:
    """The state with its floating-point parameters and buffers in `dtype`, and complex ones as they are.

    >>> import looplib as ll, torch
    >>> model = torch.nn.Linear(2, 1)
    >>> state = ll.init_state(model)
    >>> half = ll.cast(state, torch.bfloat16)
    >>> half.params["weight"].dtype, state.params["weight"].dtype
    (torch.bfloat16, torch.float32)
    >>> predict_step = ll.make_predict_step(model, lambda model, x: model(x.bfloat16()))
    >>> predict_step(half, torch.zeros(4, 2)).dtype
    torch.bfloat16

    For evaluation at half the memory, `ll.evaluate(eval_step, ll.cast(state, torch.bfloat16), batches)`, and for
    export, `ll.save_safetensors(model, ll.cast(state, torch.bfloat16), path)`. What a batch has in floating point the
    metric function casts; for arithmetic in fewer bits with weights in float32 there is `autocast`.

    Parameters and buffers, those of integers too, are copies, which carry no gradient back and are bound to no
    module, so a donated step may go on from `state`. (A module that FSDP2 shards computes, and is exported, in its
    own dtype all the same.)

    `opt_state` and `extra` are those of `state`, so torch's optimizers refuse to go on from here with moments of
    another dtype. To train on, begin them anew: `state.replace(opt_state=optimizer.init(state.params))`, with
    `master_weights` around the optimizer where the weights are of half precision.

    Args:
        state: any; of averages, `ll.eval_state(optimizer, state)` first.
        dtype: a floating-point one.

    Raises:
        TypeError: something else than a state.
        ValueError: a dtype that is not floating-point.
        DonatedStateError: the state is spent.
    """
    if not isinstance(state, TrainState):
        raise TypeError(
            f"cast got a {type(state).__name__}; give a TrainState, such as ll.init_state returns "
            "(for a module, torch has module.to(dtype))"
        )
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ValueError(f"cast to {dtype}: give a floating-point dtype, such as torch.bfloat16")

    def converted(tensor: Tensor) -> Tensor:
        own = dtype if tensor.is_floating_point() else tensor.dtype
        return tensor.detach().to(own, copy=True).requires_grad_(tensor.requires_grad)

    return state.replace(
        params={name: converted(tensor) for name, tensor in state.params.items()},
        buffers={name: converted(tensor) for name, tensor in state.buffers.items()},
    )


def scale_loss(grad_fn: GradFn) -> GradFn:
    """Multiply the loss by the scale in the state before the backward pass, and divide the gradients by it after.

    >>> import looplib as ll, torch
    >>> model = torch.nn.Linear(2, 1)
    >>> loss_fn = ll.autocast(lambda model, x: model(x).square().mean(), torch.float16)
    >>> grad_fn = ll.scale_loss(ll.make_grad_fn(model, loss_fn))
    >>> optimizer = ll.dynamic_loss_scale(ll.optimizer(torch.optim.SGD, lr=0.1))
    >>> state, metrics = ll.make_train_step(grad_fn, optimizer)(ll.init_state(model, optimizer), torch.ones(4, 2))
    >>> ll.compute(metrics)["loss_scale"]
    65536.0

    Gradients that are too small for float16 survive so; when one overflows all become NaN, and
    `dynamic_loss_scale` skips them. Clipping goes around it, where the gradients are the true ones; `accumulate`
    goes inside. The scale is reported as `loss_scale`.

    Args:
        grad_fn: whose loss.

    Raises ValueError for a state without a loss scale, for gradients in float16 (of weights in float16, which need
    `accumulate(..., dtype=torch.float32)` and `master_weights`), and within `accumulate`.

    Source: Micikevicius et al., "Mixed precision training", 2018; `torch.amp.GradScaler`.
    """

    def scaled(state: TrainState, batch: Any, part: Part = WHOLE) -> Gradients:
        if part.scale is not None:
            raise ValueError("scale_loss within scale_loss: once is enough")
        scale = _scale_of(state.opt_state)
        out = grad_fn(state, batch, dataclasses.replace(part, scale=scale))
        if half := [name for name, grad in out.grads.items() if grad.dtype is torch.float16]:
            raise ValueError(
                f"gradients of {', '.join(half)} are in float16, where small ones become 0 when divided by the "
                "scale: keep the weights in float32 and compute in float16, ll.autocast(loss_fn, torch.float16); or "
                "add up in float32, scale_loss(accumulate(grad_fn, ..., dtype=torch.float32)), with master_weights"
            )
        factor = scale.double().reciprocal().float()
        # All NaN after an overflow, so that no clipping around this makes an infinite gradient a finite one.
        multiply(out.grads, torch.where(_finite(out.grads.values()).to(factor.device), factor, torch.nan))
        return out._replace(metrics={**out.metrics, "loss_scale": Mean(scale)})

    return of_whole("scale_loss", scaled, scaled=True)


def _scale_of(opt_state: Any) -> Tensor:
    record = opt_state
    while isinstance(record, dict):
        if "loss_scale" in record:
            scale: Tensor = record["loss_scale"]
            return scale
        record = record.get("inner_state")
    raise ValueError(
        "scale_loss found no loss scale in the state: wrap the optimizer as well, "
        "ll.dynamic_loss_scale(ll.optimizer(...)), and make the state with it"
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
    """Hold the loss scale that `scale_loss` uses; skip the updates whose gradients overflowed, and lower it then.

    >>> import looplib as ll, torch
    >>> optimizer = ll.dynamic_loss_scale(ll.optimizer(torch.optim.SGD, lr=0.1))
    >>> params = {"w": torch.ones(1)}
    >>> opt_state = optimizer.init(params)
    >>> same, opt_state = optimizer.update({"w": torch.tensor([torch.inf])}, opt_state, params, 0)
    >>> same is params, opt_state["loss_scale"].item()
    (True, 32768.0)

    The scale moves as `torch.amp.GradScaler`'s does. A skipped step changes nothing else: neither parameters nor
    buffers, averages of weights, or `state.step`, so the schedules stand still too; `state.skipped` is True. Ranks
    decide alike. To know on the host whether to skip, each step waits for its gradients.

    Args:
        optimizer: what updates when all is finite.
        init_scale: the first scale.
        growth_factor: what the scale is multiplied by after `growth_interval` updates in a row.
        backoff_factor: what it is multiplied by after an overflow.
        growth_interval: updates in a row without an overflow that make it grow.
        min_scale: an overflow below it is no matter of the scale.

    Raises:
        NonFiniteGradientsError: from the step, when the scale would fall below `min_scale`.
        ValueError: an argument out of its range.
    """
    if not (growth_factor > 1 and 0 < backoff_factor < 1 and growth_interval >= 1 and 0 < min_scale <= init_scale):
        raise ValueError(
            f"init_scale={init_scale}, growth_factor={growth_factor}, backoff_factor={backoff_factor}, "
            f"growth_interval={growth_interval}, min_scale={min_scale}: growth is above 1, backoff between 0 and 1, "
            "the interval at least 1, and the scale at least min_scale, above 0"
        )

    def init(params: Params, **extra: Any) -> dict[str, Any]:
        device = next(iter(params.values())).device
        return {
            "inner_state": optimizer.init(params, **extra),
            "loss_scale": torch.full((), init_scale, dtype=torch.float32, device=device),
            "growth_tracker": torch.zeros((), dtype=torch.int32, device=device),
        }

    def update(
        grads: Grads, opt_state: Any, params: Params, step: int, *, donate: bool = False, **extra: Any
    ) -> tuple[Params, Any]:
        finite = all_finite(grads)
        scale, tracker = opt_state["loss_scale"].clone(), opt_state["growth_tracker"].clone()
        if isinstance(finite, Tensor):
            overflowed = (~finite).to(scale)
        else:
            overflowed = torch.full((), float(not finite), device=scale.device)
        torch._amp_update_scale_(scale, tracker, overflowed, growth_factor, backoff_factor, growth_interval)
        record = {**opt_state, "loss_scale": scale, "growth_tracker": tracker}
        if isinstance(finite, Tensor) or not finite:
            afterwards(check, finite, scale, opt_state["loss_scale"], step)
        if not tracing() and not finite:
            return params, record
        new, inner = optimizer.update(grads, opt_state["inner_state"], params, step, donate=donate, **extra)
        updated = {**record, "inner_state": inner}
        return choose(finite, new, params, updated, record) if isinstance(finite, Tensor) else (new, updated)

    def check(finite: Tensor | bool, scale: Tensor, before: Tensor, step: int) -> None:
        if not finite and scale < min_scale:
            raise NonFiniteGradientsError(
                f"gradients are not finite at step {step} though the loss scale is down to "
                f"{before.item()} (min_scale={min_scale}), so the scale is not the cause: "
                "lower the learning rate, clip the gradients, or look at the batch"
            )

    return wrap(optimizer, init, update)


def master_weights(optimizer: Optimizer, dtype: torch.dtype = torch.float32) -> Optimizer:
    """Keep the weights in `dtype` in the optimizer's state, and train those, where the model's are of half precision.

    >>> import looplib as ll, torch
    >>> model = torch.nn.Linear(2, 1).bfloat16()
    >>> optimizer = ll.master_weights(ll.optimizer(torch.optim.AdamW, lr=1e-3))
    >>> state = ll.init_state(model, optimizer)
    >>> state.params["weight"].dtype, state.opt_state["master"]["weight"].dtype
    (torch.bfloat16, torch.float32)

    A weight in bfloat16 has 8 bits of precision, so an update of less than 1/256 of it is rounded away; its master
    moves, and the model's weight is the master rounded. Gradients are widened, moments are those of the
    masters. Parameters of another dtype are updated as they are. Within `ema` the average is that of the
    rounded weights; around it, `master_weights(ema(optimizer))`, that of the masters.

    Args:
        optimizer: what updates the masters.
        dtype: theirs, torch.float32 or torch.float64.

    Raises ValueError for another dtype; and, from `init`, when no parameter is of half precision.
    """
    if dtype not in (torch.float32, torch.float64):
        raise ValueError(f"masters in {dtype}: give torch.float32 or torch.float64")

    def init(params: Params, **extra: Any) -> dict[str, Any]:
        narrow = {name: p for name, p in params.items() if p.dtype in (torch.bfloat16, torch.float16)}
        if not narrow:
            found = ", ".join(sorted({str(tensor.dtype) for tensor in params.values()}))
            raise ValueError(
                f"master_weights has nothing to keep: the parameters are {found}. Make the model of half precision "
                "(model.bfloat16()), or leave this wrapper out"
            )
        master = {name: tensor.detach().to(dtype) for name, tensor in narrow.items()}
        return {"inner_state": optimizer.init({**params, **master}, **extra), "master": master}

    def update(
        grads: Grads, opt_state: Any, params: Params, step: int, *, donate: bool = False, **extra: Any
    ) -> tuple[Params, Any]:
        master = opt_state["master"]
        wide = {name: grad.to(dtype) if name in master else grad for name, grad in grads.items()}
        full = {**params, **master}
        new, inner = optimizer.update(wide, opt_state["inner_state"], full, step, donate=donate, **extra)
        if new is full:
            return params, {**opt_state, "inner_state": inner}
        narrow = {}
        with torch.no_grad():
            for name in master.keys() & grads.keys():
                old = params[name]
                rounded = old.copy_(new[name]) if donate else new[name].to(old.dtype)
                narrow[name] = rounded.requires_grad_(old.requires_grad)
        changed = {**new, **{name: params[name] for name in master}, **narrow}
        return like(new, changed), {"inner_state": inner, "master": {name: new[name] for name in master}}

    def evaluation(params: Params, buffers: dict[str, Tensor], opt_state: Any) -> tuple[Params, dict[str, Tensor]]:
        full = {**params, **opt_state["master"]}
        chosen, buffers = optimizer.evaluation(full, buffers, opt_state["inner_state"])
        if chosen is full:
            return params, buffers
        return {name: tensor.to(params[name].dtype) for name, tensor in chosen.items()}, buffers

    return wrap(optimizer, init, update, evaluation)
