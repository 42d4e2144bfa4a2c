"""Signals that predicates listen to, and the handlers in front of those that were installed before.

Signal handlers belong to the process, so the listeners do too.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType
from typing import Any

from looplib._core import interrupts as _interrupts

# In seconds. `timeout` sends its signal twice, and so do Slurm and torchrun together. Python may notice the second
# one only after a long call into C.
_ONE_SIGNAL = 5.0


_listeners: dict[int, set[Listener]] = {}


class Listener:
    """Signals that a predicate has seen. Handlers refer to this and not to the predicate, so that it can be collected."""

    def __init__(self, signals: tuple[int, ...]) -> None:
        self.signals = tuple(dict.fromkeys(signals))
        self.process = os.getpid()
        self.came: dict[int, float] = {}  # signal -> time of its first arrival
        for number in self.signals:
            _listeners.setdefault(number, set()).add(self)
            current = _handler(number)
            if not isinstance(current, _Handler):
                signal.signal(number, _Handler(current))

    def close(self) -> None:
        for number in self.signals:
            _listeners[number].discard(self)
            current = _handler(number)
            # In a different thread, such as one that runs the garbage collector, the handler stays and passes all signals on.
            alone = not _listeners[number] and threading.current_thread() is threading.main_thread()
            if alone and isinstance(current, _Handler):
                signal.signal(number, current.previous)


def _tell(number: int) -> bool:
    """Tell all listeners about a signal. True if it is the first for any of them, or soon after the first."""
    now = time.monotonic()
    mine = [listener for listener in tuple(_listeners.get(number, ())) if listener.process == os.getpid()]
    first = [listener.came.setdefault(number, now) for listener in mine]
    return any(now - came < _ONE_SIGNAL for came in first)


class _Handler:
    """Signal handler: tells all listeners, and passes a repeated signal on to the previous handler."""

    def __init__(self, previous: Any) -> None:
        self.previous = previous

    def note(self, number: int) -> bool:
        """Tell the listeners of a first signal, which raises nothing and so may come at any moment."""
        return _tell(number)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.note(number):
            return
        if callable(self.previous):
            self.previous(number, frame)
        elif self.previous == signal.SIG_DFL:
            current = signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)  # the default action of most signals ends the process
            signal.signal(number, current)


def _handler(number: int) -> Any:
    """Current handler of a signal, below the guard of `_core.interrupts`, which the next batch or donated step restores."""
    current = signal.getsignal(number)
    return current.handlers[number] if isinstance(current, _interrupts.Guard) else current
