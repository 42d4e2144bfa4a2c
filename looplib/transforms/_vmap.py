"""Vectorized steps: many members in one step.

A stack is a `TrainState` whose tensors have one more dimension in front, the members. `vmap_step` writes down the
step of one member as a graph, and maps that graph over all of them: each wrapper, optimizer and schedule does for
each member what it does for a run alone, and small models fill the machine together.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functionalize
from torch.fx import Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from looplib._core import tracing as _tracing
from looplib._core.random import mix
from looplib._core.ranks import rank
from looplib._core.tracing import UntraceableError
from looplib.metrics._mean import Mean
from looplib.steps import Outcome, parts_of
from looplib.transforms import _per_member, _program
from looplib.transforms._compile import Compiler, Machine, Ready, fakes
from looplib.transforms._compile_step import GraphParts, step_of_graphs
from looplib.transforms._program import Core, Dissected, Program, Question, as_answer, dissect, value_of
from looplib.transforms._stacks import (
    _member,
    _Records,
    members_of,
)
from looplib.transforms._watch import Held
from looplib.types import Metric, TrainState

S = TypeVar("S", bound=Callable[..., Any])


def vmap_step(step: S, *, own_batches: bool = False) -> S:
    """A step of one member as a step of a stack: all members in one graph.

    >>> import looplib as ll, torch
    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = ll.optimizer(torch.optim.SGD, lr=ll.transforms.per_member([0.0, 0.1, 0.2]))
    >>> grad_fn = ll.make_grad_fn(model, lambda model, x: model(x).square().mean())
    >>> train_step = ll.vmap_step(ll.make_train_step(grad_fn, optimizer))
    >>> stack = ll.transforms.stack_states([ll.init_state(model, optimizer, seed=seed) for seed in range(3)])
    >>> stack, metrics = train_step(stack, torch.ones(4, 2))
    >>> len(ll.transforms.compute_members(metrics)), torch.equal(stack.params["weight"][0], model.weight)
    (3, True)

    Each member does what the step would do with it alone: with its own random numbers (a function of its seed), its
    own clipping, averages, loss scale and learning rate. The result is that of as many runs in turn but for the last
    bits, which batched kernels round otherwise. Nothing mixes members, whatever the optimizer or the wrapper: one
    that diverges is not seen by the others. One whose update is skipped (`apply_if_finite`) stays where it was while
    `step` counts on, unless all are skipped, and never makes the step raise.

    Random numbers are those that the step draws for the member alone, but for dropout on a GPU,
    where torch has a kernel of its own.

    The step is written down as a graph at the first batch of each shape, as a compiled step is, and what holds there
    holds here: no value of a tensor may be asked for. `donate=True` of the step is kept, so that the stack is written
    in place, and `compile_step(vmap_step(train_step))` makes machine code of the graph. A small stack of large models
    gains nothing, and attention is computed by matrices and not by fused kernels, which know of no members.

    To evaluate, `compute_members(measure(vmap_step(eval_step), stack, batches))`. What `vmap_step(predict_step)`
    returns has the members in a first dimension; for `ll.predict`, which wants the examples there, take their mean,
    `lambda stack, batch: predict_step(stack, batch).mean(0)`, or transpose.

    Args:
        step: what `make_train_step`, `make_eval_step` or `make_predict_step` returns.
        own_batches: each tensor of a batch has the members in a first dimension; otherwise all see the same batch.

    Metrics are those of `step`, with a value for each member: `ll.transforms.compute_members` reads them.

    Raises:
        TypeError: another function.
        ValueError: a state that is no stack; members whose wrappers differ in what they do (an average that moves in
            some of them alone); `per_member` values for another number of members.
        UntraceableError: sparse gradients; random numbers whose distribution depends on tensors in a way that cannot
            be mapped; and see `ll.compile_step`.

    Source: `jax.vmap` over initialisations, as in Equinox's "ensembling" example; `torch.func.stack_module_state`.
    """
    parts = parts_of(step, "vmap_step")
    options: Mapping[str, Any] = {"backend": "eager"}
    if isinstance(parts, GraphParts):
        options = parts.compiler.options_for("vmap_step")
    compiler = _Stacked(parts.core, parts.donate, options, parts.watched, own_batches)
    return step_of_graphs(step, parts, compiler)


class _Stacked(Compiler):
    """Programs of one member, mapped over all of a stack."""

    def __init__(
        self, core: Core, donate: bool, options: Mapping[str, Any], watched: tuple[Any, ...], own_batches: bool
    ) -> None:
        def mappable(state: TrainState, batch: Any) -> Outcome:
            with sdpa_kernel(SDPBackend.MATH), _Dense():  # type: ignore[no-untyped-call]
                return core(state, batch)

        super().__init__(mappable, donate, options, watched)
        self.of_member, self.own_batches = core, own_batches
        self.count = 0

    def compiled(self, options: Mapping[str, Any]) -> Compiler:
        if self.options.get("backend") != "eager":
            return super().compiled(options)
        return _Stacked(self.of_member, self.donate, options, self.watched, self.own_batches)

    def options_for(self, transform: str) -> Mapping[str, Any]:
        raise TypeError(f"{transform} got a step of a stack, as vmap_step returns it: give the step of one member")

    def prepare(self, state: TrainState, batch: Any) -> Ready:
        self.count = members_of(state)
        if self.own_batches:
            for leaf in dissect(batch).tensors:
                if not leaf.dim() or len(leaf) != self.count:
                    raise ValueError(
                        f"the batch has a tensor of shape {tuple(leaf.shape)}, and the stack {self.count} members: "
                        "with own_batches=True each tensor has a first dimension of members"
                    )
        return super().prepare(state, batch)

    def answer(self, question: Question, flat: list[Tensor], counts: Mapping[str, Any]) -> tuple[Any, list[Tensor]]:
        answers, own = self.ask(question.function, question.sources, flat, counts)
        if not own:
            return answers[0].key(), answers[0].tensors
        columns = zip(*(said.tensors for said in answers), strict=True)
        return answers[0].key(), [torch.stack(column) for column in columns]

    def ask(
        self, function: Callable[..., Any], sources: list[Any], flat: list[Tensor], counts: Mapping[str, Any]
    ) -> tuple[list[Dissected], bool]:
        """What the host says for each member, and whether it may say something else for another."""
        answers, own = self.said(function, sources, flat, counts)
        keys = [said.key() for said in answers]
        if keys.count(keys[0]) < self.count and {said.source for said in answers} == {"True", "False"}:
            # torch's optimizers leave out a term whose factor is 0. Where it is not 0 for all, all have the term.
            answers, own = self.said(function, sources, flat, counts, without_zeros=True)
            keys = [said.key() for said in answers]
        for number, key in enumerate(keys):
            if key != keys[0]:
                raise ValueError(
                    f"members 0 and {number} of the stack part in what their step does (on_host said "
                    f"{answers[0].source} and {answers[number].source}): a counter of theirs differs, such as that "
                    "of an average when some updates were skipped. Step them in stacks of their own, by "
                    "ll.transforms.select_members"
                )
        return answers, own

    def said(
        self,
        function: Callable[..., Any],
        sources: list[Any],
        flat: list[Tensor],
        counts: Mapping[str, Any],
        without_zeros: bool = False,
    ) -> tuple[list[Dissected], bool]:
        known: dict[str, Dissected] = {}  # by what is asked about: most members of most stacks are told the same
        inputs = [flat[value] for kind, value in sources if kind == "input"]
        rows = list(zip(*(tensor.tolist() for tensor in inputs), strict=True)) or [()] * self.count
        before, _per_member._asked = _per_member._asked, (asked := _per_member._Asked(0, self.count, without_zeros))
        try:
            answers: list[Dissected] = []
            for number, row in enumerate(rows):
                asked.number = number
                if asked.own or str(row) not in known:
                    values = [
                        _without_zero(flat[value][number], without_zeros)
                        if kind == "input"
                        else value_of((kind, value), flat, counts)
                        for kind, value in sources
                    ]
                    known[str(row)] = as_answer(function(*values))
                answers.append(known[str(row)])
            return answers, asked.own or bool(inputs)
        finally:
            _per_member._asked = before

    def make(
        self,
        state: TrainState,
        batch: Any,
        questions: dict[Any, Any],
        flat: list[Tensor],
        counts: Mapping[str, Any],
        held: list[Held],
    ) -> tuple[dict[Any, Any], Any, Machine]:
        in_batch = dissect(batch)
        stacked = len(flat) - len(in_batch.tensors) * (not self.own_batches)
        varied: list[bool] = []  # of each number of the host's: whether each member has its own

        def evaluate(function: Callable[..., Any], sources: list[Any]) -> Any:
            answers, own = self.ask(function, sources, flat, counts)
            varied.extend(own for _ in answers[0].tensors)
            return answers[0].build()(answers[0].tensors)

        one = [tensor.detach()[0] if place < stacked else tensor for place, tensor in enumerate(flat)]
        example = in_batch.build()(one[-len(in_batch.tensors) :]) if in_batch.tensors else batch
        program, answers, at = _program.trace(
            self.core, _member(state, 0), example, questions, one, held, evaluate, varied.clear
        )
        mapped, draws = self.mapped(program, stacked, varied)
        machine = Machine(mapped, self.build(mapped))
        machine.draws = cast(Any, list(zip(draws, program.streams, strict=True)))
        machine.random = bool(draws)
        return answers, at, machine

    def mapped(self, program: Program, stacked: int, varied: list[bool]) -> tuple[Program, list[_Drawing]]:
        """The program of one member as that of all, and the operations that draw its random numbers beforehand."""
        with torch.no_grad():
            pure = functionalize(program.graph, remove="mutations")
            one = make_fx(pure, _mappable_forms(), tracing_mode="fake")(*fakes(program.graph))
        _without_copies(one)
        draws = _drawn_beforehand(one)
        inputs = [*((3, place) for place in range(len(draws))), *program.inputs]
        dims = [
            0 if kind == 3 or (kind == 1 and value < stacked) or (kind == 2 and varied[value]) else None
            for kind, value in inputs
        ]
        examples = fakes(one, [None if dim is None else self.count for dim in dims])
        with torch.no_grad():
            all_of_them = torch.vmap(lambda *values: one(*values), in_dims=tuple(dims), randomness="error")
            graph = make_fx(all_of_them, tracing_mode="fake")(*examples)
        graph.graph.eliminate_dead_code()
        graph.recompile()
        params, opt_state, buffers, metrics, samples, applied = program.outcome[0]
        outcome: Any = (
            (params, opt_state, buffers, metrics, samples, applied),
            [],
        )  # errors of one member are nobody's
        shapes = dissect(outcome)
        with FakeTensorMode():
            wide = [torch.empty((self.count, *t.shape), dtype=t.dtype, device=t.device) for t in shapes.tensors]
        batched = replace(
            program,
            graph=graph,
            inputs=inputs,
            outputs=program.outputs[: len(wide)],
            outcome=shapes.build("v, n")(wide, _Same()),
            afterwards=[],
        )
        return (batched.donated() if self.donate else batched), draws

    def draw(self, machine: Machine, state: TrainState, generators: Sequence[torch.Generator]) -> list[Tensor]:
        seeds: Any = state.seed
        draws: list[Any] = machine.draws
        drawn = [draw.empty(len(seeds)) for draw, _ in draws]
        rows = list(zip(*(tensor.unbind() for tensor in drawn), strict=True))
        for seed, row in zip(seeds, rows, strict=True):
            before = None
            for (draw, stream), into in zip(draws, row, strict=True):
                if stream != before:  # each microbatch has a stream of its own, and draws all it needs at once
                    place, before = mix(seed, state.step, rank(), stream), stream
                    for generator in generators:
                        generator.manual_seed(place)
                draw.fill(into)
        return [tensor.contiguous() for tensor in drawn]

    def run(self, ready: Ready, state: TrainState) -> Outcome:
        out = super().run(ready, state)
        metrics: Any = out.metrics
        if isinstance(metrics, dict):
            metrics = {name: _of_members(metric, self.count) for name, metric in metrics.items()}
        return out._replace(
            metrics=metrics, applied=out.applied.any() if isinstance(out.applied, Tensor) else out.applied
        )


class _Dense(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses sparse gradients."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, Tensor) and made.layout is not torch.strided:
            raise UntraceableError(
                f"the step makes sparse gradients (shape {tuple(made.shape)}), which cannot be mapped over members: "
                "leave out Embedding(sparse=True), and train the stack by an optimizer of dense gradients"
            )
        return made


def _without_zero(value: Tensor, now: bool) -> Tensor:
    """A hyperparameter of the state, a double as no other number there is, as if it were not 0."""
    return value.clamp(min=_per_member._LEAST) if now and value.dtype == torch.float64 and value == 0 else value


def _of_members(metric: Any, count: int) -> Any:
    """A record of records, where it is one of more than sums."""
    if isinstance(metric, (Mean, Tensor)) or not isinstance(metric, Metric):
        return metric
    leaves, spec = tree_flatten(metric)
    rows = [leaf.unbind() if isinstance(leaf, Tensor) else [leaf] * count for leaf in leaves]
    return _Records(tuple(tree_unflatten(list(row), spec) for row in zip(*rows, strict=True)))


class _Same(dict[str, Any]):
    """Counts as they stand in the tree of an outcome."""

    def __missing__(self, name: str) -> Any:
        return _tracing.Count(name)


@functools.cache
def _mappable_forms() -> dict[Any, Callable[..., Any]]:
    """Operations that `torch.vmap` does not know, or knows as a loop over the members, as others that it does."""

    def put(into: Tensor, indices: Sequence[Tensor | None], values: Tensor, accumulate: bool = False) -> Any:
        mask = indices[0]
        if len(indices) > 1 or mask is None or mask.dtype is not torch.bool or values.dim() or accumulate:
            return NotImplemented
        return torch.where(mask.reshape(mask.shape + (1,) * (into.dim() - mask.dim())), values, into)

    def scale(
        now: Tensor, tracker: Tensor, overflow: Tensor, growth: float, backoff: float, interval: int
    ) -> tuple[Tensor, Tensor]:
        good = tracker + 1
        grows, grown = good == interval, now * growth
        larger = torch.where(grows & grown.isfinite(), grown, now)
        overflows = overflow > 0
        return (
            torch.where(overflows, now * backoff, larger),
            torch.where(overflows | grows, torch.zeros_like(good), good).to(tracker.dtype),
        )

    def dropout(values: Tensor, rate: float, train: bool | None) -> Any:
        if train is False:
            return NotImplemented
        kept = torch.ops.aten.bernoulli.p(torch.empty_like(values), 1 - rate)
        return values * (kept / (1 - rate) if rate < 1 else kept), kept.bool()

    aten = torch.ops.aten
    return {
        **_program.simple_forms(),
        aten.index_put.default: put,
        aten._amp_update_scale.default: scale,
        aten.native_dropout.default: dropout,
        aten.bernoulli.default: lambda rates: (torch.rand_like(rates) < rates).to(rates.dtype),
    }


def _without_copies(graph: torch.fx.GraphModule) -> None:
    """Only batch norm's kernels write in this graph, so that for all others a copy is as good as what it is of."""
    for node in list(graph.graph.nodes):
        copies = node.target in (torch.ops.aten.detach.default, torch.ops.aten.clone.default) and not node.kwargs
        if copies and not any(user.op == "output" or "batch_norm" in str(user.target) for user in node.users):
            node.replace_all_uses_with(node.args[0])
            graph.graph.erase_node(node)


def _drawn_beforehand(graph: torch.fx.GraphModule) -> list[_Drawing]:
    """Take the random numbers of a graph for inputs, its first ones, and return what draws each of them.

    So each member's come from a stream of its own, just as they would alone.
    """
    nodes = graph.graph
    first = next(iter(nodes.nodes))
    drawn: list[_Drawing] = []
    for node in [node for node in nodes.nodes if _program.draws(node)]:
        drawn.append(_drawing(node))
        with nodes.inserting_before(first):
            given = nodes.placeholder(f"drawn_{len(drawn)}")
        given.meta.update(node.meta)
        node.replace_all_uses_with(given)
    nodes.eliminate_dead_code(is_impure_node=lambda node: node.op in ("placeholder", "output"))
    graph.recompile()
    return drawn


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


class _Drawing(NamedTuple):
    """An operation that draws random numbers: `fill(into)` draws those of one member, in their order in memory."""

    like: Tensor
    fill: Callable[[Tensor], Any]

    def empty(self, count: int) -> Tensor:
        span = 1 + sum((size - 1) * stride for size, stride in zip(self.like.size(), self.like.stride(), strict=True))
        size, stride = (count, *self.like.size()), (span, *self.like.stride())
        return torch.empty_strided(size, stride, dtype=self.like.dtype, device=self.like.device)


def _drawing(node: Node) -> _Drawing:
    """What draws the same given nothing: for this the distribution must depend on no tensor, only on its shape."""
    target = cast(Any, node.target)
    name = str(target).split(".")[1]
    if node.all_input_nodes and name not in _IN_PLACE | _LIKE:
        raise UntraceableError(
            f"the step draws random numbers by {target}, whose distribution depends on tensors, and which cannot be "
            "mapped over members: draw them from torch.rand, and make of them what is needed"
        )

    def like(value: Any) -> Any:
        if not isinstance(value, Node):
            return value
        meta = value.meta["val"]
        return torch.empty_strided(meta.size(), meta.stride(), dtype=meta.dtype, device=meta.device)

    args: Any = torch.fx.node.map_aggregate(node.args, like)
    kwargs = node.kwargs
    if name in _IN_PLACE:  # as a step alone draws; the functional forms that a graph has keep no order of memory
        method = getattr(Tensor, f"{name.removesuffix('_functional')}_")
        return _Drawing(args[0], lambda into: method(into, *args[1:], **kwargs))
    return _Drawing(like(node), lambda into: into.copy_(target(*args, **kwargs)))
