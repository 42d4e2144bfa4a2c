"""The compiler of a step: a cache of programs, by the shapes of their inputs and the host's answers.

A step is a function of values, so all of it can be compiled at once: forward pass, backward pass, clipping, update.
It is written down as a graph once for each shape of its inputs, and torch's Inductor makes machine code of that. What
the host decides from step to step, such as the learning rate, goes into the graph as a number; and the random numbers
are a function of the state's seed and step as ever, though others than those of the step as it is.

A graph is what the step's Python did when it was written down. Python that only looks on (hooks, prints) is done that
once. A number that a loss function has from elsewhere (an attribute, a global, a closure) is watched, and the step
compiled again, with a warning, when it has changed; tensors from there are read at each step. Numbers and strings in a
batch are part of its shape. Random numbers are drawn in the order of the graph, so microbatches each have their own.
Dynamo has no part in this, so there are no guards and no graph breaks: what cannot be written down is an error.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from looplib._core import tracing
from looplib._core.modules import _generators
from looplib._core.random import mix
from looplib._core.ranks import rank, several
from looplib._core.tracing import UntraceableError
from looplib.steps import Outcome
from looplib.transforms._donation import donated
from looplib.transforms._explain import warn
from looplib.transforms._expression import as_answer, expression, reader
from looplib.transforms._inductor import Compiled, backend
from looplib.transforms._program import COUNTS, Core, Inputs, Program, Question
from looplib.transforms._trace import trace
from looplib.transforms._watch import changed, held_by
from looplib.types import TrainState

_MANY = (16, 64, 256)  # compilations to warn of

Draw = Callable[[TrainState, Sequence[torch.Generator]], list[Tensor]]


def seed_streams(state: TrainState, generators: Sequence[torch.Generator]) -> list[Tensor]:
    """Put the random streams where this step's begin, for a graph that draws from them itself."""
    seed = mix(state.seed, state.step, rank(), 0)
    for generator in generators:
        generator.manual_seed(seed)
    return []


class Machine:
    """A program with its machine code.

    Attributes:
        program: the program.
        run: takes the values of its inputs, and returns those of its graph's outputs.
        rebuild: builds the outcome of these.
        random: whether it takes random numbers.
        draw: puts the random streams where they begin, and draws what the graph takes as inputs.
        finish: what becomes of the outcome at last.
        stable: whether what comes out is like what goes in, known after the first run.
    """

    def __init__(
        self,
        program: Program,
        run: Compiled,
        draw: Draw = seed_streams,
        finish: Callable[[Outcome], Outcome] = lambda outcome: outcome,
    ) -> None:
        self.program, self.run, self.rebuild, self.random = program, run, program.rebuild(), program.random()
        self.draw, self.finish = draw, finish
        self.stable: bool | None = None


class Ready(NamedTuple):
    """The prepared inputs of one run: all decided and checked, nothing written."""

    machine: Machine
    flat: list[Tensor]
    answers: list[Tensor]
    counts: dict[str, Any]
    kind: int


class Compiler:
    """The programs of one step, by the shapes of their inputs.

    Subclasses make other programs of it (`make`), and say what the host answers to them (`answer`).
    """

    no_grad = True  # whether the programs run without recording gradients

    def __init__(self, core: Core, donate: bool, options: Mapping[str, Any], watched: tuple[Any, ...]) -> None:
        self.core, self.donate, self.watched, self.options = core, donate, watched, options
        self.build = backend(**options)
        self.kinds: dict[Any, int] = {}  # of states
        self.table: dict[Any, dict[Any, Any]] = {}  # by what goes in, and then by what the host answers
        self.known: tuple[weakref.ref[TrainState], Callable[..., list[Tensor]], int] | None = None
        self.compilations = 0
        self.seconds = 0.0  # spent on them, which a progress bar shows
        self.intact = True  # whether the run that has raised left the state as it was

    def compiled(self, options: Mapping[str, Any]) -> Compiler:
        """One that makes the same programs, and compiles them by these options."""
        raise TypeError(
            "compile_step got a step that is compiled already: give the one that ll.make_train_step returned"
        )

    def options_for(self, transform: str) -> Mapping[str, Any]:
        """The options that programs are compiled by, for a transform of the step that they are made of."""
        return self.options

    def prepare(self, state: TrainState, batch: Any) -> Ready:
        """Find the program for these inputs, or make it, and what the host has to say for this step."""
        if several():
            raise UntraceableError(
                f"a step cannot be compiled whole on {torch.distributed.get_world_size()} ranks, which send each "
                "other gradients: leave out ll.compile_step, and compile the model's blocks, ll.transforms.compile_blocks(model, Block)"
            )
        flat, kind = self.tensors_of(state)
        in_batch = expression(batch)
        flat += in_batch.tensors
        counts = {name: getattr(state, name) for name in COUNTS}
        questions = self.table.setdefault((kind, in_batch.key(self.no_grad)), {})
        machine, answers = self.find(questions, flat, counts)
        if machine is not None and (names := changed(machine.program.held)):
            warn(f"{', '.join(names)} changed since the step was compiled, so it is compiled anew")
            questions.clear()
            machine = None
        while machine is None:
            self.compile(Inputs(state, batch, flat, counts, held_by(*self.watched), questions))
            machine, answers = self.find(questions, flat, counts)
        return Ready(machine, flat, answers, counts, kind)

    def tensors_of(self, state: TrainState) -> tuple[list[Tensor], int]:
        """The tensors of a state, and the number of its kind."""
        trees = state.params, state.buffers, state.opt_state
        if self.known is not None and self.known[0]() is state:
            return self.known[1](trees), self.known[2]
        in_state = expression(trees)
        return in_state.tensors, self.kinds.setdefault(in_state.key(self.no_grad), len(self.kinds))

    def find(
        self, questions: Mapping[Any, Any], flat: list[Tensor], counts: Mapping[str, Any]
    ) -> tuple[Machine | None, list[Tensor]]:
        """Ask the host until its answers lead to a machine, or to nothing yet; with the tensors in the answers."""
        tensors: list[Tensor] = []
        node: Any = questions.get(None)
        while type(node) is Question:
            key, more = self.answer(node, flat, counts)
            tensors += more
            node = node.answers.get(key)
        return node, tensors

    def compile(self, inputs: Inputs) -> None:
        """Make a program for such inputs, and file it under what the host answers."""
        begin = time.perf_counter()
        with tracing.one_at_a_time():
            answers, key, machine = self.make(inputs)
        answers[key] = machine
        self.compilations += 1
        self.seconds += time.perf_counter() - begin
        if self.compilations in _MANY:
            warn(
                f"the step has been compiled {self.compilations} times, since it was given so many different "
                "shapes, numbers or strings in batches, or answers of on_host: pad batches to few shapes"
            )

    def answer(self, question: Question, flat: list[Tensor], counts: Mapping[str, Any]) -> tuple[Any, list[Tensor]]:
        """The host's answer now: the part that chooses a graph, and the tensors for it."""
        answer = as_answer(question.function(*question.arguments(flat, counts)))
        return answer.key(), answer.tensors

    def make(self, inputs: Inputs) -> tuple[dict[Any, Any], Any, Machine]:
        """A program for such inputs, and the table and key that it is found by."""

        def evaluate(question: Question) -> Any:
            return question.function(*question.arguments(inputs.flat, inputs.counts))

        program, answers, key = trace(self.core, inputs, evaluate)
        program = donated(program) if self.donate else program
        return answers, key, Machine(program, self.build(program))

    def run(self, ready: Ready, state: TrainState) -> Outcome:
        """Run it; with `donate` the state's tensors are written."""
        machine, flat, answers, counts, _ = ready
        program = machine.program
        drawn: list[Tensor] = []
        grad_mode = torch.is_grad_enabled()
        self.intact = True
        generators = _generators(flat[0].device) if machine.random else ()
        streams = [generator.get_state() for generator in generators]
        try:
            if self.no_grad:
                torch._C._set_grad_enabled(False)
            if generators:
                drawn = machine.draw(state, generators)
            tensors: tuple[list[Tensor], ...] = ([], flat, answers, drawn)
            self.intact = not self.donate
            outputs = machine.run(
                [value() if kind is None else tensors[kind][value] for kind, value in program.inputs]
            )
            outcome, arguments = machine.rebuild(outputs, flat, answers, counts)
        finally:
            torch._C._set_grad_enabled(grad_mode)
            for generator, stream in zip(generators, streams, strict=True):
                generator.set_state(stream)
        out = Outcome(*outcome)
        if program.afterwards:
            self.intact = not (self.donate and out.applied)
            for function, values in zip(program.afterwards, arguments, strict=True):
                function(*values)
        return machine.finish(out)

    def remember(self, ready: Ready, state: TrainState) -> None:
        """Remember the state that a run has made: where it is like the one before, the next step need not search it."""
        if not self.no_grad:  # tensors that autograd tracks are not to be held on to
            return
        machine, trees = ready.machine, (state.params, state.buffers, state.opt_state)
        if machine.stable is None:
            machine.stable = self.kinds.get(expression(trees).key(self.no_grad)) == ready.kind
        if machine.stable:
            alike = self.known is not None and self.known[2] == ready.kind
            read = self.known[1] if self.known is not None and alike else reader(trees)
            self.known = (weakref.ref(state), read, ready.kind)
