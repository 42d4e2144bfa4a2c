"""The whole step in one compiled graph.

A step is a function of values, so all of it can be compiled at once: forward pass, backward pass, clipping, update.
It is written down as a graph once for each shape of its inputs, and torch's Inductor makes machine code of that. What
the host decides from step to step, such as the learning rate, goes into the graph as a number.
"""

from __future__ import annotations

import time
import warnings
import weakref
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from looplib import _latest, _program
from looplib._modules import _generators
from looplib._program import COUNTS, Core, Outcome, Program, Question, as_answer, dissect, value_of
from looplib._random import mix
from looplib._ranks import rank, several
from looplib._tracing import UntraceableError
from looplib.state import TrainState

Compiled = Callable[[list[Tensor]], Any]
_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")


class _Machine:
    """A program with its machine code."""

    __slots__ = ("inputs", "program", "run")

    def __init__(self, program: Program, run: Compiled) -> None:
        self.program, self.run = program, run
        self.inputs = program.inputs


class Machine:
    """A program with its machine code."""

    __slots__ = ("program", "run", "stable")

    def __init__(self, program: Program, run: Compiled) -> None:
        self.program, self.run = program, run
        self.stable: bool | None = None  # whether what comes out is like what goes in, known after the first run


class Ready(NamedTuple):
    """What one run needs: all decided and checked, nothing written."""

    machine: Machine
    flat: list[Tensor]
    spares: list[Tensor]
    counts: dict[str, Any]
    kind: int


class Compiler:
    """The programs of one step, by the shapes of their inputs."""

    def __init__(self, core: Core, donate: bool, options: Mapping[str, Any], watched: tuple[Any, ...]) -> None:
        self.core, self.donate, self.watched = core, donate, watched
        self.build = _backend(**options)
        self.kinds: dict[Any, int] = {}  # of states
        self.table: dict[Any, dict[Any, Any]] = {}  # by what goes in, and then by what the host answers
        self.known: tuple[weakref.ref[TrainState], Callable[..., list[Tensor]], int] | None = None
        self.compilations = 0

    def prepare(self, state: TrainState, batch: Any) -> Ready:
        """Find the program for these inputs, or make it, and what the host has to say for this step."""
        if several():
            raise UntraceableError(
                f"a step cannot be compiled whole on {torch.distributed.get_world_size()} ranks, which send each other "
                "gradients: leave out compile=, and compile the blocks of the model, ll.compile_blocks(model, Block)"
            )
        trees = state.params, state.buffers, state.opt_state
        if self.known is not None and self.known[0]() is state:
            flat, kind = self.known[1](trees), self.known[2]
        else:
            dissected = dissect(trees)
            flat, kind = dissected.tensors, self.kinds.setdefault(dissected.key(), len(self.kinds))
        in_batch = dissect(batch)
        flat += in_batch.tensors
        counts = {name: getattr(state, name) for name in COUNTS}
        first = self.table.setdefault((kind, in_batch.key()), {})
        while True:
            spares: list[Tensor] = []
            node: Any = first.get(None)
            while type(node) is Question:
                answer = as_answer(node.function(*[value_of(source, flat, counts) for source in node.sources]))
                spares += answer.tensors
                node = node.answers.get(answer.key())
            if node is not None and (names := _program.changed(node.program.held)):
                warnings.warn(
                    f"{', '.join(names)} changed since the step was compiled, so it is compiled anew", stacklevel=4
                )
                first.clear()
                node = None
            if node is not None:
                return Ready(node, flat, spares, counts, kind)
            begin = time.perf_counter()
            held = _program.held_by(*self.watched)
            program, answers, at = _program.trace(self.core, state, batch, first, flat, self.donate, held)
            answers[at] = Machine(program, self.build(program))
            self.compilations += 1
            _latest.compiling += time.perf_counter() - begin

    def run(self, ready: Ready, state: TrainState) -> Outcome:
        """Run it; with `donate` the state's tensors are written."""
        machine, flat, spares, counts, _ = ready
        program = machine.program
        values = [value if kind is None else ready[kind][value] for kind, value in program.inputs]
        grad_mode = torch.is_grad_enabled()
        generators = _generators(flat[0].device) if program.random else ()
        streams = [generator.get_state() for generator in generators]
        try:
            torch._C._set_grad_enabled(False)
            if generators:
                seed = mix(state.seed, state.step, rank(), 0)
                for generator in generators:
                    generator.manual_seed(seed)
            outputs = machine.run(values)
            outcome, arguments = program.rebuild(outputs, flat, spares, counts)
        finally:
            torch._C._set_grad_enabled(grad_mode)
            for generator, stream in zip(generators, streams, strict=True):
                generator.set_state(stream)
        for function, given in zip(program.afterwards, arguments, strict=True):
            function(*given)
        return Outcome(*outcome)

    def remember(self, ready: Ready, state: TrainState) -> None:
        """The state that a run has given: where it is like the one before, the next step need not look through it."""
        machine = ready.machine
        if machine.stable is None:
            found = dissect((state.params, state.buffers, state.opt_state)).key()
            machine.stable = self.kinds.get(found) == ready.kind
        if machine.stable:
            if self.known is None or self.known[2] != ready.kind:
                read = _program.reader((state.params, state.buffers, state.opt_state))
            else:
                read = self.known[1]
            self.known = (weakref.ref(state), read, ready.kind)


def _backend(
    backend: str = "inductor", mode: str | None = None, options: Mapping[str, Any] | None = None, **unknown: Any
) -> Callable[[Program, list[Tensor]], Compiled]:
    if unknown or not isinstance(backend, str) or (mode is not None and mode not in _MODES):
        raise TypeError(
            f"compile={dict(backend=backend, mode=mode, **unknown)}: give True, or torch.compile's backend=, mode= "
            f"(one of {', '.join(_MODES)}) or options=; dynamic= and fullgraph= have no choice here"
        )

    def build(program: Program) -> Compiled:
        examples = [_example(node) for node in program.graph.graph.nodes if node.op == "placeholder"]
        with torch.no_grad():
            if backend == "inductor":
                from torch._inductor import list_mode_options
                from torch._inductor.compile_fx import compile_fx

                chosen = {**list_mode_options(mode or "default"), **(options or {})}
                made = compile_fx(program.graph, examples, config_patches=chosen)
            else:
                made = torch._dynamo.lookup_backend(backend)(program.graph, examples)
        return lambda values: made(*values)

    return build


def _example(node: torch.fx.Node) -> Tensor:
    value: Tensor = node.meta["val"]
    return value
