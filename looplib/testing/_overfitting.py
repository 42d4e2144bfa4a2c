"""Overfitting check on one batch."""

from __future__ import annotations

import math
from typing import Any

from looplib._core.checks import check, check_count, check_number
from looplib._core.records import check_no_module
from looplib.metrics import compute
from looplib.state import copy_state
from looplib.testing._compare import copied, fail
from looplib.testing._surroundings import streams_kept
from looplib.types import TrainState, TrainStep


def assert_overfits(
    step: TrainStep,
    state: TrainState,
    batch: Any,
    *,
    steps: int = 200,
    fraction: float = 0.1,
    below: float | None = None,
    metric: str = "loss",
) -> None:
    """Check that a run can overfit one batch: the loss falls to a fraction of its initial value.

    >>> import looplib as ll, torch
    >>> from looplib import testing
    >>> model, optimizer = torch.nn.Linear(2, 1), ll.optimizer(torch.optim.Adam, lr=0.1)
    >>> step = ll.make_train_step(ll.make_grad_fn(model, lambda model, x: model(x).square().mean()), optimizer)
    >>> testing.assert_overfits(step, ll.init_state(model, optimizer), torch.ones(4, 2))

    It stops as soon as the goal is reached. Use a batch of a few samples, and a learning rate for such a short run: a
    schedule with a long warmup would hardly have started.

    Args:
        step: train step, pure or donated.
        state: initial state.
        batch: batch for all steps.
        steps: largest number of steps.
        fraction: goal as a fraction of the initial loss.
        below: goal as a loss, for losses that are not positive or whose minimum is far from 0, such as a negative
            log-density, or with label smoothing.
        metric: name of the metric to check.

    Raises:
        AssertionError: the goal was not reached. The message has the loss along the way.
        ValueError: the initial loss is not above 0 and `below` is not given, or the step has no such metric.
    """
    __tracebackhide__ = True
    check_no_module(
        "assert_overfits",
        step,
        "a step of it, as ll.make_train_step(ll.make_grad_fn(model, loss_fn), optimizer) returns",
    )
    check_count("steps", steps, advice="give 1 or more")
    check_number(
        "fraction", fraction, lambda part: part > 0, "give the part of the first loss to be reached, such as 0.1"
    )
    if below is not None:
        check_number("below", below, math.isfinite, "give the value to be reached")
    curve: list[float] = []
    with streams_kept(state):
        current = copy_state(state)
        for _ in range(steps):
            current, metrics = step(current, copied(batch))
            check(metric in metrics, f"the step has no metric {metric!r}; it has {', '.join(metrics)}")
            curve.append(compute({metric: metrics[metric]})[metric])
            goal = fraction * curve[0] if below is None else below
            check(
                below is not None or not curve[0] <= 0,  # a NaN has advice of its own
                f"the first {metric} is {curve[0]:.4g}, of which there is no fraction: give below=, the value to be reached",
            )
            if not math.isfinite(curve[-1]):
                break
            if curve[-1] <= goal:
                return
    shown = sorted({0, *(len(curve) * k // 5 for k in range(1, 5)), len(curve) - 1})
    lines = [f"{metric} {curve[k]:.4g} in step {k + 1}" for k in shown]
    fail(
        f"one batch was not learned by heart in {len(curve)} steps: the goal was a {metric} of {goal:.4g}",
        lines,
        "If it blew up or rises: usually a learning rate that is too large (try a tenth, a warmup, "
        "ll.clip_by_global_norm), a loss with the wrong sign, a log or a division of zero, or half precision without "
        "ll.optim.dynamic_loss_scale. If it stays: a learning rate of 0 (the start of a warmup), updates that are all skipped, or a "
        "step that returns the state that it was given. Otherwise labels or masks that changed from step to step or "
        "stand beside other samples' inputs, a softmax before cross_entropy (which does it itself), predictions and targets "
        "of shapes (n,) and (n, 1) that broadcast, a branch that is detached or frozen (see assert_all_gradients), strong "
        "dropout or weight decay, inputs that are not normalized, or a learning rate that is too small or too few steps.",
    )
