"""Tracing: run a step's Python once on tensors without values, and record its operations as a graph.

The step's own Python runs through every wrapper, the backward pass and the optimizer's own `step`, and torch records
the operations (`make_fx`). The result is a function of flat lists of tensors, which can be compiled, mapped over many
members, or differentiated. Numbers read from the state and values kept in Python objects would be frozen in the
graph, so the former are requested from the host at each step, and the latter are watched.
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot, make_fx, track_tensor_tree
from torch.fx.graph import CodeGen
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from looplib._core import tracing
from looplib._core.tracing import UntraceableError
from looplib._core.trees import same_kind
from looplib.steps import Outcome
from looplib.transforms._program import (
    COUNTS,
    Count,
    Expression,
    HostInput,
    Inputs,
    StepForGraphs,
    Traced,
    changed,
    draws,
    expression,
    replace_node,
)
from looplib.transforms.closures import Variable, is_library, itself
from looplib.transforms.decompositions import RecurrentInParts
from looplib.types import TrainState

FROM_HOST = "looplib_host"  # key in a node's metadata: it is a tensor of the host's answers

_SIGNS = ("DataDependent", "DynamicOutputShape", "Unsupported", "value out of a tracing tensor", "numpy")


def trace(
    step: StepForGraphs,
    inputs: Inputs,
    evaluate: Callable[[HostInput], Expression],
    around_loss: Callable[[], Any] | None = None,
    stacked: bool = False,
    kernels_from: float = math.inf,
    originals: Sequence[Tensor] | None = None,
) -> Traced:
    """Trace a step.

    Args:
        step: the step without its counts.
        inputs: the inputs for which the program is made.
        evaluate: function that returns the host's answer for this state.
        around_loss: context for the loss function, if the graph itself is to be differentiated.
        stacked: True if the graph is to be mapped over members.
        kernels_from: number of parameters from which on a fused kernel updates them.
        originals: the tensors of all members of the stack whose first one is `inputs.state`; by default those of this.
    """
    in_state = expression((inputs.state.params, inputs.state.buffers, inputs.state.opt_state))
    in_batch = expression(inputs.batch)
    without_values = FakeTensorMode(allow_non_fake_inputs=True)  # and no symbols for values, so reading one raises
    # An address would be that of the trace, and nobody would be told.
    without_values._allow_unsafe_data_ptr_access = False
    branch = _Branch(inputs.questions, evaluate, without_values)
    recorded: list[Any] = []

    def run(*tensors: Tensor) -> list[Tensor]:
        """Run the step on a state made of these tensors."""
        known = {id(tensor): index for index, tensor in enumerate(tensors)}
        of_values = dict(zip(map(id, tensors), in_state.tensors if originals is None else originals, strict=False))
        record = tracing.Trace(branch.ask, around_loss, stacked, kernels_from, of_values)
        counts: dict[str, Any] = {name: None if inputs.counts[name] is None else Count(name) for name in COUNTS}
        params, buffers, opt_state = in_state.build()(tensors)
        state = TrainState(**counts, params=params, buffers=buffers, opt_state=opt_state)
        # A loss may take derivatives with respect to those that require a gradient.
        of_batch = zip(in_batch.tensors, tensors[len(in_state.tensors) :], strict=True)
        batch = in_batch.build()([row.detach().requires_grad_() if of.requires_grad else row for of, row in of_batch])
        with tracing.within(record), _DrawnOnce(record) as draws:
            out = step(state, batch)
            out = out._replace(buffers=tracing.where(out.applied, out.buffers, state.buffers))
        outcome = tuple(out), [values for _, values in record.afterwards]
        checks = [function for function, _ in record.afterwards]
        recorded[:] = outcome, checks, _replaced(out, state, known), draws.streams
        return expression(outcome).tensors

    examples = [without_values.from_tensor(tensor.detach()) for tensor in inputs.flat]
    with torch.no_grad(), torch.random.fork_rng(devices=()), _as_when_compiling(), RecurrentInParts():
        try:
            graph = make_fx(run, tracing_mode="fake", _allow_non_fake_inputs=True)(*examples)
        except UntraceableError:
            raise
        except Exception as error:
            if (better := _better_error(error)) is None:
                raise
            raise better from error
    if names := changed(inputs.captured):
        raise UntraceableError(
            f"the forward pass changes {', '.join(sorted(set(names)))}, which is kept as a plain Python value: "
            "a graph would keep what they were. Make them buffers (register_buffer), which are part of the state"
        )
    outcome, checks, replaced, streams = recorded
    constants, streams = _tidied(graph, inputs.captured, streams)
    trained = (i for i, name in enumerate(outcome[0][0]) if inputs.state.params[name].requires_grad)
    return Traced(
        graph=graph,
        constants=constants,
        input_count=len(inputs.flat),
        outcome=outcome,
        checks=checks,
        replaced=replaced,
        trained=frozenset(trained),
        captured=inputs.captured,
        streams=streams,
        place=(branch.table, branch.key),
    )


def _better_error(error: Exception) -> UntraceableError | None:
    """An UntraceableError with the user's line if it was the value of a tensor that could not be read."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not is_library(frame.filename)]
    if not frames or not any(sign in f"{type(error).__name__}: {error}" for sign in _SIGNS):
        return None
    frame = frames[-1]
    return UntraceableError(
        f"{frame.filename}:{frame.lineno}, in {frame.name}: `{frame.line}` cannot be part of a compiled step, which is a "
        "graph of tensor operations: it asks for the value of a tensor (by if, .item(), bool(), int(), float(), a "
        "shape that depends on values, or NumPy). Write it with torch.where or masks, take it out of the step, or "
        f"leave out ll.compile_step, or ll.vmap_step. torch says: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
    )


def _replaced(out: Outcome, old: TrainState, known: dict[int, int]) -> dict[int, int]:
    """Map each tensor of the outcome to the tensor of the state that it replaces, in trees that keep their structure."""
    pairs: list[tuple[Tensor, Tensor]] = []
    for new, before in zip(out[:3], (old.params, old.opt_state, old.buffers), strict=True):
        updated, replaced = expression(new), expression(before)
        pairs += zip(
            updated.tensors, (replaced if updated.source == replaced.source else updated).tensors, strict=True
        )
    return {
        index: known[id(was)] for index, (now, was) in enumerate(pairs) if id(was) in known and same_kind(now, was)
    }


def _tidied(
    graph: GraphModule, captured: list[Variable], streams: list[int]
) -> tuple[list[Callable[[], Tensor]], list[int]]:
    """Make inputs of all that a graph reads: the host's answers and the constants come before what it was given.

    Returns functions that read the constants, and the microbatch of each draw that is used.
    """
    nodes = graph.graph
    nodes.set_codegen(CodeGen())
    first = next(iter(nodes.nodes))
    for node in nodes.find_nodes(op="placeholder"):
        if FROM_HOST in node.meta:  # it is at the point where it was requested
            first.prepend(node)
    # Tensors that the step holds in Python are read at each run.
    constants: list[Callable[[], Tensor]] = []
    reads = {id(value): read for _, _, read, value in captured if isinstance(value, Tensor)}
    for node in nodes.find_nodes(op="get_attr"):
        if isinstance(value := getattr(graph, str(node.target), None), Tensor):
            with nodes.inserting_before(next(iter(nodes.nodes))):
                constant = nodes.placeholder(f"constant_{len(constants)}")
            constant.meta.update(node.meta)
            replace_node(node, constant)
            constants.insert(0, reads.get(id(value), partial(itself, value)))
    for node, stream in zip(filter(draws, nodes.nodes), streams, strict=True):
        node.meta["stream"] = stream
    nodes.eliminate_dead_code()
    graph.recompile()
    return constants, [node.meta["stream"] for node in nodes.nodes if draws(node)]


@dataclass
class _Branch:
    """The host's answers so far in one run of a step's Python, and the place of the next one."""

    table: dict[Any, Any]
    evaluate: Callable[[HostInput], Expression]
    without_values: FakeTensorMode
    key: Any = None

    def ask(self, function: Callable[..., Any], values: tuple[Any, ...]) -> Any:
        """The host's answer, with its tensors as inputs of the graph."""
        tracer: Any = get_proxy_mode().tracer  # type: ignore[union-attr]
        question = HostInput(function, [_source(value, tracer) for value in values], {})
        with _disable_current_modes():  # the host computes now, and nothing is recorded
            answer = self.evaluate(question)
            inputs = [self.without_values.from_tensor(tensor) for tensor in answer.tensors]
        question = self.table.setdefault(self.key, question)
        for tensor in inputs:
            proxy = tracer.create_proxy("placeholder", f"host_{len(tracer.graph.nodes)}", (), {})
            proxy.node.meta[FROM_HOST] = True
            track_tensor_tree(tensor, proxy, constant=None, tracer=tracer)
        self.table, self.key = question.answers, answer.key()
        return answer.build()(inputs)


def _source(value: Any, tracer: Any) -> tuple[str, Any]:
    """The source of an argument of `on_host`, as in `HostInput.sources`."""
    if isinstance(value, Count):
        return "count", value.name
    if not isinstance(value, Tensor):
        return "value", value
    tracked: Any = get_proxy_slot(value, tracer, None)
    node: Any = tracked and tracked.proxy.node
    while node is not None and node.target in (torch.ops.aten.clone.default, torch.ops.aten.detach.default):
        (node,) = node.all_input_nodes  # an update is given copies
    placeholders = [
        placeholder for placeholder in tracer.graph.find_nodes(op="placeholder") if FROM_HOST not in placeholder.meta
    ]
    if node not in placeholders:
        raise UntraceableError(
            "on_host was given a tensor that the step has computed: it takes numbers of the state as "
            "the step was given it, such as state.step or a counter in opt_state"
        )
    return "input", placeholders.index(node)


class _DrawnOnce(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Record a random draw once: draws from the same point of a stream give the same numbers.

    Checkpointing resets the random streams, and a second pass over a batch starts where the first did. A trace draws
    nothing, so this class advances the stream at each draw, and identifies a draw by its starting point.
    """

    def __init__(self, trace: tracing.Trace) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.trace = trace
        self.drawn: dict[Any, Any] = {}
        self.streams: list[int] = []  # index of the microbatch of each draw

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        with _disable_current_modes():
            shapes = tuple(arg.shape for arg in args if isinstance(arg, Tensor))
            draw = func, shapes, torch.default_generator.get_state().numpy().tobytes()
            torch.rand((), device="cpu")
        in_place = func._schema.is_mutable
        if draw in self.drawn:
            return args[0].copy_(self.drawn[draw]) if in_place else self.drawn[draw]
        self.streams.append(self.trace.stream)
        out = func(*args, **kwargs)
        self.drawn[draw] = out.clone() if in_place else out  # the numbers may be overwritten
        return out


@contextmanager
def _as_when_compiling() -> Iterator[None]:
    """Tell torch that it is compiling, which its optimizers check, for example before dividing by a CPU tensor."""
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before
