"""Checks of arguments: whole numbers and numbers, where a bool is neither; and how a message names a value."""

from __future__ import annotations

import inspect
import math
from typing import Any


def is_count(value: Any, least: float = 1) -> bool:
    """Is it an int, not a bool, of at least `least`?"""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def is_number(value: Any) -> bool:
    """Is it a finite int or float, not a bool?"""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def check_count(name: str, value: Any, least: int = 1, advice: str = "") -> None:
    """Raise ValueError unless the argument is a whole number of at least `least`; `advice` says what to give.

    >>> check_count("microbatches", 0)
    Traceback (most recent call last):
    ValueError: microbatches is 0; give a whole number of at least 1
    """
    if not is_count(value, least):
        raise ValueError(f"{name} is {value!r}; {advice or f'give a whole number of at least {least}'}")


def check_optional_count(name: str, value: Any, least: int = 1, advice: str = "") -> None:
    """The same for an argument that may be None."""
    if value is not None:
        check_count(name, value, least, advice)


def named(value: Any) -> str:
    """A value as a message names it.

    >>> [named(value) for value in (1, {}, "sgd", None, int, len)]
    ['an int', 'a dict', "the text 'sgd'", 'None', 'the class int', 'the function len']
    """
    if value is None:
        return "None"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if isinstance(value, str):
        return f"the text {value!r}"
    if inspect.isroutine(value):
        return f"the function {getattr(value, '__name__', value)}"
    name = type(value).__name__
    return f"{'an' if name[0] in 'AEIOaeio' else 'a'} {name}"
