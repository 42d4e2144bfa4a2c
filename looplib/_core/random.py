"""Random streams and seeds.

Randomness in looplib never comes from a shared stream that advances: each draw belongs to a position (a step, an
epoch, a sample), and the position is hashed into a seed (`mix`).

torch has one random stream of the CPU for all threads. Steps seed it and put it back, so one thread at a time takes a
step: `turn`. A loader does not wait for that, since a forward pass may take long: while another thread takes steps, its
reads draw from a generator of their own, to which a dispatch mode hands torch's operations. A user's thread that draws
by itself, such as by `torch.rand`, draws from torch's stream wherever that stands.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from looplib._core.torch_private import TorchDispatchMode, argument_names

_MASK = (1 << 64) - 1
_FACTOR = 0xD1342543DE82EF95
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB

turn = threading.RLock()  # held while torch's streams are another's than the user's


def mix(*values: int) -> int:
    """Hash any integers into a well-mixed 63-bit seed: equal for equal ones, unrelated for others.

    It is a polynomial in the values, so that their order matters, followed by the finalizer of splitmix64 (Steele,
    Lea and Flood, "Fast splittable pseudorandom number generators", 2014), so that neighboring inputs share nothing,
    in their low 32 bits either.

    >>> mix(0, 1) == mix(0, 1), mix(0, 1) == mix(1, 0)
    (True, False)
    """
    seed = len(values)
    for value in values:
        seed = (seed * _FACTOR + value + 1) & _MASK
    seed = ((seed ^ (seed >> 30)) * _FIRST) & _MASK
    seed = ((seed ^ (seed >> 27)) * _SECOND) & _MASK
    return (seed ^ (seed >> 31)) >> 1


@contextmanager
def restored(*generators: torch.Generator) -> Iterator[None]:
    """Restore the states of these random streams at the end of the block."""
    with turn:  # between steps of other threads
        states = [generator.get_state() for generator in generators]
    try:
        yield
    finally:
        with turn:
            for generator, state in zip(generators, states, strict=True):
                generator.set_state(state)


class _Thread(threading.local):
    own: torch.Generator | None = None  # from which this thread draws at present, in place of torch's


_thread = _Thread()
_stepping: list[int] = []  # the thread that took a step last


def _after_fork() -> None:
    """Let a child process take turns, whatever a thread of its parent was doing."""
    global turn
    turn = threading.RLock()
    _stepping.clear()


os.register_at_fork(after_in_child=_after_fork)


def takes_step(thread: int) -> None:
    """Remember that a thread takes steps: reads of other threads do not borrow torch's stream from now on."""
    _stepping[:] = (thread,)


def stream() -> torch.Generator:
    """The generator that this thread's operations on the CPU draw from."""
    return _thread.own or torch.default_generator


@contextmanager
def kept() -> Iterator[None]:
    """Let the block seed and draw from `stream()`, without waiting for steps, and put torch's stream back afterwards."""
    mine = _stepping in ([], [threading.get_ident()]) and turn.acquire(blocking=False)
    if mine or _thread.own is not None:
        generator = stream()
        state = generator.get_state()
        try:
            yield
        finally:
            generator.set_state(state)
            if mine:
                turn.release()
        return
    _thread.own = torch.Generator()
    _thread.own.set_state(torch.default_generator.get_state())
    try:
        with _Redirected(_thread.own):
            yield
    finally:
        _thread.own = None


class _Redirected(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Mode in which operations on the CPU draw from this generator unless they are given one."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.generator = generator

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags or kwargs.get("generator") is not None:
            return func(*args, **kwargs)
        devices = {leaf.device.type for leaf in (*args, *kwargs.values()) if isinstance(leaf, Tensor)}
        if not {*devices, torch.device(kwargs.get("device") or "cpu").type} <= {"cpu"}:
            return func(*args, **kwargs)
        if (with_generator := _with_generator(func)) is not None:
            return with_generator(*args, **kwargs, generator=self.generator)
        with turn:  # an operation without such an argument borrows torch's stream
            state = torch.default_generator.get_state()
            torch.default_generator.set_state(self.generator.get_state())
            try:
                return func(*args, **kwargs)
            finally:
                self.generator.set_state(torch.default_generator.get_state())
                torch.default_generator.set_state(state)


@functools.cache
def _with_generator(func: Any) -> Any:
    """The overload of an operation that has the same arguments and a generator, or None."""
    overloads = [getattr(func.overloadpacket, name) for name in func.overloadpacket.overloads()]
    wanted = argument_names(func) | {"generator"}
    return next((each for each in (func, *overloads) if argument_names(each) == wanted), None)
