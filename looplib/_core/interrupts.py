"""Interrupts: signals wait while a step updates a state, and Ctrl-C waits for the end of a batch.

A signal whose Python handler raises (Ctrl-C, a timeout, a SIGTERM turned into SystemExit) may arrive between any two
bytecodes. A guard in front of the handlers that were installed before chooses the moment:

- A function of looplib that must not be interrupted sets its local variable `_hold_signals` to True. From then until
  it has returned, a signal is sent again some milliseconds later.
- Python looks for signals after calls into C, and C calls a step, which is an object with a repr. So a donated step
  notes the place that it returns to (`returns_to`), and signals wait there too, until its result has a name. In a
  function of the user's around the step, they may still come before that function has returned.
- A first Ctrl-C in the body of a loop over a looplib loader is raised at its next batch, so that each batch is stepped,
  logged and saved completely.
- A signal that a predicate listens to is noted, which raises nothing.

Everything else, and a second Ctrl-C, is immediate. Guards are installed by the first step or batch, or for a predicate,
never on import, and removed at the end of a loop. Signal handlers belong to the process and run in its main thread.
"""

from __future__ import annotations

import _signal
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from inspect import CO_GENERATOR
from itertools import islice
from types import CodeType, FrameType
from typing import Any, TypeVar

T = TypeVar("T")

_HELD = tuple(
    getattr(signal, name)
    for name in ("SIGTERM", "SIGHUP", "SIGALRM", "SIGUSR1", "SIGUSR2", "SIGINT")
    if hasattr(signal, name)  # Windows has SIGTERM and SIGINT
)

_NOTICE = b"\nlooplib: stopping at the next batch; press Ctrl-C again to stop at once\n"

# In seconds. `timeout` sends its signal twice, and so do Slurm and torchrun together. Python may notice the second
# one only after a long call into C.
_ONE_SIGNAL = 5.0

_stopping = False  # a first Ctrl-C has arrived and will be raised at the next batch

# Loops, the outermost first, with the frame whose loop body is working on a batch, or None while a batch is read.
_bodies: dict[object, tuple[int, CodeType] | None] = {}


class Guard:
    """Signal handler in front of another one."""

    def __init__(self, previous: Any) -> None:
        self.previous = previous
        self.listeners: set[Listener] = set()

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        global _stopping
        now = time.monotonic()
        came = [one.came.setdefault(signum, now) for one in self.listeners if one.process == os.getpid()]
        if any(now - first < _ONE_SIGNAL for first in came):
            return
        if held(frame):
            _send_later(signum)
        elif signum == signal.SIGINT and not _stopping and _loops_around(frame):
            _stopping = True
            with suppress(OSError):  # the reader may be gone: Ctrl-C also ends the `tee` of a pipe
                os.write(2, _NOTICE)  # not print: the signal may have arrived during a print
        else:
            if signum == signal.SIGINT:
                _stopping = False
            self.pass_on(signum, frame)

    def pass_on(self, signum: int, frame: FrameType | None) -> None:
        if callable(self.previous):
            self.previous(signum, frame)
        elif self.previous == signal.SIG_DFL:
            current = signal.signal(signum, signal.SIG_DFL)
            signal.raise_signal(signum)  # the default action of most signals ends the process
            signal.signal(signum, current)


class Listener:
    """Signals that a predicate has seen. Guards refer to this and not to the predicate, so that it can be collected."""

    def __init__(self, signals: tuple[int, ...]) -> None:
        self.signals = tuple(dict.fromkeys(signals))
        self.process = os.getpid()  # in a forked process the signals do what they did before
        self.came: dict[int, float] = {}  # signal -> time of its first arrival
        self.guards = [(signum, _guarded(signum)) for signum in self.signals]
        for _, guard in self.guards:
            guard.listeners.add(self)

    def close(self) -> None:
        for signum, guard in self.guards:
            guard.listeners.discard(self)
            # In a different thread, such as one that runs the garbage collector, the guard stays and passes all signals on.
            if _in_main_thread() and signal.getsignal(signum) is guard:
                _remove_guard(signum)


def install() -> None:
    """Put guards in front of the current Python handlers. Does nothing off the main thread."""
    # Each step asks twice, so it compares with what was there last time.
    if [*map(_signal.getsignal, _HELD)] != _handlers and _in_main_thread():
        for signum in _HELD:
            if callable(_signal.getsignal(signum)):
                _guarded(signum)
        _handlers[:] = map(_signal.getsignal, _HELD)


_handlers: list[Any] = []  # when `install` last looked


def _guarded(signum: int) -> Guard:
    """The guard of a signal, which is installed if a different handler stands in its place."""
    guard = signal.getsignal(signum)
    if not isinstance(guard, Guard):
        guard = Guard(guard)
        signal.signal(signum, guard)
    return guard


def _remove_guard(signum: int) -> None:
    guard = signal.getsignal(signum)
    if isinstance(guard, Guard) and not guard.listeners:
        signal.signal(signum, guard.previous)


_returned: list[tuple[int, CodeType, int]] = []  # the place of the last call whose result must get a name


def returns_to(frame: FrameType) -> None:
    """Hold signals back until this frame continues from where it is, with the result of its call.

    A step is an object with a repr, which C calls, and after a call into C Python looks for signals before it assigns.
    """
    _returned[:] = [(id(frame), frame.f_code, frame.f_lasti)]


def held(frame: FrameType | None) -> bool:
    """True if a function that is running, called from this frame or around it, holds signals back, or has just returned."""
    if frame is not None and (id(frame), frame.f_code, frame.f_lasti) in _returned:
        return True
    return any("_hold_signals" in f.f_code.co_varnames and "_hold_signals" in f.f_locals for f in _stack(frame))


def _send_later(signum: int) -> None:
    """Send a signal again in 10 ms."""
    main_thread = threading.main_thread().ident
    send = getattr(signal, "pthread_kill", lambda thread, signum: signal.raise_signal(signum))
    timer = threading.Timer(0.01, send, (main_thread, signum))
    timer.daemon = True
    timer.start()


def interruptible(iterator: Iterator[T], note: Callable[[], object] = lambda: None) -> Iterator[T]:
    """Iterate, call `note` for each item, and raise an interrupt of the loop's body when the next one is requested."""
    loop = object()
    try:
        while True:
            _end_body(loop)
            batches = list(islice(iterator, 1))
            if not batches:
                return
            if _in_main_thread():
                _bodies[loop] = _body(sys._getframe(1))
            note()
            yield batches.pop()  # this frame must not keep it alive
    finally:
        _leave(loop, iterator)


def _end_body(loop: object) -> None:
    """Raise the interrupt that waits for this loop's next batch. In loops within a body it waits for the outermost one."""
    global _stopping
    install()
    frame = sys._getframe(1)
    due = _stopping and _in_main_thread() and _loops_around(frame)[:1] in ([], [loop])
    _bodies[loop] = None
    if due:
        _stopping = False
        # Use the current handler: the earlier one may have been removed at the end of a `with` in the body.
        _guarded(signal.SIGINT).pass_on(signal.SIGINT, frame)


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _stack(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _loops_around(frame: FrameType | None) -> list[object]:
    """Loops from whose bodies this frame was called. A loop that an error has left may still be in memory."""
    frames = {(id(outer), outer.f_code) for outer in _stack(frame)} if _bodies else set()
    return [loop for loop, body in _bodies.items() if body in frames]


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
        _hold_signals = True  # since Python ignores what a handler raises while it closes the generator of a loop
        _bodies.pop(loop, None)
        # The garbage collector, which may end a loop at any moment, takes no guard from an update.
        if not _bodies and _in_main_thread() and not held(sys._getframe(1)):
            if _stopping:  # the loop was left by a break or an error while an interrupt was waiting
                _stopping = False
                _send_later(signal.SIGINT)
            for signum in _HELD:
                _remove_guard(signum)
