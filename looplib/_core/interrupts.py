"""Interrupts: signals wait while a step updates a state.

A signal whose Python handler raises (Ctrl-C, a timeout, a SIGTERM turned into SystemExit) may arrive between any two
bytecodes. A guard in front of the handlers that were installed before chooses the moment:

- A function of looplib that must not be interrupted sets its local variable `_hold_signals` to True. From then until
  it has returned, a signal is sent again some milliseconds later.
- A signal that a predicate listens to is noted, which raises nothing.

Everything else is immediate. That leaves about a microsecond open, after a step has returned and before its result has a
name: C calls a step, which is an object with a repr, and after a call into C Python looks for signals. If one comes then,
the donated state is spent and the next one lost.

Guards are installed by the first step, or for a predicate, never on import. They stay, and do nothing but pass signals on
while no step and no predicate needs them. Each call of a step looks for handlers that were set since, as a notebook does
for each cell. Signal handlers belong to the process and run in its main thread.
"""

from __future__ import annotations

import _signal
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

_HELD = tuple(
    getattr(signal, name)
    for name in ("SIGTERM", "SIGHUP", "SIGALRM", "SIGUSR1", "SIGUSR2", "SIGINT")
    if hasattr(signal, name)  # Windows has SIGTERM and SIGINT
)


class Guard:
    """Signal handler in front of another one.

    Attributes:
        listeners: functions that are told of the signal, and return True if the other handler is not to have it.
    """

    def __init__(self, previous: Any) -> None:
        self.previous = previous
        self.listeners: set[Callable[[int], bool]] = set()

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        taken = [listener(signum) for listener in self.listeners]
        if any(taken):
            return
        if held(frame):
            _send_later(signum)
        elif callable(self.previous):
            self.previous(signum, frame)
        elif self.previous == signal.SIG_DFL:
            current = signal.signal(signum, signal.SIG_DFL)
            signal.raise_signal(signum)  # the default action of most signals ends the process
            signal.signal(signum, current)


def install() -> None:
    """Put guards in front of the current Python handlers. Does nothing off the main thread."""
    # Each step asks, so it compares with what was there last time.
    if [*map(_signal.getsignal, _HELD)] != _handlers and threading.current_thread() is threading.main_thread():
        for signum in _HELD:
            if callable(_signal.getsignal(signum)):
                guarded(signum)
        _handlers[:] = map(_signal.getsignal, _HELD)


_handlers: list[Any] = []  # when `install` last looked


def guarded(signum: int) -> Guard:
    """The guard of a signal, which is installed if a different handler stands in its place."""
    guard = signal.getsignal(signum)
    if not isinstance(guard, Guard):
        guard = Guard(guard)
        signal.signal(signum, guard)
    return guard


def held(frame: FrameType | None) -> bool:
    """True if this frame, or one that it was called from, holds signals back."""
    while frame is not None:
        if "_hold_signals" in frame.f_code.co_varnames and "_hold_signals" in frame.f_locals:
            return True
        frame = frame.f_back
    return False


def _send_later(signum: int) -> None:
    """Send a signal again in 10 ms."""
    main_thread = threading.main_thread().ident
    send = getattr(signal, "pthread_kill", lambda thread, signum: signal.raise_signal(signum))
    timer = threading.Timer(0.01, send, (main_thread, signum))
    timer.daemon = True
    timer.start()
