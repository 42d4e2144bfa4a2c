"""Programs: a step as a graph of tensor operations, with its inputs and outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Node

from looplib.steps import Outcome
from looplib.transforms._expression import expression, kind_of
from looplib.transforms._watch import Held
from looplib.types import COUNTS as _COUNTS
from looplib.types import TrainState

COUNTS = (*_COUNTS, "extra")  # values outside a graph

# Kinds of tensors: in the graph's result, in state and batch, in the host's answers, and drawn beforehand.
RESULT, GIVEN, ANSWER, DRAWN = range(4)

Core = Callable[[TrainState, Any], Outcome]  # a step without its counts


class Question(NamedTuple):
    """A call of `on_host`: a question to the host before the graph runs.

    Attributes:
        function: the function passed to `on_host`.
        sources: source of each argument: ("input", index), ("count", name) or ("value", the value itself).
        answers: the next Question, or a Program, by the part of the answer that is not a tensor.
    """

    function: Callable[..., Any]
    sources: list[Any]
    answers: dict[Any, Any]

    def arguments(self, flat: list[Tensor] | dict[int, Tensor], counts: Mapping[str, Any]) -> list[Any]:
        """Values of its arguments for this state."""
        return [
            flat[value] if kind == "input" else counts[value] if kind == "count" else value
            for kind, value in self.sources
        ]


class Inputs(NamedTuple):
    """Inputs for which a program is made.

    Attributes:
        state, batch: examples of the shapes, dtypes and devices that the program accepts.
        flat: tensors of both.
        counts: fields of the state that are not trees of tensors.
        held: values outside the state that the step may read.
        questions: table of the questions that the step asks, from its first on.
    """

    state: TrainState
    batch: Any
    flat: list[Tensor]
    counts: Mapping[str, Any]
    held: list[Held]
    questions: dict[Any, Any]


@dataclass(frozen=True)
class Program:
    """A graph and its calling convention.

    Attributes:
        graph: takes the tensors of `inputs` as arguments, and returns a list of tensors.
        inputs: source of each placeholder: `(GIVEN, i)`, `(ANSWER, i)` or `(DRAWN, i)`, or `(None, read)` for values
            that the step holds in Python.
        outputs: source of each tensor of the outcome: `(RESULT, i)`, or an unchanged input, `(GIVEN, i)` or
            `(ANSWER, i)`.
        outcome: an `Outcome` and the arguments of `afterwards`, as a tree.
        afterwards: functions to call after a run.
        successors: (index among `outputs`, index in the state) of each tensor and the one it replaces.
        trained: indices among `outputs` of parameters that require a gradient.
        held: values outside the state that it may have read.
        streams: for each operation that draws random numbers, the index of its microbatch.
        written: names of the parameters, and of the buffers, that it writes in place.
    """

    graph: GraphModule
    inputs: list[tuple[int | None, Any]]
    outputs: list[tuple[int, int]]
    outcome: Any
    afterwards: list[Callable[..., None]]
    successors: list[tuple[int, int]]
    trained: frozenset[int]
    held: list[Held]
    streams: list[int]
    written: tuple[set[str], set[str]] = (set(), set())

    def rebuild(self) -> Callable[[Any, Any, Any, Any], tuple[Any, Any]]:
        """`rebuild(result, given, answers, counts) -> (outcome, arguments)`."""
        return expression(self.outcome, self._code_of).build("r, g, a, n")

    def _code_of(self, _: Tensor, index: int) -> str:
        """Code for a tensor of the outcome: in the graph's result, in what it was given, or in the host's answers."""
        kind, source = self.outputs[index]
        trained = kind == RESULT and index in self.trained
        return f"{'rga'[kind]}[{source}]{'.requires_grad_()' * trained}"

    def in_place(self) -> list[int]:
        """Indices of the inputs that are tensors of a donated state, which stay at their addresses from step to step."""
        if not any(self.written):
            return []
        state = {(1, index) for _, index in self.successors}
        return [index for index, source in enumerate(self.inputs) if source in state]

    def random(self) -> bool:
        """True if it draws random numbers."""
        return any(map(draws, self.graph.graph.nodes))


def draws(node: Node) -> bool:
    """True if an operation draws random numbers."""
    return isinstance(node.target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags


def storage(node: Node) -> int:
    """Memory that holds the result of an operation."""
    value: Tensor = node.meta["val"]
    return int(value.untyped_storage()._cdata)


def is_tensor(node: Any) -> bool:
    """True if the result of an operation is one tensor."""
    return isinstance(node, Node) and isinstance(node.meta.get("val"), Tensor)


def is_same(node: Node, viewed: Node) -> bool:
    """True if two results are the same numbers in the same memory, read in the same way."""
    if not is_tensor(viewed) or storage(node) != storage(viewed):
        return False
    one, two = node.meta["val"], viewed.meta["val"]
    # A conjugate is a view of the same memory that is read differently, and so is its imaginary part.
    read_alike = one.is_conj() == two.is_conj() and one.is_neg() == two.is_neg()
    return read_alike and kind_of(one) == kind_of(two) and one.storage_offset() == two.storage_offset()


def memory_like(tensor: Tensor) -> Tensor:
    """New memory with the layout of a tensor, outside all transforms."""
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=tensor.device)


def fakes(
    graph: GraphModule, members: Sequence[int | None] = (), stacks: Mapping[int, Tensor] | None = None
) -> list[Tensor]:
    """Tensors without values like the graph's inputs, with a dimension of members in front if given.

    `stacks` has inputs with that dimension, by index: a graph is specialized to their strides.
    """
    from torch.fx.experimental.symbolic_shapes import ShapeEnv  # imported here because it imports sympy

    metas = [node.meta["val"] for node in graph.graph.find_nodes(op="placeholder")]
    sizes, stacks = list(members) or [None] * len(metas), stacks or {}
    with FakeTensorMode(shape_env=ShapeEnv()):  # otherwise Inductor would not use its cache
        return [
            memory_like(stacks.get(index, meta))
            if size is None or index in stacks
            else torch.empty((size, *meta.size()), dtype=meta.dtype, device=meta.device)
            for index, (meta, size) in enumerate(zip(metas, sizes, strict=True))
        ]
