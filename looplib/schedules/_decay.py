"""Decay schedules.

A schedule is called with the number of updates made so far (the first update uses `schedule(0)`) and returns a float,
so there is no scheduler object to step, save or forget. The schedules here are frozen records that print as the code
that makes them. Any `Callable[[int], float]`, such as a lambda, works too, and each can be used for momentum or
weight decay as well as for the learning rate.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass

from looplib.schedules._schedule import _Ending, _mix, _Schedule, count, increasing_counts, number


@dataclass(frozen=True, slots=True)
class constant(_Schedule):
    """Constant schedule: the same `value` at every step.

    >>> import looplib as ll
    >>> ll.schedules.constant(3e-4)(1000)
    0.0003

    Args:
        value: the value.

    Raises:
        ValueError: `value` is not finite.
    """

    value: float

    def __post_init__(self) -> None:
        self._check(value=number)

    def __call__(self, step: int) -> float:
        return self.value


@dataclass(frozen=True, slots=True)
class linear(_Ending):
    """Linear decay: a straight line from `start` at step 0 to `final` at step `total`, and `final` from then on.

    >>> import looplib as ll
    >>> [ll.schedules.linear(1.0, total=4)(step) for step in (0, 1, 2, 4, 100)]
    [1.0, 0.75, 0.5, 0.0, 0.0]

    A line may also rise: torch's `LinearLR` is by default `linear(lr / 3, total=5, final=lr)`.

    Args:
        start: value at step 0.
        total: number of steps.
        final: value from step `total` on.

    Raises:
        ValueError: a number is not finite, or `total` is not an int of at least 1.
    """

    start: float
    _: KW_ONLY
    total: int
    final: float = 0.0

    def __post_init__(self) -> None:
        self._check(start=number, total=count, final=number)

    def __call__(self, step: int) -> float:
        weight = max(0, self.total - step) / self.total
        return _mix(self.start, self.final, weight)


@dataclass(frozen=True, slots=True)
class cosine(_Ending):
    """Cosine decay: half a cosine wave from `start` at step 0 to `final` at step `total`, and `final` from then on.

    >>> import looplib as ll
    >>> [round(ll.schedules.cosine(1.0, total=4)(step), 3) for step in (0, 1, 2, 4, 100)]
    [1.0, 0.854, 0.5, 0.0, 0.0]

    Args:
        start: value at step 0.
        total: number of steps.
        cycles: number of cosine waves, 0.5 by default. With a different number the value goes up and down between
            `start` and `final`, and keeps the value that it has at step `total`.
        final: value from step `total` on.

    Raises:
        ValueError: a number is not finite, or `total` is not an int of at least 1.

    Source: https://arxiv.org/abs/1608.03983
    """

    start: float
    _: KW_ONLY
    total: int
    cycles: float = 0.5
    final: float = 0.0

    def __post_init__(self) -> None:
        self._check(start=number, total=count, cycles=number, final=number)

    def __call__(self, step: int) -> float:
        angle = 2.0 * math.pi * self.cycles * (min(step, self.total) / self.total)
        weight = 0.5 * (1.0 + math.cos(angle))
        return _mix(self.start, self.final, weight)


@dataclass(frozen=True, slots=True)
class polynomial(_Ending):
    """Polynomial decay: from `start` to `final` as a power of the fraction of steps left, and `final` from then on.

    >>> import looplib as ll
    >>> [ll.schedules.polynomial(1.0, total=4, power=2.0)(step) for step in (0, 1, 2, 4, 100)]
    [1.0, 0.5625, 0.25, 0.0, 0.0]

    Args:
        start: value at step 0.
        total: number of steps.
        final: value from step `total` on.
        power: exponent, above 0.

    Raises:
        ValueError: a number is not finite, `total` is not an int of at least 1, or `power` is not positive.
    """

    start: float
    _: KW_ONLY
    total: int
    final: float = 0.0
    power: float = 1.0

    def __post_init__(self) -> None:
        self._check(start=number, total=count, final=number, power=number)
        if self.power <= 0:
            raise ValueError(f"polynomial: power must be above 0, got {self.power!r}.")

    def __call__(self, step: int) -> float:
        weight: float = (max(0, self.total - step) / self.total) ** self.power
        return _mix(self.start, self.final, weight)


@dataclass(frozen=True, slots=True)
class exponential(_Schedule):
    """Exponential decay: `start` times `factor` to the power of the step.

    >>> import looplib as ll
    >>> [ll.schedules.exponential(1.0, factor=0.5)(step) for step in (0, 1, 3)]
    [1.0, 0.5, 0.125]

    Args:
        start: value at step 0.
        factor: factor per step.

    Raises:
        ValueError: a number is not finite.
    """

    start: float
    _: KW_ONLY
    factor: float

    def __post_init__(self) -> None:
        self._check(start=number, factor=number)

    def __call__(self, step: int) -> float:
        return self.start * self.factor**step


@dataclass(frozen=True, slots=True)
class step_decay(_Schedule):
    """Step decay: `start`, multiplied by `factor` after every `every` steps.

    >>> import looplib as ll
    >>> [ll.schedules.step_decay(1.0, every=30, factor=0.5)(step) for step in (0, 29, 30, 60)]
    [1.0, 1.0, 0.5, 0.25]

    Args:
        start: value at step 0.
        every: number of steps between changes.
        factor: factor for each change.

    Raises:
        ValueError: a number is not finite, or `every` is not an int of at least 1.
    """

    start: float
    _: KW_ONLY
    every: int
    factor: float = 0.1

    def __post_init__(self) -> None:
        self._check(start=number, every=count, factor=number)

    def __call__(self, step: int) -> float:
        return self.start * self.factor ** (step // self.every)


@dataclass(frozen=True, slots=True)
class multistep_decay(_Schedule):
    """Piecewise-constant decay: `start`, multiplied by `factor` at each of the `boundaries`.

    >>> import looplib as ll
    >>> [ll.schedules.multistep_decay(1.0, boundaries=[30, 80], factor=0.5)(step) for step in (0, 29, 30, 80)]
    [1.0, 1.0, 0.5, 0.25]

    Args:
        start: value at step 0.
        boundaries: steps at which the value changes, increasing.
        factor: factor for each change.

    Raises:
        ValueError: a number is not finite, or `boundaries` are not increasing ints.
    """

    start: float
    _: KW_ONLY
    boundaries: Sequence[int]
    factor: float = 0.1

    def __post_init__(self) -> None:
        self._check(start=number, boundaries=increasing_counts, factor=number)

    def __call__(self, step: int) -> float:
        return self.start * self.factor ** bisect_right(self.boundaries, step)


@dataclass(frozen=True, slots=True)
class inverse_sqrt(_Schedule):
    """Inverse square root decay: `start` divided by the square root of `1 + step / timescale`.

    >>> import looplib as ll
    >>> [ll.schedules.inverse_sqrt(1.0, timescale=100)(step) for step in (0, 300, 1500)]
    [1.0, 0.5, 0.25]

    The value is half of `start` after three times the timescale. The schedule of the original Transformer is
    `ll.schedules.warmup(ll.schedules.inverse_sqrt(peak, timescale=n), n)`.

    Args:
        start: value at step 0.
        timescale: number of steps.

    Raises:
        ValueError: `start` is not finite, or `timescale` is not an int of at least 1.

    Source: https://arxiv.org/abs/1706.03762
    """

    start: float
    _: KW_ONLY
    timescale: int

    def __post_init__(self) -> None:
        self._check(start=number, timescale=count)

    def __call__(self, step: int) -> float:
        return self.start / math.sqrt((step + self.timescale) / self.timescale)
