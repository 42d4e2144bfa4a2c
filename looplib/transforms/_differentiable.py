"""Differentiable steps: gradients through training, over one step or many.

A step is a function of a state and a batch, and its graph consists of differentiable operations, so `torch.func.grad`
can differentiate it, over as many steps in a row as a loop takes.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import (
    temporarily_clear_interpreter_stack,
    temporarily_restore_interpreter_stack,
)
from torch.func import functionalize
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from looplib._core import torch_private, tracing
from looplib._core.checks import check
from looplib._core.mappings import mapped
from looplib._core.records import with_repr
from looplib._core.tracing import UntraceableError
from looplib._core.trees import map_tensors
from looplib.steps import Outcome
from looplib.transforms import decompositions
from looplib.transforms._compile_step import (
    WITHOUT_CODE,
    CompiledProgram,
    Compiler,
    seed_streams,
    spec_without_graphs,
    step_of_graphs,
)
from looplib.transforms._program import (
    Expression,
    HostInput,
    Inputs,
    as_answer,
    examples_of,
    memory_like,
    program_of,
    replace_node,
)
from looplib.transforms._trace import trace
from looplib.types import TrainStep


def differentiable(train_step: TrainStep) -> TrainStep:
    """Differentiate through training: make a train step that autograd and `torch.func.grad` can differentiate.

    Use it for meta-learning: learned initializations, learning rates and losses.

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

    The gradient is that of the full update, including momenta, bias corrections, clipping, accumulation and averages.
    It reaches the state's tensors before the step (an initialization), the batch (weights of its samples, parameters
    of a loss), and hyperparameters: in the state (`ll.optim.inject`), or the tensors that a schedule computes. A schedule
    is called at each step, so it may close over the tensor that is learned. The other functions are traced once.

    Args:
        train_step: a step from `make_train_step`.

    Raises:
        TypeError: `train_step` is a different function, or is compiled already.
        UntraceableError: from the step, as for compiled steps, whose optimizers it has; also if another function than a
            schedule closes over a tensor of a surrounding `torch.func` transform (put it into the batch), and for an
            update that may be skipped, such as with `skip_nonfinite`, in a compiled outer step.
        RuntimeError: from torch, for an operation without a second derivative; and under torch.vmap, for a value that
            Python reads: the flag of an update that may be skipped, or a number in `opt_state` that decides what the
            update does, such as the counter of `ema`, if the tasks differ in it.

    **An outer loop** is an ordinary training loop whose loss function trains on each task, starting from the outer
    weights:

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

    With `ll.compile_step` around the outer step, the inner steps become part of its graph. Inner draws depend on the
    seed and step of the inner state, so they are the same in each outer step, unless the outer step is compiled.
    Under `torch.vmap`, a step that draws random numbers needs `randomness="different"`.

    **Limits.** The step is traced into a graph at the first batch of each shape, so the limits of graphs listed in
    `ll.compile_step` apply. Metrics carry gradients too; buffers do not. Values that the loss function detaches, or
    computes under `no_grad`, stay cut off. An `autograd.Function` is differentiated as the operations it consists of.
    Attention uses its plain form, because fused kernels have no second derivative. Nothing is written in place, even
    with `donate`.

    Memory holds the operations of all steps. To compute those of a segment of steps again in the backward pass instead,
    call a function of the segment through `torch.utils.checkpoint.checkpoint(segment, state, batches,
    use_reentrant=False)`: for `backward()`, as an outer train step calls it, but not under `torch.vmap` or
    `torch.func.grad`, where torch raises.

    Source: Maclaurin, Duvenaud and Adams, "Gradient-based hyperparameter optimization through reversible learning",
    2015; Finn, Abbeel and Levine, "Model-agnostic meta-learning", 2017.
    """
    spec = spec_without_graphs(train_step, "differentiable")
    kind = f"differentiable got a step of kind {spec.kind!r}: give what ll.make_train_step returned"
    check(spec.kind == "train", kind, TypeError)
    graph_step = step_of_graphs(train_step, spec, _Differentiable(spec.for_graphs, False, spec.watched, WITHOUT_CODE))
    return with_repr(graph_step, differentiable, train_step)


class _Differentiable(Compiler):
    """Programs whose operations autograd records."""

    no_grad = False

    def ask(
        self, question: HostInput, flat: list[Tensor], counts: Mapping[str, Any]
    ) -> tuple[Expression, list[Tensor]]:
        values = question.arguments(flat, counts)
        # Values that select a graph have no gradient, and torch warns when tracked tensors are converted to numbers.
        answer = as_answer(question.function(*map_tensors(Tensor.detach, values)))
        if answer.tensors and any(isinstance(value, Tensor) for value in values):
            answer = as_answer(question.function(*values))
        return answer, answer.tensors

    def make(self, inputs: Inputs) -> CompiledProgram:
        with _written_apart() as interpreters:

            def evaluate(question: HostInput) -> Expression:
                with temporarily_restore_interpreter_stack(interpreters):
                    answer, _ = self.ask(question, inputs.flat, inputs.counts)
                return answer._replace(tensors=[*map(_zeros, answer.tensors)])

            examples = inputs._replace(flat=[*map(_zeros, inputs.flat)])
            traced = trace(self.step, examples, evaluate, around_loss=_Marks)
            graph = _without_cuts(traced.graph)
        program = program_of(replace(traced, graph=graph, trained=frozenset()), own_memory=False)
        draw = seed_streams if traced.streams else None
        return CompiledProgram(program, lambda values: graph.forward(*values), draw, _with_detached_buffers)


def _with_detached_buffers(out: Outcome) -> Outcome:
    """Buffers without gradients, as usual in torch, whose batch norm refuses running statistics that require one."""
    return out._replace(buffers=mapped(Tensor.detach, out.buffers))


@contextmanager
def _written_apart() -> Iterator[Any]:
    """Trace a step independently of the surrounding transforms and traces.

    Its formulas have differentiable backward passes, which torch does not have for fused attention kernels.
    """
    with (
        temporarily_clear_interpreter_stack() as interpreters,
        _disable_current_modes(),
        tracing.within(None),
        sdpa_kernel(SDPBackend.MATH),
        torch.fx.traceback.preserve_node_meta(),
        warnings.catch_warnings(),
    ):
        # torch warns about a cycle through .grad, which make_grad_fn removes.
        warnings.filterwarnings("ignore", r"Using backward\(\) with create_graph=True", UserWarning)
        yield interpreters


def _zeros(tensor: Tensor) -> Tensor:
    return memory_like(tensor).zero_()


def _without_cuts(graph: GraphModule) -> GraphModule:
    """A graph without in-place writes, detached only where the loss function detaches."""
    for node in graph.graph.find_nodes(op="call_function", target=torch.ops.aten.native_batch_norm.default):
        if node.args[3] is not None:  # running statistics, which the other form declares that it writes
            node.target = torch.ops.aten._native_batch_norm_legit.default
    with torch.no_grad():
        interpreted = functionalize(torch.fx.Interpreter(graph).run, remove="mutations")
        pure = make_fx(interpreted, decompositions.differentiable(), tracing_mode="fake")(*examples_of(graph))
    for node in list(pure.graph.nodes):
        if node.target is torch.ops.aten.view.default:  # torch.vmap may have changed their strides
            node.target = torch.ops.aten.reshape.default
        _detach_where_asked(pure.graph, node)
    pure.graph.eliminate_dead_code()
    pure.recompile()
    return pure


def _detach_where_asked(graph: Graph, node: Node) -> None:
    """Detach the node's value if the loss function does, and if not, undo a detach."""
    detach = torch.ops.aten.detach.default
    if node.target is detach and not _stops(node):
        replace_node(node, cast(Node, node.args[0]))
    elif node.op == "call_function" and _stops(node) and isinstance(node.meta.get("val"), Tensor):
        with graph.inserting_after(node):
            cut = graph.call_function(detach, (node,))
        node.replace_all_uses_with(cut, delete_user_cb=lambda user: user is not cut)


def _stops(node: Node) -> bool:
    return bool((node.meta.get("custom") or {}).get(STOPS))


# Where a loss function itself blocks the gradient to its inputs
#
# The graph of a step contains its own backward pass, in which torch detaches tensors freely. A differentiable step must
# block gradients exactly where the loss function does, so the operations of those cuts are marked.

STOPS = "looplib_stops"  # key in a node's metadata: no gradient passes here


class _Marks(TorchFunctionMode):
    """Mode that marks where a loss function blocks gradients: with `detach`, `no_grad` and similar.

    It watches `no_grad` itself to know if gradients are off, because they are also off inside an `autograd.Function`,
    which blocks nothing.
    """

    def __init__(self) -> None:
        super().__init__()
        self.trace = tracing.current()
        self.off = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if tracing.current() is not self.trace:  # a step inside the loss function is traced with its own marks
            return func(*args, **kwargs)
        _refuse_strangers(args, kwargs)
        if func is torch_private.set_grad_enabled:
            self.off = not args[0]
        if not (self.off or _cuts(func, kwargs)):
            return func(*args, **kwargs)
        with torch.fx.traceback.annotate({STOPS: True}):
            return func(*args, **kwargs)


def _cuts(func: Any, kwargs: Any) -> bool:
    """True if a torch function returns something through which its inputs get no gradient."""
    if func is torch.autograd.grad:
        return not kwargs.get("create_graph")
    if getattr(func, "__self__", None) is Tensor.data:
        return True
    name: str = getattr(func, "__name__", "")
    return name.partition(".")[0] == "detach"


def _refuse_strangers(args: Any, kwargs: Any) -> None:
    """Raise for tensors of a torch.func transform that is not active here: no gradient would reach them."""
    level = torch_private.functorch_level()
    for leaf in torch_private.pytree.tree_leaves((args, kwargs)):
        if isinstance(leaf, Tensor) and torch_private.functorch_level_of(leaf) > level:
            raise UntraceableError(
                "the step reads a tensor that torch.func transforms from elsewhere than its state and batch (a "
                "function closes over it), so no gradient would reach it: give it in the batch, or as a "
                "hyperparameter in the state (ll.optim.inject)"
            )
