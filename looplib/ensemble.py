"""Many members in one step: ensembles and sweeps as one stack of states.

A stack is a `TrainState` whose tensors have one more dimension in front, the members. `vmap_step` writes down the
step of one member as a graph, and maps that graph over all of them: each wrapper, optimizer and schedule does for
each member what it does for a run alone, and small models fill the machine together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functionalize
from torch.fx import Node
from torch.fx.experimental.proxy_tensor import make_fx

from looplib import _program, _tracing
from looplib._program import Core, Dissected, Program, Question, as_answer, dissect, value_of
from looplib._random import mix
from looplib._ranks import rank
from looplib.compiling import Compiler, Machine, Ready, fakes
from looplib.metrics import Metric
from looplib.state import TrainState
from looplib.steps import Outcome, Parts, compiled_step

S = TypeVar("S", bound=Callable[..., Any])

_TREES = ("params", "buffers", "opt_state", "extra")


def stack_states(states: Sequence[TrainState]) -> TrainState:
    """One state of many, to be trained by `vmap_step`: each tensor with the members in a first dimension.

    >>> import looplib as ll, torch
    >>> optimizer = ll.optimizer(torch.optim.AdamW, lr=1e-3)
    >>> def member(seed):
    ...     torch.manual_seed(seed)
    ...     return ll.init_state(torch.nn.Linear(2, 1), optimizer, seed=seed)
    >>> stack = ll.stack_states([member(seed) for seed in range(4)])
    >>> stack.params["weight"].shape, stack.seed
    (torch.Size([4, 1, 2]), (0, 1, 2, 3))

    The members are copied. Predicates, `eval_state`, `checkpoint_io` and all that looks at counts or at whole trees
    take a stack as they take a state. Its `seed` is the tuple of the members' seeds.

    Args:
        states: at the same step and place of the data, alike in names, shapes and dtypes.

    Raises ValueError for no states, or for states that differ, with the name of what does.
    """
    if not states:
        raise ValueError("stack_states got no states; give a list of at least one")
    first = states[0]
    for number, state in enumerate(states):
        for name in ("step", "epoch", "batch", "epoch_length", "samples"):
            if getattr(state, name) != getattr(first, name):
                raise ValueError(
                    f"member {number} is at {name} {getattr(state, name)}, member 0 at {getattr(first, name)}: "
                    "members are stepped together, so take states of one moment"
                )
    trees = {name: _stacked([getattr(state, name) for state in states], name) for name in _TREES}
    return first.replace(**trees, seed=tuple(state.seed for state in states))


def _stacked(trees: Sequence[Any], path: str) -> Any:
    first = trees[0]
    if isinstance(first, Tensor):
        kinds = {(tuple(t.shape), t.dtype, t.device) if isinstance(t, Tensor) else type(t) for t in trees}
        if len(kinds) > 1:
            raise ValueError(f"{path} differs among the members: {', '.join(map(str, kinds))}; a stack has one shape")
        with torch.no_grad():
            return torch.stack([tensor.detach() for tensor in trees]).requires_grad_(first.requires_grad)
    if isinstance(first, dict):
        for number, tree in enumerate(trees):
            if not isinstance(tree, dict) or tree.keys() != first.keys():
                raise ValueError(f"{path} of member {number} has other names than that of member 0")
        return {key: _stacked([tree[key] for tree in trees], f"{path}[{key!r}]") for key in first}
    if isinstance(first, (list, tuple)):
        if len({len(tree) for tree in trees}) > 1:
            raise ValueError(f"{path} differs among the members in its length")
        members = [_stacked(column, f"{path}[{place}]") for place, column in enumerate(zip(*trees, strict=True))]
        return type(first)(*members) if hasattr(first, "_fields") else type(first)(members)
    if any(tree != first for tree in trees):
        raise ValueError(f"{path} is {first!r} in member 0 and not in all others; only tensors are stacked")
    return first


def unstack_states(stack: TrainState) -> list[TrainState]:
    """The members of a stack, each a state of its own that goes on alone.

    >>> import looplib as ll, torch
    >>> stack = ll.stack_states([ll.init_state(torch.nn.Linear(2, 1), seed=seed) for seed in (5, 6)])
    >>> [member.seed for member in ll.unstack_states(stack)]
    [5, 6]

    They are copies, so that a donated step of the stack or of a member spends no other. Raises ValueError for a state
    that is no stack.
    """
    return [_member(stack, number) for number in range(members_of(stack))]


def members_of(stack: TrainState) -> int:
    """How many members a stack has.

    >>> import looplib as ll, torch
    >>> ll.members_of(ll.stack_states([ll.init_state(torch.nn.Linear(2, 1))] * 3))
    3

    Raises ValueError for a state that is no stack.
    """
    seeds: Any = stack.seed
    if not isinstance(seeds, tuple):
        raise ValueError(
            f"this is one state, with the seed {seeds}, and no stack; make one by ll.stack_states([...])"
        )
    return len(seeds)


def select_members(stack: TrainState, numbers: Sequence[int]) -> TrainState:
    """A smaller stack of these members, in this order: to drop the weak, or to go on from the best.

    >>> import looplib as ll, torch
    >>> stack = ll.stack_states([ll.init_state(torch.nn.Linear(2, 1), seed=seed) for seed in range(4)])
    >>> ll.select_members(stack, [3, 1]).seed
    (3, 1)

    Raises ValueError for a number of no member, or none at all.
    """
    count = members_of(stack)
    if not numbers or any(not 0 <= number < count for number in numbers):
        raise ValueError(f"numbers are {list(numbers)}; a stack of {count} has the members 0 to {count - 1}")
    places = torch.tensor(list(numbers))
    seeds: Any = stack.seed

    def chosen(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return leaf.detach().index_select(0, places.to(leaf.device)).requires_grad_(leaf.requires_grad)

    trees = {name: torch.utils._pytree.tree_map(chosen, getattr(stack, name)) for name in _TREES}
    return stack.replace(**trees, seed=tuple(seeds[number] for number in numbers))


def _member(stack: TrainState, number: int) -> TrainState:
    seeds: Any = stack.seed

    def own(leaf: Any) -> Any:
        return leaf.detach()[number].clone().requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf

    trees = {name: torch.utils._pytree.tree_map(own, getattr(stack, name)) for name in _TREES}
    return stack.replace(**trees, seed=seeds[number])


class per_member:
    """A hyperparameter with a value, or a schedule, of its own for each member of a stack.

    >>> import looplib as ll, torch
    >>> optimizer = ll.optimizer(torch.optim.AdamW, lr=ll.per_member([1e-3, 3e-3, 1e-2]), weight_decay=0.1)

    It stands where `ll.optimizer` takes a number or a schedule. Raises ValueError for no values; the step raises it
    when the stack has another number of members.
    """

    def __init__(self, values: Sequence[Any]) -> None:
        if not len(values):
            raise ValueError("per_member got no values; give one for each member")
        self.values = tuple(value if callable(value) else float(value) for value in values)

    def __repr__(self) -> str:
        return f"per_member({list(self.values)})"

    def __call__(self, step: int) -> float:
        number = _tracing.member if _tracing.member is not None else 0
        if _tracing.member is not None:
            _tracing.members_asked = True
            if _tracing.members != len(self.values):
                raise ValueError(
                    f"{self} has {len(self.values)} values, and the stack {_tracing.members} members: give one each"
                )
        value = self.values[number]
        return float(value(step) if callable(value) else value)


def compute_members(metrics: Mapping[str, Metric], prefix: str = "") -> list[dict[str, float]]:
    """What `ll.compute` gives, for each member of a stack.

    >>> import looplib as ll, torch
    >>> ll.compute_members({"loss": ll.Mean(torch.tensor([2.0, 6.0]), 2)})
    [{'loss': 1.0}, {'loss': 3.0}]

    Raises ValueError for metrics of one state.
    """
    values = {name: torch.as_tensor(metric.compute()).detach().double().cpu() for name, metric in metrics.items()}
    counts = {len(value) for value in values.values() if value.dim()}
    if len(counts) != 1:
        raise ValueError(f"these metrics are of {sorted(counts) or 'no'} members; give those of a step by vmap_step")
    (count,) = counts
    columns = {prefix + name: value.expand(count).tolist() for name, value in values.items()}
    return [{name: column[number] for name, column in columns.items()} for number in range(count)]


def vmap_step(step: S, *, own_batches: bool = False) -> S:
    """A step of one member as a step of a stack: all members in one graph.

    >>> import looplib as ll, torch
    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = ll.optimizer(torch.optim.SGD, lr=ll.per_member([0.0, 0.1, 0.2]))
    >>> grad_fn = ll.make_grad_fn(model, lambda model, x: model(x).square().mean())
    >>> train_step = ll.vmap_step(ll.make_train_step(grad_fn, optimizer))
    >>> stack = ll.stack_states([ll.init_state(model, optimizer, seed=seed) for seed in range(3)])
    >>> stack, metrics = train_step(stack, torch.ones(4, 2))
    >>> len(ll.compute_members(metrics)), torch.equal(stack.params["weight"][0], model.weight)
    (3, True)

    Each member does what the step would do with it alone: with its own random numbers (a function of its seed), its
    own clipping, averages, loss scale and learning rate. The result is that of as many runs in turn but for the last
    bits, which batched kernels round otherwise. One that diverges is not seen by the others; one whose update is
    skipped (`apply_if_finite`) stays where it was while `step` counts on, and never makes the step raise.

    The step is written down as a graph at the first batch of each shape, as a compiled step is, and what holds there
    holds here: no value of a tensor may be asked for. `make_train_step(..., donate=True, compile=True)` is kept, so
    the stack is written in place and compiled. A small stack of large models gains nothing.

    Args:
        step: what `make_train_step`, `make_eval_step` or `make_predict_step` returns.
        own_batches: each tensor of a batch has the members in a first dimension; otherwise all see the same batch.

    Metrics are those of `step`, with a value for each member: `ll.compute_members` reads them.

    Raises:
        TypeError: another function.
        ValueError: a state that is no stack; members whose wrappers differ in what they do (an average that moves in
            some of them alone); `per_member` values for another number of members.
        UntraceableError: see `make_train_step(compile=)`.

    Source: Rochester, Kidger and others' "model ensembling" by `jax.vmap`; `torch.func.stack_module_state`.
    """
    parts = getattr(step, "parts", None)
    if not isinstance(parts, Parts):
        raise TypeError(
            f"vmap_step got a {type(step).__name__} that is no step of looplib; give what ll.make_train_step, "
            "ll.make_eval_step or ll.make_predict_step returned, and wrap the stack's step instead"
        )
    options = {} if parts.compile is True else parts.compile or {"backend": "eager"}
    compiler = _Stacked(parts.core, parts.donate, options, parts.watched, own_batches)
    if hasattr(step, "is_train_step") or step.__name__ in ("pure_step", "donated_step", "compiled"):
        train_step: Any = compiled_step(parts, compiler)
        return cast(S, train_step)

    def mapped(state: TrainState, batch: Any) -> Any:
        return compiler.run(compiler.prepare(state, batch), state).metrics

    result: Any = mapped
    result.compiler = compiler
    return cast(S, result)


class _Stacked(Compiler):
    """Programs of one member, mapped over all of a stack."""

    def __init__(
        self, core: Core, donate: bool, options: Mapping[str, Any], watched: tuple[Any, ...], own_batches: bool
    ) -> None:
        super().__init__(core, donate, options, watched)
        self.own_batches = own_batches

    def prepare(self, state: TrainState, batch: Any) -> Ready:
        self.count = members_of(state)
        if self.own_batches:
            for leaf in dissect(batch).tensors:
                if not leaf.dim() or len(leaf) != self.count:
                    raise ValueError(
                        f"the batch has a tensor of shape {tuple(leaf.shape)}, and the stack {self.count} members: "
                        "with own_batches=True each tensor has a first dimension of members"
                    )
        self.of_state = len(dissect((state.params, state.buffers, state.opt_state)).tensors)
        return super().prepare(state, batch)

    def answer(self, question: Question, flat: list[Tensor], counts: Mapping[str, Any]) -> tuple[Any, list[Tensor]]:
        said, key, asked = self.said_by(0, question.function, question.sources, flat, counts)
        varied = any(kind == "input" for kind, _ in question.sources)
        if not (varied or asked):
            return key, said.tensors
        columns = [said.tensors]
        for number in range(1, self.count):
            other, other_key, _ = self.said_by(number, question.function, question.sources, flat, counts)
            if other_key != key:
                raise ValueError(
                    f"members 0 and {number} of the stack part in what their step does ({said.source} and "
                    f"{other.source}): a counter of theirs, or whether a hyperparameter is 0, differs. Step them in "
                    "stacks of their own (ll.select_members)"
                )
            columns.append(other.tensors)
        return key, [torch.stack(column) for column in zip(*columns, strict=True)]

    def said_by(
        self,
        number: int,
        function: Callable[..., Any],
        sources: list[Any],
        flat: list[Tensor],
        counts: Mapping[str, Any],
    ) -> tuple[Dissected, Any, bool]:
        """One member's answer, and whether it is its own."""
        before = _tracing.member, _tracing.members, _tracing.members_asked
        _tracing.member, _tracing.members, _tracing.members_asked = number, self.count, False
        try:
            values = [
                flat[value][number] if kind == "input" else value_of((kind, value), flat, counts)
                for kind, value in sources
            ]
            said = as_answer(function(*values))
            return said, said.key(), _tracing.members_asked
        finally:
            _tracing.member, _tracing.members, _tracing.members_asked = before

    def make(
        self,
        state: TrainState,
        batch: Any,
        questions: dict[Any, Any],
        flat: list[Tensor],
        counts: Mapping[str, Any],
        held: list[_program.Held],
    ) -> tuple[dict[Any, Any], Any, Machine]:
        in_batch = dissect(batch)
        stacked = self.of_state + len(in_batch.tensors) * self.own_batches
        varied: list[bool] = []

        def evaluate(function: Callable[..., Any], sources: list[Any]) -> Any:
            said, _, asked = self.said_by(0, function, sources, flat, counts)
            own = asked or any(kind == "input" for kind, _ in sources)
            varied.extend(own for _ in said.tensors)
            return said.build()(said.tensors)

        def questions_begin() -> None:
            varied.clear()

        one = [tensor.detach()[0] if place < stacked else tensor for place, tensor in enumerate(flat)]
        example = in_batch.build()([t.detach()[0] for t in in_batch.tensors]) if self.own_batches else batch
        program, answers, at = _program.trace(
            self.core, _member(state, 0), example, questions, one, held, evaluate, questions_begin
        )
        batched, draws = self.mapped(program, stacked, varied)
        machine = Machine(batched, self.build(batched))
        machine.draws = draws
        machine.random = machine.random or bool(draws)
        return answers, at, machine

    def mapped(
        self, program: Program, stacked: int, varied: list[bool]
    ) -> tuple[Program, list[Callable[[], Tensor]]]:
        """The program of one member as that of all, and the operations that draw its random numbers beforehand."""
        with torch.no_grad():
            pure = functionalize(program.graph, remove="mutations")
            one = make_fx(pure, _program.simple_forms(), tracing_mode="fake")(*fakes(program.graph))
        _without_copies(one)
        draws = [node for node in one.graph.nodes if _program.draws(node) and _of_shape_alone(node)]
        first = next(iter(one.graph.nodes))
        inputs = list(program.inputs)
        inputs[:0] = [(3, place) for place in range(len(draws))]
        drawing = [_drawing(node) for node in draws]
        for place, node in enumerate(draws):
            with one.graph.inserting_before(first):
                drawn = one.graph.placeholder(f"drawn_{place}")
            drawn.meta.update(node.meta)
            node.replace_all_uses_with(drawn)
        one.graph.eliminate_dead_code(is_impure_node=lambda node: node.op in ("placeholder", "output"))
        one.recompile()
        dims = [
            0 if kind == 3 or (kind == 1 and value < stacked) or (kind == 2 and varied[value]) else None
            for kind, value in inputs
        ]
        examples = fakes(one, [None if dim is None else self.count for dim in dims])
        mapped = torch.vmap(lambda *values: one(*values), in_dims=tuple(dims), randomness="different")
        with torch.no_grad():
            graph = make_fx(mapped, tracing_mode="fake")(*examples)
        graph.graph.eliminate_dead_code()
        graph.recompile()
        shapes = dissect(program.outcome)
        with FakeTensorMode():
            wide = [torch.empty((self.count, *t.shape), dtype=t.dtype, device=t.device) for t in shapes.tensors]
        batched = replace(program, graph=graph, inputs=inputs, outcome=shapes.build("v, n")(wide, _Same()))
        batched = replace(batched, afterwards=[], outcome=(batched.outcome[0], []))
        batched = replace(batched, outputs=batched.outputs[: len(dissect(batched.outcome).tensors)])
        return (batched.donated() if self.donate else batched), drawing

    def draw(self, machine: Machine, state: TrainState, generators: Sequence[torch.Generator]) -> list[Tensor]:
        seeds: Any = state.seed
        columns: list[list[Tensor]] = []
        for seed in seeds:
            place = mix(seed, state.step, rank(), 0)
            for generator in generators:
                generator.manual_seed(place)
            columns.append([draw() for draw in machine.draws])
        return [torch.stack(column) for column in zip(*columns, strict=True)]

    def run(self, ready: Ready, state: TrainState) -> Outcome:
        out = super().run(ready, state)
        return out._replace(applied=out.applied.any() if isinstance(out.applied, Tensor) else out.applied)


class _Same(dict[str, Any]):
    """Counts as they stand in the tree of an outcome."""

    def __missing__(self, name: str) -> Any:
        return _tracing.Count(name)


def _without_copies(graph: torch.fx.GraphModule) -> None:
    """Nothing is written in place in this graph, so that a copy is as good as what it was made of."""
    for node in list(graph.graph.nodes):
        copies = node.target in (torch.ops.aten.detach.default, torch.ops.aten.clone.default) and not node.kwargs
        if copies and all(user.op != "output" for user in node.users):
            node.replace_all_uses_with(node.args[0])
            graph.graph.erase_node(node)


_SHAPED = {
    "bernoulli",
    "uniform",
    "normal_functional",
    "rand_like",
    "randn_like",
    "rand",
    "randn",
    "randint",
    "random",
}


def _of_shape_alone(node: Node) -> bool:
    """Whether what is drawn depends on nothing but numbers and shapes, so that it can be drawn beforehand."""
    name = str(node.target).split(".")
    return name[1] in _SHAPED | {"randint_like", "exponential"} and not (
        name[1] == "bernoulli" and name[2] == "default"
    )


def _drawing(node: Node) -> Callable[[], Tensor]:
    """What draws the same for tensors without values of the same shapes."""

    def like(value: Any) -> Any:
        if not isinstance(value, Node):
            return value
        meta = value.meta["val"]
        return torch.empty_strided(meta.size(), meta.stride(), dtype=meta.dtype, device=meta.device)

    given, target = (node.args, node.kwargs), cast(Callable[..., Tensor], node.target)

    def draw() -> Tensor:
        args, kwargs = torch.fx.node.map_aggregate(given, like)
        return target(*args, **kwargs)

    return draw
