"""Warmup schedules."""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass

from looplib.schedules._schedule import (
    _SHAPES,
    Shape,
    _Ending,
    _mix,
    _Schedule,
    count,
    count_or_zero,
    function,
    number,
    shape,
)
from looplib.types import Schedule


@dataclass(frozen=True, slots=True)
class warmup(_Schedule):
    """Linear warmup before a schedule: from `start` to the schedule's first value in `steps` steps.

    >>> import looplib as ll
    >>> lr = ll.schedules.warmup(ll.schedules.linear(1.0, total=10), steps=4)
    >>> [lr(step) for step in (0, 2, 4, 9, 14)]
    [0.0, 0.5, 1.0, 0.5, 0.0]

    The schedule's own step 0 follows the warmup: step `steps` gives `schedule(0)`, and a schedule of 10 steps ends
    after `steps + 10`.

    Args:
        schedule: the schedule after the warmup.
        steps: number of warmup steps, an int; 0 for none.
        start: value at step 0.

    Raises:
        TypeError: `schedule` is not callable.
        ValueError: `start` is not finite, or `steps` is not an int of at least 0.
    """

    schedule: Schedule
    steps: int
    _: KW_ONLY
    start: float = 0.0

    def __post_init__(self) -> None:
        if type(self.steps) is float:
            raise ValueError(
                f"warmup: steps is {self.steps!r}, but the length of the whole run is not known here to take a share of: give "
                "an int, such as round(0.1 * total)"
            )
        self._check(schedule=function, steps=count_or_zero, start=number)

    def __call__(self, step: int) -> float:
        if step < self.steps:
            return _mix(self.schedule(0), self.start, step / self.steps)
        return self.schedule(step - self.steps)


@dataclass(frozen=True, slots=True)
class warmup_linear(_Ending):
    """Linear warmup and linear decay: from 0 to `peak` in `warmup` steps, then to `final` at step `total`.

    >>> import looplib as ll
    >>> lr = ll.schedules.warmup_linear(1.0, warmup=2, total=6)
    >>> [lr(step) for step in (0, 1, 2, 4, 6, 100)]
    [0.0, 0.5, 1.0, 0.5, 0.0, 0.0]

    After step `total` the value is `final`.

    Args:
        peak: highest value.
        warmup: number of warmup steps, or a float for a share of `total`.
        total: number of steps, including the warmup: `epochs * len(loader)`.
        final: value from step `total` on.

    Raises:
        ValueError: a number is not finite, a count is neither an int nor a share, or `warmup` is above `total`.
    """

    peak: float
    _: KW_ONLY
    warmup: float
    total: int
    final: float = 0.0

    def __post_init__(self) -> None:
        self._check(peak=number, total=count, warmup=self._steps, final=number)
        if self.warmup > self.total:
            raise ValueError(
                f"{type(self).__name__}: warmup={self.warmup} is above total={self.total}; total counts the "
                "steps of the warmup too."
            )

    def __call__(self, step: int) -> float:
        if step < self.warmup:
            return self.peak * (step / self.warmup)
        if step >= self.total:
            return self.final
        weight = self._weight(step)
        return _mix(self.peak, self.final, weight)

    def _weight(self, step: int) -> float:
        """Share of `peak` in the decay: 1 at the end of the warmup, 0 at `total`."""
        return (self.total - step) / (self.total - self.warmup)


@dataclass(frozen=True, slots=True)
class warmup_cosine(warmup_linear):
    """Linear warmup and cosine decay: from 0 to `peak` in `warmup` steps, then to `final` at step `total`.

    >>> import looplib as ll
    >>> lr = ll.warmup_cosine(3e-4, warmup=100, total=2000)
    >>> [lr(step) for step in (0, 50, 100, 1050, 2000)]
    [0.0, 0.00015, 0.0003, 0.00015, 0.0]
    >>> ll.warmup_cosine(3e-4, warmup=0.05, total=2000)  # a share of the steps
    warmup_cosine(peak=0.0003, warmup=100, total=2000, final=0.0)

    After step `total` the value is `final`.

    Args:
        peak: highest value.
        warmup: number of warmup steps, or a float for a share of `total`.
        total: number of steps, including the warmup: `epochs * len(loader)`.
        final: value from step `total` on.

    Raises:
        ValueError: a number is not finite, a count is neither an int nor a share, or `warmup` is above `total`.
    """

    def _weight(self, step: int) -> float:
        angle = math.pi * ((step - self.warmup) / (self.total - self.warmup))
        return 0.5 * (1.0 + math.cos(angle))


@dataclass(frozen=True, slots=True)
class warmup_stable_decay(_Ending):
    """Warmup-stable-decay (WSD): rise to `peak` in `warmup` steps, stay, and fall in the last `decay` steps.

    >>> import looplib as ll
    >>> lr = ll.schedules.warmup_stable_decay(1.0, warmup=2, decay=4, total=10)
    >>> [round(lr(step), 3) for step in (0, 1, 2, 6, 7, 8, 10)]
    [0.0, 0.5, 1.0, 1.0, 0.854, 0.5, 0.0]

    Args:
        peak: highest value.
        warmup, decay: number of steps of the warmup and of the decay, or floats for shares of `total`.
        total: number of steps in all.
        start, final: values at step 0 and from step `total` on.
        warmup_shape, decay_shape: "linear", "cosine" or "1-sqrt".

    Raises:
        ValueError: a number is not finite, a count is not an int, a shape is unknown, or `warmup` and `decay` add up
            to more than `total`.

    Source: https://arxiv.org/abs/2404.06395, and for "1-sqrt" https://arxiv.org/abs/2405.18392
    """

    peak: float
    _: KW_ONLY
    warmup: float
    decay: float
    total: int
    start: float = 0.0
    final: float = 0.0
    warmup_shape: Shape = "linear"
    decay_shape: Shape = "cosine"

    def __post_init__(self) -> None:
        self._check(
            peak=number,
            total=count,
            warmup=self._steps,
            decay=self._steps,
            start=number,
            final=number,
            warmup_shape=shape,
            decay_shape=shape,
        )
        if self.warmup + self.decay > self.total:
            raise ValueError(
                f"warmup_stable_decay: warmup={self.warmup} and decay={self.decay} are more than "
                f"total={self.total} together."
            )

    def __call__(self, step: int) -> float:
        if step < self.warmup:
            weight = _SHAPES[self.warmup_shape](1.0 - step / self.warmup)
            return _mix(self.peak, self.start, weight)
        if step >= self.total:
            return self.final
        done = step - (self.total - self.decay)
        if done < 0:
            return self.peak
        return _mix(self.peak, self.final, _SHAPES[self.decay_shape](done / self.decay))
