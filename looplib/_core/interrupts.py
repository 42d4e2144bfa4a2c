"""Interrupts: signals wait while a step updates a state.

A signal whose Python handler raises (Ctrl-C, a timeout, a SIGTERM turned into SystemExit) may arrive whenever Python looks
for signals: at the start of a function, after a call into C, and where a loop begins again. A guard in front of the handlers
that were installed before chooses the moment:

- What must not be interrupted stands between `waits.depth += 1` and `waits.depth -= 1`, in a `try` with `finally`: giving up a
  donated state, writing it and returning the next one; and giving back what a step has borrowed (a module's slots and modes,
  random streams, `.grad`). A signal that arrives there is sent again some milliseconds later. These are statements and not
  a context manager, since Python looks for signals where a function begins, so that one could arrive before it waits.
- A second Ctrl-C does not wait. A second SIGTERM does.
- A signal that a predicate listens to is noted, which raises nothing.

Everything else is immediate, the passes of a step included. That leaves some microseconds open, after a step has ended its
wait and before its result has a name: C calls a step, which is an object with a repr, and after a call into C Python looks for
signals. If one comes then, the donated state is spent and the next one lost. To keep that time short, a step frees what it holds
while signals still wait, and then looks for them (`look`).

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


class _Waits(threading.local):
    """Number of blocks of this thread that signals wait for. That of the main thread counts, where handlers run."""

    depth = 0


waits = _Waits()


def look() -> None:
    """Let Python look for signals, which it does where a function begins.

    A block during which signals wait ends with this call. A signal that came during the statement before, such as one that
    frees gradients, would otherwise be handled right after the block.
    """


class Guard:
    """Signal handler in front of another one.

    Attributes:
        listeners: functions that are told of the signal, and return True if the other handler is not to have it.
        waiting: True while a signal waits to be sent again.
        sent_again: True if the next one is that signal.
    """

    def __init__(self, previous: Any) -> None:
        self.previous = previous
        self.listeners: set[Callable[[int], bool]] = set()
        self.waiting = self.sent_again = False

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        taken = [listener(signum) for listener in self.listeners]
        if any(taken):
            return
        again, self.sent_again = self.sent_again, False
        if waits.depth:
            if again or not self.waiting:
                self.waiting = True
                self._send_later(signum)
                return
            if signum != signal.SIGINT:  # one of the same waits already
                return
        self.waiting = False
        if callable(self.previous):
            self.previous(signum, frame)
        elif self.previous == signal.SIG_DFL:
            current = signal.signal(signum, signal.SIG_DFL)
            signal.raise_signal(signum)  # the default action of most signals ends the process
            signal.signal(signum, current)

    def _send_later(self, signum: int) -> None:
        """Send a signal again in 10 ms."""
        main_thread = threading.main_thread().ident
        kill = getattr(signal, "pthread_kill", lambda thread, signum: signal.raise_signal(signum))

        def send() -> None:
            if self.waiting:  # else it has been overtaken by a second one
                self.sent_again = True
                kill(main_thread, signum)

        timer = threading.Timer(0.01, send)
        timer.daemon = True
        timer.start()


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
