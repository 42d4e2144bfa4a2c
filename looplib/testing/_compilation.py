"""Compilation check."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from looplib._core.checks import check, check_count
from looplib._core.mappings import mapped
from looplib._core.tracing import UntraceableError
from looplib.state import copy_state
from looplib.steps import Parts, parts_of
from looplib.testing._compare import copied, differences, leaves
from looplib.testing._float64 import WithoutDropout, in_float64
from looplib.testing._report import fail, kind_of
from looplib.testing._surroundings import streams_kept, users_own
from looplib.transforms._compile_step import GraphParts, step_of_graphs
from looplib.transforms._compiler import Compiler
from looplib.transforms._program import Question
from looplib.transforms._watch import changed
from looplib.types import TrainState, TrainStep

Outcome = dict[str, dict[str, Any]]  # leaves of the metrics and of each tree of the state, by name


def assert_compiles(
    step: TrainStep,
    state: TrainState,
    batch: Any,
    *,
    steps: int = 10,
    programs: int = 1,
    tolerance: float = 1e-5,
    backend: str = "eager",
) -> None:
    """Check compilation: a step becomes one graph, compiled once for all steps, with the results of the eager step.

    >>> import looplib as ll, torch
    >>> from looplib import testing
    >>> model, lr = torch.nn.Linear(2, 1), ll.schedules.warmup_linear(1e-3, warmup=2, total=9)
    >>> optimizer = ll.optimizer(torch.optim.AdamW, lr=lr)
    >>> step = ll.make_train_step(ll.make_grad_fn(model, lambda model, x: model(x).square().mean()), optimizer)
    >>> testing.assert_compiles(step, ll.init_state(model, optimizer), torch.randn(4, 2))

    By default the graph is traced and run without generating machine code, which takes a fraction of a second instead
    of ten and finds the same mistakes. Both steps run in float64 if the loss function supports it, and without the
    dropout of torch's own layers, since a compiled step draws different numbers for microbatches.

    Args:
        step: from `make_train_step`, compiled or not, pure or donated. For a stack, pass the step of one member.
        state: initial state.
        batch: batch for all steps. Every new shape would compile once more.
        steps: number of steps, at least 2.
        programs: largest number of graphs: 1, plus one for each switch on the way, such as a layer that is unfrozen,
            or an average that is updated every few steps.
        tolerance: largest difference of metrics and state, relative to the largest number in each.
        backend: backend of torch.compile; pass "inductor" to check the machine code of a real run.

    Raises:
        AssertionError: a line cannot be traced, the step is recompiled (with the reason), or results differ.
        TypeError: the step was not made by looplib.
        ValueError: there is only one step, or the loss draws its own random numbers, which differ when compiled.
    """
    __tracebackhide__ = True
    parts = parts_of(step, "assert_compiles")
    kind = f"assert_compiles got a step of kind {parts.kind!r}: give what ll.make_train_step returned"
    check(parts.kind == "train", kind, TypeError)
    advice = "give 2 or more: the second step shows if it is compiled again"
    check_count("steps", steps, 2, advice)
    compiler = Compiler(parts.core, parts.donate, _options(parts, backend), parts.watched)
    compiled = step_of_graphs(step, parts, compiler)
    first: list[Any] = []
    with streams_kept(state), WithoutDropout(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*changed since the step was compiled")  # reported below
        begin, inputs, _ = in_float64(parts.core, state, batch)
        plain, current = begin, copy_state(begin)
        for number in range(1, steps + 1):
            before = plain
            plain, expected = _by_core(parts, before, inputs)
            current, metrics = _compiled_or_refused(compiled, current, inputs)
            first = first or _machines(compiler)
            if compiler.compilations > programs:
                fail(
                    f"the step was compiled again in step {number}: {compiler.compilations} graphs so far",
                    _reasons(compiler, first, begin, before),
                    "A graph keeps its plain Python numbers, texts and bools for ever, so that each new value of one "
                    "takes another graph. Let schedules and ll.transforms.on_host return floats, and keep counts as "
                    "tensors in opt_state or in buffers. What is switched on purpose within these steps, such as a "
                    "layer that is thawed, is allowed for by programs=, one more for each.",
                )
            _check_outcome(number, expected, _outcome(current, metrics), compiler, tolerance)


def _options(parts: Parts, backend: str) -> dict[str, Any]:
    options = parts.compiler.options_for("assert_compiles") if isinstance(parts, GraphParts) else {}
    if backend != "inductor":
        return {"backend": backend}
    # Inductor draws different random numbers than eager torch.
    return {**options, "backend": backend, "options": {**(options.get("options") or {}), "fallback_random": True}}


def _compiled_or_refused(compiled: Any, state: TrainState, batch: Any) -> tuple[TrainState, Any]:
    __tracebackhide__ = True
    try:
        result: tuple[TrainState, Any] = compiled(state, copied(batch))
        return result
    except UntraceableError as error:
        refusal = error
    fail(
        "the step cannot be compiled whole",
        [str(refusal)],
        "Where that is no fault, compile the blocks of the model alone: ll.transforms.compile_blocks(model, Block).",
    )
    raise refusal


def _check_outcome(number: int, expected: Outcome, outcome: Outcome, compiler: Any, tolerance: float) -> None:
    __tracebackhide__ = True
    differing = [line for name in expected for line in differences(expected[name], outcome[name], tolerance)]
    draws = any(machine.random for machine in _machines(compiler))
    check(
        not (differing and draws),
        "the loss draws random numbers by itself, and a compiled step other ones than an eager one, so there is nothing "
        "to compare. Turn off what draws (dropout of torch's own layers is off already)",
    )
    fail(
        f"the compiled step is not the eager one: after step {number} numbers differ",
        differing,
        "Usually Python that is to run in each step and runs once, while the graph is written down: a draw of random or "
        "NumPy, the time, a list or dict that is appended to or read, a global or an attribute of an object that is set "
        "elsewhere. Give what changes in the batch, the state or by ll.transforms.on_host. Or rounding, where code "
        "insists on float32 or less, or where a gradient is nothing else (that of a bias before BatchNorm) and the "
        "optimizer blows it up: a larger tolerance.",
    )


def _by_core(parts: Parts, state: TrainState, batch: Any) -> tuple[TrainState, Outcome]:
    """One step by the step's own Python."""
    out = parts.core(state, copied(batch))
    applied = bool(out.applied)
    new = {"params": out.params, "opt_state": out.opt_state, "buffers": out.buffers if applied else state.buffers}
    later = state.replace(**new, step=state.step + applied)
    return later, _outcome(later, out.metrics)


def _outcome(state: TrainState, metrics: Mapping[str, Any]) -> Outcome:
    trees = {"metrics": metrics, "params": state.params, "buffers": state.buffers, "opt_state": state.opt_state}
    return {name: dict(leaves(tree, name)) for name, tree in trees.items()} | {"step": {"step": state.step}}


def _machines(compiler: Any) -> list[Any]:
    return [node for node in _asked(compiler) if not isinstance(node, Question)]


def _asked(compiler: Any) -> Iterator[Any]:
    """Questions to the host that a compiled step has asked, and the graphs selected by the answers."""
    waiting = [node for first in compiler.table.values() for node in first.values()]
    while waiting:
        node = waiting.pop()
        yield node
        if isinstance(node, Question):
            waiting += node.answers.values()


def _reasons(compiler: Any, machines: list[Any], begin: TrainState, now: TrainState) -> list[str]:
    """Changes since the first graph: values in Python, the layout of the state, answers of the host."""
    lines = [f"{name}: a plain value that has changed" for m in machines for name in changed(m.program.held)]
    for tree in ("params", "buffers", "opt_state"):
        one, other = (mapped(_layout, dict(leaves(getattr(state, tree), tree))) for state in (begin, now))
        lines += differences(one, other)
    questions = [node for node in _asked(compiler) if isinstance(node, Question) and len(node.answers) > 1]
    return [*lines, *map(_answers, questions)]


def _answers(question: Question) -> str:
    """Answers of a function that was asked for a host value and gave several, with its place in the code."""
    function = users_own(question.function)
    code = getattr(function, "__code__", None)
    line = f" ({code.co_filename}:{code.co_firstlineno})" if code else ""
    answers = [answer[0] for answer in question.answers]
    return f"{getattr(function, '__qualname__', function)}{line}: returned {', then '.join(answers[:4])}"


def _layout(leaf: Any) -> Any:
    return f"{kind_of(leaf)}, strides {leaf.stride()}" if isinstance(leaf, Tensor) else leaf
