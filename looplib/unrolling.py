"""Gradients through training: a step that is differentiated itself.

What a step computes is a function of state and batch, and its graph consists of operations that have gradients. So
`torch.func.grad` goes through it, and through as many in a row as memory holds, or more where a segment of steps is
computed again in the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.func import functionalize
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel

from looplib import _program, _tracing
from looplib._program import dissect, value_of
from looplib._tracing import STOPS
from looplib.compiling import Compiler, Machine, Ready, fakes
from looplib.metrics import Metric
from looplib.state import TrainState
from looplib.steps import Outcome, Parts, TrainStep, compiled_step


def differentiable(train_step: TrainStep) -> TrainStep:
    """A train step that autograd and `torch.func.grad` go through: for learned initialisations, rates and losses.

    >>> import looplib as ll, torch
    >>> model = torch.nn.Linear(1, 1, bias=False)
    >>> def loss_fn(model, batch):
    ...     return (model(batch) - 1).square().mean()
    >>> optimizer = ll.optimizer(torch.optim.SGD, lr=0.1)
    >>> inner_step = ll.differentiable(ll.make_train_step(ll.make_grad_fn(model, loss_fn), optimizer))
    >>> start, x = ll.init_state(model, optimizer), torch.ones(4, 1)
    >>> def after_three_steps(weight):
    ...     state = start.replace(params={"weight": weight})
    ...     for _ in range(3):
    ...         state, metrics = inner_step(state, x)
    ...     return (state.params["weight"] - 1).square().sum()
    >>> weight = torch.zeros(1, 1)
    >>> torch.func.grad(after_three_steps)(weight)  # 2 (w - 1) (1 - 2 lr) ** 6
    tensor([[-0.5243]])

    The gradient reaches the state's tensors before the step (an initialisation), the batch (weights of its rows, the
    parameters of a loss), and hyperparameters that stand in the state (`ll.injected`) or that a schedule computes
    from a tensor. It is that of the exact update, momenta and bias corrections included; clipping, accumulation and
    averages are gone through too. Metrics carry it as well. What the loss function detaches, or computes in
    `no_grad`, stays cut off.

    The step is written down as a graph at the first batch of each shape, so what `make_train_step(compile=)` says of
    graphs holds here. Attention is taken in its plain form, as fused kernels have no second derivative. Nothing is
    written in place, whatever `donate` says.

    Args:
        train_step: what `make_train_step` returns.

    Raises:
        TypeError: another function.
        UntraceableError: as a compiled step; RuntimeError of torch's for an operation without a second derivative.

    Source: Maclaurin, Duvenaud and Adams, "Gradient-based hyperparameter optimization through reversible learning",
    2015; Finn, Abbeel and Levine, "Model-agnostic meta-learning", 2017.
    """
    parts = getattr(train_step, "parts", None)
    if not isinstance(parts, Parts):
        raise TypeError(
            f"differentiable got a {type(train_step).__name__} that is no train step of looplib; give what "
            "ll.make_train_step returned"
        )
    return compiled_step(parts._replace(donate=False), _Differentiable(parts.core, parts.watched))


class _Differentiable(Compiler):
    """Programs whose operations autograd records."""

    def __init__(self, core: Callable[[TrainState, Any], Outcome], watched: tuple[Any, ...]) -> None:
        super().__init__(core, False, {"backend": "eager"}, watched)
        self.by_gradient = False
        self.no_grad = False

    def make(
        self,
        state: TrainState,
        batch: Any,
        questions: dict[Any, Any],
        flat: list[Tensor],
        counts: Mapping[str, Any],
        held: list[_program.Held],
    ) -> tuple[dict[Any, Any], Any, Machine]:
        def evaluate(function: Callable[..., Any], sources: list[Any]) -> Any:
            said = function(*[value_of(source, flat, counts) for source in sources])
            shapes = dissect(said)
            return shapes.build()([_plain(tensor) for tensor in shapes.tensors])

        plain = [_plain(tensor) for tensor in flat]
        trees = dissect((state.params, state.buffers, state.opt_state))
        params, buffers, opt_state = trees.build()(plain)
        example = TrainState(params=params, buffers=buffers, opt_state=opt_state, epoch_length=state.epoch_length)
        batch = dissect(batch).build()(plain[len(trees.tensors) :])
        _tracing.differentiable = True
        try:
            with torch._functorch.pyfunctorch.temporarily_clear_interpreter_stack(), sdpa_kernel(SDPBackend.MATH):
                program, answers, at = _program.trace(self.core, example, batch, questions, plain, held, evaluate)
                graph = _without_cuts(program.graph)
        finally:
            _tracing.differentiable = False
        program = replace(program, graph=graph, trained=frozenset())
        return answers, at, Machine(program, lambda values: graph(*values))

    def remember(self, ready: Ready, state: TrainState) -> None:
        pass  # a state of tensors that autograd tracks is not to be held on to


def _plain(tensor: Tensor) -> Tensor:
    """Zeros that no transform knows, of the same kind."""
    with torch._functorch.pyfunctorch.temporarily_clear_interpreter_stack():
        return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=tensor.device).zero_()


def _without_cuts(graph: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """A graph without writes in place, and with a cut just where the loss function has made one."""
    with torch.no_grad(), torch.fx.traceback.preserve_node_meta():
        interpreted = functionalize(torch.fx.Interpreter(graph).run, remove="mutations")
        pure = make_fx(interpreted, _program.simple_forms(), tracing_mode="fake")(*fakes(graph))
    for node in list(pure.graph.nodes):
        if node.target is torch.ops.aten.detach.default and not _stops(node):
            node.replace_all_uses_with(node.args[0])
            pure.graph.erase_node(node)
        elif node.op == "call_function" and _stops(node) and isinstance(node.meta.get("val"), Tensor):
            with pure.graph.inserting_after(node):
                cut = pure.graph.call_function(torch.ops.aten.detach.default, (node,))
            node.replace_all_uses_with(cut, delete_user_cb=lambda user, cut=cut: user is not cut)
    pure.graph.eliminate_dead_code()
    pure.recompile()
    return pure


def _stops(node: torch.fx.Node) -> bool:
    return bool((node.meta.get("custom") or {}).get(STOPS))


def unroll(
    train_step: TrainStep, state: TrainState, batches: Sequence[Any], *, recompute_every: int | None = None
) -> tuple[TrainState, list[dict[str, Metric]]]:
    """Steps over the batches, one after another; returns the last state and the metrics of each step.

    >>> import looplib as ll, torch
    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = ll.optimizer(torch.optim.SGD, lr=0.1)
    >>> grad_fn = ll.make_grad_fn(model, lambda model, x: model(x).square().mean())
    >>> inner_step = ll.differentiable(ll.make_train_step(grad_fn, optimizer))
    >>> start, batches = ll.init_state(model, optimizer), [torch.ones(4, 2)] * 6
    >>> def loss(params):
    ...     state, metrics = ll.unroll(inner_step, start.replace(params=params), batches, recompute_every=3)
    ...     return metrics[-1]["loss"].compute()
    >>> params = {name: tensor.detach() for name, tensor in model.named_parameters()}
    >>> sorted(torch.func.grad(loss)(params))
    ['bias', 'weight']

    With `recompute_every` the backward pass holds the states between segments and the operations of one segment,
    which it computes again: the square root of the number of steps keeps memory least, for about one more forward
    pass in time. The gradient then reaches what stands in state and batches, and nothing that functions close over.

    Args:
        train_step: from `differentiable`; any other if no gradient is wanted.
        state: where to begin.
        batches: one for each step.
        recompute_every: steps of a segment; None keeps all operations of all steps.

    Raises ValueError for a segment of less than one step.

    Source: Chen et al., "Training deep nets with sublinear memory cost", 2016.
    """
    if recompute_every is not None and recompute_every < 1:
        raise ValueError(f"recompute_every is {recompute_every}; give at least 1 step, or None")
    batches, every = list(batches), recompute_every or max(1, len(batches))
    metrics: list[dict[str, Metric]] = []
    for begin in range(0, len(batches), every):
        segment = batches[begin : begin + every]
        if recompute_every is None:
            for batch in segment:
                state, one = train_step(state, batch)
                metrics.append(one)
        else:
            state, found = _recomputed(train_step, state, segment)
            metrics += found
    return state, metrics


def _recomputed(
    train_step: TrainStep, state: TrainState, batches: list[Any]
) -> tuple[TrainState, list[dict[str, Metric]]]:
    trees = dissect(((state.params, state.buffers, state.opt_state), batches))
    rebuild: list[Any] = []

    def run(*flat: Tensor) -> tuple[Tensor, ...]:
        (params, buffers, opt_state), given = trees.build()(flat)
        new = state.replace(params=params, buffers=buffers, opt_state=opt_state)
        found = []
        for batch in given:
            new, metrics = train_step(new, batch)
            found.append(metrics)
        out = dissect((new.params, new.buffers, new.opt_state, found))
        rebuild[:] = [out, new]
        return tuple(out.tensors)

    flat = _Segment.apply(run, *trees.tensors)  # type: ignore[no-untyped-call]
    shapes, new = rebuild
    params, buffers, opt_state, found = shapes.build()(flat)  # of the last run, the one that counts
    return new.replace(params=params, buffers=buffers, opt_state=opt_state), found


class _Segment(torch.autograd.Function):
    """Some steps, of which the backward pass is given the beginning alone."""

    generate_vmap_rule = True

    @staticmethod
    def forward(run: Callable[..., tuple[Tensor, ...]], *flat: Tensor) -> tuple[Tensor, ...]:
        return tuple(tensor.clone() for tensor in run(*flat))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.run = inputs[0]
        ctx.save_for_backward(*inputs[1:])
        ctx.mark_non_differentiable(*[tensor for tensor in output if not tensor.is_floating_point()])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        flat = ctx.saved_tensors
        places = [place for place, tensor in enumerate(flat) if tensor.is_floating_point()]

        def run(*floating: Tensor) -> tuple[Tensor, ...]:
            given = list(flat)
            for place, tensor in zip(places, floating, strict=True):
                given[place] = tensor
            return tuple(tensor for tensor in ctx.run(*given) if tensor.is_floating_point())

        _, pull_back = torch.func.vjp(run, *[flat[place] for place in places])[:2]
        wanted = [grad for grad in grads if grad is not None and grad.is_floating_point()]
        found = dict(zip(places, pull_back(tuple(wanted)), strict=True))
        return None, *[found.get(place) for place in range(len(flat))]
