"""What schedules share: the shapes of curves, their repr and their checks."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields
from itertools import pairwise
from typing import Any, Literal

from looplib._core.checks import is_count, is_number

Shape = Literal["linear", "cosine", "1-sqrt"]


Natural = int  # at least 0, where a plain int is at least 1


# What is left to fall after a fraction of the way; a rise is the same curve run backwards.
_SHAPES: dict[Shape, Callable[[float], float]] = {
    "linear": lambda progress: 1.0 - progress,
    "cosine": lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)),
    "1-sqrt": lambda progress: 1.0 - math.sqrt(progress),
}


# Two values are mixed as weight * a + (1 - weight) * b, not b + weight * (a - b): that is exact at both ends.
def _mix(start: float, final: float, weight: float) -> float:
    return weight * start + (1.0 - weight) * final


class _Schedule:
    """What they share: every field is checked by its annotation, and numbers are made Python floats."""

    __slots__ = ()

    def __post_init__(self) -> None:
        for item in fields(self):  # type: ignore[arg-type]
            if item.init:
                name = f"{type(self).__name__}: {item.name}"
                value = _checked(name, str(item.type), getattr(self, item.name))
                object.__setattr__(self, item.name, value)


def _checked(name: str, kind: str, value: Any) -> Any:
    if kind == "float | Schedule":
        kind = "Schedule" if callable(value) else "float"
    match kind:
        case "float":
            if not is_number(value):
                raise ValueError(f"{name} must be a finite number, got {value!r}.")
            return float(value)
        case "int" | "Natural":
            lowest = 1 if kind == "int" else 0
            if not is_count(value, lowest):
                raise ValueError(f"{name} must be an int of at least {lowest}, got {value!r}.")
        case "Sequence[int]":
            value = tuple(value)
            if any(type(step) is not int for step in value) or any(a >= b for a, b in pairwise((0, *value))):
                raise ValueError(f"{name} must be ints of at least 1 that increase, got {value!r}.")
        case "Schedule":
            if not callable(value):
                raise TypeError(
                    f"{name}: expected a function of the step (ll.schedules.constant(x) is one), got {value!r}."
                )
        case "Sequence[Schedule]":
            return tuple(_checked(name, "Schedule", inner) for inner in value)
        case "Shape":
            if value not in _SHAPES:
                raise ValueError(f"{name} must be one of {', '.join(map(repr, _SHAPES))}, got {value!r}.")
    return value
