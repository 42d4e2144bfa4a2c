"""Better errors: short tracebacks, notes about the batch and the layer, and what to write instead of an attribute."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import FrozenInstanceError
from pathlib import Path
from traceback import walk_tb
from typing import Any, NoReturn, ParamSpec, TypeVar

from torch import Tensor, nn

from looplib._core.checks import named

P = ParamSpec("P")
R = TypeVar("R")

# looplib, and how torch calls a module's forward
_FOLDED = f"{Path(__file__).parents[1]}{os.sep}", nn.modules.module.__file__


def fold(error: BaseException) -> None:
    """Take the frames between the user's code and where an error was raised out of its traceback.

    They stay if LOOPLIB_FULL_TRACEBACKS is set in the environment. It changes what a traceback shows and nothing else.
    """
    if "LOOPLIB_FULL_TRACEBACKS" in os.environ:
        return
    entries, entry, folded = [], error.__traceback__, None
    while entry is not None:
        entries.append(entry)
        entry = entry.tb_next
    for entry in reversed(entries):
        if folded is None or not entry.tb_frame.f_code.co_filename.startswith(_FOLDED):
            entry.tb_next, folded = folded, entry
    error.__traceback__ = folded


def note_batch(error: Exception, batch: Any, layers: Iterable[tuple[str, nn.Module]]) -> None:
    """Add a description of the batch to an error from the user's function or torch, and of the layer that raised it.

    Frames are read for this note alone: a layer that raised is the `self` of one of them, and the error is the same without.
    """
    frames = [frame for frame, _ in walk_tb(error.__traceback__)]
    if str(frames[-1].f_globals.get("__name__")).startswith("looplib."):
        return
    note = f"The batch was {described_batch(batch)}."
    names = {id(layer): name for name, layer in layers}
    running = [frame.f_locals["self"] for frame in frames if id(frame.f_locals.get("self")) in names]
    if running:
        layer = running[-1]
        name = names[id(layer)] or "the model itself"
        note += f" The layer was {name}: {type(layer).__name__}({layer.extra_repr()})."
    error.add_note(note)


def described_batch(batch: Any) -> str:
    """Description of a batch in words.

    >>> import torch
    >>> described_batch((torch.zeros(6, 4), {"label": torch.zeros(6, dtype=torch.int64)}))
    'a tuple (float32 (6, 4), a dict {label: int64 (6,)})'
    """
    if isinstance(batch, Tensor):
        device = "" if batch.device.type == "cpu" else f" on {batch.device}"
        return f"{str(batch.dtype).removeprefix('torch.')} {tuple(batch.shape)}{device}"
    if isinstance(batch, dict):
        members = [f"{key}: {described_batch(value)}" for key, value in batch.items()]
        return f"a dict {{{', '.join(members[:20])}}}"
    if isinstance(batch, (tuple, list)):
        return f"{named(batch)} ({', '.join(map(described_batch, batch[:20]))})"
    return named(batch)


def missing(record: Any, owner: str, name: str, advice: Mapping[str, str]) -> AttributeError:
    """Error for an attribute that a record does not have, with what to write instead."""
    instead = f": {advice[name]}" if name in advice else ""
    return AttributeError(f"{owner} has no attribute {name!r}{instead}", name=name, obj=record)


def with_advice(advice: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorator: add what to write to Python's error for a call that does not fit the signature.

    >>> @with_advice("write halve(x)")
    ... def halve(x):
    ...     return x / 2
    >>> halve(1.0, 2.0)
    Traceback (most recent call last):
    TypeError: halve() takes 1 positional argument but 2 were given: write halve(x)
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def called(*args: P.args, **settings: P.kwargs) -> R:
            __tracebackhide__ = True
            try:
                return function(*args, **settings)
            except TypeError as error:
                try:
                    signature.bind(*args, **settings)
                except TypeError:
                    raise TypeError(f"{error}: {advice}") from None
                raise

        return called

    return decorate


def no_assignment(owner: str, advice: str) -> Callable[[Any, str, Any], NoReturn]:
    """The `__setattr__` of a frozen record, whose error says what to write; {name} in the advice is the attribute's."""

    def __setattr__(record: Any, name: str, value: Any) -> NoReturn:
        raise FrozenInstanceError(f"cannot assign to {name!r}: {owner} does not change; {advice.format(name=name)}")

    return __setattr__
