"""Wall-clock predicates: time intervals and a time budget."""

from __future__ import annotations

import time
from collections.abc import Callable

from looplib._core.checks import is_number
from looplib._core.collective import together
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
        if not together().barrier(now >= self.due):
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

    The time starts again in each process. All ranks give the same answer, true if the clock of any of them is due;
    each answer costs one small message to all ranks.

    Args:
        seconds: time budget in seconds, above 0.
        clock: function that returns the time in seconds.

    Raises:
        ValueError: `seconds` is not above 0 and finite.
    """

    __slots__ = ()

    def fires(self, state: TrainState) -> bool:
        return together().barrier(self.clock() >= self.due)
