"""When an interrupt is taken.

A signal whose Python handler raises (Ctrl-C, a time-out, a SIGTERM turned into SystemExit) may strike between
any two bytecodes: amid an update in place, or when the new state has no name yet. A guard stands before the
handlers that were there and only chooses the moment: never within an update; a first Ctrl-C in the body of a
loop over a looplib loader at its next batch, so that each batch is stepped, logged and saved whole; everything
else, and a second Ctrl-C, at once. It is put up by the first donated step or batch, never at import.
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
    if hasattr(signal, name)
)


_STEPS = {"looplib.steps", "looplib.transforms._compile_step"}  # the modules whose functions take steps


_NOTICE = b"\nlooplib: stopping at the next batch; press Ctrl-C again to stop at once\n"


_main_thread = threading.main_thread().ident or 0


_holders: list[int] = []  # the threads that hold signals up, each as often as it does


_waiting: list[tuple[Guard, int]] = []  # signals that are held up


_stopping = False  # a first Ctrl-C came, and the next batch is to take it


_bodies: dict[object, tuple[int, CodeType]] = {}  # loop -> the frame whose loop body has been given a batch


before_raising: list[Callable[[], None]] = []  # _donation, which knows what is in flight, asks to be told


class Guard:
    """Stands before handlers. Another one is made when a handler is found where this one stood: whoever put it
    there may have kept this one, to put it back, and then it must still know its own."""

    def __init__(self) -> None:
        self.handlers: dict[int, Callable[[int, FrameType | None], Any]] = {}

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        if _waiting.count((self, signum)) < 2:  # the second is a Ctrl-C that insists
            _waiting.append((self, signum))
        deliver(frame)

    def take(self, signum: int, frame: FrameType | None) -> None:
        global _stopping
        running = {there.f_code for there in _stack(frame)}
        if signum == signal.SIGINT and not _stopping and _in_body(frame):
            _stopping = True
            with suppress(OSError):  # nobody may be reading any more: Ctrl-C ends the `tee` of a pipe too
                os.write(2, _NOTICE)  # not print: the signal may have struck amid a print
        elif _leave.__code__ in running:
            _send_later(signum)  # for what a destructor raises is swallowed,
            if _close.__code__ in running:
                self.handlers[signum](signum, frame)  # though it ends what the destructor waits for
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
    """Stand before the Python handlers of this moment; cheap when already there, nothing off the main thread."""
    global _handle, _previous
    if threading.get_ident() == _main_thread:
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


# With the thread's number: from the one to the other, signals wait. Calls nest; off the main thread, where no signals
# come, they do nothing. Both are C functions, so that no signal fits between the call and its effect: as the first
# thing in a `finally` they are sure to be done. After end_hold, deliver.
begin_hold = _holders.append


end_hold = _holders.remove


def hold() -> None:
    """The same where a signal may come first: from here to `release`, signals wait."""
    begin_hold(threading.get_ident())


def release() -> None:
    """End a `hold`; at the outermost one the signals that waited are taken, each at its moment."""
    end_hold(threading.get_ident())
    deliver(sys._getframe(1))


def deliver(frame: FrameType | None = None) -> None:
    """Let the signals that waited get to their handlers, unless something still holds them up."""
    if _waiting and _main_thread not in _holders and threading.get_ident() == _main_thread:
        frame = frame or sys._getframe(1)
        try:
            guard, signum = _waiting.pop(0)
        except IndexError:  # a signal that struck just now has taken it along
            return
        try:
            guard.take(signum, frame)
        finally:  # one that raises does not keep the others from their handlers
            deliver(frame)


def _stack(frame: FrameType | None) -> list[FrameType]:
    frames = []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return frames


def _in_body(frame: FrameType | None) -> bool:
    return not {(id(there), there.f_code) for there in _stack(frame)}.isdisjoint(_bodies.values())


def _send_later(signum: int) -> None:
    """Send the signal once more, when what it must not strike is over."""
    send = getattr(signal, "pthread_kill", lambda thread, signum: signal.raise_signal(signum))
    timer = threading.Timer(0.01, send, (_main_thread, signum))
    timer.daemon = True
    timer.start()


def interruptible(iterator: Iterator[T]) -> Iterator[T]:
    """What the iterator gives; asking for the next is where an interrupt of the loop's body is taken."""
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
            yield batches.pop()  # nothing here may keep it alive
    finally:
        _leave(loop, iterator)


def _stop_if_asked(frame: FrameType) -> None:
    global _stopping
    install()
    # A loop in the body of another is part of that body.
    if _stopping and threading.get_ident() == _main_thread and not _in_body(frame):
        _stopping = False
        # The handler of now: that of then may have gone with a `with` in the body.
        if type(guard := _signal.getsignal(signal.SIGINT)) is Guard:
            guard.take(signal.SIGINT, frame)


def _body(frame: FrameType | None) -> tuple[int, CodeType] | None:
    """The frame of the loop: the first that stays, not one of a function of ours or of a generator between."""
    for there in _stack(frame):
        if not (there.f_code.co_flags & CO_GENERATOR or there.f_globals.get("__name__", "").startswith("looplib.")):
            return id(there), there.f_code
    return None


def _leave(loop: object, iterator: Iterator[T]) -> None:
    """End a loop and, if no other runs, put back the handlers that were there."""
    global _stopping
    try:
        _close(iterator)
    finally:
        _bodies.pop(loop, None)
        # The garbage collector may have called, at a time when the guard is needed.
        modules = {there.f_globals.get("__name__") for there in _stack(sys._getframe())}
        needed = _bodies or _main_thread in _holders or not _STEPS.isdisjoint(modules)
        if not needed and threading.get_ident() == _main_thread:
            if _stopping:  # the loop was left by a break or an error, with an interrupt waiting
                _stopping = False
                _send_later(signal.SIGINT)
            _uninstall()


def _close(iterator: Iterator[T]) -> None:
    if hasattr(iterator, "close"):
        iterator.close()
