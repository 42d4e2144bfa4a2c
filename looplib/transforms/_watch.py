"""Watched values: Python values that a graph would freeze, and changes to them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from torch import Tensor

from looplib._core.closures import is_installed, is_plain, walk
from looplib._core.trees import same
from looplib.transforms._expression import kind_of


class Held(NamedTuple):
    """A plain value or a tensor outside the state that a step may read.

    Attributes:
        name: its name in messages.
        read: function that returns its current value.
        value: its value when the step was traced.
    """

    name: str
    read: Callable[[], Any]
    value: Any


def held_by(*functions: Any) -> list[Held]:
    """Plain values and tensors outside the state that these functions may read.

    Variables of looplib's own wrappers are left out, since they never change.
    """
    return [
        Held(variable.path, variable.read, variable.value)
        for variable in walk(*functions)
        if is_plain(variable.value) and not is_installed(variable.owner)
    ]


def changed(held: Iterable[Held]) -> list[str]:
    """Names of the values that have changed. A tensor may be replaced by one of the same shape and dtype."""
    return [name for name, read, value in held if (now := read()) is not value and not _alike(now, value)]


def _alike(now: Any, value: Any) -> bool:
    if isinstance(now, Tensor) and isinstance(value, Tensor):
        return kind_of(now) == kind_of(value)
    return same(now, value)
