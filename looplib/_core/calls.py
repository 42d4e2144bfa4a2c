"""Reprs that read as the code that made an object: `ll.make_train_step(ll.make_grad_fn(Linear, loss_fn), ...)`.

A factory returns `with_repr(result, itself, *its_arguments)`. Arguments without short code are shown by name: modules
and datasets by their class, functions by their name, lambdas by their parameters.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar, cast

from torch import nn

from looplib._core import kinds

T = TypeVar("T")

_MANY = 8  # number of entries of a container that are shown
_LONG = 200  # maximum length of a repr, such as a tensor's, in characters
_ADDRESS = r" at 0x[0-9a-fA-F]+"


class Call(NamedTuple):
    """A call of a factory with its arguments."""

    factory: Callable[..., Any]
    args: tuple[Any, ...]
    settings: Mapping[str, Any]

    def __str__(self) -> str:
        defaults = inspect.signature(self.factory).parameters
        named = [
            f"{name}={shown(value)}"
            for name, value in self.settings.items()
            if name not in defaults or value is not defaults[name].default
        ]
        return f"{_public_name(self.factory)}({', '.join([*map(shown, self.args), *named])})"


class Code(str):
    """Text that is already code, such as the name of a class in place of its instance."""

    __slots__ = ()


class Function(functools.partial[Any]):
    """A function whose repr is the call that made it. Calling it adds no Python code."""

    call: Call

    def __repr__(self) -> str:
        return str(self.call)


Function.__name__ = "function"  # in error messages, which call it what it is to its users


def with_repr(made: T, factory: Callable[..., Any], *args: Any, **settings: Any) -> T:
    """Return the object that a factory made, with the call as its repr. Settings at their defaults are left out."""
    call = Call(factory, args, settings)
    if hasattr(type(made), "call"):
        object.__setattr__(made, "call", call)  # works for frozen records too
        return made
    function: Any = Function(made)  # type: ignore[arg-type]
    vars(function).update(vars(made), call=call)
    if (record := kinds.made(made)) is not None:
        kinds.mark(function, record)
    return function  # type: ignore[no-any-return]


def without_repr(function: T) -> T:
    """The function itself, without its repr. Calls of it are faster: a subclass of `partial` lacks the fast protocol."""
    return cast(Any, function).func if type(function) is Function else function


def shown(value: Any) -> str:
    """A value as code.

    >>> shown({"lr": 0.1, "dtype": float, "key": lambda name: name})
    "{'lr': 0.1, 'dtype': float, 'key': lambda name: ...}"
    """
    return next(text(value) for is_one, text in _SHOWN if is_one(value))


def _object(value: Any) -> str:
    text = repr(value)
    if type(value).__module__.startswith("looplib.") and text.startswith(f"{type(value).__name__}("):
        return text.replace(type(value).__name__, _public_name(type(value)), 1)
    return f"{type(value).__name__}(...)" if re.search(_ADDRESS, text) or len(text) > _LONG else text


def _function(function: Any) -> str:
    name: str = getattr(function, "__name__", type(function).__name__)
    if name != "<lambda>":
        return name
    return f"lambda {', '.join(inspect.signature(function).parameters)}: ..."


def _container(values: Any) -> str:
    if len(values) > _MANY:
        return f"{type(values).__name__} of {len(values)}"
    if isinstance(values, dict):
        return f"{{{', '.join(f'{key!r}: {shown(value)}' for key, value in values.items())}}}"
    inside = ", ".join(map(shown, values))
    if isinstance(values, list):
        return f"[{inside}]"
    return f"({inside},)" if len(values) == 1 else f"({inside})"


# Kinds of values, the first that fits, and how to write each as code.
_SHOWN: tuple[tuple[Callable[[Any], bool], Callable[[Any], str]], ...] = (
    (inspect.isroutine, _function),
    (lambda value: isinstance(getattr(value, "call", None), Call), lambda value: str(value.call)),
    (lambda value: isinstance(value, Code), str),
    (lambda value: isinstance(value, nn.Module), lambda value: type(value).__name__),
    (lambda value: isinstance(value, type), lambda value: value.__name__),
    (lambda value: isinstance(value, (list, tuple, dict)), _container),
    (lambda value: True, _object),
)


def _public_name(thing: Any) -> str:
    """Public name of an object: `ll.ema`, `ll.optim.swa`."""
    looplib, name = sys.modules["looplib"], thing.__name__
    if vars(looplib).get(name) is thing:
        return f"ll.{name}"
    room = thing.__module__.split(".")[1]
    return f"ll.{room}.{name}" if getattr(getattr(looplib, room, None), name, None) is thing else name
