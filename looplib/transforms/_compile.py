"""The whole step in one compiled graph.

A step is a function of values, so all of it can be compiled at once: forward pass, backward pass, clipping, update.
It is written down as a graph once for each shape of its inputs, and torch's Inductor makes machine code of that. What
the host decides from step to step, such as the learning rate, goes into the graph as a number; and the random numbers
are a function of the state's seed and step as ever, though others than those of the step as it is.

A graph is what the step's Python did when it was written down. Python that only looks on (hooks, prints) is done that
once. A number that a loss function has from elsewhere (an attribute, a global, a closure) is watched, and the step
compiled anew, with a warning, when it has changed; tensors from there are read at each step. Numbers and strings in a
batch are part of its shape. Random numbers are drawn in the order of the graph, so microbatches each have their own.
Dynamo has no part in this, so there are no guards and no graph breaks: what cannot be written down is an error.
"""

from __future__ import annotations

import sys
import time
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from looplib._core.modules import _generators
from looplib._core.random import mix
from looplib._core.ranks import rank, several
from looplib._core.tracing import UntraceableError
from looplib.steps import Outcome
from looplib.transforms import _program
from looplib.transforms._program import COUNTS, Core, Program, Question, as_answer, dissect, value_of
from looplib.transforms._watch import Held, changed, held_by
from looplib.types import TrainState

Compiled = Callable[[list[Tensor]], Any]


_MANY = (16, 64, 256)  # compilations to warn of


_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")


class Machine:
    """A program with its machine code."""

    def __init__(self, program: Program, run: Compiled) -> None:
        self.program, self.run, self.rebuild, self.random = program, run, program.rebuild(), program.random()
        self.draws: list[Callable[[], Tensor]] = []  # made before the graph runs
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
        self.core, self.donate, self.watched, self.options = core, donate, watched, options
        self.build = _backend(**options)
        self.by_gradient = True  # whether inputs that require a gradient are another kind
        self.no_grad = True
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
        """How programs are compiled, for a transform of the step that they are made of."""
        return self.options

    def prepare(self, state: TrainState, batch: Any) -> Ready:
        """Find the program for these inputs, or make it, and what the host has to say for this step."""
        if several():
            raise UntraceableError(
                f"a step cannot be compiled whole on {torch.distributed.get_world_size()} ranks, which send each "
                "other gradients: leave out ll.compile_step, and compile the model's blocks, ll.transforms.compile_blocks(model, Block)"
            )
        trees = state.params, state.buffers, state.opt_state
        if self.known is not None and self.known[0]() is state:
            flat, kind = self.known[1](trees), self.known[2]
        else:
            dissected = dissect(trees)
            flat, kind = dissected.tensors, self.kinds.setdefault(dissected.key(self.by_gradient), len(self.kinds))
        in_batch = dissect(batch)
        flat += in_batch.tensors
        counts = {name: getattr(state, name) for name in COUNTS}
        first = self.table.setdefault((kind, in_batch.key(self.by_gradient)), {})
        while True:
            spares: list[Tensor] = []
            node: Any = first.get(None)
            while type(node) is Question:
                key, tensors = self.answer(node, flat, counts)
                spares += tensors
                node = node.answers.get(key)
            if node is not None and (names := changed(node.program.held)):
                _warn(f"{', '.join(names)} changed since the step was compiled, so it is compiled anew")
                first.clear()
                node = None
            if node is not None:
                return Ready(node, flat, spares, counts, kind)
            begin = time.perf_counter()
            held = held_by(*self.watched)
            answers, at, machine = self.make(state, batch, first, flat, counts, held)
            answers[at] = machine
            self.compilations += 1
            self.seconds += time.perf_counter() - begin
            if self.compilations in _MANY:
                _warn(
                    f"the step has been compiled {self.compilations} times, since it was given so many different "
                    "shapes, numbers or strings in batches, or answers of on_host: pad batches to few shapes"
                )

    def answer(self, question: Question, flat: list[Tensor], counts: Mapping[str, Any]) -> tuple[Any, list[Tensor]]:
        """What the host says now: the part that chooses a graph, and the tensors for it."""
        said = as_answer(question.function(*[value_of(source, flat, counts) for source in question.sources]))
        return said.key(), said.tensors

    def make(
        self,
        state: TrainState,
        batch: Any,
        questions: dict[Any, Any],
        flat: list[Tensor],
        counts: Mapping[str, Any],
        held: list[Held],
    ) -> tuple[dict[Any, Any], Any, Machine]:
        """A program for such inputs, and the table and key that it is found by."""

        def evaluate(function: Callable[..., Any], sources: list[Any]) -> Any:
            return function(*[value_of(source, flat, counts) for source in sources])

        program, answers, at = _program.trace(self.core, state, batch, questions, flat, held, evaluate)
        program = program.donated() if self.donate else program
        return answers, at, Machine(program, self.build(program))

    def draw(self, machine: Machine, state: TrainState, generators: Sequence[torch.Generator]) -> list[Tensor]:
        """Put the random streams where this step's begin; what is drawn before the graph runs."""
        seed = mix(state.seed, state.step, rank(), 0)
        for generator in generators:
            generator.manual_seed(seed)
        return []

    def run(self, ready: Ready, state: TrainState) -> Outcome:
        """Run it; with `donate` the state's tensors are written."""
        machine, flat, spares, counts, _ = ready
        program = machine.program
        draws: list[Tensor] = []
        grad_mode = torch.is_grad_enabled()
        self.intact = True
        generators = _generators(flat[0].device) if machine.random else ()
        streams = [generator.get_state() for generator in generators]
        try:
            if self.no_grad:
                torch._C._set_grad_enabled(False)
            if generators:
                draws = self.draw(machine, state, generators)
            given: tuple[list[Tensor], ...] = ([], flat, spares, draws)
            self.intact = not self.donate
            outputs = machine.run([value() if kind is None else given[kind][value] for kind, value in program.inputs])
            outcome, arguments = machine.rebuild(outputs, flat, spares, counts)
        finally:
            torch._C._set_grad_enabled(grad_mode)
            for generator, stream in zip(generators, streams, strict=True):
                generator.set_state(stream)
        out = Outcome(*outcome)
        if program.afterwards:
            self.intact = not (self.donate and out.applied)
            for function, values in zip(program.afterwards, arguments, strict=True):
                function(*values)
        return out

    def remember(self, ready: Ready, state: TrainState) -> None:
        """The state that a run has given: where it is like the one before, the next step need not look through it."""
        machine = ready.machine
        if machine.stable is None:
            found = dissect((state.params, state.buffers, state.opt_state)).key(self.by_gradient)
            machine.stable = self.kinds.get(found) == ready.kind
        if machine.stable:
            if self.known is None or self.known[2] != ready.kind:
                read = _program.reader((state.params, state.buffers, state.opt_state))
            else:
                read = self.known[1]
            self.known = (weakref.ref(state), read, ready.kind)


def _warn(message: str) -> None:
    """Warn at the line that called the step, however many functions of ours are in between."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("looplib."):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)


def _backend(
    backend: str = "inductor", mode: str | None = None, options: Mapping[str, Any] | None = None
) -> Callable[[Program], Compiled]:
    if not isinstance(backend, str) or (mode is not None and mode not in _MODES):
        raise TypeError(
            f"compile_step got backend={backend!r} and mode={mode!r}: give torch.compile's backend=, mode= "
            f"(one of {', '.join(_MODES)}) or options="
        )
    if backend != "inductor" and (mode or options):
        raise TypeError(f"compile_step got mode= or options=, which are Inductor's, and the backend {backend!r}")
    chosen = {name.replace("-", "_"): value for name, value in (options or {}).items()}
    if chosen and (strange := chosen.keys() - torch._inductor.list_options()):
        raise TypeError(f"Inductor has no option {', '.join(sorted(strange))}; see torch._inductor.list_options()")
    graphs = mode in ("reduce-overhead", "max-autotune") or chosen.get("triton.cudagraphs")
    if backend == "inductor":
        compiled_by = None
    elif backend in (known := torch._dynamo.list_backends(exclude_tags=())):
        compiled_by = torch._dynamo.lookup_backend(backend)
    else:
        raise TypeError(f"torch has no backend {backend!r}: give inductor, or one of {', '.join(known)}")

    def build(program: Program) -> Compiled:
        _without_alpha(program.graph)
        _stacked_where_it_goes(program.graph)
        _powers_once(program.graph)
        with torch.no_grad():
            examples = fakes(program.graph)
            if compiled_by is None:
                from torch._inductor.compile_fx import compile_fx

                patches = {**torch._inductor.list_mode_options(mode or "default"), **chosen}
                made: Any = compile_fx(program.graph, examples, config_patches=patches)
            else:
                made = compiled_by(program.graph, examples)
        if graphs and any(example.is_cuda for example in examples):
            return partial(_run_apart, made)
        return lambda values: made(*values)

    return build


def _run_apart(made: Callable[..., Any], values: list[Tensor]) -> list[Tensor]:
    """Run what may be a CUDA graph, whose outputs the next run writes over: a state is to last."""
    torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
    return [tensor.clone() for tensor in made(*values)]


_SCALED = {getattr(torch.ops.aten, name).Tensor for name in ("add", "add_", "sub", "sub_")}


def _without_alpha(graph: torch.fx.GraphModule) -> None:
    """`x + alpha * y` as two operations: Inductor takes x + alpha * (a @ b) for one, and forgets alpha."""
    for node in graph.graph.nodes:
        if node.target in _SCALED and node.kwargs.get("alpha", 1) != 1:
            x, y = node.args
            if not isinstance(y, torch.fx.Node):
                continue  # a number
            wide = torch.result_type(x.meta["val"], y.meta["val"])  # which torch multiplies in
            with graph.graph.inserting_before(node):
                if y.meta["val"].dtype is not wide:
                    value = y.meta["val"].to(wide)
                    y = graph.graph.call_function(torch.ops.aten._to_copy.default, (y,), {"dtype": wide})
                    y.meta["val"] = value
                product = graph.graph.call_function(torch.ops.aten.mul.Tensor, (y, node.kwargs["alpha"]))
            product.meta["val"] = y.meta["val"]
            node.args, node.kwargs = (x, product), {}
    graph.recompile()


def _stacked_where_it_goes(graph: torch.fx.GraphModule) -> None:
    """A permuted stack that is copied is a stack of permuted tensors, and needs no copy.

    The gradient of `q, k, v = qkv.permute(...)` is one; Inductor would write it to memory twice.
    """
    aten = torch.ops.aten
    for copy in graph.graph.find_nodes(op="call_function", target=aten.clone.default):
        permuted = copy.args[0]
        if permuted.target is not aten.permute.default or len(permuted.users) > 1:
            continue
        stacked, order = permuted.args
        contiguous = copy.kwargs.get("memory_format") is torch.contiguous_format
        if not contiguous or stacked.target is not aten.stack.default or len(stacked.users) > 1:
            continue
        tensors, dim = stacked.args[0], stacked.args[1] % len(order) if len(stacked.args) > 1 else 0
        order = [place % len(order) for place in order]
        rest = [place - (place > dim) for place in order if place != dim]
        values = [tensor.meta["val"] for tensor in tensors]
        alike = [torch.empty_strided(v.size(), v.stride(), device="meta").permute(rest) for v in values]
        if not torch.stack(alike, order.index(dim)).is_contiguous():
            continue
        with graph.graph.inserting_before(stacked):  # not where the copy is: the tensors may be written in between
            parts = [graph.graph.call_function(aten.permute.default, (tensor, rest)) for tensor in tensors]
            copy.replace_all_uses_with(graph.graph.call_function(aten.stack.default, (parts, order.index(dim))))
        for node in (copy, permuted, stacked):
            graph.graph.erase_node(node)
    graph.recompile()


def _powers_once(graph: torch.fx.GraphModule) -> None:
    """A power, and what follows from it, computed once and not for each element of what it scales.

    Inductor computes `1 - beta**step` within the loop over a weight's elements, where two powers of doubles take as
    long as all the rest; a value that is asked for by its strides is written to memory first.
    """
    aten = torch.ops.aten
    powers = {aten.pow.Scalar, aten.pow.Tensor_Scalar, aten.pow.Tensor_Tensor}
    sizes: dict[torch.fx.Node, int] = {}  # of powers, and of what is computed from one alike in size
    for node in list(graph.graph.nodes):
        if node.op != "call_function" or not isinstance(value := node.meta.get("val"), Tensor):
            continue
        for power in node.all_input_nodes:
            if sizes.get(power, value.numel()) < value.numel():
                like = power.meta["val"]
                with graph.graph.inserting_before(node):
                    arguments = (power, list(like.size()), list(like.stride()), like.storage_offset())
                    once = graph.graph.call_function(aten.as_strided.default, arguments)
                node.replace_input_with(power, once)
        if node.target in powers or any(sizes.get(power) == value.numel() for power in node.all_input_nodes):
            sizes[node] = value.numel()
    graph.recompile()


def fakes(graph: torch.fx.GraphModule, members: Sequence[int | None] = ()) -> list[Tensor]:
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
