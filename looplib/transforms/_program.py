"""Programs: a step as a graph of tensor operations, with what goes in and what comes out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Node

from looplib.steps import Outcome
from looplib.transforms._expression import expression
from looplib.transforms._watch import Held
from looplib.types import COUNTS as _COUNTS
from looplib.types import TrainState

COUNTS = (*_COUNTS, "extra")  # what a graph does not hold

Core = Callable[[TrainState, Any], Outcome]  # a step without its counts


class Question(NamedTuple):
    """A call of `on_host`: something that the host is asked before the graph runs.

    Attributes:
        function: what `on_host` was given.
        sources: where its arguments come from: ("input", index), ("count", name) or ("value", the value itself).
        answers: the next Question, or a Program, by the part of the answer that is no tensor.
    """

    function: Callable[..., Any]
    sources: list[Any]
    answers: dict[Any, Any]

    def arguments(self, flat: list[Tensor] | dict[int, Tensor], counts: Mapping[str, Any]) -> list[Any]:
        """The values of its arguments for this state."""
        return [
            flat[value] if kind == "input" else counts[value] if kind == "count" else value
            for kind, value in self.sources
        ]


class Inputs(NamedTuple):
    """The inputs that a program is made for.

    Attributes:
        state, batch: whose shapes, dtypes and devices the program is for.
        flat: the tensors of both.
        counts: the fields of the state that are no trees of tensors.
        held: what the step may read outside of the state.
        questions: where the questions that the step asks are kept, from its first on.
    """

    state: TrainState
    batch: Any
    flat: list[Tensor]
    counts: Mapping[str, Any]
    held: list[Held]
    questions: dict[Any, Any]


@dataclass(frozen=True)
class Program:
    """A graph, and how to call it.

    Attributes:
        graph: takes the tensors of `inputs`, one by one, and returns a list of tensors.
        inputs: for each placeholder where its value comes from: (1, i) of state and batch, (2, i) of what the host
            answers, (3, i) of what was drawn before, (None, read) that the step holds in Python.
        outputs: for each tensor of the outcome where it is: ("o", i) of what the graph returns, or an input as it
            was, ("f", i) of state and batch, ("s", i) of what the host answers.
        outcome: an `Outcome` and the arguments of `afterwards`, as a tree.
        afterwards: functions to call when it has run.
        successors: (index among `outputs`, index in the state) of each tensor and of the one that it replaces.
        trained: the indices among `outputs` of parameters that require a gradient.
        held: what it may have read outside of the state.
        streams: of each operation that draws random numbers, the microbatch that it draws for.
        written: the names of the parameters, and of the buffers, that it writes in place.
    """

    graph: GraphModule
    inputs: list[tuple[int | None, Any]]
    outputs: list[tuple[str, int]]
    outcome: Any
    afterwards: list[Callable[..., None]]
    successors: list[tuple[int, int]]
    trained: frozenset[int]
    held: list[Held]
    streams: list[int]
    written: tuple[set[str], set[str]] = (set(), set())

    def rebuild(self) -> Callable[[Any, Any, Any, Any], tuple[Any, Any]]:
        """`rebuild(returned, flat, answers, counts) -> (outcome, arguments)`."""

        def name(_: Tensor, index: int) -> str:
            kind, source = self.outputs[index]
            return f"{kind}[{source}]{'.requires_grad_()' if kind == 'o' and index in self.trained else ''}"

        return expression(self.outcome, name).build("o, f, s, n")

    def random(self) -> bool:
        """Tell whether it draws random numbers."""
        return any(map(draws, self.graph.graph.nodes))


def draws(node: Node) -> bool:
    """Tell whether an operation draws random numbers."""
    return isinstance(node.target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags


def storage(node: Node) -> int:
    """The memory that the result of an operation lies in."""
    value: Tensor = node.meta["val"]
    return int(value.untyped_storage()._cdata)


def fakes(graph: GraphModule, members: Sequence[int | None] = ()) -> list[Tensor]:
    """Tensors without values like the graph's inputs; with a first dimension of members where one is given."""
    from torch.fx.experimental.symbolic_shapes import ShapeEnv  # which imports sympy

    metas = [node.meta["val"] for node in graph.graph.nodes if node.op == "placeholder"]
    sizes = list(members) or [None] * len(metas)
    with FakeTensorMode(shape_env=ShapeEnv()):  # without which Inductor would not look into its cache
        return [
            torch.empty_strided(meta.size(), meta.stride(), dtype=meta.dtype, device=meta.device)
            if size is None
            else torch.empty((size, *meta.size()), dtype=meta.dtype, device=meta.device)
            for meta, size in zip(metas, sizes, strict=True)
        ]
