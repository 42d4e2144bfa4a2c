"""Interrupt handling: signals are deferred while a step updates a state.

A signal whose Python handler raises (Ctrl-C, a timeout, a SIGTERM turned into SystemExit) may arrive between any two
bytecodes: during an in-place update, or before the new state has a name. A guard in front of the existing handlers
only chooses the moment: never during an update; for a first Ctrl-C in the body of a loop over a looplib loader, at
its next batch, so that each batch is stepped, logged and saved completely; for everything else, and a second Ctrl-C,
immediately. It is installed by the first donated step or batch, never on import.
"""

from __future__ import annotations

import _signal
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from inspect import CO_GENERATOR
from itertools import islice
from types import CodeType, FrameType, FunctionType
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, WeakSet, WeakValueDictionary

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])

_HELD = tuple(
    int(getattr(signal, name))
    for name in ("SIGTERM", "SIGHUP", "SIGALRM", "SIGUSR1", "SIGUSR2", "SIGINT")
    if hasattr(signal, name)
)

_STEPS = {"looplib.steps", "looplib.transforms._compile_step"}  # modules whose functions run steps

_NOTICE = b"\nlooplib: stopping at the next batch; press Ctrl-C again to stop at once\n"

_main_thread = threading.main_thread().ident or 0

_holders: list[int] = []  # threads that hold signals back, once for each hold

_waiting: list[tuple[Guard, int]] = []  # signals that are held back

_stopping = False  # a first Ctrl-C has arrived and will be raised at the next batch

_bodies: dict[object, tuple[int, CodeType]] = {}  # loop -> frame whose loop body is working on a batch

# Destructors and callbacks, whose exceptions Python only prints: looplib's, and those of containers with weak references.
_swallowing: set[CodeType] = {
    code
    for container in (WeakKeyDictionary, WeakValueDictionary, WeakSet)
    for code in vars(container)["__init__"].__code__.co_consts
    if isinstance(code, CodeType)
}

before_raising: list[Callable[[], None]] = []  # registered by `ownership`, which knows the result in flight


class Guard:
    """Guard in front of signal handlers.

    A new one is created if a handler is found in place of this one: the code that installed it may have saved this
    guard to restore it later, and then it must still know its own handlers.
    """

    def __init__(self) -> None:
        self.handlers: dict[int, Callable[[int, FrameType | None], Any]] = {}

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        if _waiting.count((self, signum)) < 2:  # a second Ctrl-C is immediate
            _waiting.append((self, signum))
        deliver(frame)

    def take(self, signum: int, frame: FrameType | None) -> None:
        global _stopping
        running = {inner.f_code for inner in _stack(frame)}
        if signum == signal.SIGINT and not _stopping and _in_body(frame):
            _stopping = True
            with suppress(OSError):  # the reader may be gone: Ctrl-C also ends the `tee` of a pipe
                os.write(2, _NOTICE)  # not print: the signal may have arrived during a print
        elif not _swallowing.isdisjoint(running):
            _send_later(signum)
            if _close.__code__ in running:
                self.handlers[signum](signum, frame)  # although they end what the destructor waits for
        else:
            if signum == signal.SIGINT:
                _stopping = False
            try:
                self.handlers[signum](signum, frame)
            except BaseException:
                for tell in before_raising:
                    tell()
                raise


_handle = Guard()

_previous = _handle.handlers


def install() -> None:
    """Install the guard in front of the current Python handlers.

    Cheap if already installed. Does nothing off the main thread.
    """
    if threading.get_ident() == _main_thread and [*map(_signal.getsignal, _HELD)] != _handlers:
        _guard_handlers()
        _handlers[:] = map(_signal.getsignal, _HELD)


_handlers: list[Any] = []  # when `install` last looked


def _guard_handlers() -> None:
    global _handle, _previous
    for signum in _HELD:
        handler = _signal.getsignal(signum)
        if type(handler) is not Guard and callable(handler):
            if signum in _previous:
                _handle = Guard()
                _previous = _handle.handlers
            _previous[signum] = handler
            _signal.signal(signum, _handle)


def _uninstall() -> None:
    for signum in _HELD:
        if type(guard := _signal.getsignal(signum)) is Guard:
            _signal.signal(signum, guard.handlers[signum])


# Called with the thread's ident: between the two, signals wait. Calls nest. In threads other than the main one, which
# get no signals, they do nothing. Both are C functions, so no signal can arrive between the call and its effect: as
# the first statement of a `finally` they always run. Call deliver after end_hold.
begin_hold = _holders.append

end_hold = _holders.remove


def hold() -> None:
    """Start holding signals back, where a signal may still arrive first. They wait until `release`."""
    begin_hold(threading.get_ident())


def release() -> None:
    """End a `hold`. At the outermost one, waiting signals are delivered, each at its moment."""
    end_hold(threading.get_ident())
    deliver(sys._getframe(1))


def deliver(frame: FrameType | None = None) -> None:
    """Pass waiting signals to their handlers, unless they are still held back."""
    if _waiting and _main_thread not in _holders and threading.get_ident() == _main_thread:
        frame = frame or sys._getframe(1)
        try:
            guard, signum = _waiting.pop(0)
        except IndexError:  # a signal that has just arrived has taken it along
            return
        try:
            guard.take(signum, frame)
        finally:  # an exception does not keep the other signals from their handlers
            deliver(frame)


def _stack(frame: FrameType | None) -> list[FrameType]:
    frames = []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return frames


def _in_body(frame: FrameType | None) -> bool:
    return not {(id(outer), outer.f_code) for outer in _stack(frame)}.isdisjoint(_bodies.values())


def _send_later(signum: int) -> None:
    """Send the signal again once the critical section is over."""
    send = getattr(signal, "pthread_kill", lambda thread, signum: signal.raise_signal(signum))
    timer = threading.Timer(0.01, send, (_main_thread, signum))
    timer.daemon = True
    timer.start()


def swallows(function: F) -> F:
    """Mark a destructor or a weak reference's callback: a signal that arrives in it is sent again afterwards."""
    assert isinstance(function, FunctionType)
    _swallowing.add(function.__code__)
    return function


def interruptible(iterator: Iterator[T]) -> Iterator[T]:
    """Iterate, and raise an interrupt of the loop's body when the next item is requested."""
    loop = object()
    try:
        while True:
            _bodies.pop(loop, None)
            _stop_if_asked(sys._getframe(1))
            batches = list(islice(iterator, 1))
            if not batches:
                return
            if threading.get_ident() == _main_thread and (frame := _body(sys._getframe(1))):
                _bodies[loop] = frame
            yield batches.pop()  # this frame must not keep it alive
    finally:
        _leave(loop, iterator)


def _stop_if_asked(frame: FrameType) -> None:
    global _stopping
    install()
    # An inner loop is part of the outer loop's body.
    if _stopping and threading.get_ident() == _main_thread and not _in_body(frame):
        _stopping = False
        # Use the current handler: the earlier one may have been removed at the end of a `with` in the body.
        if type(guard := _signal.getsignal(signal.SIGINT)) is Guard:
            guard.take(signal.SIGINT, frame)


def _body(frame: FrameType | None) -> tuple[int, CodeType] | None:
    """Frame of the loop: the first one that is not a function of looplib or a generator in between."""
    for outer in _stack(frame):
        if not (outer.f_code.co_flags & CO_GENERATOR or outer.f_globals.get("__name__", "").startswith("looplib.")):
            return id(outer), outer.f_code
    return None


@swallows
def _leave(loop: object, iterator: Iterator[T]) -> None:
    """End a loop and, if no others are running, restore the previous handlers."""
    global _stopping
    try:
        _close(iterator)
    finally:
        _bodies.pop(loop, None)
        # The garbage collector may have called this while the guard is needed.
        modules = {outer.f_globals.get("__name__") for outer in _stack(sys._getframe())}
        needed = _bodies or _main_thread in _holders or not _STEPS.isdisjoint(modules)
        if not needed and threading.get_ident() == _main_thread:
            if _stopping:  # the loop was left by a break or an error while an interrupt was waiting
                _stopping = False
                _send_later(signal.SIGINT)
            _uninstall()


def _close(iterator: Iterator[T]) -> None:
    if hasattr(iterator, "close"):
        iterator.close()
