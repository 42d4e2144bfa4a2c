"""Vectorized steps: many members in one step.

A stack is a `TrainState` whose tensors have an additional first dimension, the members. `vmap_step` traces the step
of one member into a graph and maps the graph over all of them. Each wrapper, optimizer and schedule treats each
member as it would a single run, and small models use the device together.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.func import functionalize
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_flatten, tree_unflatten

from looplib._core.checks import check
from looplib._core.copies import is_shared
from looplib._core.random import mix
from looplib._core.ranks import rank
from looplib._core.records import with_repr
from looplib._core.tracing import UntraceableError
from looplib.metrics import Mean
from looplib.steps import Outcome
from looplib.transforms._compile_step import (
    WITHOUT_CODE,
    CompiledProgram,
    Compiler,
    Ready,
    spec_without_graphs,
    step_of_graphs,
)
from looplib.transforms._program import (
    Expression,
    HostInput,
    Inputs,
    Traced,
    as_answer,
    draws,
    examples_of,
    expression,
    fakes,
    is_copy,
    is_tensor,
    memory_like,
    program_of,
    replace_node,
    written_in,
)
from looplib.transforms._stacks import _member, _Records, asking, members_of
from looplib.transforms._trace import trace
from looplib.transforms.decompositions import mappable
from looplib.types import Metric, TrainState

S = TypeVar("S", bound=Callable[..., Any])

# Operations whose numbers depend on the shape of a tensor, and not on its values.
_IN_PLACE = {
    "bernoulli",
    "cauchy",
    "exponential",
    "geometric",
    "log_normal",
    "normal_functional",
    "random",
    "uniform",
}
_LIKE = {"rand_like", "randn_like", "randint_like"}


def vmap_step(step: S, *, own_batches: bool = False) -> S:
    """Vectorize a step over the members of a stack: train an ensemble or a sweep in one graph, like `jax.vmap`.

    >>> import looplib as ll, torch
    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = ll.optimizer(torch.optim.SGD, lr=ll.transforms.per_member([0.0, 0.1, 0.2]))
    >>> grad_fn = ll.make_grad_fn(model, lambda model, x: model(x).square().mean())
    >>> train_step = ll.vmap_step(ll.make_train_step(grad_fn, optimizer))
    >>> stack = ll.transforms.stack_states([ll.init_state(model, optimizer, seed=seed) for seed in range(3)])
    >>> stack, metrics = train_step(stack, torch.ones(4, 2))
    >>> len(ll.transforms.compute_members(metrics)), torch.equal(stack.params["weight"][0], model.weight)
    (3, True)

    Each member is trained as it would be alone, with its own random numbers (a function of its seed), clipping,
    averages, loss scale and learning rate. Members never affect each other: if one diverges, the others do not
    change. The metrics have one value for each member; read them with `ll.transforms.compute_members`.

    Args:
        step: a step from `make_train_step`, `make_eval_step` or `make_predict_step`.
        own_batches: if True, each tensor of a batch has a first dimension of members. By default, all members get the
            same batch.

    Raises:
        TypeError: `step` is a different function, or is compiled already (compile the step of the stack).
        ValueError: the state is not a stack; the wrappers of different members would do different things (for example
            average only some of them); or the number of `per_member` values is not the number of members.
        UntraceableError: an optimizer that graphs do not have (Adafactor, ASGD, LBFGS, RAdam, Rprop, SparseAdam, a third
            party's: train its members one after another); sparse gradients; random numbers whose distribution depends on
            tensors in a way that cannot be mapped; and the cases listed in `ll.compile_step`.

    **Accuracy.** The result equals that of separate runs except for the last bits, because batched kernels round
    differently. (Under Adam, a parameter whose gradient is rounding alone, such as a bias in front of BatchNorm, moves by whole
    steps of another sign, and the running mean follows it.) Dropout on a GPU is a further exception, since torch uses a
    different kernel there. A member whose update is skipped (`skip_nonfinite`) keeps its values. `step` counts an update if
    any member made it. Members that are skipped many times in a row raise no error, unlike in a plain step.

    **Speed.** The step is traced into a graph at the first batch of each shape, so the limits of graphs listed in
    `ll.compile_step` apply. `compile_step(vmap_step(train_step))` generates machine code. If the step donates, the
    stack is overwritten in place. A small stack of large models gains nothing, and attention is computed with matrix
    products, since fused kernels do not support members.

    **Evaluation.** Use `compute_members(evaluate_records(vmap_step(eval_step), stack, batches))`. Outputs of
    `vmap_step(predict_step)` have members in the first dimension. For `ll.predict`, which expects samples there, take
    the mean over members, `lambda stack, batch: predict_step(stack, batch).mean(0)`, or transpose.

    Source: `jax.vmap` over initialisations, as in Equinox's "ensembling" example; `torch.func.stack_module_state`.
    """
    spec = spec_without_graphs(step, "vmap_step")
    compiler = _Stacked(spec.for_graphs, spec.donate, spec.watched, WITHOUT_CODE, own_batches)
    remembered: S = with_repr(step_of_graphs(step, spec, compiler), vmap_step, step, own_batches=own_batches)
    return remembered


@dataclass(eq=False)
class _Stacked(Compiler):
    """Programs of one member, mapped over all members of a stack."""

    own_batches: bool
    count: int = field(init=False)  # of members of the stack of this step

    def prepare(self, state: TrainState, batch: Any) -> Ready:
        self.count = members_of(state)
        if self.own_batches:
            for leaf in expression(batch).tensors:
                if leaf.shape[:1] != (self.count,):
                    raise ValueError(
                        f"the batch has a tensor of shape {tuple(leaf.shape)}, and the stack {self.count} members: "
                        "with own_batches=True each tensor has a first dimension of members"
                    )
        return super().prepare(state, batch)

    def ask(
        self, question: HostInput, flat: list[Tensor], counts: Mapping[str, Any]
    ) -> tuple[Expression, list[Tensor]]:
        """The answer for one member, and its tensors, or those of all members if theirs may differ."""
        indices = [value for kind, value in question.sources if kind == "input"]
        rows = list(zip(*(flat[index].tolist() for index in indices), strict=True)) or [()] * self.count
        known: dict[str, Expression] = {}  # by argument: most members of most stacks get the same answer
        answers: list[Expression] = []
        with asking(self.count) as asked:
            for number, row in enumerate(rows):
                asked.number = number
                if asked.per_member or str(row) not in known:
                    inputs = {index: flat[index][number] for index in indices}
                    known[str(row)] = _answer(question, inputs, counts)
                answers.append(known[str(row)])
        first, *others = (answer.key() for answer in answers)
        for number, key in enumerate(others, 1):
            if key != first:
                raise ValueError(
                    f"members 0 and {number} of the stack part in what their step does (on_host said "
                    f"{answers[0].source} and {answers[number].source}): a counter of theirs differs, such as that "
                    "of an average when some updates were skipped. Step them in stacks of their own, by "
                    "ll.transforms.unstack_states and stack_states"
                )
        if not (asked.per_member or indices):
            return answers[0], answers[0].tensors
        columns = zip(*(answer.tensors for answer in answers), strict=True)
        return answers[0], [*map(torch.stack, columns)]

    def make(self, inputs: Inputs) -> CompiledProgram:
        stacked = len(inputs.flat) - len(expression(inputs.batch).tensors) * (not self.own_batches)
        varied: list[bool] = []  # for each number from the host, True if each member has its own

        def evaluate(question: HostInput) -> Expression:
            answer, tensors = self.ask(question, inputs.flat, inputs.counts)
            varied.extend(tensors is not answer.tensors for _ in tensors)
            return answer

        flat = [tensor.detach()[0] if index < stacked else tensor for index, tensor in enumerate(inputs.flat)]
        member = inputs._replace(state=_member(inputs.state, 0, {}), flat=flat)
        with sdpa_kernel(SDPBackend.MATH):  # which can be mapped over members
            traced = trace(self.step, member, evaluate, stacked=True, originals=inputs.flat)
        mapped, drawings = _mapped(traced, self.count, inputs.flat[:stacked], varied)
        program = program_of(mapped, self.donate)
        draw = partial(draw_members, list(zip(drawings, traced.streams, strict=True))) if drawings else None
        return CompiledProgram(program, self.build(program), draw, partial(_of_all, self.count))


def _answer(question: HostInput, inputs: dict[int, Tensor], counts: Mapping[str, Any]) -> Expression:
    """The host's answer for a member with these inputs."""
    arguments = question.arguments(inputs, counts)
    check(
        not any(isinstance(argument, tuple) for argument in arguments),
        "on_host was given state.seed within vmap_step, which is a tuple of the members' seeds, and its answer is "
        "for all of them, so that they would draw the same numbers: take the step of each member by itself",
        UntraceableError,
    )
    return as_answer(question.function(*arguments))


def _mapped(
    traced: Traced, count: int, stacked: Sequence[Tensor], varied: list[bool]
) -> tuple[Traced, list[Drawing]]:
    """The step of one member mapped over all members, and the operations that draw its random numbers beforehand."""
    with torch.no_grad():
        pure = functionalize(traced.graph, remove="mutations")
        of_member = make_fx(pure, mappable(), tracing_mode="fake")(*examples_of(traced.graph))
    _without_copies(of_member)
    _with_numbers_moved(of_member)
    drawings = drawn_beforehand(of_member)
    fixed = [None] * len(traced.constants)
    of_members = [None if is_shared(tensor) else 0 for tensor in stacked]  # a shared one is computed with once
    of_batch = [None] * (traced.input_count - len(stacked))
    dims = (*[0] * len(drawings), *fixed, *[0 if varies else None for varies in varied], *of_members, *of_batch)
    likes = [node.meta["val"] for node in of_member.graph.find_nodes(op="placeholder")]
    likes = [
        like.new_empty((count, *like.size())) if dim == 0 else like for like, dim in zip(likes, dims, strict=True)
    ]
    begin = len(likes) - traced.input_count
    likes[begin : begin + len(stacked)] = stacked  # a graph is specialized to their strides
    examples = fakes(likes)
    shared = {begin + index for index, dim in enumerate(of_members) if dim is None}

    def mapped(*values: Tensor) -> list[Tensor]:
        inputs = [value[0] if index in shared else value for index, value in enumerate(values)]
        return [*map(_of_own_memory, torch.vmap(of_member, in_dims=dims, randomness="error")(*inputs))]

    with torch.no_grad():
        graph = make_fx(mapped, tracing_mode="fake")(*examples)
    _with_shared_unchanged(
        graph, of_member, {index: begin + place for index, place in traced.replaced.items()}, shared
    )
    outcome: Any = traced.outcome[0], []  # an error of one member is not raised
    (output,) = graph.graph.find_nodes(op="output")
    output.args = (output.args[0][: len(expression(outcome).tensors)],)
    return replace(traced, graph=graph, outcome=outcome, checks=[]), drawings


def _with_shared_unchanged(
    graph: GraphModule, member: GraphModule, replaced: Mapping[int, int], shared: set[int]
) -> None:
    """Return shared tensors that the step of a member leaves as they are, which `torch.vmap` would make for each member."""
    (output,), (member_output,) = (module.graph.find_nodes(op="output") for module in (graph, member))
    placeholders, member_inputs = (module.graph.find_nodes(op="placeholder") for module in (graph, member))
    results = list(output.args[0])
    for index, place in replaced.items():
        if place in shared and is_copy(member_output.args[0][index], member_inputs[place], written_in(member.graph)):
            results[index] = placeholders[place]
    output.args = (results,)


def _of_own_memory(value: Tensor) -> Tensor:
    """A copy of a value that is the same for all members, which `torch.vmap` expands: a step may write to it later."""
    return value.clone() if value.dim() and not value.stride(0) else value


def _without_copies(graph: GraphModule) -> None:
    """Remove copies: only batch norm's kernels write in this graph, so elsewhere a copy equals its original."""
    for node in list(graph.graph.nodes):
        if _is_needless_copy(node):
            replace_node(node, cast(Node, node.args[0]))


def _is_needless_copy(node: Node) -> bool:
    copies = node.target in (torch.ops.aten.detach.default, torch.ops.aten.clone.default) and not node.kwargs
    return copies and not any(user.op == "output" or "batch_norm" in str(user.target) for user in node.users)


def _with_numbers_moved(graph: GraphModule) -> None:
    """Move numbers on the CPU to the device that uses them, which takes one of them from there, but not a stack."""
    for node in [node for node in graph.graph.nodes if node.op == "call_function"]:
        devices = {
            input_node: input_node.meta["val"].device for input_node in node.all_input_nodes if is_tensor(input_node)
        }
        elsewhere = [device for device in devices.values() if device.type != "cpu"]
        for number in [input_node for input_node, device in devices.items() if elsewhere and device.type == "cpu"]:
            with graph.graph.inserting_before(node):
                moved = graph.graph.call_function(
                    torch.ops.aten._to_copy.default, (number,), {"device": elsewhere[0]}
                )
            node.replace_input_with(number, moved)


def _of_all(count: int, out: Outcome) -> Outcome:
    """The outcome of a stack: metrics of members, and True if any of them made an update."""
    metrics: Any = out.metrics
    if isinstance(metrics, dict):
        metrics = {name: _of_members(metric, count) for name, metric in metrics.items()}
    applied = out.applied.any() if isinstance(out.applied, Tensor) else out.applied
    return out._replace(metrics=metrics, applied=applied)


def _of_members(metric: Any, count: int) -> Any:
    """A record of each member's record, for metrics that are more than sums."""
    if isinstance(metric, (Mean, Tensor)) or not isinstance(metric, Metric):
        return metric
    leaves, spec = tree_flatten(metric)
    rows = [leaf.unbind() if isinstance(leaf, Tensor) else [leaf] * count for leaf in leaves]
    return _Records(tuple(tree_unflatten(list(row), spec) for row in zip(*rows, strict=True)))


# Random numbers

Drawing = Callable[[], Tensor]  # draws the random numbers of one operation, for one member


def drawn_beforehand(graph: GraphModule) -> list[Drawing]:
    """Turn the random numbers of a graph into its first inputs, and return the operations that draw them.

    Each member's numbers then come from its own stream, as they would alone.
    """
    nodes = graph.graph
    first = next(iter(nodes.nodes))
    drawn: list[Drawing] = []
    for node in list(filter(draws, nodes.nodes)):
        drawn.append(_drawing(node))
        with nodes.inserting_before(first):
            placeholder = nodes.placeholder(f"drawn_{len(drawn)}")
        placeholder.meta.update(node.meta)
        replace_node(node, placeholder)
    nodes.eliminate_dead_code()
    graph.recompile()
    return drawn


def _drawing(node: Node) -> Drawing:
    """The drawing of an operation, independent of its graph. Its distribution may depend only on shapes, not on tensors."""
    target = cast(Any, node.target)
    name = str(target).split(".")[1]
    if node.all_input_nodes and name not in _IN_PLACE | _LIKE:
        raise UntraceableError(
            f"the step draws random numbers by {target}, whose distribution depends on tensors, and which cannot be "
            "mapped over members: draw them from torch.rand, and make of them what is needed"
        )
    args: Any = torch.fx.node.map_aggregate(node.args, _like)
    kwargs = node.kwargs
    if name in _IN_PLACE:  # draws like a single step; the functional forms in a graph do not keep memory order
        method = getattr(Tensor, f"{name.removesuffix('_functional')}_")
        return lambda: method(memory_like(args[0]), *args[1:], **kwargs)
    return lambda: target(*args, **kwargs)


def _like(value: Any) -> Any:
    """Memory with the layout of a node's value; anything else unchanged."""
    return memory_like(value.meta["val"]) if isinstance(value, Node) else value


def draw_members(
    drawings: Sequence[tuple[Drawing, int]], state: TrainState, generators: Sequence[torch.Generator]
) -> list[Tensor]:
    """Draw for each member from its own stream, as its step alone would.

    Args:
        drawings: the operations, each with the index of its microbatch.
        state: the stack.
        generators: generators of the device that is used.
    """
    seeds: Any = state.seed
    members: list[list[Tensor]] = []
    for seed in seeds:
        members.append(drawn := [])
        for stream, of_stream in itertools.groupby(drawings, key=operator.itemgetter(1)):  # a stream per microbatch
            for generator in generators:
                generator.manual_seed(mix(seed, state.step, rank(), stream))
            drawn += [drawing() for drawing, _ in of_stream]
    return [*map(torch.stack, zip(*members, strict=True))]
