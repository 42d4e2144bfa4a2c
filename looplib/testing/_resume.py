"""Resume check of a run."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from looplib._core import trees
from looplib._core.checks import check, check_optional_count
from looplib._core.mappings import fields_of, mapped
from looplib._core.records import check_no_module
from looplib.checkpoint import checkpoint_io
from looplib.data import Loader
from looplib.metrics import compute
from looplib.state import copy_state
from looplib.testing._compare import about_kernels, copied, differing, fail
from looplib.testing._surroundings import seed_streams, streams_kept
from looplib.types import TREES, TrainState, TrainStep


def assert_resumes(
    step: TrainStep,
    state: TrainState,
    batches: Sequence[Any] | Loader,
    *,
    steps: int | None = None,
) -> None:
    """Check exact resume: a run that is stopped anywhere, saved and restored ends bitwise like an uninterrupted one.

    >>> import looplib as ll, torch
    >>> from looplib import testing
    >>> model, optimizer = torch.nn.Linear(2, 1), ll.optimizer(torch.optim.AdamW, lr=1e-3)
    >>> step = ll.make_train_step(ll.make_grad_fn(model, lambda model, x: model(x).square().mean()), optimizer)
    >>> loader = ll.make_loader(torch.randn(10, 2), batch_size=4)
    >>> state = ll.init_state(model, optimizer, loader=loader)
    >>> testing.assert_resumes(step, state, loader, steps=5)

    One run goes through all batches and is saved after each. Every checkpoint is then restored into a template with
    different numbers everywhere, and trained to the end. The metrics of each batch and the final state must be
    bitwise equal. n batches take n * (n + 1) / 2 steps: 4 to 8 are plenty. The same step continues, so a value that it
    remembers from its very first call goes unnoticed.

    Args:
        step: train step, pure or donated.
        state: initial state.
        batches: a list, or a looplib loader, which is asked for the rest of the epoch at each start and whose batches
            are compared too. With a loader, let `steps` continue beyond the end of an epoch.
        steps: number of batches. Defaults to the length of the list, or 6 for a loader.

    Raises:
        AssertionError: a resumed run differs. The message has the batch after which it was stopped, the first batch
            that differs, and the differences.
        ValueError: there are fewer than 2 batches.
        TypeError, ValueError: from `checkpoint_io`, if a state cannot be saved or restored.
    """
    __tracebackhide__ = True
    check_no_module(
        "assert_resumes",
        step,
        "a step of it, as ll.make_train_step(ll.make_grad_fn(model, loss_fn), optimizer) returns",
    )
    check_optional_count("steps", steps, 2, "a run is stopped between two batches")
    most = math.inf if isinstance(batches, Loader) else len(batches)
    steps = int(min(6, most) if isinstance(batches, Loader) else most) if steps is None else steps
    message = f"steps is {steps}, of {most} batches; a run is stopped between two batches: give 2 or more"
    check(2 <= steps <= most, message)
    with streams_kept(state), tempfile.TemporaryDirectory() as folder:
        uninterrupted = {}
        for done, outputs, current in run(step, copy_state(state), batches, 0, steps):
            uninterrupted[done] = outputs
            if done < steps:
                checkpoint_io(f"{folder}/after-{done}").save(current)
        end = copied(current)
        for stop in range(1, steps):
            seed_streams(stop)
            restored = checkpoint_io(f"{folder}/after-{stop}").restore(_spoiled(state), quiet=True)
            resumed = {}
            for done, outputs, current in run(step, restored, batches, stop, steps):  # noqa: B007
                resumed[done] = outputs
            expected = {done: uninterrupted[done] for done in resumed}  # in order: what differs first is named first
            fail(
                f"a run that was stopped after {stop} batches and restored is not the run that went on",
                differing({"batch": expected, "end": end}, {"batch": resumed, "end": current}),
                "So something that the run depends on is not in its checkpoint. Usually a count, "
                "an average or a cache that a closure, a module's attribute or an optimizer's wrapper keeps between "
                "steps (put it into a buffer, opt_state or state.extra, which are saved), a loader or dataset that "
                "draws from a generator of its own, or a step that is not pure: see assert_pure."
                + about_kernels(state),
            )


def run(
    step: TrainStep, state: TrainState, batches: Sequence[Any] | Loader, start: int, stop: int
) -> Iterator[tuple[int, dict[str, Any], TrainState]]:
    """A run: after each step, the number of steps so far, the batch with its metrics, and the state."""
    at = start
    while at < stop:
        before = at
        for batch in batches(state) if isinstance(batches, Loader) else batches[start:stop]:
            read = copied(batch)
            state, metrics = step(state, copied(batch))
            at += 1
            yield at, {"batch": read, "metrics": compute(metrics)}, state
            if at == stop:
                return
        check(
            at > before and state.epoch_length is not None,
            f"the loader ended after {at - before} batches, and steps is {stop}: give a state of "
            "ll.init_state(..., loader=loader), or, of a stream, fewer steps than it has batches",
        )


def _spoiled(state: TrainState) -> TrainState:
    """A template as in a new process, with different numbers in all tensors and counts."""
    spoiled = mapped(partial(trees.map_tensors, _wrong), fields_of(state, TREES))
    return state.replace(**spoiled, step=0, epoch=0, batch=0, samples=0)


def _wrong(tensor: Tensor) -> Tensor:
    wrong = math.nan if tensor.is_floating_point() or tensor.is_complex() else 1
    return torch.full_like(tensor, wrong).requires_grad_(tensor.requires_grad)
