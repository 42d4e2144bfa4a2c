"""Gradients through training: a step that is differentiated itself.

What a step computes is a function of state and batch, and its graph consists of operations that have gradients. So
`torch.func.grad` goes through it, and through as many in a row as memory holds, or more where a segment of steps is
computed again in the backward pass.
"""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch._decomp import get_decompositions
from torch._functorch.pyfunctorch import (
    retrieve_current_functorch_interpreter,
    temporarily_clear_interpreter_stack,
    temporarily_restore_interpreter_stack,
)
from torch._subclasses.fake_tensor import FakeTensor
from torch.func import functionalize
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from looplib._core import tracing as _tracing
from looplib._core.checks import check_optional_count
from looplib._core.tracing import STOPS, UntraceableError
from looplib.steps import Outcome, parts_of
from looplib.transforms import _program
from looplib.transforms._compile import Compiler, Machine, Ready, fakes
from looplib.transforms._compile_step import GraphParts, step_of_graphs
from looplib.transforms._program import Core, Dissected, Question, as_answer, dissect, value_of
from looplib.transforms._watch import Held
from looplib.types import Metric, TrainState, TrainStep


def differentiable(train_step: TrainStep) -> TrainStep:
    """A train step that autograd and `torch.func.grad` go through: for learned initialisations, rates and losses.

    >>> import looplib as ll, torch
    >>> model = torch.nn.Linear(1, 1, bias=False)
    >>> def loss_fn(model, batch):
    ...     return (model(batch) - 1).square().mean()
    >>> optimizer = ll.optimizer(torch.optim.SGD, lr=0.1)
    >>> inner_step = ll.transforms.differentiable(ll.make_train_step(ll.make_grad_fn(model, loss_fn), optimizer))
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
    parameters of a loss), and hyperparameters that stand in the state (`ll.optim.injected`) or that a schedule computes
    from a tensor. It is that of the exact update, momenta and bias corrections included; clipping, accumulation and
    averages are gone through too. Metrics carry it as well, buffers do not. What the loss function detaches, or
    computes in `no_grad`, stays cut off; an `autograd.Function` is gone through as the operations it consists of.

    An outer loop is a loop of the ordinary kind, whose loss function trains on each task from the outer weights:

    >>> def meta_loss(model, tasks):
    ...     params = dict(model.named_parameters())
    ...     def loss_of(shots, queries):
    ...         state, _ = inner_step(start.replace(params=params), shots)
    ...         return (torch.func.functional_call(model, state.params, queries) - 1).square().mean()
    ...     return torch.vmap(loss_of)(*tasks).mean()
    >>> outer = ll.optimizer(torch.optim.Adam, lr=0.1)
    >>> outer_step = ll.make_train_step(ll.make_grad_fn(model, meta_loss), outer)
    >>> tasks = torch.randn(3, 5, 1), torch.randn(3, 5, 1)  # 3 tasks of 5 points each, to train on and to test on
    >>> state, metrics = outer_step(ll.init_state(model, outer), tasks)

    With `ll.compile_step` around the outer step, the inner steps become part of its graph. Under `torch.vmap` a step that
    draws random numbers needs `randomness="different"`. The inner draws depend on the seed and step of the inner
    state, so they are the same in each outer step, but for a compiled one, whose draws they are part of.

    The step is written down as a graph at the first batch of each shape, so what `ll.compile_step` says of graphs
    holds here. Attention is taken in its plain form, as fused kernels have no second derivative. Nothing is
    written in place, whatever `donate` says.

    Args:
        train_step: what `make_train_step` returns.

    Raises:
        TypeError: another function.
        UntraceableError: by the step, as by a compiled one; for a function that closes over a tensor of torch.func's;
            for one that may skip the update, such as `apply_if_finite`, under torch.vmap or in a compiled outer step.
        RuntimeError: torch's, for an operation without a second derivative.

    Source: Maclaurin, Duvenaud and Adams, "Gradient-based hyperparameter optimization through reversible learning",
    2015; Finn, Abbeel and Levine, "Model-agnostic meta-learning", 2017.
    """
    parts = parts_of(train_step, "differentiable")
    if parts.kind != "train":
        raise TypeError(f"differentiable got a step of kind {parts.kind!r}: give what ll.make_train_step returned")
    if isinstance(parts, GraphParts):
        parts.compiler.options_for("differentiable")  # how the step would be compiled makes no difference here
    return step_of_graphs(train_step, parts, _Differentiable(parts.core, parts.watched))


class _Differentiable(Compiler):
    """Programs whose operations autograd records."""

    def __init__(self, core: Core, watched: tuple[Any, ...]) -> None:
        super().__init__(core, False, {"backend": "eager"}, watched)
        self.by_gradient = False
        self.no_grad = False

    def compiled(self, options: Mapping[str, Any]) -> Compiler:
        raise TypeError(
            "compile_step got a differentiable step, which runs operation by operation so that autograd records it: "
            "compile the outer train step, whose graph then holds this one"
        )

    def options_for(self, transform: str) -> Mapping[str, Any]:
        if transform == "differentiable":
            return self.options
        raise TypeError(f"{transform} got a differentiable step: give the one that ll.make_train_step returned")

    def prepare(self, state: TrainState, batch: Any) -> Ready:
        ready = super().prepare(state, batch)
        program = ready.machine.program
        decides = bool(program.afterwards) or isinstance(Outcome(*program.outcome[0]).applied, Tensor)
        if decides and any(isinstance(tensor, FakeTensor) or _is_mapped(tensor) for tensor in ready.flat):
            raise UntraceableError(
                "whether this step updates (apply_if_finite, skip_spikes, dynamic_loss_scale) is read from a tensor, "
                "which has no one value under torch.vmap or while an outer step is compiled: leave the wrapper out, "
                "or take the tasks one by one in an outer step without ll.compile_step"
            )
        return ready

    def answer(self, question: Question, flat: list[Tensor], counts: Mapping[str, Any]) -> tuple[Any, list[Tensor]]:
        said = _said(question.function, [value_of(source, flat, counts) for source in question.sources])
        return said.key(), said.tensors

    def make(
        self,
        state: TrainState,
        batch: Any,
        questions: dict[Any, Any],
        flat: list[Tensor],
        counts: Mapping[str, Any],
        held: list[Held],
    ) -> tuple[dict[Any, Any], Any, Machine]:
        with _written_apart() as interpreters:

            def evaluate(function: Callable[..., Any], sources: list[Any]) -> Any:
                with temporarily_restore_interpreter_stack(interpreters):
                    said = _said(function, [value_of(source, flat, counts) for source in sources])
                return said.build()([_plain(tensor) for tensor in said.tensors])

            plain = [_plain(tensor) for tensor in flat]
            trees = dissect((state.params, state.buffers, state.opt_state))
            params, buffers, opt_state = trees.build()(plain)
            example = TrainState(params=params, buffers=buffers, opt_state=opt_state, epoch_length=state.epoch_length)
            batch = dissect(batch).build()(plain[len(trees.tensors) :])
            program, answers, at = _program.trace(self.core, example, batch, questions, plain, held, evaluate)
            graph = _without_cuts(program.graph)
        program = replace(program, graph=graph, trained=frozenset())
        return answers, at, Machine(program, lambda values: graph.forward(*values))

    def run(self, ready: Ready, state: TrainState) -> Outcome:
        out = super().run(ready, state)
        return out._replace(buffers=_detached(out.buffers))

    def remember(self, ready: Ready, state: TrainState) -> None:
        """Nothing: the loop's own step is another, and tensors that autograd tracks are not to be held on to."""


@contextmanager
def _written_apart() -> Iterator[Any]:
    """Writes a step down by itself, whatever is being transformed or written down around it.

    In formulas whose backward pass can be differentiated: torch has none for kernels of fused attention.
    """
    before = _tracing.differentiable
    with (
        temporarily_clear_interpreter_stack() as interpreters,
        _disable_current_modes(),
        _tracing.within(None),
        sdpa_kernel(SDPBackend.MATH),
        torch.fx.traceback.preserve_node_meta(),
        warnings.catch_warnings(),
    ):
        # torch warns of a cycle through .grad, which make_grad_fn takes away again.
        warnings.filterwarnings("ignore", r"Using backward\(\) with create_graph=True", UserWarning)
        _tracing.differentiable = True
        try:
            yield interpreters
        finally:
            _tracing.differentiable = before


def _plain(tensor: Tensor) -> Tensor:
    """Zeros of the same kind, that no transform knows."""
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=tensor.device).zero_()


def _said(function: Callable[..., Any], values: list[Any]) -> Dissected:
    """What the host says of these values, which is the same for all tasks where they are mapped by torch.vmap."""
    mapped = [place for place, value in enumerate(values) if isinstance(value, Tensor) and _is_mapped(value)]
    if mapped:
        first, *others = (as_answer(function(*one)) for one in _one_by_one(values, mapped))
        if not first.tensors and all(other.key() == first.key() for other in others):
            return first
        raise UntraceableError(
            "torch.vmap maps over a number in opt_state that a graph is chosen by, and the tasks would need "
            "different graphs: let it be the same for all tasks, or take them one by one"
        )
    # What chooses a graph has no gradient, and torch warns of tracked tensors that are made numbers.
    said = as_answer(function(*[value.detach() if isinstance(value, Tensor) else value for value in values]))
    tracked = said.tensors and any(isinstance(value, Tensor) for value in values)
    return as_answer(function(*values)) if tracked else said


def _one_by_one(values: list[Any], mapped: list[int]) -> Iterator[list[Any]]:
    columns = {place: _innermost(values[place]).detach().reshape(-1, *values[place].shape) for place in mapped}
    for row in itertools.product(*[columns.get(place, [value]) for place, value in enumerate(values)]):
        yield list(row)


def _innermost(tensor: Tensor) -> Tensor:
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


def _is_mapped(tensor: Tensor) -> bool:
    """Whether torch.vmap is mapping over it."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        if torch._C._functorch.is_batchedtensor(tensor):
            return True
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return False


def _without_cuts(graph: GraphModule) -> GraphModule:
    """A graph without writes in place, and with a cut just where the loss function has made one."""
    with torch.no_grad():
        interpreted = functionalize(_Pure(graph).run, remove="mutations")
        pure = make_fx(interpreted, _forms(), tracing_mode="fake")(*fakes(graph))
    for node in list(pure.graph.nodes):
        if node.target is torch.ops.aten.view.default:  # whose strides torch.vmap may have changed
            node.target = torch.ops.aten.reshape.default
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


class _Pure(torch.fx.Interpreter):
    """Says of batch norm that it writes its running statistics."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is torch.ops.aten.native_batch_norm.default and args[3] is not None:
            target = torch.ops.aten._native_batch_norm_legit.default
        return super().call_function(target, args, kwargs)


def _stops(node: Node) -> bool:
    return bool((node.meta.get("custom") or {}).get(STOPS))


@functools.cache
def _forms() -> dict[Any, Callable[..., Any]]:
    """Operations written as others, whose derivatives of every order are right.

    For the statistics that a norm hands to its backward pass torch has no derivative. As long as torch differentiates
    the norm itself it needs none, but under torch.vmap it differentiates what the norm is made of, and the outer
    gradient would be wrong.
    """
    aten = torch.ops.aten
    norms = [
        aten.native_layer_norm,
        aten.native_layer_norm_backward,
        aten.native_batch_norm,
        aten.native_batch_norm_backward,
        aten._native_batch_norm_legit,
        aten._native_batch_norm_legit_functional,
    ]
    forms: dict[Any, Callable[..., Any]] = {**_program.simple_forms(), **get_decompositions(norms)}
    # torch.vmap has no rule for fill
    return {**forms, aten.sqrt.default: _root, aten.fill.Scalar: torch.full_like}


def _root(x: Tensor) -> Tensor:
    """The square root, with a slope of 0 at 0.

    Adam divides by the root of a mean square, which is 0 for a weight that has had no gradient, as those of a dead
    unit. The root's infinite slope times the square's, which is 0, would be NaN there; what counts is that the update
    does not depend on it.
    """
    positive = x != 0
    return torch.where(positive, torch.where(positive, x, 1).pow(0.5), 0)


def unroll(
    train_step: TrainStep, state: TrainState, batches: Sequence[Any], *, recompute_every: int | None = None
) -> tuple[TrainState, list[dict[str, Metric]]]:
    """Steps over the batches, one after another; returns the last state and the metrics of each step.

    >>> import looplib as ll, torch
    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = ll.optimizer(torch.optim.SGD, lr=0.1)
    >>> grad_fn = ll.make_grad_fn(model, lambda model, x: model(x).square().mean())
    >>> inner_step = ll.transforms.differentiable(ll.make_train_step(grad_fn, optimizer))
    >>> start, batches = ll.init_state(model, optimizer), [torch.ones(4, 2)] * 6
    >>> def loss(params):
    ...     state, metrics = ll.transforms.unroll(inner_step, start.replace(params=params), batches, recompute_every=3)
    ...     return metrics[-1]["loss"].compute()
    >>> params = {name: tensor.detach() for name, tensor in model.named_parameters()}
    >>> sorted(torch.func.grad(loss)(params))
    ['bias', 'weight']

    With `recompute_every` the backward pass holds the states between segments and the operations of one segment,
    which it computes again: the square root of the number of steps keeps memory least, for about one more forward
    pass in time, and no bit of the gradient changes. Where `torch.func.grad` goes through `torch.vmap` of this, its
    own record of the backward pass keeps all of it; `backward()`, as an outer train step calls it, does not. The
    gradient reaches what stands in state and batches, and nothing that functions close over.

    Args:
        train_step: from `differentiable`; any other if no gradient is wanted.
        state: where to begin.
        batches: one for each step.
        recompute_every: steps of a segment; None keeps all operations of all steps.

    Raises ValueError for a segment of less than one step, or where recomputation would keep a gradient from a tensor
    that a loss function or a schedule closes over.

    Source: Chen et al., "Training deep nets with sublinear memory cost", 2016.
    """
    check_optional_count("recompute_every", recompute_every, advice="give at least 1 step, or None")
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
    build = trees.build()
    rebuild: list[Callable[[Sequence[Tensor]], Any]] = []

    def run(*flat: Tensor) -> tuple[Tensor, ...]:
        (params, buffers, opt_state), given = build(flat)
        new = state.replace(params=params, buffers=buffers, opt_state=opt_state)
        found = []
        for batch in given:
            new, metrics = train_step(new, batch)
            found.append(metrics)
        out = dissect((new, found))
        rebuild[:] = [out.build()]
        return tuple(out.tensors)

    flat = _Segment.apply(run, *trees.tensors)  # type: ignore[no-untyped-call]
    new, found = rebuild[0](flat)
    return new.replace(buffers=_detached(new.buffers)), found


def _detached(buffers: dict[str, Tensor]) -> dict[str, Tensor]:
    """Running statistics have no gradient, as ever in torch, whose batch norm takes none that want one."""
    return {name: tensor.detach() for name, tensor in buffers.items()}


class _WithoutStrangers(TorchFunctionMode):
    """Refuses tensors that would lose their gradient, as `users_own` does, of schedules too."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not _tracing.differentiable:
            _tracing.refuse_strangers(args, kwargs)
        return func(*args, **(kwargs or {}))


class _Segment(torch.autograd.Function):
    """Some steps, of which the backward pass is given the beginning alone."""

    generate_vmap_rule = True

    @staticmethod
    def forward(run: Callable[..., tuple[Tensor, ...]], *flat: Tensor) -> tuple[Tensor, ...]:
        with torch.enable_grad(), _WithoutStrangers():
            found = run(*[tensor.detach() for tensor in flat])
        if any(tensor.requires_grad for tensor in found):
            raise ValueError(
                "a loss function or a schedule closes over a tensor that requires a gradient, which recompute_every "
                "would keep from it: give it in the batches, or as a hyperparameter in the state (ll.optim.injected), or "
                "leave out recompute_every"
            )
        return tuple(tensor.clone() for tensor in found)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.run = inputs[0]
        ctx.save_for_backward(*inputs[1:])
        ctx.mark_non_differentiable(*[tensor for tensor in output if not _is_smooth(tensor)])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        places = [place for place, needed in enumerate(ctx.needs_input_grad[1:]) if needed]

        def run(*varied: Tensor) -> tuple[Tensor, ...]:
            given = {**dict(enumerate(flat)), **dict(zip(places, varied, strict=True))}
            return tuple(tensor for tensor in ctx.run(*given.values()) if _is_smooth(tensor))

        with _beneath_gradient() as (down, up):
            flat = [down(tensor) for tensor in ctx.saved_tensors]
            _, pull_back = torch.func.vjp(run, *[flat[place] for place in places])[:2]
            found = pull_back(tuple(down(grad) for grad in grads if _is_smooth(grad)))
        by_place = dict(zip(places, map(up, found), strict=True))
        return None, *[by_place.get(place) for place in range(len(flat))]


@contextmanager
def _beneath_gradient() -> Iterator[tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]]:
    """One level of torch.func's down, if that is one of a gradient; with a tensor's ways there and back.

    torch.func.grad records its own backward pass, of which nothing is left when it has returned; so it need not hold
    what a segment computes again. Transforms around it record what they need.
    """
    top = torch._C._functorch.peek_interpreter_stack()
    if top is None or top.key() != torch._C._functorch.TransformType.Grad:
        yield lambda tensor: tensor, lambda tensor: tensor
        return
    level = top.level()
    with retrieve_current_functorch_interpreter().lower():
        yield (
            lambda tensor: torch._C._functorch._unwrap_for_grad(tensor, level),
            lambda tensor: torch._C._functorch._wrap_for_grad(tensor, level),
        )


def _is_smooth(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()
