"""Gradient functions: from a state and a batch to the gradients of a loss.

`make_grad_fn` runs your loss function on your module with the state's tensors in it, and takes the gradient inside
that call, so hooks, buffers and activation checkpointing behave as in a raw loop. Everything between the loss and the
update (clipping, accumulation, loss scaling) wraps one `GradFn` in another.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from looplib._core import modules as _modules
from looplib._core import torch_private
from looplib._core.engines import RunningSum, Sync, sync_over_ranks
from looplib._core.mappings import as_record, mapped, pairs, without
from looplib._core.random import mix
from looplib._core.ranks import placed_like, rank_and_size
from looplib._core.records import Made, check_function_of_model, mark, with_repr
from looplib._core.tracing import cuts_marked, differentiated, entered, tracing
from looplib._core.trees import batch_size as count_examples
from looplib._core.trees import padding_batch
from looplib._core.watches import LabelWatch, Reach
from looplib._objective import (
    aux_records,
    objective_of,
    record,
    scalar_like,
    split_loss,
    uncounted,
    with_own_weight,
    without_weight,
)
from looplib.metrics._mean import Mean
from looplib.types import WHOLE, GradFn, Gradients, GradRequest, LossFn, TrainState, trees_of

__all__ = ["make_grad_fn"]


def make_grad_fn(
    model: nn.Module,
    loss_fn: LossFn,
    *,
    trainable: Callable[[str, Tensor], bool] | None = None,
    allow_unused: bool = False,
    batch_size: Callable[[Any], int] = count_examples,
) -> GradFn:
    """Make a pure gradient function from a module and a loss function.

    >>> import looplib as ll, torch
    >>> model = torch.nn.Linear(2, 1)
    >>> def loss_fn(model, batch):
    ...     x, y = batch
    ...     return torch.nn.functional.mse_loss(model(x), y)
    >>> grad_fn = ll.make_grad_fn(model, loss_fn)
    >>> gradients = grad_fn(ll.init_state(model), (torch.zeros(4, 2), torch.ones(4, 1)))
    >>> sorted(gradients.grads), gradients.samples
    (['bias', 'weight'], 4)

    The same state and batch always give the same gradients, because dropout and other draws are seeded from the
    state. If the module is wrapped in DDP or sharded by FSDP2, the result is the gradient of the global batch over
    all ranks, even if their batches have different sizes or token counts.

    Args:
        model: the `nn.Module`, with or without torch's wrappers.
        loss_fn: `loss_fn(model, batch)`, which returns a scalar loss (the mean over the samples), a
            `Mean(total, weight)`, or `(loss, aux)` with a dict of scalars and metrics.
        trainable: `(name, tensor) -> bool`, selects the parameters to train. Defaults to those that require a
            gradient when `make_grad_fn` is called.
        allow_unused: skip parameters that the loss does not reach, as a raw loop does, instead of raising.
        batch_size: function that counts the samples in a batch. The default takes the length of the first dimension.

    Raises:
        ValueError: the loss is not a scalar or reaches no parameter, a parameter has no gradient or carries a graph,
            the batch has no samples, the state belongs to a different model, or the batch is on a different device.
            The message gives the names.
        TypeError: `loss_fn` returns anything else.
        RuntimeError: the module is wrapped in DDP or FSDP2, and the state is not bound to it or the step does not
            donate.

    **Training mode.** What counts is the mode at the call of `make_grad_fn`. If the module itself is in training mode
    then, it is so during each call, and submodules that are in eval mode stay in it. If one of those has dropout and
    trainable parameters, a warning names it: models from `from_pretrained` come in eval mode, and stay in it inside a
    peft wrapper. If the module itself is in eval mode, that is taken for an oversight: all of it runs in training mode,
    submodules too, and a warning names its batch norm and dropout layers.

    **Random draws.** torch's random streams are seeded from `(seed, step, rank, microbatch)` for the call and
    restored afterwards. Steps of several threads take turns, because threads share torch's stream of the CPU. A
    thread of yours that draws by itself (`torch.rand`) during a step draws from the step's numbers.

    **Whose tensors.** If the state is bound to the module, the module runs on its own tensors, hooks included.
    Otherwise the state's tensors take their place during the call.
    """
    check_function_of_model(model, loss_fn, "make_grad_fn", "loss_fn")
    host = _modules.FunctionalModule(model, training=True)
    names = _modules.trainable_names(model, trainable)
    needed = [] if allow_unused else names
    host.warn_of_eval_mode(names)
    reach = Reach(model, plain=host.engine is not None and bool(host.engine.shards))
    passes_of = _passes_of(host, loss_fn, batch_size, reach)

    def grad_fn(state: TrainState, batch: Any, request: GradRequest = WHOLE) -> Gradients:
        return microbatches(state, (batch,), request)[0]

    def microbatches(state: TrainState, batches: Sequence[Any], request: GradRequest) -> list[Gradients]:
        """Gradients of several microbatches in order, with the state's tensors placed in the module once."""
        params, buffers = of_this_model(host, state)
        rank, ranks = rank_and_size()
        sync, total = None, request.sum
        if ranks > 1 or host.engine is not None:
            in_place = request.donate and host.holds(params)
            sync = sync_over_ranks(host.engine, ranks, state, batches, batch_size, total, in_place)
        leaves = _Leaves(params, names)
        indexes = indices(request, len(batches))
        seeds = indexes if leaves.traced else [mix(state.seed, state.step, rank, index) for index in indexes]
        lent, writes = (
            (buffers, None) if request.donate else (mapped(Tensor.clone, buffers), host.unwritten.begin(params))
        )
        outs: list[Gradients] = []
        body = partial(passes_of, batches, seeds, request, sync, leaves, outs)
        grad_mode = torch.is_grad_enabled()
        try:
            torch_private.set_grad_enabled(True)
            grads, after = host.run(leaves.all, lent, seeds[0], body, request.donate)
        except Exception as error:
            if torch.is_inference_mode_enabled():
                raise RuntimeError(_IN_INFERENCE_MODE) from error
            batch = batches[min(len(outs), len(batches) - 1)]
            raise host.explained(error, params, buffers, batch)  # noqa: B904
        finally:
            _hold_signals = True
            torch_private.set_grad_enabled(grad_mode)
            leaves.end()
            if reach.plain:
                reach.put_back()
            if sync is not None:
                sync.end()
        if len(grads) < len(needed):
            _refuse_unreached(grads, needed)
        if writes is not None:
            host.unwritten.check(params, writes)
            after = mapped(_without_graph, after)
        _, metrics, _, samples, weight, scale = outs[-1]
        outs[-1] = Gradients(grads, metrics, after, samples, weight, scale)
        return outs

    facts = Made(
        "grad_fn",
        "make_grad_fn",
        microbatches=microbatches,
        model=model,
        batch_norms=host.batch_norms(),
        reach=reach,
    )
    settings = {"trainable": trainable, "allow_unused": allow_unused, "batch_size": batch_size}
    return with_repr(mark(grad_fn, facts), make_grad_fn, model, loss_fn, **settings)


def _passes_of(
    host: _modules.FunctionalModule, loss_fn: LossFn, batch_size: Callable[[Any], int], reach: Reach
) -> Callable[..., tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """Forward and backward passes of microbatches, with a state's tensors already in the module."""
    model, watch = host.model, LabelWatch()

    def passes_of(
        batches: Sequence[Any],
        seeds: Sequence[int],
        request: GradRequest,
        sync: Sync | None,
        leaves: _Leaves,
        outs: list[Gradients],
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The gradients of all microbatches, and the buffers after them. What each one gives goes into `outs`."""
        leaves.begin()
        if reach.plain:
            reach.set_aside()
        for number, batch in enumerate(batches):
            if number:
                host.seed(seeds[number])
            samples = batch_size(batch)
            if not samples:
                batch = _stand_in(batch, request.sum, sync)
            one = partial(microbatch, batch, samples, request, sync, leaves)
            if not samples:
                one = partial(host.aside, one)
            out = one() if sync is None else sync.make(number, one)
            outs.append(out if samples else out._replace(metrics=uncounted(out.metrics)))
        if sync is None:
            grads = leaves.grads()
        else:
            sync.pad(partial(host.aside, partial(microbatch, batch, 0, request, sync, leaves)))
            grads = leaves.grads()
        if len(grads) < len(leaves.names) and not leaves.traced:
            reach.check(leaves.loss, {*leaves.names} - grads.keys())
        return grads, host.buffers() if host.slots.buffers else {}

    # A separate function, so that one microbatch's graph is freed before the next one is built.
    def microbatch(batch: Any, samples: int, request: GradRequest, sync: Sync | None, leaves: _Leaves) -> Gradients:
        """One pass, which adds to the gradients of `leaves`. One of 0 samples does not count."""
        total, leaves.loss = request.sum, None
        with leaves.cuts:
            out = loss_fn(model, batch)
        loss, aux = split_loss(out)
        if isinstance(loss, Mean):
            loss = with_own_weight(loss) if samples else without_weight(loss)
        elif total is not None or sync is not None:
            watch.look(batch)
        value, factor, weight = objective_of(loss, samples, total, sync)
        leaves.loss = value
        inputs = leaves.inputs if leaves.traced else _filled(reach, value, batch, leaves)
        _backward(value, factor, request.scale, inputs, leaves.again)
        metrics = {"loss": record("loss", loss, samples)}
        if aux:
            metrics |= aux_records(aux, samples)
        return as_record(Gradients, ({}, metrics, {}, samples, weight, request.scale))

    return passes_of


def _filled(reach: Reach, loss: Tensor, batch: Any, leaves: _Leaves) -> tuple[Tensor, ...]:
    """The leaves that the backward pass of a loss is told to fill; none if it is not to be told."""
    if not reach.known:
        reach.learn(loss, batch, leaves.all, leaves.names)
    return () if reach.plain else leaves.inputs


def _stand_in(batch: Any, total: RunningSum | None, sync: Sync | None) -> Any:
    """A batch to run the model on in place of one without samples, since other ranks or microbatches may have some."""
    if total is None and sync is None:
        raise ValueError("the batch has no samples, so its mean loss has no value: leave it out")
    return padding_batch(batch)


_IN_INFERENCE_MODE = (
    "gradients were asked for under torch.inference_mode(), whose tensors carry none: take the step out of it. Eval and "
    "predict steps record no gradients anyway, and torch.no_grad() does the same for your own code"
)
_AS_IT_IS: AbstractContextManager[Any] = nullcontext()


class _Leaves:
    """Trained parameters as the leaves of one call's graph, with their gradients in `grad`.

    Attributes:
        all: all parameters, including the trained ones.
        traced: True while the call is being traced instead of run.
        cuts: context for the loss function, in which a trace may mark where it blocks gradients.
        loss: of the last microbatch.
        names: their names.
        inputs: the leaves that a backward pass has to fill.
        again: True if the gradients must be differentiable themselves.
    """

    __slots__ = ("_frozen", "_stale", "again", "all", "cuts", "inputs", "loss", "names", "traced")

    def __init__(self, params: dict[str, Tensor], names: Sequence[str]) -> None:
        self.names = names
        self.inputs = tuple(
            [
                tensor if (tensor := params[name]).requires_grad and tensor.is_leaf else _leaf(name, tensor)
                for name in names
            ]
        )
        self.all = {**params, **dict(zip(names, self.inputs, strict=True))}
        self._frozen: list[Tensor] = []
        if len(names) < len(params):
            rest = without(params, {*names})
            self._frozen = [_leaf(name, tensor) for name, tensor in rest.items() if tensor.requires_grad]
        self._stale = [leaf.grad for leaf in self.inputs]
        self.loss: Any = None
        self.traced, self.again, self.cuts = False, False, _AS_IT_IS
        if entered and tracing():
            self.traced, self.again, self.cuts = True, differentiated(), cuts_marked()

    def begin(self) -> None:
        """Start accumulating from zero. Frozen parameters get no gradients."""
        for tensor in self._frozen:
            tensor.requires_grad_(False)
        for leaf in self.inputs:
            leaf.grad = None

    def grads(self) -> dict[str, Tensor]:
        """Gradients by name, each placed over the ranks as its parameter is."""
        return {
            name: grad if type(grad) is Tensor else placed_like(leaf, grad)
            for name, leaf in pairs(self.names, self.inputs)
            if (grad := leaf.grad) is not None
        }

    def end(self) -> None:
        for tensor in self._frozen:
            tensor.requires_grad_(True)
        for leaf, grad in pairs(self.inputs, self._stale):
            leaf.grad = grad
        self.loss = None


def _without_graph(buffer: Tensor) -> Tensor:
    """A buffer without the graph of a forward pass that has assigned a new one."""
    return buffer.detach() if buffer.requires_grad else buffer


def indices(request: GradRequest, count: int) -> Sequence[int]:
    """Indices of the microbatches of a part, distinct even if the part is itself a microbatch of another."""
    if count == 1:
        return [request.index]
    return range(count) if not request.index else [mix(request.index, index) for index in range(count)]


def of_this_model(host: _modules.FunctionalModule, state: TrainState) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    params, buffers, _ = trees_of(state)
    if params.keys() != host.slots.params.keys() or buffers.keys() != host.slots.buffers.keys():
        host.explain(params, buffers, None)
    return params, buffers


def _leaf(name: str, tensor: Tensor) -> Tensor:
    if tensor.requires_grad and tensor.is_leaf:
        return tensor
    if tensor.grad_fn is not None:
        check_history({name: tensor})
    return tensor.detach().requires_grad_()


_TRAINED = (
    "compute it under torch.no_grad(), or give its detach(); to take the gradient through the step, use "
    "ll.transforms.differentiable(train_step)"
)
EVALUATED = (
    "eval and predict steps would cut its gradient off. Take the loss itself, "
    "torch.func.functional_call(model, state.params, inputs), or if you want no gradient, give its detach(), or "
    "call the step under torch.no_grad()"
)


def check_history(params: Mapping[str, Tensor], instead: str = _TRAINED) -> None:
    """Raise if a parameter carries a graph: a step would cut off its gradient, and a donated step would keep the graph."""
    for name, tensor in params.items():
        if tensor.grad_fn is not None or (
            torch_private.in_transform(tensor) and torch_private.is_differentiated(tensor)
        ):
            graph = type(tensor.grad_fn).__name__ if tensor.grad_fn is not None else "torch.func"
            raise ValueError(
                f"the parameter {name} of the state was computed from others, with a graph behind it ({graph}): {instead}"
            )


def _refuse_unreached(grads: Mapping[str, Tensor], needed: Sequence[str]) -> None:
    """Raise if any of these parameters has no gradient."""
    if missing := [name for name in needed if name not in grads]:
        raise ValueError(
            f"no gradient reached {', '.join(missing)}: the loss does not depend on them. Choose what is trained "
            "(make_grad_fn(..., trainable=...) and the same for init_state), or leave them as they are with "
            "allow_unused=True"
        )


_run_backward = torch_private.run_backward


def _backward(
    loss: Tensor,
    factor: Tensor | float,
    scale: Tensor | None,
    inputs: tuple[Tensor, ...] = (),
    again: bool = False,
) -> None:
    """Run `(loss * factor * scale).backward()` without an operation for the factors."""
    if loss.dim():
        loss = loss.reshape(())
    seed = factor if isinstance(factor, Tensor) else scalar_like(loss, factor)
    if scale is not None:
        seed = seed * scale.to(loss.device)  # the scale is on the first parameter's
    if scale is not None or seed is factor:
        seed = seed.reshape(()).to(loss.device, loss.dtype)
    _run_backward((loss,), (seed,), again, again, inputs, allow_unreachable=True, accumulate_grad=True)
