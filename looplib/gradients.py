"""Gradient functions: from a state and a batch to the gradients of a loss.

`make_grad_fn` runs your loss function on your module with the state's tensors in it, and takes the gradient inside
that call, so hooks, buffers and activation checkpointing behave as in a raw loop. Everything between the loss and the
update (clipping, accumulation, loss scaling) wraps one `GradFn` in another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from looplib._core import modules as _modules
from looplib._core import torch_private
from looplib._core.engines import LOCAL_PASSES, Engine, Passes
from looplib._core.mappings import as_record, mapped, pairs, subset, without
from looplib._core.random import mix
from looplib._core.ranks import is_distributed, placed_like, rank
from looplib._core.records import Made, check_function_of_model, mark, with_repr
from looplib._core.tracing import cuts_marked, differentiated, entered, tracing
from looplib._core.trees import batch_size as count_examples
from looplib._core.watches import LabelWatch, Reach
from looplib._objective import objective_of, records, scalar_like, split_loss, value_of, with_own_weight
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
            the state belongs to a different model, or the batch is on a different device. The message gives the
            names.
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
    reach = Reach(model, plain=host.engine.gathers)
    microbatch = _microbatch_of(host, loss_fn, batch_size, reach)
    renormed = tuple(name for name in host.renormed if name in names)

    def grad_fn(state: TrainState, batch: Any, request: GradRequest = WHOLE) -> Gradients:
        return microbatches(state, (batch,), request)[0]

    def microbatches(state: TrainState, batches: Sequence[Any], request: GradRequest) -> list[Gradients]:
        """Gradients of several microbatches in order, with the state's tensors placed in the module once."""
        given, buffers = of_this_model(host, state)
        params = _renormed(host, given, names, request) if host.renormed else given
        total, in_place = request.sum, lambda: request.donate and host.holds(params)
        passes = host.engine.passes(state, batches, batch_size, total, in_place)
        leaves = _Leaves(params, names)
        seeds = _seeds(state, request, len(batches), leaves.traced)
        outs: list[Gradients] = []

        def body() -> None:
            leaves.begin(None if total is None else total.grads)
            if reach.plain:
                reach.set_aside()
            for index, batch in enumerate(batches):
                if index:
                    host.start(seeds[index])
                outs.append(microbatch(batch, request, passes, leaves, index == len(batches) - 1))

        lent, writes = (
            (buffers, None) if request.donate else (mapped(Tensor.clone, buffers), host.unwritten.begin(given))
        )
        grad_mode = torch.is_grad_enabled()
        try:
            torch_private.set_grad_enabled(True)
            host.run(leaves.all, lent, seeds[0], body)
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
            if passes is not LOCAL_PASSES:
                passes.end()
        last = outs[-1]
        if len(last.grads) < len(needed) and (total is None or total.last):
            _refuse_unreached(last, needed)
        if writes is not None:
            host.unwritten.check(given, writes)
            last = last._replace(buffers=mapped(_without_graph, last.buffers))
        if renormed:
            last = last._replace(buffers={**last.buffers, **_written(renormed, params, given)})
        outs[-1] = last
        return outs

    facts = Made(
        "grad_fn",
        "make_grad_fn",
        adds=True,
        microbatches=microbatches,
        compare=host.engine.compare if isinstance(host.engine, Engine) else None,
        model=model,
        renormed=renormed,
        reach=reach,
    )
    settings = {"trainable": trainable, "allow_unused": allow_unused, "batch_size": batch_size}
    return with_repr(mark(grad_fn, facts), make_grad_fn, model, loss_fn, **settings)


def _microbatch_of(
    host: _modules.FunctionalModule, loss_fn: LossFn, batch_size: Callable[[Any], int], reach: Reach
) -> Callable[[Any, GradRequest, Passes, _Leaves, bool], Gradients]:
    """Forward and backward pass of one microbatch, with a state's tensors already in the module."""
    model, watch = host.model, LabelWatch()

    # A separate function, so that one microbatch's graph is freed before the next one is built.
    def microbatch(batch: Any, request: GradRequest, passes: Passes, leaves: _Leaves, final: bool) -> Gradients:
        samples, total = batch_size(batch), request.sum
        batch, counts = passes.before(final, batch, samples)
        with cuts_marked() if leaves.traced else _AS_IT_IS:
            out = loss_fn(model, batch)
        loss, aux = split_loss(out, counts)
        if host.slots.buffers:
            loss = with_own_weight(loss)
        if not isinstance(loss, Mean) and (total is not None or passes.ranks > 1):
            watch.look(batch)
        value, factor, weight = objective_of(loss, samples, total, passes)
        if not (reach.known or leaves.traced):
            reach.learn(value, batch, leaves.all, leaves.names)
        inputs = _NO_INPUTS if reach.plain and not leaves.traced else leaves.inputs
        _backward(value, factor, request.scale, inputs, leaves.again)
        metrics = records(loss, aux, samples, apart=not leaves.traced, counts=counts)
        grads, after = {}, {}
        if final:
            for left in passes.padding:
                passes.before_padding(left)
                again, _ = split_loss(loss_fn(model, batch))
                _backward(value_of(again), 0.0, request.scale, inputs)
            grads, after = leaves.grads(), host.buffers() if host.slots.buffers else {}
            if len(grads) < len(leaves.names) and not leaves.traced:
                reach.check(value, {*leaves.names} - grads.keys())
            if total is not None and passes.ranks > 1:
                total.ranks = passes.ranks
                total.written = {name: (grad, torch_private.version(grad)) for name, grad in grads.items()}
        return as_record(Gradients, (grads, metrics, after, passes.samples(samples), weight, request.scale))

    return microbatch


def _refuse_unreached(out: Gradients, needed: Sequence[str]) -> None:
    """Raise if any of these parameters has no gradient."""
    if missing := [name for name in needed if name not in out.grads]:
        raise ValueError(unreached(missing))


_IN_INFERENCE_MODE = (
    "gradients were asked for under torch.inference_mode(), whose tensors carry none: take the step out of it. Eval and "
    "predict steps record no gradients anyway, and torch.no_grad() does the same for your own code"
)
_AS_IT_IS = nullcontext()
_NO_INPUTS: tuple[Tensor, ...] = ()


class _Leaves:
    """Trained parameters as the leaves of one call's graph, with their gradients in `grad`.

    Attributes:
        all: all parameters, including the trained ones.
        traced: True while the call is being traced instead of run.
        names: their names.
        inputs: the leaves that a backward pass has to fill.
        again: True if the gradients must be differentiable themselves.
    """

    __slots__ = ("_frozen", "_stale", "again", "all", "inputs", "names", "traced")

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
        self.traced, self.again = False, False
        if entered and tracing():
            self.traced, self.again = True, differentiated()

    def begin(self, into: Mapping[str, Tensor] | None) -> None:
        """Start accumulating from zero, or into these gradients. Frozen parameters get none."""
        for tensor in self._frozen:
            tensor.requires_grad_(False)
        for name, leaf in pairs(self.names, self.inputs):
            leaf.grad = into.get(name) if into else None

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


def _renormed(
    host: _modules.FunctionalModule, params: dict[str, Tensor], names: Sequence[str], request: GradRequest
) -> dict[str, Tensor]:
    """Parameters to run on if the forward pass writes some: copies, unless the step trains them in place."""
    if is_distributed():
        raise RuntimeError(
            f"{', '.join(host.renormed)} has max_norm=, so each rank writes it in its forward pass by what its own "
            "part of the batch holds, and the ranks' weights drift apart: leave out max_norm= (weight decay on the "
            "embedding, or dividing by the norm in forward, bounds it on all ranks alike)"
        )
    return host.unshared(params, names if request.donate else ())


def _written(renormed: Iterable[str], params: dict[str, Tensor], before: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: params[name] for name in renormed if params[name] is not before[name]}


def forward_writes(
    buffers: dict[str, Tensor], params: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The parameters and the buffers among the tensors after a forward pass (see `Gradients.buffers`)."""
    if buffers.keys().isdisjoint(params):
        return {}, buffers
    return subset(buffers, params), without(buffers, params)


def _without_graph(buffer: Tensor) -> Tensor:
    """A buffer without the graph of a forward pass that has assigned a new one."""
    return buffer.detach() if buffer.requires_grad else buffer


def _seeds(state: TrainState, request: GradRequest, count: int, traced: bool) -> list[int]:
    if traced:
        return [*indices(request, count)]
    step, seed, own = state.step, state.seed, rank()
    return [mix(seed, step, own, index) for index in indices(request, count)]


def indices(request: GradRequest, count: int) -> Iterable[int]:
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


def check_history(params: Mapping[str, Tensor]) -> None:
    """Raise if a parameter carries a graph: a step would cut off its gradient, and a donated step would keep the graph."""
    for name, tensor in params.items():
        if tensor.grad_fn is not None:
            raise ValueError(
                f"the parameter {name} of the state was computed from others, with a graph behind it "
                f"({type(tensor.grad_fn).__name__}): compute it under torch.no_grad(), or give its detach(); to take "
                "the gradient through the step, use ll.transforms.differentiable(train_step)"
            )


def unreached(names: Iterable[str]) -> str:
    return (
        f"no gradient reached {', '.join(names)}: the loss does not depend on them. Choose what is trained "
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
