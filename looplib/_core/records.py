"""Records of functions: what made a function, what it wraps, its kind, and the parts that transforms take.

To Python, gradient functions, steps, loggers and so on are all callables. Each that looplib makes, or a user with
`ll.grads.wrapper`, is therefore a `Function` with one record, `Made`. Functions that take such a function read the
record, through all wrappers that have one too.

The record also holds the call that made the function, which is its repr: `ll.make_train_step(ll.make_grad_fn(Linear,
loss_fn), ...)`. A factory returns `with_repr(result, itself, *its_arguments)`. Arguments without short code are shown
by name: modules and datasets by their class, functions by their name, lambdas by their parameters.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar, cast

from torch import nn

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")

ADDRESS = r" at 0x[0-9a-fA-F]+"
_MANY = 8  # number of entries of a container that are shown
_LONG = 200  # maximum length of a repr, such as a tensor's, in characters


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


class Made(NamedTuple):
    """Facts about a function made by looplib, or by a user with `ll.grads.wrapper`.

    Attributes:
        kind: one of `kinds.KINDS`, or None if it is not certain.
        name: name of the function that made it, such as "accumulate".
        inner: the function that it wraps.
        whole_step: True if it makes sense only for the gradients of a whole step, not of a microbatch.
        scaled: True if it also makes sense for the gradients of a scaled loss.
        per_sample: True if its gradients are those of each sample.
        max_norm: bound on the norm of each sample's gradient before they were added up.
        adds: True if it accumulates into given gradients of earlier microbatches itself.
        microbatches: the same function for several microbatches at once, which is faster.
        compare: function that raises on all ranks, before the first step, if they run different programs.
        model: the module whose gradients it computes.
        batch_norms: layers that normalize a sample by the others of its batch.
        renormed: names of the trained parameters that its forward pass writes because of `max_norm=`.
        reach: what the graph of its loss reaches (`_core.reached.Reach`).
        parts: of a step, its components (`looplib.steps.StepSpec`).
        call: the call that made it, which is its repr.
    """

    kind: str | None
    name: str
    inner: Any = None
    whole_step: bool = False
    scaled: bool = False
    per_sample: bool = False
    max_norm: float | None = None
    adds: bool = False
    microbatches: Callable[..., Any] | None = None
    compare: Callable[..., None] | None = None
    model: nn.Module | None = None
    batch_norms: tuple[str, ...] = ()
    renormed: tuple[str, ...] = ()
    reach: Any = None
    parts: Any = None
    call: Call | None = None


class Function(functools.partial[Any]):
    """A function with its record. Calling it adds no Python code."""

    record: Made

    def __repr__(self) -> str:
        return str(self.record.call or self.func)

    @property
    def compiler(self) -> Any:
        """The compiler of a step that runs as a graph."""
        return self.record.parts.compiler


Function.__name__ = "function"  # in error messages, which call it what it is to its users


def made(function: Any) -> Made | None:
    """Record of a function, or None."""
    return function.record if type(function) is Function else None


def chain(function: Any) -> Iterator[Made]:
    """Records of a function, of the function it wraps, and so on, as far as they have one."""
    while (record := made(function)) is not None:
        yield record
        function = record.inner


def mark(function: F, record: Made) -> F:
    """The function with this record, and no other."""
    plain = without_record(function)
    marked = Function(plain)
    # The name, the docstring and attributes. A function that `functools.wraps` it has no record: it is no `Function`.
    functools.update_wrapper(marked, plain)
    marked.record = record
    return cast(F, marked)


def without_record(function: T) -> T:
    """The function itself. Calls of it are faster: a subclass of `partial` lacks the fast protocol."""
    return cast(Any, function).func if type(function) is Function else function


def with_repr(result: T, factory: Callable[..., Any], *args: Any, **settings: Any) -> T:
    """Return what a factory made, with the call as its repr. Settings at their defaults are left out."""
    call = Call(factory, args, settings)
    if hasattr(type(result), "call"):
        object.__setattr__(result, "call", call)  # works for frozen records too
        return result
    record = made(result) or Made(None, factory.__name__)
    return cast(T, mark(cast(Any, result), record._replace(call=call)))


class Code(str):
    """Text that is already code, such as the name of a class in place of its instance."""

    __slots__ = ()
    __repr__ = str.__str__


def shown(value: Any) -> str:
    """A value as code.

    >>> shown({"lr": 0.1, "dtype": float, "key": lambda name: name})
    "{'lr': 0.1, 'dtype': float, 'key': lambda name: ...}"
    """
    record = made(value)
    call = getattr(value, "call", None) if record is None else record.call
    if isinstance(call, Call):
        return str(call)
    name = type(value).__name__
    if isinstance(value, nn.Module):
        return name
    if record is not None or isinstance(value, type) or inspect.isroutine(value):
        return _name_of(value)
    if isinstance(value, (list, tuple, dict)):
        return repr(_members(value)) if len(value) <= _MANY else f"{name} of {len(value)}"
    text = repr(value)
    if type(value).__module__.startswith("looplib.") and text.startswith(f"{name}("):
        return text.replace(name, _public_name(type(value)), 1)
    return f"{name}(...)" if re.search(ADDRESS, text) or len(text) > _LONG else text


def _members(values: Any) -> Any:
    """The members of a container as code, in a container of the same kind."""
    if isinstance(values, dict):
        return {key: Code(shown(value)) for key, value in values.items()}
    members = [Code(shown(value)) for value in values]
    return members if isinstance(values, list) else tuple(members)


def _name_of(function: Any) -> str:
    name: str = getattr(function, "__name__", type(function).__name__)
    return f"lambda {', '.join(inspect.signature(function).parameters)}: ..." if name == "<lambda>" else name


def _public_name(thing: Any) -> str:
    """Public name of an object: `ll.ema`, `ll.optim.swa`."""
    looplib, name = sys.modules["looplib"], thing.__name__
    if vars(looplib).get(name) is thing:
        return f"ll.{name}"
    room = thing.__module__.split(".")[1]
    return f"ll.{room}.{name}" if getattr(getattr(looplib, room, None), name, None) is thing else name
