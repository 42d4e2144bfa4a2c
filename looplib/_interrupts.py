"""When an interrupt is taken.

A signal whose Python handler raises (Ctrl-C, a time-out, a SIGTERM turned into SystemExit) may strike between
any two bytecodes: amid an update in place, or when the new state has no name yet. Our handler stands before
the one that was there and only chooses the moment: never within an update; a first Ctrl-C in the body of a
loop over a looplib loader at its next batch, so that each batch is stepped, logged and saved whole; everything
else, and a second Ctrl-C, at once. It is put up by the first donated step or batch, never at import.
"""

from __future__ import annotations

import _signal  # the signal module's wrappers turn numbers into enums, at 2 us a call
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any, Generic, TypeVar

T = TypeVar("T")

_HELD = tuple(
    int(getattr(signal, name))
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGALRM", "SIGUSR1", "SIGUSR2")
    if hasattr(signal, name)
)
_NOTICE = b"\nlooplib: stopping at the next batch; press Ctrl-C again to stop at once\n"
_main_thread = threading.main_thread().ident

_previous: dict[int, Callable[[int, FrameType | None], Any]] = {}
_bodies: dict[int, tuple[int, CodeType]] = {}  # iterator -> the frame whose loop body it has given a batch
_pending: list[int] = []
_depth = 0

before_raising: list[Callable[[], None]] = []  # _donation, which knows what is in flight, asks to be told


def install() -> None:
    """Stand before the Python handlers of this moment; cheap when already there, nothing off the main thread."""
    if threading.get_ident() == _main_thread:
        for signum in _HELD:
            handler = _signal.getsignal(signum)
            if handler is not _handle and callable(handler):
                _previous[signum] = handler
                _signal.signal(signum, _handle)


def _uninstall() -> None:
    for signum, handler in list(_previous.items()):
        if _signal.getsignal(signum) is _handle:
            _signal.signal(signum, handler)


def _handle(signum: int, frame: FrameType | None) -> None:
    if _depth:
        _pending.append(signum)
    elif signum == signal.SIGINT and not _pending and _in_body(frame):
        _pending.append(signum)
        os.write(2, _NOTICE)  # not print: the signal may have struck amid a print
    else:
        _pending.clear()
        _forward(signum, frame)


def _forward(signum: int, frame: FrameType | None) -> None:
    for tell in before_raising:
        tell()
    _previous[signum](signum, frame)


def _in_body(frame: FrameType | None) -> bool:
    bodies = set(_bodies.values())
    while bodies and frame is not None:
        if (id(frame), frame.f_code) in bodies:
            return True
        frame = frame.f_back
    return False


def hold() -> None:
    """From here to `release`, signals wait. Calls nest; off the main thread, where none come, nothing is done."""
    global _depth
    if threading.get_ident() == _main_thread:
        _depth += 1


def release() -> None:
    """End a `hold`; at the outermost one a signal that waited is taken, unless a loop's next batch will."""
    global _depth
    if threading.get_ident() != _main_thread:
        return
    _depth -= 1
    if _pending and not _depth:
        frame = sys._getframe(1)
        if _pending != [signal.SIGINT] or not _in_body(frame):
            signum = _pending[0]
            _pending.clear()
            _forward(signum, frame)


class interruptible(Generic[T]):
    """The iterator given, with its `next` as the place where an interrupt of the loop's body is taken."""

    def __init__(self, iterator: Iterator[T]) -> None:
        self._iterator = iterator

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        if threading.get_ident() != _main_thread:
            return next(self._iterator)
        _bodies.pop(id(self), None)
        try:
            if _pending and not _depth:
                signum = _pending[0]
                _pending.clear()
                _forward(signum, sys._getframe())
            install()
            batch = next(self._iterator)
        except BaseException:
            self.close()
            raise
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_globals.get("__name__", "").startswith("looplib."):
            frame = frame.f_back
        if frame is not None:
            _bodies[id(self)] = (id(frame), frame.f_code)
        return batch

    def close(self) -> None:
        """Let go of the iterator and, if no other loop runs, of the signal handlers."""
        iterator, self._iterator = self._iterator, iter(())
        if hasattr(iterator, "close"):
            iterator.close()
        del iterator
        _bodies.pop(id(self), None)
        if not _bodies and threading.get_ident() == _main_thread:
            _uninstall()
            if _pending and not _depth:
                # The loop was left by a break with an interrupt still waiting. Raised here, in a destructor,
                # it would be swallowed; so it is sent once more, when the destructor is over.
                signum = _pending[0]
                _pending.clear()
                timer = threading.Timer(0.01, signal.raise_signal, (signum,))
                timer.daemon = True
                timer.start()

    def __del__(self) -> None:
        self.close()
