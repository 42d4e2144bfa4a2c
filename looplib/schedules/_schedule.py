"""Curve shapes and argument checks shared by the schedules."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any, Literal

from looplib._core.checks import is_count, is_number
from looplib._core.records import instances_are
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


@instances_are("schedule")
class _Schedule:
    """Base of schedules: a record whose fields are checked on creation."""

    __slots__ = ()
    total: int

    def _check(self, **checks: Callable[[str, Any], Any]) -> None:
        """Check each of these fields, and store the result of its check: numbers as floats, sequences as tuples."""
        for field, check in checks.items():
            object.__setattr__(self, field, check(f"{type(self).__name__}: {field}", getattr(self, field)))

    def _steps(self, name: str, value: Any) -> int:
        """Check for a number of steps, or a float for a share of `total`, which is checked first."""
        if type(value) is not float:
            return count_or_zero(name, value)
        if not 0 <= value < 1:
            raise ValueError(
                f"{name} must be an int, or a float of at least 0 and below 1 for a share of total, got {value!r}."
            )
        return round(value * self.total)


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
