"""Step compiler: a cache of programs by the shapes of their inputs and the host's answers.

A step is a function of values, so all of it can be compiled together: forward pass, backward pass, clipping, update.
It is traced into a graph once for each shape of its inputs, and torch's Inductor generates machine code from the
graph. Values that the host decides at each step, such as the learning rate, are inputs of the graph, and so are
tensors that a loss function reads from elsewhere. Random numbers are drawn in the order of the graph, so each
microbatch has its own. Dynamo is not used, so there are no guards and no graph breaks: anything that cannot be traced
is an error. `compile_step` lists what a graph keeps of the step's Python.
"""

from __future__ import annotations

import sys
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from looplib._core import random as draws
from looplib._core import tracing
from looplib._core.checks import few, warn
from looplib._core.modules import _generators
from looplib._core.random import mix
from looplib._core.ranks import is_distributed, is_sharded, rank
from looplib._core.tracing import UntraceableError
from looplib.steps import Outcome
from looplib.transforms._expression import Expression, as_answer, expression, reader
from looplib.transforms._inductor import Compiled, backend
from looplib.transforms._program import (
    COUNTS,
    Core,
    HostInput,
    Inputs,
    Program,
    changed,
    held_by,
    program_of,
)
from looplib.transforms._trace import trace
from looplib.types import TrainState

_MANY = 16  # number of compilations at which a warning is given
_KERNELS_FROM = 64  # parameters; generated code is faster for fewer, and takes long to compile for more

Draw = Callable[[TrainState, Sequence[torch.Generator]], list[Tensor]]


def seed_streams(state: TrainState, generators: Sequence[torch.Generator]) -> list[Tensor]:
    """Seed the random streams for this step, for a graph that draws from them itself."""
    seed = mix(state.seed, state.step, rank(), 0)
    for generator in generators:
        generator.manual_seed(seed)
    return []


def _is_watched() -> bool:
    """True if somebody reads what is printed: on a terminal, or in a notebook."""
    shell: Any = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return hasattr(shell, "kernel") or (sys.stderr is not None and sys.stderr.isatty())


@dataclass
class CompiledProgram:
    """A program with its machine code.

    Attributes:
        program: the program.
        run: function from the values of its inputs to those of its graph's outputs.
        draw: seeds the random streams, and draws the numbers that are inputs of the graph; None if it needs none.
        finish: final change to the outcome.
        reads: function that lists the tensors of the new state's trees, or False if their layout is not that of the
            old state; known after the first run.
        reached: parameters of other modules that it reads.
        generators: those of the devices of its inputs, if it needs random numbers; known after the first run.
    """

    program: Program
    run: Compiled
    draw: Draw | None
    finish: Callable[[Outcome], Outcome] = lambda outcome: outcome
    reads: Callable[[Any], list[Tensor]] | Literal[False] | None = None
    reached: list[Tensor] = field(default_factory=list)
    generators: Sequence[torch.Generator] | None = None


class Ready(NamedTuple):
    """Prepared inputs of one run: everything is decided and checked, and nothing is written yet."""

    machine: CompiledProgram
    flat: list[Tensor]
    answers: list[Tensor]
    counts: dict[str, Any]
    kind: int


class Compiler:
    """Programs of one step, by the shapes of their inputs.

    Subclasses make different programs (`make`) and give them different answers of the host (`answer`).
    """

    no_grad = True  # True if the programs run without recording gradients

    def __init__(self, core: Core, donate: bool, options: Mapping[str, Any], watched: tuple[Any, ...]) -> None:
        self.core, self.donate, self.watched, self.options = core, donate, watched, options
        self.build = backend(**options)
        self.kernels_from = 1 if options.get("backend") == "eager" else _KERNELS_FROM
        self.kinds: dict[Any, int] = {}  # of states
        self.table: dict[Any, dict[Any, Any]] = {}  # by the inputs, and then by the host's answers
        self.known: tuple[weakref.ref[TrainState], Callable[..., list[Tensor]], int] | None = None
        self.compilations = 0

    def compiled(self, options: Mapping[str, Any]) -> Compiler:
        """A compiler that makes the same programs and compiles them with these options."""
        raise TypeError(
            "compile_step got a step that is compiled already, or differentiable: give the one that ll.make_train_step "
            "returned, or compile the outer train step, whose graph then holds the differentiable one"
        )

    def prepare(self, state: TrainState, batch: Any) -> Ready:
        """Find or make the program for these inputs, and get the host's answers for this step."""
        if is_distributed():
            raise UntraceableError(
                f"a step cannot be compiled whole on {torch.distributed.get_world_size()} ranks, which send each "
                "other gradients: leave out ll.compile_step, and compile the model's blocks, for block in model.blocks: block.compile()"
            )
        flat, kind = self.tensors_of(state)
        in_batch = expression(batch)
        flat += in_batch.tensors
        counts = {name: getattr(state, name) for name in COUNTS}
        missing = tuple(name for name, value in counts.items() if value is None)  # which a step may ask about
        questions = self.table.setdefault((kind, in_batch.key(self.no_grad), missing), {})
        machine, answers = self.find(questions, flat, counts)
        if machine is not None and (names := changed(machine.program.traced.held)):
            warn(f"{', '.join(names)} changed since the step was compiled, so it is compiled again")
            questions.clear()
            machine = None
        while machine is None:
            self.compile(Inputs(state, batch, flat, counts, held_by(*self.watched), questions))
            machine, answers = self.find(questions, flat, counts)
        return Ready(machine, flat, answers, counts, kind)

    def tensors_of(self, state: TrainState) -> tuple[list[Tensor], int]:
        """The tensors of a state, and the number of its layout."""
        trees = state.params, state.buffers, state.opt_state
        if self.known is not None and self.known[0]() is state:
            return self.known[1](trees), self.known[2]
        in_state = expression(trees)
        return in_state.tensors, self.kinds.setdefault(in_state.key(self.no_grad), len(self.kinds))

    def find(
        self, questions: Mapping[Any, Any], flat: list[Tensor], counts: Mapping[str, Any]
    ) -> tuple[CompiledProgram | None, list[Tensor]]:
        """Ask the host until its answers lead to a machine, or to none yet. Also returns the tensors in the answers."""
        tensors: list[Tensor] = []
        node: Any = questions.get(None)
        while type(node) is HostInput:
            key, more = self.answer(node, flat, counts)
            tensors += more
            node = node.answers.get(key)
        return node, tensors

    def compile(self, inputs: Inputs) -> None:
        """Make a program for such inputs and store it under the host's answers."""
        if names := [name for name, tensor in inputs.state.params.items() if is_sharded(tensor)]:
            raise UntraceableError(
                f"{few(names, 3)} in the state: DTensors, whose ranks send each other parts, which a graph of a step would "
                "leave out. Compile the model's blocks instead, for block in model.blocks: block.compile()"
            )
        begin, shown = time.perf_counter(), self.options.get("backend") != "eager" and _is_watched()
        if shown:
            print("looplib: compiling the step ...", file=sys.stderr, flush=True)
        with tracing.one_at_a_time():
            machine = self.make(inputs)
        traced = machine.program.traced
        if self.no_grad:
            machine.reached = [tensor for read in traced.constants if (tensor := read()).requires_grad]
        answers, key = traced.place
        answers[key] = machine
        self.compilations += 1
        if shown:
            print(f"looplib: compiled the step in {time.perf_counter() - begin:.0f} s", file=sys.stderr, flush=True)
        if self.compilations == _MANY:
            warn(
                f"the step has been compiled {self.compilations} times, since it was given so many different "
                "shapes, numbers or strings in batches, or answers of on_host: pad batches to few shapes"
            )

    def ask(self, question: HostInput, flat: list[Tensor], counts: Mapping[str, Any]) -> Expression:
        """The host's current answer."""
        return as_answer(question.function(*question.arguments(flat, counts)))

    def answer(self, question: HostInput, flat: list[Tensor], counts: Mapping[str, Any]) -> tuple[Any, list[Tensor]]:
        """The part of the host's current answer that selects a graph, and the tensors for it."""
        answer = self.ask(question, flat, counts)
        return answer.key(), answer.tensors

    def make(self, inputs: Inputs) -> CompiledProgram:
        """Make a program for such inputs."""
        evaluate = partial(self.ask, flat=inputs.flat, counts=inputs.counts)
        program = program_of(trace(self.core, inputs, evaluate, kernels_from=self.kernels_from), self.donate)
        return CompiledProgram(program, self.build(program), seed_streams if program.traced.streams else None)

    def run(self, ready: Ready, state: TrainState) -> tuple[Outcome, list[partial[None]]]:
        """Run the program, and return its outcome and the checks to make of it.

        With `donate`, the state's tensors are overwritten.
        """
        machine, flat, answers, counts, _ = ready
        program, traced = machine.program, machine.program.traced
        drawn: list[Tensor] = []
        grad_mode = torch.is_grad_enabled()
        if machine.generators is None:
            machine.generators = _generators(*(tensor.device for tensor in flat)) if machine.draw else ()
        generators = machine.generators
        with draws.turn if generators else nullcontext():
            streams = [generator.get_state() for generator in generators]
            try:
                if self.no_grad:
                    torch._C._set_grad_enabled(False)
                if machine.draw is not None:
                    drawn = machine.draw(state, generators)
                values = [*drawn, *[read() for read in traced.constants], *answers, *flat]
                result = machine.run([values[index] for index in program.inputs])
                outcome, arguments = program.rebuild(result, values, counts)
            finally:
                torch._C._set_grad_enabled(grad_mode)
                for generator, stream in zip(generators, streams, strict=True):
                    generator.set_state(stream)
        checks = [partial(function, *values) for function, values in zip(traced.checks, arguments, strict=True)]
        return machine.finish(Outcome(*outcome)), checks

    def remember(self, ready: Ready, state: TrainState) -> None:
        """Remember the state that a run has made: if its layout is unchanged, the next step need not search it."""
        if not self.no_grad:  # do not keep references to tensors that autograd tracks
            return
        machine, trees = ready.machine, (state.params, state.buffers, state.opt_state)
        if machine.reads is None:
            alike = self.kinds.get(expression(trees).key(self.no_grad)) == ready.kind
            machine.reads = alike and reader(trees)
        if machine.reads:
            self.known = weakref.ref(state), machine.reads, ready.kind
