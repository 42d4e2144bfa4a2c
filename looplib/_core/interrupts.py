"""Interrupts: signals wait while a step updates a state, and Ctrl-C waits for the end of a batch.

A signal whose Python handler raises (Ctrl-C, a timeout, a SIGTERM turned into SystemExit) may arrive between any two
bytecodes. A guard in front of the existing handlers chooses the moment. During an update it sends the signal again some
milliseconds later, when the caller's variable holds the result: what is left is the moment of about 100 ns between the
return of a step and the assignment. A first Ctrl-C in the body of a loop over a looplib loader is raised at its next
batch, so that each batch is stepped, logged and saved completely. Everything else, and a second Ctrl-C, is immediate.

The guard is installed by the first step or batch, never on import, and removed at the end of a loop.
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
from types import CodeType, FrameType
from typing import Any, TypeVar

T = TypeVar("T")

_HELD = tuple(
    int(getattr(signal, name))
    for name in ("SIGTERM", "SIGHUP", "SIGALRM", "SIGUSR1", "SIGUSR2", "SIGINT")
    if hasattr(signal, name)  # Windows has SIGTERM and SIGINT
)

_NOTICE = b"\nlooplib: stopping at the next batch; press Ctrl-C again to stop at once\n"

_main_thread = threading.main_thread().ident or 0

_holders: list[int] = []  # threads that hold signals back, once for each hold

_stopping = False  # a first Ctrl-C has arrived and will be raised at the next batch

_bodies: dict[object, tuple[int, CodeType]] = {}  # loop -> frame whose loop body is working on a batch

# Called with the thread's ident: between the two, signals wait. Calls nest. In threads other than the main one, which
# get no signals, they do nothing. Both are C functions, so no signal can arrive between the call and its effect: as
# the first statement of a `finally` they always run.
begin_hold = _holders.append

end_hold = _holders.remove


class Guard:
    """Guard in front of signal handlers.

    A new one is created if a handler is found in place of this one: the code that installed it may have saved this
    guard to restore it later, and then it must still know its own handlers.
    """

    def __init__(self) -> None:
        self.handlers: dict[int, Callable[[int, FrameType | None], Any]] = {}

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        global _stopping
        if _main_thread in _holders:
            # What predicates listen to is noted at once, since that raises nothing.
            note = getattr(self.handlers[signum], "note", None)
            if note is None or not note(signum):
                _send_later(signum)
        elif signum == signal.SIGINT and not _stopping and _in_body(frame):
            _stopping = True
            with suppress(OSError):  # the reader may be gone: Ctrl-C also ends the `tee` of a pipe
                os.write(2, _NOTICE)  # not print: the signal may have arrived during a print
        else:
            if signum == signal.SIGINT:
                _stopping = False
            self.handlers[signum](signum, frame)


_handle = Guard()


def install() -> None:
    """Install the guard in front of the current Python handlers.

    Cheap if already installed. Does nothing off the main thread.
    """
    if threading.get_ident() == _main_thread and [*map(_signal.getsignal, _HELD)] != _handlers:
        _guard_handlers()
        _handlers[:] = map(_signal.getsignal, _HELD)


_handlers: list[Any] = []  # when `install` last looked


def _guard_handlers() -> None:
    global _handle
    for signum in _HELD:
        handler = _signal.getsignal(signum)
        if type(handler) is not Guard and callable(handler):
            if signum in _handle.handlers:
                _handle = Guard()
            _handle.handlers[signum] = handler
            _signal.signal(signum, _handle)


def _uninstall() -> None:
    for signum in _HELD:
        if type(guard := _signal.getsignal(signum)) is Guard:
            _signal.signal(signum, guard.handlers[signum])


def _send_later(signum: int) -> None:
    """Send a signal again in 10 ms."""
    send = getattr(signal, "pthread_kill", lambda thread, signum: signal.raise_signal(signum))
    timer = threading.Timer(0.01, send, (_main_thread, signum))
    timer.daemon = True
    timer.start()


def interruptible(iterator: Iterator[T], note: Callable[[], object] = lambda: None) -> Iterator[T]:
    """Iterate, call `note` for each item, and raise an interrupt of the loop's body when the next one is requested."""
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
            note()
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
            guard.handlers[signal.SIGINT](signal.SIGINT, frame)


def _stack(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _in_body(frame: FrameType | None) -> bool:
    """True if this frame was called from the body of a loop. A loop that an error has left may still be in memory."""
    return bool(_bodies) and any((id(outer), outer.f_code) in _bodies.values() for outer in _stack(frame))


def _body(frame: FrameType | None) -> tuple[int, CodeType] | None:
    """Frame of the loop: the first one that is not a function of looplib or a generator in between."""
    for outer in _stack(frame):
        if not (outer.f_code.co_flags & CO_GENERATOR or outer.f_globals.get("__name__", "").startswith("looplib.")):
            return id(outer), outer.f_code
    return None


def _leave(loop: object, iterator: Iterator[T]) -> None:
    """End a loop and, if no others are running, restore the previous handlers."""
    global _stopping
    try:
        if hasattr(iterator, "close"):
            iterator.close()
    finally:
        _bodies.pop(loop, None)
        if not _bodies and _main_thread not in _holders and threading.get_ident() == _main_thread:
            if _stopping:  # the loop was left by a break or an error while an interrupt was waiting
                _stopping = False
                _send_later(signal.SIGINT)
            _uninstall()
