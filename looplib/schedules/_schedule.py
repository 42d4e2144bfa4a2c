"""Curve shapes and argument checks shared by the schedules, and schedules in sequence."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, fields
from itertools import pairwise
from typing import Any, Literal, Self, cast

from looplib._core.checks import is_count, is_number
from looplib._core.records import kinds_of_classes
from looplib.types import Schedule

Shape = Literal["linear", "cosine", "1-sqrt"]


# Fraction of the height that is left after a fraction of the way. A rise is the same curve in reverse.
_SHAPES: dict[Shape, Callable[[float], float]] = {
    "linear": lambda progress: 1.0 - progress,
    "cosine": lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)),
    "1-sqrt": lambda progress: 1.0 - math.sqrt(progress),
}


# Interpolate as weight * a + (1 - weight) * b instead of b + weight * (a - b), which is inexact at one end.
def _mix(start: float, final: float, weight: float) -> float:
    return weight * start + (1.0 - weight) * final


class _Schedule:
    """Base of schedules: a record whose fields are checked on creation."""

    __slots__ = ()

    def __new__(cls, *args: Any, **settings: Any) -> Self:
        """Raise TypeError for a second number by position, which could be any of those that follow."""
        all_fields = [field for field in fields(cast(Any, cls)) if field.init]
        by_position = [field.name for field in all_fields if not field.kw_only]
        by_name = [field for field in all_fields if field.kw_only]
        if len(args) > len(by_position):
            needed = [f"{field.name}=..." for field in by_name if field.default is MISSING]
            others = [f"{field.name}=" for field in by_name if field.default is not MISSING]
            optional = f", with {', '.join(others)} where meant" if others else ""
            raise TypeError(
                f"{cls.__name__}() takes {', '.join(by_position)} by position, and got {len(args)} positional arguments: write "
                f"ll.schedules.{cls.__name__}({', '.join([*by_position, *needed])}){optional}"
            )
        return super().__new__(cls)

    @property
    def end(self) -> int | None:
        """The step from which it keeps its value; None for one that has no such step, or may have none."""
        return None

    def _check(self, **checks: Callable[[str, Any], Any]) -> None:
        """Check each of these fields, and store the result of its check: numbers as floats, sequences as tuples."""
        for field, check in checks.items():
            object.__setattr__(self, field, check(f"{type(self).__name__}: {field}", getattr(self, field)))

    def _default(self, **values: Any) -> None:
        """Give each of these fields its value where it is None."""
        for field, value in values.items():
            if getattr(self, field) is None:
                object.__setattr__(self, field, value)


class _Ending(_Schedule):
    """Base of schedules that keep their value from step `total` on."""

    __slots__ = ()
    total: int

    @property
    def end(self) -> int:
        return self.total

    def _steps(self, name: str, value: Any) -> int:
        """Check for a number of steps, or a float for a share of `total`, which is checked first."""
        if type(value) is not float:
            return count_or_zero(name, value)
        if not 0 <= value < 1:
            raise ValueError(
                f"{name} must be an int, or a float of at least 0 and below 1 for a share of total, got {value!r}."
            )
        return round(value * self.total)


kinds_of_classes[_Schedule] = "schedule"


def number(name: str, value: Any) -> float:
    if not is_number(value):
        raise ValueError(f"{name} must be a finite number, got {value!r}.")
    return float(value)


def count(name: str, value: Any, least: int = 1) -> int:
    if not is_count(value, least):
        raise ValueError(f"{name} must be an int of at least {least}, got {value!r}.")
    return value  # type: ignore[no-any-return]


def count_or_zero(name: str, value: Any) -> int:
    return count(name, value, least=0)


def increasing_counts(name: str, value: Any) -> tuple[int, ...]:
    steps = tuple(value)
    if any(type(step) is not int for step in steps) or any(a >= b for a, b in pairwise((0, *steps))):
        raise ValueError(f"{name} must be ints of at least 1 that increase, got {steps!r}.")
    return steps


def function(name: str, value: Any) -> Schedule:
    if not callable(value):
        raise TypeError(f"{name}: expected a function of the step (ll.schedules.constant(x) is one), got {value!r}.")
    return value  # type: ignore[no-any-return]


def functions(name: str, value: Any) -> tuple[Schedule, ...]:
    return tuple(function(name, inner) for inner in value)


def number_or_function(name: str, value: Any) -> float | Schedule:
    return function(name, value) if callable(value) else number(name, value)


def shape(name: str, value: Any) -> Shape:
    if value not in _SHAPES:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, _SHAPES))}, got {value!r}.")
    return value  # type: ignore[no-any-return]


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
