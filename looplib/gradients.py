"""From a state and a batch to gradients.

`make_grad_fn` runs the user's loss function on the user's module, with the state's tensors in it for the time of
the call, and takes the gradient inside, so that hooks, buffers and recomputation see what a raw loop shows
them. What stands between loss and update (clipping, accumulation, loss scales) wraps a `GradFn` into another.
"""

from __future__ import annotations

import math
import threading
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from looplib._core import interrupts as _interrupts
from looplib._core import modules as _modules
from looplib._core import torch_private
from looplib._core import tracing as _tracing
from looplib._core.random import mix
from looplib._core.ranks import (
    Sums,
    add_up_over_ranks,
    largest_over_ranks,
    rank,
    shards,
    total_over_ranks,
    world_size,
)
from looplib._core.tracing import UntraceableError, tracing, users_own
from looplib._core.trees import batch_size as count_examples
from looplib.metrics._mean import Mean
from looplib.types import WHOLE, GradFn, Gradients, LossFn, Metric, Part, TrainState

__all__ = ["make_grad_fn"]


def make_grad_fn(
    model: nn.Module,
    loss_fn: LossFn,
    *,
    trainable: Callable[[str, Tensor], bool] | None = None,
    allow_unused: bool = False,
    batch_size: Callable[[Any], int] = count_examples,
) -> GradFn:
    """The gradient of a loss, as a pure function of state and batch.

    >>> import looplib as ll, torch
    >>> model = torch.nn.Linear(2, 1)
    >>> def loss_fn(model, batch):
    ...     x, y = batch
    ...     return torch.nn.functional.mse_loss(model(x), y)
    >>> grad_fn = ll.make_grad_fn(model, loss_fn)
    >>> gradients = grad_fn(ll.init_state(model), (torch.zeros(4, 2), torch.ones(4, 1)))
    >>> sorted(gradients.grads), gradients.samples
    (['bias', 'weight'], 4)

    The module is in training mode for the time of the call, but for submodules that were in eval mode when
    `make_grad_fn` was called; a warning names one that has dropout and is to be trained, as models of
    `from_pretrained` come in eval mode, and stay so within peft's. torch's random streams are at a place that depends
    on `(seed, step, rank, microbatch)` alone, and afterwards where they were. On a state that is bound to the module
    its own tensors are used, hooks and all, else the state's are put in their places for the time of the call.

    Args:
        model: the module, wrapped by torch's engines or not.
        loss_fn: `loss_fn(model, batch)`, which gives a scalar loss (the mean over the examples), or a
            `Mean(total, weight)`, or `(loss, aux)` with a dict of scalars and metrics.
        trainable: `(name, tensor) -> bool`; without it the parameters that require a gradient now.
        allow_unused: leave out parameters that the loss does not reach, as a raw loop does, instead of raising.
        batch_size: counts the examples in a batch.

    Raises:
        ValueError: a loss that is no scalar or reaches no parameter, a parameter without a gradient, a state of
            another model or with parameters that have a graph behind them, a batch on another device; each with the
            names.
        TypeError: something else than the above returned by `loss_fn`.
        RuntimeError: a module wrapped in DDP or FSDP2 with a state that is not bound, or without donation.

    A module that is wrapped in DDP or sharded by FSDP2 gives the gradient of the global batch, the parts of all ranks
    together, whatever each weighs: see `ll.distributed`.
    """
    host = _modules.Host(model, training=True)
    names = _modules.trainable_names(model, trainable)
    if left := host.left_in_eval(names):
        warnings.warn(
            f"{left} is in eval mode within a module that is not, and has dropout and parameters to train: they are "
            "trained without dropout. from_pretrained gives models in eval mode, and peft and other wrappers leave "
            "them so: call model.train() before make_grad_fn. If it is meant, set p of its dropout to 0",
            stacklevel=2,
        )
    chosen = frozenset(names)
    weighed = False  # the loss had a weight on the host at the last call, on all ranks alike

    def grad_fn(state: TrainState, batch: Any, part: Part = WHOLE) -> Gradients:
        return many(state, (batch,), part)[0]

    def many(state: TrainState, pieces: Sequence[Any], part: Part) -> list[Gradients]:
        """The same of several pieces, one after another, with the tensors put into the module once."""
        params, buffers = of_this_model(host, state)
        if host.engine and tracing():
            raise UntraceableError(
                f"{host.engine} sends gradients from within the backward pass, which a graph of a step cannot hold: "
                "leave out ll.compile_step, and compile the blocks of the model instead, ll.transforms.compile_blocks(model, Block), "
                "before it is wrapped"
            )
        if host.engine and not (part.donate and host.holds(params)):
            raise RuntimeError(
                f"{host.engine} works on the module's own parameters, in place, and would be silently wrong on "
                "others: use make_train_step(..., donate=True) and a bound state (from ll.init_state, or "
                "state = ll.bind(model, state))"
            )
        ranks = world_size()
        if ranks > 1 and not host.engine:
            _warn_of_local_gradients(grad_fn, part)
            ranks = 1
        if ranks > 1 and part.local:
            raise RuntimeError(
                f"reduce_gradients around a model in {host.engine}, which reduces its gradients itself: leave one of "
                "them out"
            )
        apart, later = part.retried is not None and bool(host.replicas), False
        if part.retried is not None and (reason := host.only_together()):
            if ranks > 1:
                raise RuntimeError(f"retry_on_oom cannot give up a pass of this model on one rank alone: {reason}")
            apart = False
        elif part.retried is not None and ranks > 1:
            ranks, later = 1, True
            if finish not in part.retried:
                part.retried.append(finish)
        leaves = {name: _leaf(name, params[name]) for name in names}
        rest = {} if len(names) == len(params) else {name: t for name, t in params.items() if name not in chosen}
        frozen = [_leaf(name, tensor) for name, tensor in rest.items() if tensor.requires_grad]
        stale = [leaf.grad for leaf in leaves.values()]
        here = state.seed, state.step, rank()
        seeds = [index if tracing() else mix(*here, index) for index in indices(part, len(pieces))]
        outs: list[Gradients] = []
        counted: Sums | None = None
        own: list[float] = []
        if ranks > 1 and part.per is None:
            own = [part.samples if part.samples is not None else sum(map(batch_size, pieces))]
            # On its way during the first forward pass, unless a weight is to go with it, which is known after that.
            counted = Sums(own) if part.sums or not weighed else None
        # Where a pass is one of all ranks, those with fewer pieces take their last one again, for nothing.
        alike = ranks > 1 and part.sums and host.passes_together()
        spare = round(largest_over_ranks([len(pieces)])[0]) - len(pieces) if alike else 0

        def body() -> None:
            nonlocal counted, weighed
            for name, leaf in leaves.items():
                leaf.grad = part.into.get(name) if part.into else None
            per = part.per
            for seed, piece in zip(seeds, pieces, strict=True):
                if outs:
                    host.seed(seed)
                if ranks > 1:
                    host.sync(part.last and not spare and len(outs) == len(pieces) - 1)
                samples = batch_size(piece)
                with users_own():
                    loss, aux = split_loss(loss_fn(model, piece))
                total: list[float] = []
                if own and not part.sums:
                    weight_here = _on_host(loss)
                    if counted is None:
                        counted = Sums([*own, *weight_here])
                        total = counted.read()[1:]
                    elif weight_here:
                        total = Sums(weight_here).read()
                    weighed = bool(weight_here)
                if counted is not None and not outs:
                    # The engine's average over the ranks of sums over this is the mean over all samples.
                    per = counted.read()[0] / ranks
                elif per is None and not isinstance(loss, Mean):
                    per = part.samples  # known beforehand, so there is nothing to divide at the end
                value, factor, weight, divisor = objective_of(loss, samples, part.sums, per, ranks, *total)
                per = divisor
                _backward(value, factor, part.scale, leaves.values() if tracing() else ())
                metrics: dict[str, Metric] = {"loss": record("loss", loss, samples)}
                for name, value in aux.items():
                    metrics[name] = record(name, value, samples)
                if ranks > 1:  # those of all ranks, once
                    samples = round(counted.read()[0]) if counted is not None and not outs else 0
                if len(outs) < len(pieces) - 1:
                    outs.append(Gradients({}, metrics, {}, samples, weight, divisor, ranks))
                    del loss, aux, value  # or two graphs would stand side by side
            for left in reversed(range(spare)):
                host.sync(part.last and not left)
                again = split_loss(loss_fn(model, pieces[-1]))[0]
                _backward(objective_of(again, 0, True, 1.0)[0], 0.0, part.scale)
            grads = {name: grad for name, leaf in leaves.items() if (grad := leaf.grad) is not None}
            outs.append(Gradients(grads, metrics, host.buffers(), samples, weight, divisor, ranks))

        lent = buffers if part.donate else {name: tensor.clone() for name, tensor in buffers.items()}
        grad_mode, thread = torch.is_grad_enabled(), threading.get_ident()
        try:
            torch_private.set_grad_enabled(True)
            for tensor in frozen:
                tensor.requires_grad_(False)
            if apart:
                host.apart(True)
            host.run(leaves if len(names) == len(params) else {**params, **leaves}, lent, seeds[0], body)
        except RuntimeError:
            host.explain(params, buffers, pieces[min(len(outs), len(pieces) - 1)])
            raise
        finally:
            _interrupts.begin_hold(thread)
            try:
                torch_private.set_grad_enabled(grad_mode)
                for tensor in frozen:
                    tensor.requires_grad_(True)
                for leaf, grad in zip(leaves.values(), stale, strict=True):
                    leaf.grad = grad
                if apart:
                    host.apart(False)
                elif ranks > 1:
                    host.sync(True)
            finally:
                _interrupts.end_hold(thread)
                _interrupts.deliver()
        out = outs[-1]
        if len(out.grads) < len(names) and not (allow_unused or later or not part.last):
            raise ValueError(unreached(name for name in names if name not in out.grads))
        if out.buffers and not part.donate:
            kept = {name: _kept(buffers[name], lent[name], tensor) for name, tensor in out.buffers.items()}
            outs[-1] = out._replace(buffers=kept)
        return outs

    def finish(state: TrainState, out: Gradients) -> Gradients:
        """What an engine would have made of all ranks' sums, and of the buffers."""
        out = mean_over_ranks(out, state.params)
        if not (allow_unused or out.grads.keys() >= chosen):
            raise ValueError(unreached(name for name in names if name not in out.grads))
        if out.buffers:
            host.run(state.params, out.buffers, 0, host.share_buffers)
        return out

    grad_fn.many = many  # type: ignore[attr-defined]
    return grad_fn


def mean_over_ranks(out: Gradients, params: Mapping[str, Tensor]) -> Gradients:
    """The gradient of the mean over all ranks, from each rank's own of its summed loss; collective.

    What each weighs is summed first, and the gradients after that. One that a rank does not have is zero there.
    """
    there = [float(name in out.grads) for name in params]
    weight = out.weight if out.weight is not None else out.samples
    sums = Sums([out.samples, *there, *([] if isinstance(weight, Tensor) else [weight])])
    total = total_over_ranks(weight) if isinstance(weight, Tensor) else None
    samples, *counts = sums.read()
    if total is None:
        total = counts.pop()
    reached = [name for name, count in zip(params, counts, strict=True) if count]
    grads = {name: out.grads[name] if name in out.grads else torch.zeros_like(params[name]) for name in reached}
    add_up_over_ranks(grads.values(), out.per / (total + (total == 0)))
    return out._replace(grads=grads, samples=round(samples), weight=None, per=1.0)


def indices(part: Part, count: int) -> Iterable[int]:
    """What tells apart the pieces that a part is cut into, also where it was cut from another."""
    return (
        range(count)
        if not part.index
        else [part.index]
        if count == 1
        else [mix(part.index, index) for index in range(count)]
    )


def of_this_model(host: _modules.Host, state: TrainState) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    if not isinstance(state, TrainState):
        raise TypeError(f"state is a {type(state).__name__}; give a TrainState, such as ll.init_state returns")
    params, buffers = state.params, state.buffers
    if params.keys() != host.slots.params.keys() or buffers.keys() != host.slots.buffers.keys():
        host.explain(params, buffers, None)
    return params, buffers


def _leaf(name: str, tensor: Tensor) -> Tensor:
    if tensor.requires_grad and tensor.is_leaf:
        return tensor
    if tensor.grad_fn is not None:
        check_history({name: tensor})
    return tensor.detach().requires_grad_()


def check_history(params: Mapping[str, Tensor]) -> None:
    """Raise where a step would cut off a gradient, and a donated one hold on to its graph for the rest of the run."""
    for name, tensor in params.items():
        if tensor.grad_fn is not None:
            raise ValueError(
                f"the parameter {name} of the state was computed from others, with a graph behind it "
                f"({type(tensor.grad_fn).__name__}): compute it under torch.no_grad(), or give its detach(); to take "
                "the gradient through the step, use ll.transforms.differentiable(train_step)"
            )


def _kept(before: Tensor, lent: Tensor, after: Tensor) -> Tensor:
    # torch counts the writes to a tensor, but batch norm's kernels write their float statistics uncounted.
    untouched = after is lent and torch_private.version(lent) == 0 and not lent.is_floating_point()
    return before if untouched else after.detach()


def unreached(names: Iterable[str]) -> str:
    return (
        f"no gradient reached {', '.join(names)}: the loss does not depend on them. Choose what is trained "
        "(make_grad_fn(..., trainable=...) and the same for init_state), or leave them as they are with "
        "allow_unused=True"
    )


def split_loss(out: Any) -> tuple[Any, Mapping[str, Any]]:
    if isinstance(out, tuple) and not isinstance(out, Mean):
        if len(out) == 2 and isinstance(out[1], Mapping):
            if "loss" in out[1]:
                raise ValueError('the aux of loss_fn has a "loss"; that name is the loss itself: choose another')
            return out
        raise TypeError(
            f"loss_fn returned a {type(out).__name__} of {', '.join(type(item).__name__ for item in out)}; "
            "return a scalar loss, a Mean(total, weight), or (loss, aux) with a dict aux"
        )
    return out, {}


def objective_of(
    loss: Any, samples: int, sums: bool, per: Tensor | float | None, ranks: int = 1, total: float | None = None
) -> tuple[Tensor, Tensor | float, Tensor | float | None, Tensor | float]:
    """What to differentiate, times what: to the mean loss, or to the summed loss over `per`, with its weight.

    On several ranks, whose gradients are then averaged, the mean is that over all ranks, and `per` the same on each;
    `total` is what the losses of all ranks weigh, where that is known.
    """
    value = loss.total if isinstance(loss, Mean) else loss
    if not isinstance(value, Tensor):
        raise TypeError(
            f"loss_fn returned a {type(value).__name__}; return a scalar tensor, a Mean(total, weight), or "
            "(loss, aux)" + ("; for a model's output, return output.loss" if hasattr(value, "loss") else "")
        )
    if value.numel() != 1:
        raise ValueError(
            f"the loss has shape {tuple(value.shape)}; return a scalar: loss.mean(), or for an exact average "
            "over what counts, Mean(loss.sum(), weight)"
        )
    if not value.requires_grad:
        raise ValueError(
            "the loss does not depend on any trainable parameter: it was computed without them, detached, or "
            "under no_grad"
        )
    if not isinstance(loss, Mean):
        if not sums and ranks == 1:
            return value, 1.0, None, 1.0
        per = max(samples, 1) if per is None else per
        return value, samples / per, samples if ranks == 1 else None, per
    weight = loss.weight.detach() if isinstance(loss.weight, Tensor) else loss.weight
    if ranks > 1 and not sums:
        total_weight = total_over_ranks(weight * loss.times) if total is None else total
        weight = total_weight / (ranks * loss.times)
    one = _one(value) if isinstance(weight, Tensor) or isinstance(per, Tensor) else 1.0
    if not sums:
        return value, one / weight if isinstance(weight, Tensor) or weight else math.inf, None, 1.0
    if loss.times != 1:
        weight = weight * loss.times
    if per is None:
        per = weight.clamp(min=1) if isinstance(weight, Tensor) else max(weight, 1)
    return value, one * loss.times / per, weight, per


def _on_host(loss: Any) -> list[float]:
    """What a loss weighs, where no device must be waited for to know it; else nothing."""
    if not isinstance(loss, Mean):
        return []
    if not isinstance(loss.weight, Tensor):
        return [loss.weight * loss.times]
    plain = type(loss.weight) is Tensor and loss.weight.device.type == "cpu"
    return [loss.weight.detach().item() * loss.times] if plain else []


def _warn_of_local_gradients(grad_fn: Any, part: Part) -> None:
    if not part.local and not hasattr(grad_fn, "warned"):
        grad_fn.warned = True
        warnings.warn(
            f"there are {world_size()} ranks and the model is in no engine that reduces its gradients: each rank "
            "trains one of its own. Wrap the model in DistributedDataParallel or fully_shard, or the grad_fn in "
            "ll.grads.reduce_gradients",
            RuntimeWarning,
            stacklevel=5,
        )


_run_backward = torch_private.run_backward


_constants: dict[tuple[torch.device, torch.dtype, float], Tensor] = {}


def _one(like: Tensor, value: float = 1.0) -> Tensor:
    """A scalar on the device and of the dtype of another tensor, made once."""
    kind = like.device, like.dtype, value
    if tracing():
        return torch.full((), value, device=like.device, dtype=like.dtype)
    if (constant := _constants.get(kind)) is None:
        if len(_constants) > 100:
            _constants.clear()
        constant = _constants[kind] = torch.full((), value, device=like.device, dtype=like.dtype)
    return constant


def _backward(loss: Tensor, factor: Tensor | float, scale: Tensor | None, inputs: Iterable[Tensor] = ()) -> None:
    """`(loss * factor * scale).backward()` for a loss that has been looked at: the factors need no operation."""
    if loss.dim():
        loss = loss.reshape(())
    seed = factor if isinstance(factor, Tensor) else _one(loss, factor)
    if scale is not None:
        seed = seed * scale
    if scale is not None or seed is factor:
        seed = seed.reshape(()).to(loss.device, loss.dtype)
    again = _tracing.differentiable  # by formulas that have a gradient themselves
    _run_backward((loss,), (seed,), again, again, tuple(inputs), allow_unreachable=True, accumulate_grad=True)


def record(name: str, value: Any, samples: int) -> Metric:
    """A value of the loss function as a record, cut off from the graph."""
    if isinstance(value, Mean):
        total, weight = (v.detach() if isinstance(v, Tensor) else v for v in value[:2])
        return Mean(total, weight, value.times)
    if isinstance(value, Tensor) and value.numel() == 1:
        return Mean(value.detach(), 1, samples)
    if isinstance(value, (int, float)):
        return Mean(value, 1, samples)
    if isinstance(value, Metric) and not isinstance(value, Tensor):
        return value
    found = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"type {type(value).__name__}"
    raise ValueError(f"{name!r} has {found}; give a scalar, a Mean(total, weight), or another metric")


def of_whole(name: str, grad_fn: GradFn, scaled: bool = False) -> GradFn:
    """A `GradFn` that has a meaning for the gradients of a whole step alone, and is refused for a part of one.

    It is refused for the gradients of a scaled loss too, unless it may be `scaled`.
    """

    def whole(state: TrainState, batch: Any, part: Part = WHOLE) -> Gradients:
        if part.sums:
            raise ValueError(_order(name, "accumulate"))
        if part.scale is not None and not scaled:
            raise ValueError(_order(name, "scale_loss"))
        return grad_fn(state, batch, part)

    whole.of_whole = name  # type: ignore[attr-defined]
    return whole


def check_parts(grad_fn: GradFn, wrapper: str) -> None:
    """Raise if parts of a step, as `wrapper` will ask for, have no meaning for this `GradFn`."""
    if not callable(grad_fn) or isinstance(grad_fn, nn.Module):
        raise TypeError(f"{wrapper} got a {type(grad_fn).__name__}; give a grad_fn, as ll.make_grad_fn returns")
    if name := getattr(grad_fn, "of_whole", None):
        raise ValueError(_order(name, wrapper))


def _order(name: str, wrapper: str) -> str:
    what = {"scale_loss": "scaled gradients", "reduce_gradients": "each rank's part alone"}.get(
        wrapper, "each piece alone"
    )
    return f"{name} within {wrapper} would act on {what}: put it around, {name}({wrapper}(grad_fn, ...), ...)"


def multiply(grads: Mapping[str, Tensor], factor: Tensor | float) -> None:
    """All gradients times a factor, in place."""
    parts = shards(grads.values())
    if not isinstance(factor, Tensor):
        if factor != 1:
            torch_private.foreach_mul_(parts, factor)
        return
    for device in {part.device for part in parts}:
        torch_private.foreach_mul_([part for part in parts if part.device == device], factor.to(device))
