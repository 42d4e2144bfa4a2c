"""A learning rate found by trying many on a fork of the run, which is left as it was."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from looplib._core.checks import check_argument, check_count
from looplib._core.kinds import checked
from looplib.log._plots import dress, figure_of, save, smoothed
from looplib.metrics._mean import compute
from looplib.state import copy_state
from looplib.steps import make_train_step
from looplib.types import GradFn, Optimizer, Schedule, TrainState

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class LRCurve:
    """Result of `find_lr`: the loss as the learning rate grows.

    >>> import looplib as ll
    >>> curve = ll.contrib.LRCurve(lrs=(1e-3, 1e-2, 1e-1), losses=(1.0, 0.5, 4.0), smoothed=(1.0, 0.7, 2.0), suggestion=1e-2)
    >>> curve.lrs[curve.losses.index(min(curve.losses))]
    0.01

    Attributes:
        lrs: learning rates, each of one update.
        losses: the loss before that update.
        smoothed: its exponential average, which says when to stop.
        suggestion: the learning rate at which the loss falls the fastest, or None if it never falls.
    """

    lrs: tuple[float, ...]
    losses: tuple[float, ...]
    smoothed: tuple[float, ...]
    suggestion: float | None

    def plot(self, path: str | os.PathLike[str] | None = None) -> Figure:
        """Plot the loss over the learning rate, with the suggestion; saved to a file if a path is given.

        >>> import looplib as ll
        >>> curve = ll.contrib.LRCurve((0.1, 1.0), (2.0, 1.0), (2.0, 1.5), 0.3)
        >>> curve.plot().axes[0].get_xlabel()
        'learning rate'

        Raises ImportError without `pip install looplib[recipes]`.
        """
        figure = figure_of(figsize=(6.4, 4.0), layout="constrained")
        axes = figure.subplots()
        axes.plot(self.lrs, self.losses, color="C0", alpha=0.25, linewidth=1, label="loss")
        axes.plot(self.lrs, self.smoothed, color="C0", linewidth=1.6, label="loss, smoothed")
        if self.suggestion is not None:
            label = f"suggestion: {self.suggestion:.2g}"
            axes.axvline(self.suggestion, color="C1", linestyle="--", linewidth=1.6, label=label)
        dress(axes, "", "learning rate", [])
        axes.set_xscale("log")
        axes.set_ylabel("loss")
        # What diverges would press the rest flat.
        kept = self.losses[: self.smoothed.index(min(self.smoothed)) + 1]
        room = 0.1 * (max(kept) - min(self.losses)) or 1.0
        axes.set_ylim(min(self.losses) - room, max(kept) + room)
        axes.legend(frameon=False)
        if path is not None:
            save(figure, path)
        return figure


def find_lr(
    grad_fn: GradFn,
    optimizer_of_lr: Callable[[Schedule], Optimizer],
    state: TrainState,
    batches: Any,
    *,
    low: float = 1e-7,
    high: float = 10.0,
    steps: int = 100,
    smooth: float = 0.9,
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

    The state is left as it was, to the bit, and so is torch's random stream, whatever the batches draw; the run can
    go on from it. The learning rate grows by the same factor at each update, and the sweep ends early once the
    smoothed loss is far above its lowest. Each loss is waited for.

    The suggestion is where the loss falls the fastest, by the slope of a straight line through a tenth of the points
    over the logarithm of the learning rate, before the smoothed loss is at its lowest. It is a place to begin from
    for the peak of a schedule, and depends on batch size, weight decay and warmup: look at the picture,
    `curve.plot()`.

    Args:
        grad_fn: from `make_grad_fn`, wrapped at will.
        optimizer_of_lr: makes the optimizer for a learning rate, here a schedule; of the kind that made the state.
        state: where to begin; it need not be bound.
        batches: what can be iterated over again when it ends, such as a list or a DataLoader, or a looplib loader.
        low, high: the first and the last learning rate, above 0.
        steps: updates, at least 10.
        smooth: the share of the past in the smoothed loss, from 0 to below 1, as in `plot`.
        diverged: above 1; end when the smoothed loss is above its lowest by `diverged - 1` times that, so at 4 at four times
            as much; `math.inf` to go to the end unless the loss is infinite or NaN.

    Raises:
        ValueError: a range that is none, too few steps, a `smooth` or `diverged` out of its range, batches that run
            out and cannot be read again, a state without an optimizer's, a loss that is infinite or NaN from the
            beginning.
        TypeError: an optimizer in place of the function that makes it.
        RuntimeError: a module wrapped in DDP or FSDP2, which run on their own parameters alone.

    Source: Smith, "Cyclical learning rates for training neural networks", 2017 (arXiv 1506.01186).
    """
    grad_fn = checked(grad_fn, "find_lr", "grad_fn")
    _check(optimizer_of_lr, state, low, high, steps, smooth, diverged)
    first = state.step

    def lr(step: int) -> float:
        return float(low * (high / low) ** ((step - first) / (steps - 1)))

    train_step = make_train_step(grad_fn, optimizer_of_lr(lr), donate=True)
    fork = copy_state(state)
    lrs: list[float] = []
    losses: list[float] = []
    averages: list[float] = []
    stream = torch.default_generator.get_state()
    try:
        for batch in _again(batches, state, steps):
            at = lr(fork.step)
            fork, metrics = train_step(fork, batch)
            loss = compute({"loss": metrics["loss"]})["loss"]
            if not math.isfinite(loss):
                break
            lrs.append(at)
            losses.append(loss)
            averages = smoothed(losses, smooth)
            best = min(averages)
            if averages[-1] - best > (diverged - 1) * abs(best):
                break
    finally:
        torch.default_generator.set_state(stream)
    if not losses:
        raise ValueError(f"the loss is {loss} at the first batch, before any update: look at the data or the model")
    return LRCurve(tuple(lrs), tuple(losses), tuple(averages), _steepest(lrs, losses, averages, steps // 10))


def _check(
    optimizer_of_lr: Any, state: TrainState, low: float, high: float, steps: int, smooth: float, diverged: float
) -> None:
    if not 0 < low < high < math.inf:
        raise ValueError(f"low is {low} and high is {high}; give learning rates with 0 < low < high")
    check_count("steps", steps, 10, "give at least 10, for a curve")
    advice = "give the share of the past to keep at each loss, from 0 to below 1"
    check_argument(0 <= smooth < 1, "smooth", smooth, advice)
    advice = "give the multiple of the lowest loss at which to end, above 1, such as 4, or math.inf to go to the end"
    check_argument(diverged > 1, "diverged", diverged, advice)
    if isinstance(optimizer_of_lr, Optimizer) or not callable(optimizer_of_lr):
        raise TypeError(
            f"optimizer_of_lr is a {type(optimizer_of_lr).__name__}; give a function of the learning rate, such as "
            "lambda lr: ll.optimizer(torch.optim.AdamW, lr=lr)"
        )
    if state.opt_state is None:
        raise ValueError(
            "the state has no opt_state: make it with the optimizer, ll.init_state(model, optimizer_of_lr(low))"
        )


def _again(batches: Any, state: TrainState, count: int) -> Iterator[Any]:
    """So many batches, from the beginning again when they end."""
    given = 0
    while given < count:
        before = given
        for batch in batches(state) if callable(batches) else batches:
            yield batch
            given += 1
            if given == count:
                return
        state = state.replace(epoch=state.epoch + 1, batch=0)
        if given == before:
            raise ValueError(
                f"the batches ended after {given}, and cannot be read again for {count} steps: give a list, a "
                "DataLoader or a loader rather than an iterator, or fewer steps"
            )


def _steepest(lrs: list[float], losses: list[float], averages: list[float], width: int) -> float | None:
    """The learning rate in the middle of the window through which the line of least squares falls the fastest."""
    width = max(width, 3)
    end = max(averages.index(min(averages)) + 1, width)
    if len(losses) < width:
        return None
    window = torch.tensor(losses[:end], dtype=torch.float64).unfold(0, width, 1)
    places = torch.arange(width, dtype=torch.float64) - (width - 1) / 2
    slopes = window @ places
    place = int(slopes.argmin())
    return math.sqrt(lrs[place] * lrs[place + width - 1]) if slopes[place] < 0 else None
