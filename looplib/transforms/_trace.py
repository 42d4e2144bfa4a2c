"""Tracing: run a step's Python once on tensors without values, and record its operations as a graph.

The step's own Python runs through every wrapper, the backward pass and the optimizer's own `step`, and torch records
the operations (`make_fx`). The result is a function of flat lists of tensors, which can be compiled, mapped over many
members, or differentiated. Numbers read from the state and values kept in Python objects would be frozen in the
graph, so the former are requested from the host at each step, and the latter are watched.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx, track_tensor_tree
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from looplib._core import tracing
from looplib._core.tracing import Count, UntraceableError
from looplib.steps import Outcome
from looplib.transforms._explain import explained
from looplib.transforms._expression import Expression, as_answer, expression
from looplib.transforms._program import COUNTS, Core, Inputs, Program, Question
from looplib.transforms._signature import HOSTS, Recorded, signed
from looplib.transforms._watch import changed
from looplib.types import TrainState


class Traced(NamedTuple):
    """A program, with the table and key under which it belongs among the questions."""

    program: Program
    answers: dict[Any, Any]
    key: Any


def trace(
    core: Core,
    inputs: Inputs,
    evaluate: Callable[[Question], Any],
    begin: Callable[[], None] = lambda: None,
    differentiable: bool = False,
    kernels_from: float = math.inf,
) -> Traced:
    """Trace a step.

    Args:
        core: the step without its counts.
        inputs: the inputs for which the program is made.
        evaluate: function that returns the host's answer for this state.
        begin: called when the step's Python starts to run.
        differentiable: True if the graph itself is to be differentiated.
        kernels_from: number of parameters from which on a fused kernel updates them.
    """
    in_state = expression((inputs.state.params, inputs.state.buffers, inputs.state.opt_state))
    in_batch = expression(inputs.batch)
    without_values = FakeTensorMode(allow_non_fake_inputs=True)  # and no symbols for values, so reading one raises
    without_values._allow_unsafe_data_ptr_access = False
    runs: list[tuple[_Branch, Recorded]] = []

    def run(*tensors: Tensor) -> list[Tensor]:
        begin()
        # The caller's table is filled from the first question on, so questions of a failed attempt are asked again.
        branch = _Branch(inputs.questions, evaluate, without_values)
        batch = in_batch.build()(tensors[len(in_state.tensors) :])
        recorded = _recorded(core, in_state, tensors, batch, branch, differentiable, kernels_from)
        runs.append((branch, recorded))
        return expression(recorded.outcome).tensors

    examples = [without_values.from_tensor(tensor.detach()) for tensor in inputs.flat]
    with torch.no_grad(), torch.random.fork_rng(devices=()), _AsWhenCompiling(), _LSTMInParts():
        try:
            graph = make_fx(run, tracing_mode="fake", _allow_non_fake_inputs=True)(*examples)
        except UntraceableError:
            raise
        except Exception as error:
            if (reason := explained(error)) is error:
                raise
            raise reason from error
    if names := changed(inputs.held):
        raise UntraceableError(
            f"the forward pass changes {', '.join(sorted(set(names)))}, which is kept as a plain Python value: "
            "a graph would keep what they were. Make them buffers (register_buffer), which are part of the state"
        )
    branch, recorded = runs[-1]
    return Traced(signed(graph, recorded, inputs), branch.table, branch.key)


class _Branch:
    """The host's answers so far in one run of a step's Python, and the place of the next one."""

    def __init__(
        self,
        questions: dict[Any, Any],
        evaluate: Callable[[Question], Any],
        without_values: FakeTensorMode,
    ) -> None:
        self.table, self.key = questions, None
        self.evaluate, self.without_values = evaluate, without_values
        self.tensors = 0  # number of tensors in the answers so far

    def ask(self, function: Callable[..., Any], sources: list[Any]) -> Any:
        """The host's answer, with its tensors as inputs of the graph."""
        question = Question(function, sources, {})
        with _disable_current_modes():  # the host computes now, and nothing is recorded
            answer = as_answer(self.evaluate(question))
            inputs = [self.without_values.from_tensor(tensor) for tensor in answer.tensors]
        question = self.table.setdefault(self.key, question)
        tracer: Any = get_proxy_mode().tracer  # type: ignore[union-attr]
        for tensor in inputs:
            proxy = tracer.create_proxy("placeholder", f"host_{self.tensors}", (), {})
            proxy.node.meta[HOSTS] = self.tensors
            track_tensor_tree(tensor, proxy, constant=None, tracer=tracer)
            self.tensors += 1
        self.table, self.key = question.answers, answer.key()
        return answer.build()(inputs)


def _recorded(
    core: Core,
    in_state: Expression,
    tensors: Sequence[Tensor],
    batch: Any,
    branch: _Branch,
    differentiable: bool,
    kernels_from: float,
) -> Recorded:
    """Run the step on a state made of these tensors."""
    counts: dict[str, Any] = {name: Count(name) for name in COUNTS}
    params, buffers, opt_state = in_state.build()(tensors)
    state = TrainState(**counts, params=params, buffers=buffers, opt_state=opt_state)
    known = {id(tensor): index for index, tensor in enumerate(tensors)}
    trace = tracing.Trace(known, branch.ask, differentiable, kernels_from)
    draws = _DrawnOnce(trace)
    with tracing.within(trace), draws:
        out = _decided(core(state, batch), state)
    outcome = tuple(out), [values for _, values in trace.afterwards]
    checks = [function for function, _ in trace.afterwards]
    return Recorded(outcome, checks, _successors(out, state, known), draws.streams)


def _decided(out: Outcome, state: TrainState) -> Outcome:
    """The outcome, with everything that depends on whether the update is applied."""
    return out._replace(buffers=tracing.where(out.applied, out.buffers, state.buffers))


def _successors(out: Outcome, old: TrainState, known: dict[int, int]) -> list[tuple[int, int]]:
    """Map each tensor of the outcome to the tensor of the state that it replaces, in trees that keep their structure."""
    pairs: list[tuple[Tensor, Tensor | None]] = []
    for new, before in zip(out[:3], (old.params, old.opt_state, old.buffers), strict=True):
        made, replaced = expression(new), expression(before)
        kept = made.source == replaced.source
        pairs += zip(made.tensors, replaced.tensors if kept else [None] * len(made.tensors), strict=True)
    return [(i, known[id(was)]) for i, (is_, was) in enumerate(pairs) if was is not None and _fits(is_, was)]


def _fits(new: Tensor, old: Tensor) -> bool:
    return (new.shape, new.dtype) == (old.shape, old.dtype)


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
            torch.rand(())
        in_place = func._schema.is_mutable
        if draw in self.drawn:
            return args[0].copy_(self.drawn[draw]) if in_place else self.drawn[draw]
        self.streams.append(self.trace.stream)
        out = func(*args, **kwargs)
        self.drawn[draw] = out.clone() if in_place else out  # the numbers may be overwritten
        return out


class _LSTMInParts(TorchFunctionMode):
    """Record an LSTM as products and sums: oneDNN's operation for it, on a CPU, can be neither mapped nor run in a graph."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.lstm:
            return func(*args, **(kwargs or {}))
        before = torch._C._get_mkldnn_enabled()
        try:
            torch._C._set_mkldnn_enabled(False)
            return func(*args, **(kwargs or {}))
        finally:
            torch._C._set_mkldnn_enabled(before)


class _AsWhenCompiling:
    """Tell torch that it is compiling, which its optimizers check, for example before dividing by a CPU tensor."""

    def __enter__(self) -> None:
        self.before = torch.compiler._is_compiling_flag
        torch.compiler._is_compiling_flag = True

    def __exit__(self, *_: Any) -> None:
        torch.compiler._is_compiling_flag = self.before
