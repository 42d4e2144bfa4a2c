"""Learning-rate range test on a copy of the run, which is left unchanged."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch

from looplib._core.checks import check, check_count, check_number, named
from looplib._core.misuse import forget_trial
from looplib._core.random import restored
from looplib._core.records import check_kind
from looplib.log.smoothing import smoothed
from looplib.metrics import compute
from looplib.state import copy_state
from looplib.steps import make_train_step
from looplib.types import GradFn, Optimizer, Schedule, TrainState, check_state


@dataclass(frozen=True)
class LRCurve:
    """Result of `find_lr`: the loss as a function of the learning rate.

    >>> import looplib as ll
    >>> curve = ll.contrib.LRCurve(lrs=(1e-3, 1e-2, 1e-1), losses=(1.0, 0.5, 4.0), smoothed=(1.0, 0.7, 2.0), suggestion=1e-2)
    >>> curve.lrs[curve.losses.index(min(curve.losses))]
    0.01

    To plot it: `plt.semilogx(curve.lrs, curve.smoothed)` of matplotlib, and `plt.axvline(curve.suggestion)`.

    Attributes:
        lrs: learning rates, one for each update.
        losses: the loss before that update.
        smoothed: exponential average of the losses, which determines when to stop.
        suggestion: learning rate at which the loss falls fastest, or None if it never falls.
    """

    lrs: tuple[float, ...]
    losses: tuple[float, ...]
    smoothed: tuple[float, ...]
    suggestion: float | None


def find_lr(
    grad_fn: GradFn,
    optimizer_of_lr: Callable[[Schedule], Optimizer],
    state: TrainState,
    batches: Any,
    *,
    low: float = 1e-7,
    high: float = 10.0,
    steps: int = 100,
    diverged: float = 4.0,
) -> LRCurve:
    """Learning-rate range test: try rates from `low` to `high` on a copy of a run, one update each.

    >>> import looplib as ll, torch
    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer_of_lr = lambda lr: ll.optimizer(torch.optim.AdamW, lr=lr, weight_decay=0.1)
    >>> grad_fn = ll.make_grad_fn(model, lambda model, x: (model(x) - 5).square().mean())
    >>> state = ll.init_state(model, optimizer_of_lr(1e-3))
    >>> curve = ll.contrib.find_lr(grad_fn, optimizer_of_lr, state, [torch.ones(4, 2)])
    >>> 1e-3 < curve.suggestion < 10
    True

    The state and torch's random streams are left unchanged bit for bit, because the test trains a copy, so the run
    can continue from the state. The learning rate grows by the same factor at each update, and the test ends early if
    the smoothed loss is far above its minimum. Each update waits for its loss.

    In a search of your own with `donate=True`, give each trial a copy, `ll.copy_state(state)`, or a new module: donated
    steps train the module that the state is bound to, so the next trial would continue from its weights.

    The suggestion is the rate at which the loss falls fastest: the steepest slope of a line fitted to a tenth of the
    points over the logarithm of the learning rate, before the minimum of the smoothed loss. Use it as a first guess
    for the peak of a schedule. It depends on batch size, weight decay and warmup, so look at a plot of the
    curve.

    Args:
        grad_fn: from `make_grad_fn`, with or without wrappers.
        optimizer_of_lr: function from a learning rate (here a schedule) to an optimizer of the kind that created the
            state.
        state: initial state. It need not be bound.
        batches: an iterable that can be repeated, such as a list, a DataLoader or a looplib loader.
        low, high: first and last learning rate, above 0.
        steps: number of updates, at least 10.
        diverged: factor, above 1. End when the smoothed loss exceeds its minimum by `diverged - 1` times the
            minimum's magnitude; with 4, at four times the minimum. `math.inf` continues to the end unless the loss is
            infinite or NaN.

    Raises:
        ValueError: the range is empty, there are too few steps, `diverged` is not above 1, the batches
            run out and cannot be repeated, the state has no optimizer state, or the loss is infinite or NaN from the
            start.
        TypeError: an optimizer is passed instead of the function that makes it.
        RuntimeError: the module is wrapped in DDP or FSDP2, which run only on their own parameters.

    Source: Smith, "Cyclical learning rates for training neural networks", 2017 (arXiv 1506.01186).
    """
    grad_fn = check_kind(grad_fn, "find_lr", "grad_fn")
    _check(optimizer_of_lr, state, low, high, steps, diverged)
    first = state.step

    def lr(step: int) -> float:
        return float(low * (high / low) ** ((step - first) / (steps - 1)))

    train_step = make_train_step(grad_fn, optimizer_of_lr(lr), donate=True)
    fork = copy_state(state)
    lrs: list[float] = []
    losses: list[float] = []
    averages: list[float] = []
    with restored(torch.default_generator):
        for batch in _again(batches, state, steps):
            at = lr(fork.step)
            fork, metrics = train_step(fork, batch)
            loss = compute({"loss": metrics["loss"]})["loss"]
            if not math.isfinite(loss):
                break
            lrs.append(at)
            losses.append(loss)
            averages = smoothed(losses, 0.9)
            best = min(averages)
            if averages[-1] - best > (diverged - 1) * abs(best):
                break
    forget_trial(grad_fn)
    if not losses:
        raise ValueError(f"the loss is {loss} at the first batch, before any update: look at the data or the model")
    return LRCurve(tuple(lrs), tuple(losses), tuple(averages), _steepest(lrs, losses, averages, steps // 10))


def _check(optimizer_of_lr: Any, state: TrainState, low: float, high: float, steps: int, diverged: float) -> None:
    for name, rate in (("low", low), ("high", high)):
        check_number(name, rate, lambda rate: 0 < rate < math.inf, "give a learning rate above 0")
    check(low < high, f"low is {low} and high is {high}; give learning rates with 0 < low < high")
    check_count("steps", steps, 10, "give at least 10, for a curve")
    advice = "give the multiple of the lowest loss at which to end, above 1, such as 4, or math.inf to go to the end"
    check_number("diverged", diverged, lambda multiple: multiple > 1, advice)
    check(
        callable(optimizer_of_lr) and not isinstance(optimizer_of_lr, Optimizer),
        f"optimizer_of_lr is {named(optimizer_of_lr)}; give a function of the learning rate, such as "
        "lambda lr: ll.optimizer(torch.optim.AdamW, lr=lr)",
        TypeError,
    )
    check_state(state, "ll.contrib.find_lr(grad_fn, optimizer_of_lr, state, batches)")
    check(
        state.opt_state is not None,
        "the state has no opt_state: make it with the optimizer, ll.init_state(model, optimizer_of_lr(low))",
    )


def _again(batches: Any, state: TrainState, count: int) -> Iterator[Any]:
    """This many batches, starting over when they end."""
    done = 0
    while done < count:
        before = done
        for batch in islice(batches(state) if callable(batches) else batches, count - done):
            done += 1
            yield batch
        if done == before:
            raise ValueError(
                f"the batches ended after {done}, and cannot be read again for {count} steps: give a list, a "
                "DataLoader or a loader rather than an iterator, or fewer steps"
            )
        state = state.replace(epoch=state.epoch + 1, batch=0)


def _steepest(lrs: list[float], losses: list[float], averages: list[float], width: int) -> float | None:
    """Learning rate in the middle of the window whose least-squares line falls fastest."""
    width = max(width, 3)
    end = max(averages.index(min(averages)) + 1, width)
    if len(losses) < width:
        return None
    window = torch.tensor(losses[:end], dtype=torch.float64, device="cpu").unfold(0, width, 1)
    offsets = torch.arange(width, dtype=torch.float64, device="cpu") - (width - 1) / 2
    slopes = window @ offsets
    steepest = int(slopes.argmin())
    return math.sqrt(lrs[steepest] * lrs[steepest + width - 1]) if slopes[steepest] < 0 else None
