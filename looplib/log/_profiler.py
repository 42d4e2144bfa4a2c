"""Profiler: traces of chosen steps."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from looplib._core.calls import remember
from looplib._core.checks import check
from looplib._core.kinds import check_kind, checked, mark_alike
from looplib._core.ranks import rank
from looplib.predicates._predicate import Predicate
from looplib.types import Metric, TrainState, TrainStep


def profiled(train_step: TrainStep, when: Predicate, directory: str | os.PathLike[str], **options: Any) -> TrainStep:
    """Profile chosen steps with `torch.profiler`, and write a trace for each window of them.

    >>> import looplib as ll, os, tempfile, torch
    >>> model, optimizer = torch.nn.Linear(2, 1), ll.optimizer(torch.optim.SGD, lr=0.1)
    >>> grad_fn = ll.make_grad_fn(model, lambda model, x: model(x).square().mean())
    >>> train_step = ll.make_train_step(grad_fn, optimizer)
    >>> directory = tempfile.mkdtemp()
    >>> train_step = ll.log.profiled(train_step, ll.after_steps(2) & ~ll.after_steps(4), directory)
    >>> state = ll.init_state(model, optimizer)
    >>> for batch in torch.ones(6, 4, 2):
    ...     state, metrics = train_step(state, batch)
    >>> os.listdir(directory)
    ['trace-step2-rank0.json']

    Open the file at https://ui.perfetto.dev or chrome://tracing. The predicate is evaluated on the state passed to a
    step, so `ll.after_steps(2) & ~ll.after_steps(4)` selects the third and the fourth step of a run. A window lasts
    as long as the predicate is true and includes what happens between the steps. It is written when a step returns a
    state outside the window, when a step fails, or when the program exits. Steps outside a window only pay for the
    predicate.

    Args:
        train_step: from `make_train_step`, with or without wrappers.
        when: a predicate, or any pure function of the state.
        directory: folder for the traces, created if missing. A file is named after the window's first step and
            replaces an existing one.
        options: arguments of `torch.profiler.profile`, such as `record_shapes=True`, `with_stack=True` or
            `profile_memory=True`.

    Raises:
        TypeError: `when` is not callable, or, at the first window, the profiler has no such option.
        OSError: the file cannot be written.

    Source: `torch.profiler.profile`.
    """
    train_step = checked(train_step, "profiled", "train_step", "eval_step", "predict_step")
    given = f"profiled got a {type(when).__name__} to say when; give a predicate such as ll.every_n_steps(1000)"
    check(callable(when), given, TypeError)
    check_kind(when, "profiled", "predicate")
    folder = Path(directory).absolute()
    finish: Callable[[], Any] | None = None  # writes the open window

    def step(state: TrainState, batch: Any) -> tuple[TrainState, dict[str, Metric]]:
        nonlocal finish
        if not when(state):
            close()
            return train_step(state, batch)
        if finish is None:
            # Each profiler has one window here, so there is nothing to accumulate. torch 2.11 would warn about it.
            profiler = torch.profiler.profile(**{"acc_events": True, **options})
            profiler.start()
            path = folder / f"trace-step{state.step}-rank{rank()}.json"
            finish = weakref.finalize(step, _write_trace, profiler, path)
        try:
            with torch.profiler.record_function(f"train_step {state.step}"):
                out = train_step(state, batch)
            continues = when(_state_after(out, state))
        except BaseException:
            close()
            raise
        if not continues:
            close()
        return out

    def close() -> None:
        nonlocal finish
        if finish is not None:
            write, finish = finish, None
            write()

    made = mark_alike(step, "profiled", train_step)
    return remember(made, profiled, train_step, when, directory, **options)


def _state_after(out: Any, before: TrainState) -> TrainState:
    """The state returned by a train step, or for other steps, the given state."""
    match out:
        case [TrainState() as state, *_]:
            return state
    return before


def _write_trace(profiler: Any, path: Path) -> None:
    profiler.stop()
    path.parent.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(path))
