"""Combinations of schedules."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from looplib.schedules._schedule import _Schedule, function, functions, increasing_counts, number_or_function
from looplib.types import Schedule


@dataclass(frozen=True, slots=True)
class join(_Schedule):
    """Join schedules in sequence: each starts at its own step 0 when the previous one ends.

    >>> import looplib as ll
    >>> lr = ll.schedules.join([ll.schedules.constant(1.0), ll.schedules.linear(1.0, total=10)], boundaries=[100])
    >>> [lr(step) for step in (0, 99, 100, 105, 110)]
    [1.0, 1.0, 1.0, 0.5, 0.0]

    Args:
        schedules: the schedules, in order.
        boundaries: steps at which the second schedule starts, the third, and so on.

    Raises:
        TypeError: a schedule is not callable.
        ValueError: `boundaries` are not increasing ints, or not one fewer than the schedules.
    """

    schedules: Sequence[Schedule]
    boundaries: Sequence[int]

    def __post_init__(self) -> None:
        self._check(schedules=functions, boundaries=increasing_counts)
        if len(self.schedules) != len(self.boundaries) + 1:
            raise ValueError(
                f"join: there is one boundary between two schedules, got {len(self.schedules)} schedules and "
                f"{len(self.boundaries)} boundaries."
            )

    def __call__(self, step: int) -> float:
        index = bisect_right(self.boundaries, step)
        return self.schedules[index](step - self.boundaries[index - 1] if index else step)


@dataclass(frozen=True, slots=True)
class scaled(_Schedule):
    """Scale a schedule by a number, or multiply it by another schedule.

    >>> import looplib as ll
    >>> lr = ll.schedules.linear(1.0, total=4)
    >>> [ll.schedules.scaled(lr, 0.1)(2), ll.schedules.scaled(lr, lr)(2)]
    [0.05, 0.25]

    Args:
        schedule: the schedule to scale.
        factor: a number or a schedule.

    Raises:
        TypeError: `schedule` is not callable.
        ValueError: `factor` is neither a schedule nor a finite number.
    """

    schedule: Schedule
    factor: float | Schedule

    def __post_init__(self) -> None:
        self._check(schedule=function, factor=number_or_function)

    def __call__(self, step: int) -> float:
        factor = self.factor(step) if callable(self.factor) else self.factor
        return self.schedule(step) * factor
