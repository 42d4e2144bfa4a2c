"""Compilation check."""

from __future__ import annotations

import warnings
from typing import Any

from looplib._core.checks import check, check_count
from looplib._core.mappings import fields_of
from looplib._core.records import check_kind
from looplib._core.tracing import UntraceableError
from looplib.metrics import compute
from looplib.state import copy_state
from looplib.steps import spec_of
from looplib.testing._compare import check_tolerance, copied, differing, fail, in_float64
from looplib.testing._surroundings import streams_kept
from looplib.transforms import compile_step
from looplib.types import TrainState, TrainStep


def assert_compiles(
    step: TrainStep,
    state: TrainState,
    batch: Any,
    *,
    steps: int = 10,
    programs: int = 1,
    tolerance: float = 1e-5,
) -> None:
    """Check compilation: a step becomes one graph, compiled once for all steps, with the results of the eager step.

    >>> import looplib as ll, torch
    >>> from looplib import testing
    >>> model, lr = torch.nn.Linear(2, 1), ll.schedules.warmup_linear(1e-3, warmup=2, total=90)
    >>> optimizer = ll.optimizer(torch.optim.AdamW, lr=lr)
    >>> step = ll.make_train_step(ll.make_grad_fn(model, lambda model, x: model(x).square().mean()), optimizer)
    >>> testing.assert_compiles(step, ll.init_state(model, optimizer), torch.randn(4, 2))

    The graph is traced and run without generating machine code, which takes a fraction of a second instead of ten and
    finds the same mistakes; the code that the compiler generates is not checked. Both steps run in float64 if the loss
    function supports it. A compiled step draws different numbers for microbatches: build the model without dropout, or
    the step without `accumulate`.

    Args:
        step: from `make_train_step`, pure or donated, before `compile_step`. For a stack, pass the step of one member.
        state: initial state.
        batch: batch for all steps. Every new shape would compile once more.
        steps: number of steps, at least 2.
        programs: largest number of graphs: 1, plus one for each switch on the way, such as a layer that is unfrozen,
            or an average that is updated every few steps.
        tolerance: largest difference of metrics and state, relative to the largest number in each.

    Raises:
        AssertionError: a line cannot be traced, the step is recompiled (with the values that changed), or results
            differ.
        TypeError: the step was not made by looplib, or is compiled already.
        ValueError: `steps` is below 2.
    """
    __tracebackhide__ = True
    check_kind(step, "assert_compiles", "train_step")
    check(
        spec_of(step, "assert_compiles").compiler is None,
        "assert_compiles got a step of graphs, which is compiled already or of a stack: give what ll.make_train_step "
        "returned",
        TypeError,
    )
    check_tolerance(tolerance)
    check_count("programs", programs)
    check_count("steps", steps, 2, "give 2 or more: the second step shows if it is compiled again")
    compiled: Any = compile_step(step, backend="eager")

    def eager(state: TrainState, batch: Any) -> Any:
        return step(copy_state(state), copied(batch))

    with streams_kept(state), warnings.catch_warnings(record=True) as caught:
        warnings.filterwarnings("always", ".*since the step was compiled")
        begin, inputs, _ = in_float64(eager, state, batch)
        plain, current = begin, copy_state(begin)
        for number in range(1, steps + 1):
            before = plain
            plain, expected = eager(before, inputs)
            current, metrics = _compiled_or_refused(compiled, current, inputs)
            if compiled.compiler.compilations > programs:
                fail(
                    f"the step was compiled again in step {number}: {compiled.compiler.compilations} graphs so far",
                    [str(warning.message) for warning in caught] or ["a plain number, text or bool of the state"],
                    "A graph keeps its plain Python numbers, texts and bools for ever, so that each new value of one "
                    "takes another graph. Let schedules and ll.transforms.on_host return floats, and keep counts as "
                    "tensors in opt_state or in buffers. What is switched on purpose within these steps, such as a "
                    "layer that is thawed, is allowed for by programs=, one more for each.",
                )
            fail(
                f"the compiled step is not the eager one: after step {number} numbers differ",
                differing(_results(plain, expected), _results(current, metrics), tolerance),
                "Usually Python that is to run in each step and runs once, while the graph is written down: a draw of "
                "random or NumPy, the time, a list or dict that is appended to or read, a global or an attribute of an "
                "object that is set elsewhere. Give what changes in the batch, the state or by ll.transforms.on_host. "
                "Or dropout, or another draw of the loss, of which each microbatch of a compiled step draws others: build "
                "the model without it. Or rounding, where code insists on float32 "
                "or less, or where a gradient is nothing else (that of a bias before BatchNorm) and the optimizer blows "
                "it up: a larger tolerance.",
            )


def _compiled_or_refused(compiled: Any, state: TrainState, batch: Any) -> tuple[TrainState, Any]:
    __tracebackhide__ = True
    try:
        result: tuple[TrainState, Any] = compiled(state, copied(batch))
    except UntraceableError as error:
        advice = "Where that is no fault, compile the blocks of the model alone: for block in model.blocks: block.compile()"
        raise AssertionError(f"the step cannot be compiled whole:\n  {error}\n{advice}") from error
    return result


def _results(state: TrainState, metrics: Any) -> dict[str, Any]:
    return {"metrics": compute(metrics), "step": state.step, **fields_of(state, ("params", "buffers", "opt_state"))}
