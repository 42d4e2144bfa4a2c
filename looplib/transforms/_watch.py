"""Watched values: what a graph would freeze of the Python around it, and whether that has changed since."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from torch import Tensor

from looplib._core.closures import is_installed, is_plain, walk
from looplib.transforms._expression import kind_of


class Held(NamedTuple):
    """A plain value or a tensor outside of the state that a step may read.

    Attributes:
        name: as messages name it.
        read: gives the value that stands there now.
        value: the value when the step was traced.
    """

    name: str
    read: Callable[[], Any]
    value: Any


def held_by(*functions: Any) -> list[Held]:
    """The plain values and tensors outside of the state that these functions may read.

    The variables of looplib's own wrappers are left out: they hold what they were made with, for good.
    """
    return [
        Held(variable.path, variable.read, variable.value)
        for variable in walk(*functions)
        if is_plain(variable.value) and not is_installed(variable.owner)
    ]


def changed(held: Iterable[Held]) -> list[str]:
    """The names of those that are no longer what they were; a tensor may be another of its kind."""
    return [name for name, read, value in held if (now := read()) is not value and not _alike(now, value)]


def _alike(now: Any, value: Any) -> bool:
    if isinstance(now, Tensor) and isinstance(value, Tensor):
        return kind_of(now) == kind_of(value)
    return type(now) is type(value) and bool(now == value or now != now)
