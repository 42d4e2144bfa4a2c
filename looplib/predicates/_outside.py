"""Predicates of what happens outside of a state: the clock and signals."""

from __future__ import annotations

import os
import signal
import threading
import time
import weakref
from collections.abc import Callable

from looplib._core.checks import is_number
from looplib._core.collective import together
from looplib._core.interrupts import guarded
from looplib.predicates._predicate import Predicate
from looplib.types import TrainState


class _Clock(Predicate):
    __slots__ = ("clock", "due", "seconds")

    def __init__(self, seconds: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        if not is_number(seconds) or seconds <= 0:
            raise ValueError(f"{type(self).__name__}({seconds!r}): expected a finite number of seconds above 0.")
        self.seconds = seconds
        self.clock = clock
        self.due = clock() + seconds

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.seconds!r})"


class every_seconds(_Clock):
    """Fires when at least `seconds` have passed since it last fired or was created. Not pure: it reads a clock.

    >>> import looplib as ll
    >>> times = iter([0, 30, 70, 100, 130])
    >>> save_now = ll.predicates.every_seconds(60, clock=lambda: next(times))
    >>> [save_now(ll.TrainState()) for _ in range(4)]
    [False, True, False, True]

    Create one for each use, and put it on the right side of a combination, because asking resets it:
    `every_n_steps(10) & every_seconds(60)`. The time starts again in each process. All ranks give the same answer,
    true if the clock of any of them is due; each answer costs one small message to all ranks.

    Args:
        seconds: interval in seconds, above 0.
        clock: function that returns the time in seconds.

    Raises:
        ValueError: `seconds` is not above 0 and finite.
    """

    __slots__ = ()

    def fires(self, state: TrainState) -> bool:
        now = self.clock()
        if not together().barrier("every_seconds", now >= self.due):
            return False
        self.due = now + self.seconds
        return True


class after_seconds(_Clock):
    """Time budget: true once `seconds` have passed since it was created. Not pure: it reads a clock.

    >>> import looplib as ll
    >>> times = iter([0, 30, 60, 61])
    >>> done = ll.predicates.after_seconds(60, clock=lambda: next(times))
    >>> [done(ll.TrainState()) for _ in range(3)]
    [False, True, True]

    Ask in the `for` too, `if done(state): break`, as `after_steps` shows: with `while` alone, the epoch is read to its end. The
    time starts again in each process. All ranks give the same answer, true if the clock of any of them is due;
    each answer costs one small message to all ranks.

    Args:
        seconds: time budget in seconds, above 0.
        clock: function that returns the time in seconds.

    Raises:
        ValueError: `seconds` is not above 0 and finite.
    """

    __slots__ = ()

    def fires(self, state: TrainState) -> bool:
        return together().barrier("after_seconds", self.clock() >= self.due)


_CATCHABLE = signal.valid_signals() - {getattr(signal, name, None) for name in ("SIGKILL", "SIGSTOP")}


# In seconds. `timeout` sends its signal twice, and so do Slurm and torchrun together. Python may notice the second
# one only after a long call into C.
_ONE_SIGNAL = 5.0


class _Listener:
    """Signals that a predicate has seen. Guards refer to this and not to the predicate, so that it can be collected."""

    def __init__(self, signals: tuple[int, ...]) -> None:
        self.signals = tuple(dict.fromkeys(signals))
        self.process = os.getpid()  # in a forked process the signals do what they did before
        self.came: dict[int, float] = {}  # signal -> time of its first arrival
        self.guards = [guarded(signum) for signum in self.signals]
        for guard in self.guards:
            guard.listeners.add(self)

    def __call__(self, signum: int) -> bool:
        """Note a signal, and return True if that is all that it is to do."""
        now = time.monotonic()
        return self.process == os.getpid() and now - self.came.setdefault(signum, now) < _ONE_SIGNAL

    def close(self) -> None:
        for guard in self.guards:
            guard.listeners.discard(self)


class after_signal(Predicate):
    """Stop on a signal: true once one of these signals has arrived, and from then on. Not pure: it listens.

    >>> import looplib as ll, signal
    >>> stop_now = ll.after_signal(signal.SIGUSR1)
    >>> stop_now(ll.TrainState())
    False
    >>> signal.raise_signal(signal.SIGUSR1)
    >>> stop_now(ll.TrainState()), ll.after_epochs(10) | stop_now
    (True, (after_epochs(10) | after_signal(signal.SIGUSR1)))
    >>> stop_now.close()

    In the loop:

        stop_now = ll.after_signal(signal.SIGTERM, signal.SIGUSR1)
        done = ll.after_epochs(10) | stop_now
        while not done(state):
            for batch in loader(state):
                state, metrics = train_step(state, batch)
                if stop_now(state):
                    break
        ckpt.save(state)

    The signal does nothing else, so the current batch is finished. A second signal of the same kind, 5 seconds or
    more after the first, goes to the handler that was installed before (by default, the process ends), so a run that
    hangs can still be stopped. Signals go to the previous handlers again after `close()`, at the end of a `with` block, or
    when the predicate is deleted. If there are several such predicates, all of them see the signal.

    In a forked process the signals do what they did before, unless it creates its own predicate. All ranks give the
    same answer, whichever of them got the signal. Each answer costs one small message to all ranks; to ask less
    often, write `every_n_steps(10) & after_signal(...)`.

    Args:
        signals: numbers from the signal module. Slurm sends SIGTERM before a job ends, or the signal given with
            `--signal`, such as SIGUSR1; torchrun and Kubernetes send SIGTERM. With SIGINT, Ctrl-C becomes a request
            to stop.

    Raises:
        ValueError: there are no signals, one of them is not a signal or cannot be caught (SIGKILL, SIGSTOP), or this
            is not the main thread. The predicate can be asked in any thread.
    """

    __slots__ = ("__weakref__", "_close", "_listener")

    def __init__(self, *signals: int) -> None:
        if not signals or any(number not in _CATCHABLE for number in signals):
            raise ValueError(
                f"after_signal{signals!r}: expected one or more signals that can be caught, such as signal.SIGTERM"
            )
        if threading.current_thread() is not threading.main_thread():
            raise ValueError(
                f"after_signal was called in the thread {threading.current_thread().name}, and Python lets only the "
                "main thread set signal handlers: make it there, and hand the predicate over"
            )
        self._listener = _Listener(signals)
        self._close = weakref.finalize(self, self._listener.close)
        # While Python exits, a repeated signal must not cut off data that are still being written.
        self._close.atexit = False

    def fires(self, state: TrainState) -> bool:
        return together().barrier("after_signal", bool(self._listener.came))

    def close(self) -> None:
        """Stop listening: signals go to the previous handlers again. The answer stays the same."""
        self._close()

    def __enter__(self) -> after_signal:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        names: dict[int, str] = {number: f"signal.{number.name}" for number in signal.Signals}
        return f"after_signal({', '.join(names.get(number, str(number)) for number in self._listener.signals)})"
