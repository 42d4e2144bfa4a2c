"""Compiled steps: a cache of programs by the shapes of their inputs and the host's answers.

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
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, NamedTuple, TypeVar, cast

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from looplib._core import interrupts as _interrupts
from looplib._core import random as draws
from looplib._core.checks import check, few, named, warn
from looplib._core.graphs import check_batch
from looplib._core.lease import check_assigned, give_up, trees_of
from looplib._core.misuse import Watch, warn_of_reached
from looplib._core.random import generators_of, mix
from looplib._core.ranks import is_distributed, is_sharded, rank
from looplib._core.records import with_repr
from looplib._core.torch_private import wraps_tensors
from looplib._core.tracing import UntraceableError, tracing
from looplib.gradients import EVALUATED, check_history
from looplib.steps import Outcome, StepSpec, spec_of, with_spec
from looplib.transforms._backends import Compiled, backend
from looplib.transforms._program import (
    COUNTS,
    Expression,
    HostInput,
    Inputs,
    Program,
    StepForGraphs,
    as_answer,
    changed,
    expression,
    held_by,
    program_of,
    reader,
)
from looplib.transforms._trace import trace
from looplib.transforms.closures import itself
from looplib.types import Metric, TrainState, TrainStep
from looplib.updates import UpdateKind, advanced

S = TypeVar("S", bound=Callable[..., Any])


def compile_step(
    step: S, *, mode: str | None = None, options: Mapping[str, Any] | None = None, backend: str = "inductor"
) -> S:
    """Compile a whole step into one graph, at the first batch of each shape.

    >>> import looplib as ll, torch
    >>> model = torch.nn.Linear(2, 1)
    >>> adamw = ll.optimizer(torch.optim.AdamW, lr=ll.warmup_cosine(1e-3, warmup=10, total=100))
    >>> optimizer = ll.chain(ll.clip_by_global_norm(1.0), adamw)
    >>> grad_fn = ll.make_grad_fn(model, lambda model, x: model(x).square().mean())
    >>> train_step = ll.make_train_step(grad_fn, optimizer, donate=True)
    >>> compiled_step = ll.compile_step(train_step, backend="eager")  # a graph without machine code
    >>> state, metrics = compiled_step(ll.init_state(model, optimizer), torch.ones(4, 2))
    >>> state.step
    1

    The graph of a train step contains forward pass, backward pass, clipping, loss scaling, schedule and update; that
    of an eval or predict step contains the forward pass. The step keeps its `donate=True`. To compile the step of a
    stack, write `compile_step(vmap_step(train_step))`.

    Args:
        step: a step from `make_train_step`, `make_eval_step`, `make_predict_step` or `vmap_step`.
        mode: of `torch.compile`: "default", "reduce-overhead", "max-autotune" or "max-autotune-no-cudagraphs".
            "reduce-overhead" records a pure step as a CUDA graph, so that its kernels are launched at once.
        options: Inductor's options, by name.
        backend: "inductor", or "eager" for a graph without machine code: see **Time to compile**.

    Raises:
        TypeError: `step` is a different function, is already compiled, or is differentiable; or a donated step is to
            be a CUDA graph.
        RuntimeError: torch does not know the mode or an option.
        UntraceableError: from the step, if it reads the value of a tensor, changes Python values, or runs on several
            ranks (compile the model's blocks there, `for block in model.blocks: block.compile()`).

    **The limits of graphs.** The graph is what the step's Python did when it was traced:

    - Tensor values cannot be read (`if loss > 1`, `.item()`). The error names the line.
    - The optimizer is one of torch's, and not Adafactor, ASGD, LBFGS, RAdam, Rprop or SparseAdam, whose updates read
      numbers. With these, take the step without a graph and compile the model's blocks, `for block in model.blocks:
      block.compile()`. In place of RAdam, AdamW with a warmup begins as gently; in place of ASGD, use `ll.optim.swa`.
    - A part of an update, a gradient function or a loss of your own has no second form for graphs: it consists of
      operations on tensors, and asks for numbers of the state by `ll.transforms.on_host`.
    - Python that only observes (hooks, prints) runs once, during tracing.
    - The learning rate and other hyperparameters are inputs of the graph, so changing them does not recompile.
      Numbers that the loss function reads from elsewhere (an attribute, a global, a closure) are watched; if one
      changes, the step is recompiled with a warning. Numbers and strings in a batch belong to its shape.
    - Inductor draws different random numbers than eager torch, though still as a function of the state's seed and
      step. `options={"fallback_random": True}` draws the same ones, except for microbatches after the first.

    **Kernels.** On a CPU, an update of 64 parameters or more calls the optimizer's fused kernel, if there is one
    (SGD, Adam, AdamW, Adagrad), and has its bits. Fewer parameters are updated by generated code, which is faster but
    takes long to compile for many. `foreach=` of the optimizer asks for generated code with any number.

    **Time to compile.** On a terminal or in a notebook, a line before and one after show that the step compiles with
    Inductor and how long that took. On a CPU, Inductor first tries each set of vector instructions, once for each
    cache, which takes seconds; `options={"cpp.vec_isa_ok": True}` leaves that out. `backend="eager"` takes about a
    second: it runs the graph's operations one after the other, without autograd and `torch.func`, and calls the
    optimizer's fused kernel for any number of parameters. It suits tests, and small models whose steps autograd and
    `torch.func` slow down, such as those with per-sample gradients.
    """
    spec = spec_of(step, "compile_step")
    check(
        not (spec.donate and mode == "reduce-overhead"),
        'mode="reduce-overhead" records a CUDA graph, which torch does not let write to a donated state: leave out '
        "donate=True or mode=",
        TypeError,
    )
    chosen = {"mode": mode, "options": options, "backend": backend}
    check(
        spec.compiler is None or (spec.compiler.no_grad and spec.compiler.options == WITHOUT_CODE),
        "compile_step got a step that is compiled already, or differentiable: give the one that ll.make_train_step "
        "returned, or compile the outer train step, whose graph then holds the differentiable one",
        TypeError,
    )
    plain = spec.compiler or Compiler(spec.for_graphs, spec.donate, spec.watched, WITHOUT_CODE)
    graph_step = step_of_graphs(step, spec, replace(plain, options=chosen))
    remembered: S = with_repr(graph_step, compile_step, step, mode=mode, options=options, backend=backend)
    return remembered


def spec_without_graphs(step: object, transform: str) -> StepSpec:
    """Components of a step that runs eagerly. Those of another one have its graphs, which a new `for_graphs` would not change."""
    spec = spec_of(step, transform)
    message = (
        f"{transform} got a step that is compiled, of a stack or differentiable already: give the one that "
        "ll.make_train_step returned (and compile the step of a stack, ll.compile_step(ll.vmap_step(step)))"
    )
    check(spec.compiler is None, message, TypeError)
    return spec


def step_of_graphs(step: S, spec: StepSpec, compiler: Compiler) -> S:
    """The same step, run by the graphs that a compiler makes of it."""
    graph_step = _train_step(spec, compiler) if spec.kind == "train" else _step_without_training(compiler)
    return cast(S, with_spec(graph_step, replace(spec, donate=compiler.donate, compiler=compiler)))


def _train_step(spec: StepSpec, compiler: Compiler) -> TrainStep:
    donate, kind = compiler.donate, UpdateKind(same_batch=spec.same_batch)
    # An inner step of meta-learning is given one state many times, and its module may be trained by the outer step.
    watch = Watch(spec.watched[0]) if compiler.no_grad and not donate else None

    def compiled(state: TrainState, batch: Any) -> tuple[TrainState, dict[str, Metric]]:
        params, _, _ = trees_of(state)
        if watch is not None:
            watch.see(state, batch)
        if compiler.no_grad:
            check_batch(batch)
            if not compiler.knows(state):
                check_history(params)
        ready = compiler.prepare(state, batch)
        if watch is not None and ready.machine.reached:
            warn_of_reached(ready.machine.reached)
        lease = None
        _interrupts.install()
        _interrupts.waits.depth += donate  # a pure step leaves the state as it is
        try:
            if donate:
                trees_of(state)  # the loss may have run other steps while it was traced
                if compiler.is_reassigned(state):
                    check_assigned(state)
                lease, spent = give_up(state, ready.machine.program.written)
            out, checks = compiler.run(ready, state)
            applied = bool(out.applied)
            try:
                for check in checks:
                    check()
            except BaseException as error:
                if lease is not None and applied:
                    error.add_note(_PART_APPLIED)
                elif lease is not None:  # the graph has put the state's own values into its tensors
                    lease.written, lease.step = spent, state.step
                raise
            new = advanced(state, out.params, out.buffers, out.opt_state, out.samples, applied, kind, lease)
            if lease is not None:
                lease.step = new.step
            compiler.remember(ready.machine, new)
            metrics = out.metrics
            del out, ready, checks  # freed while signals wait
            _interrupts.look()
            return new, metrics
        finally:
            _interrupts.waits.depth -= donate

    return compiled


_PART_APPLIED = (
    "the compiled step has donate=True and has updated another part of the partition, so the state is spent: continue from "
    "a checkpoint, or from a copy (ll.copy_state(state))"
)


def _step_without_training(compiler: Compiler) -> Callable[[TrainState, Any], Any]:
    def compiled(state: TrainState, batch: Any) -> Any:
        _interrupts.install()
        if torch.is_grad_enabled() and not compiler.knows(state):
            check_history(state.params, EVALUATED)
        ready = compiler.prepare(state, batch)
        out, _ = compiler.run(ready, state)
        compiler.remember(ready.machine, state)
        return out.metrics

    return compiled


# Programs of one step


_MANY = 16  # number of compilations at which a warning is given
_KERNELS_FROM = 64  # parameters; generated code is faster for fewer, and takes long to compile for more

WITHOUT_CODE: Mapping[str, Any] = {"backend": "eager"}  # options of a step that compile_step has not made

Draw = Callable[[TrainState, Sequence[torch.Generator]], list[Tensor]]


def seed_streams(state: TrainState, generators: Sequence[torch.Generator]) -> list[Tensor]:
    """Seed the random streams for this step, for a graph that draws from them itself."""
    seed = mix(state.seed, state.step, rank(), 0)
    for generator in generators:
        generator.manual_seed(seed)
    return []


def _without_hooks() -> AbstractContextManager[Any]:
    """Context in which a checkpoint around the step does not take what a trace saves for what the step saves."""
    if tracing() or torch._C._autograd._top_saved_tensors_default_hooks(False) is None:
        return nullcontext()
    return saved_tensors_hooks(itself, itself)


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
        made: layout of the new state, and function that lists the tensors of its trees; known after the first run.
        reached: parameters of other modules that it reads.
        generators: those of the devices of its inputs, if it needs random numbers.
    """

    program: Program
    run: Compiled
    draw: Draw | None
    finish: Callable[[Outcome], Outcome] = lambda outcome: outcome
    made: tuple[int, Callable[[Any], list[Tensor]]] | None = None
    reached: list[Tensor] = field(default_factory=list)
    generators: Sequence[torch.Generator] = ()


class Ready(NamedTuple):
    """Prepared inputs of one run: everything is decided and checked, and nothing is written yet."""

    machine: CompiledProgram
    flat: list[Tensor]
    answers: list[Tensor]
    counts: dict[str, Any]


@dataclass(eq=False)
class Compiler:
    """Programs of one step, by the shapes of their inputs.

    Subclasses make different programs (`make`) and give them different answers of the host (`ask`).

    Attributes:
        step, donate, watched: the step in its form for graphs, whether it donates, and the functions whose variables are watched.
        options: arguments of `backend`.
        no_grad: True if the programs run without recording gradients.
        kinds: number of each layout of a state.
        table: programs by their inputs, and then by the host's answers.
        known: the state that the last run has made, its layout, the function that lists its tensors, and the ids of its
            parameters.
        compilations: number of programs made.
    """

    step: StepForGraphs
    donate: bool
    watched: tuple[Any, ...]
    options: Mapping[str, Any]
    no_grad: ClassVar[bool] = True
    kinds: dict[Any, int] = field(default_factory=dict, init=False)
    table: dict[Any, dict[Any, Any]] = field(default_factory=dict, init=False)
    known: tuple[weakref.ref[TrainState], int, Callable[..., list[Tensor]], list[int]] | None = field(
        default=None, init=False
    )
    compilations: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.build = backend(**self.options)

    def knows(self, state: TrainState) -> bool:
        """True if the last run has made this state."""
        return self.known is not None and self.known[0]() is state

    def is_reassigned(self, state: TrainState) -> bool:
        """True if the last run has made this state, with other parameters."""
        return self.known is not None and self.knows(state) and self.known[3] != [*map(id, state.params.values())]

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
        if machine is not None and (names := changed(machine.program.traced.captured)):
            warn(f"{', '.join(names)} changed since the step was compiled, so it is compiled again")
            questions.clear()
            machine = None
        while machine is None:
            self.compile(Inputs(state, batch, flat, counts, held_by(*self.watched), questions))
            machine, answers = self.find(questions, flat, counts)
        return Ready(machine, flat, answers, counts)

    def tensors_of(self, state: TrainState) -> tuple[list[Tensor], int]:
        """The tensors of a state, and the number of its layout."""
        trees = state.params, state.buffers, state.opt_state
        if self.known is not None and self.known[0]() is state:
            return self.known[2](trees), self.known[1]
        in_state = expression(trees)
        return in_state.tensors, self.kinds.setdefault(in_state.key(self.no_grad), len(self.kinds))

    def find(
        self, questions: Mapping[Any, Any], flat: list[Tensor], counts: Mapping[str, Any]
    ) -> tuple[CompiledProgram | None, list[Tensor]]:
        """Ask the host until its answers lead to a machine, or to none yet. Also returns the tensors in the answers."""
        tensors: list[Tensor] = []
        node: Any = questions.get(None)
        while type(node) is HostInput:
            answer, inputs = self.ask(node, flat, counts)
            tensors += inputs
            node = node.answers.get(answer.key())
        return node, tensors

    def compile(self, inputs: Inputs) -> None:
        """Make a program for such inputs and store it under the host's answers."""
        if names := [name for name, tensor in inputs.state.params.items() if is_sharded(tensor)]:
            raise UntraceableError(
                f"{few(names, 3)} in the state: DTensors, whose ranks send each other parts, which a graph of a step would "
                "leave out. Compile the model's blocks instead, for block in model.blocks: block.compile()"
            )
        of_state = {**inputs.state.params, **inputs.state.buffers}
        if names := [name for name, tensor in of_state.items() if wraps_tensors(tensor)]:
            raise UntraceableError(
                f"{few(names, 3)} in the state: {named(of_state[names[0]])} consists of other tensors, as quantized weights do, "
                "and the graph of a step is one of plain tensors. Leave out ll.compile_step, ll.vmap_step or "
                "ll.transforms.differentiable, and compile the model's blocks, for block in model.blocks: block.compile()"
            )
        begin, shown = time.perf_counter(), self.options.get("backend") != "eager" and _is_watched()
        if shown:
            print("looplib: compiling the step ...", file=sys.stderr, flush=True)
        # A trace moves the random streams that steps of other threads draw from, so these wait for it.
        # Nor does one compile beside another: torch's compilers and their flags are shared by the whole process.
        with draws.turn, _without_hooks():
            machine = self.make(inputs)
        traced = machine.program.traced
        if self.no_grad:
            machine.reached = [tensor for read in traced.constants if (tensor := read()).requires_grad]
        if machine.draw is not None:
            machine.generators = generators_of(*(tensor.device for tensor in inputs.flat))
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

    def ask(
        self, question: HostInput, flat: list[Tensor], counts: Mapping[str, Any]
    ) -> tuple[Expression, list[Tensor]]:
        """The host's current answer, which selects a graph, and its tensors as the graph takes them."""
        answer = as_answer(question.function(*question.arguments(flat, counts)))
        return answer, answer.tensors

    def make(self, inputs: Inputs) -> CompiledProgram:
        """Make a program for such inputs."""

        def evaluate(question: HostInput) -> Expression:
            return self.ask(question, inputs.flat, inputs.counts)[0]

        kernels_from = 1 if self.options.get("backend") == "eager" else _KERNELS_FROM
        program = program_of(trace(self.step, inputs, evaluate, kernels_from=kernels_from), self.donate)
        return CompiledProgram(program, self.build(program), seed_streams if program.traced.streams else None)

    def run(self, ready: Ready, state: TrainState) -> tuple[Outcome, list[partial[None]]]:
        """Run the program, and return its outcome and the checks to make of it.

        With `donate`, the state's tensors are overwritten.
        """
        machine, flat, answers, counts = ready
        program, traced = machine.program, machine.program.traced
        drawn: list[Tensor] = []
        grad_mode = torch.is_grad_enabled()
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

    def remember(self, machine: CompiledProgram, state: TrainState) -> None:
        """Remember the state that a run has made, so that the next step need not search it."""
        if not self.no_grad:  # do not keep references to tensors that autograd tracks
            return
        if machine.made is None:
            _, kind = self.tensors_of(state)
            machine.made = kind, reader((state.params, state.buffers, state.opt_state))
        self.known = weakref.ref(state), *machine.made, [*map(id, state.params.values())]
