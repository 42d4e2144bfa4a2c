"""Predicates: functions from the state to bool, combined with `&`, `|` and `~`.

Ask a predicate once per batch, after the step. It is a pure function of the state, so one predicate can serve many
runs, and a resumed run gets the same answers as an uninterrupted one. Predicates that need a memory (a best score,
patience) read a record in `state.extra`. Predicates that read a clock or listen for signals are not pure, and their
docstrings say so.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from looplib._core.records import kinds_of_classes
from looplib.types import TrainState, check_state

Number = float | Fraction


class Predicate:
    """Predicate: a function from a `TrainState` to bool. Combine predicates with `&`, `|` and `~`.

    >>> import looplib as ll
    >>> save_now = ll.every_n_steps(500) & ~ll.at_epoch_end() | ll.predicates.at_step(1)
    >>> save_now
    ((every_n_steps(500) & ~at_epoch_end()) | at_step(1))
    >>> save_now(ll.TrainState(step=1000, epoch=2, batch=10))
    True

    The right side is asked only if the left one does not settle the answer.

    Raises:
        TypeError: it is called with anything but a state, used as a truth value (`if predicate:`, `and`, `or`,
            `not`), or combined with anything but a predicate.
    """

    __slots__ = ()

    def __call__(self, state: TrainState) -> bool:
        try:
            return self.fires(state)
        except AttributeError:
            check_state(state, f"{self!r}(state)")
            raise

    def fires(self, state: TrainState) -> bool:
        raise NotImplementedError

    def between(self, first: Number, last: Number = math.inf) -> Predicate:
        """Restrict the predicate to a window of steps, epochs or samples, both ends included.

        >>> import looplib as ll
        >>> ll.every_n_steps(5).between(8, 25)  # fires at 10, 15, 20 and 25
        every_n_steps(5).between(8, 25)

        Args:
            first, last: ends of the window, in the unit that the predicate counts.

        Raises:
            ValueError: the window ends before it starts, or its ends are not in the predicate's unit.
            TypeError: the predicate does not count.
        """
        raise TypeError(
            f"between({first!r}, {last!r}): a window of {self!r} has no unit, as one of every_n_steps has. Say it in "
            "steps, epochs or samples: predicate & after_steps(first) & ~after_steps(last + 1)."
        )

    def __and__(self, other: Predicate) -> Predicate:
        return _And(self, self._operand("&", other))

    def __or__(self, other: Predicate) -> Predicate:
        return _Or(self, self._operand("|", other))

    def __invert__(self) -> Predicate:
        return _Not(self)

    def _operand(self, sign: str, other: object) -> Predicate:
        if isinstance(other, Predicate):
            return other
        raise TypeError(
            f"{self!r} {sign} {other!r}: both sides must be predicates. A function becomes one by "
            f"ll.predicates.predicate(function); predicates are combined before the call, (a {sign} b)(state)."
        )

    def __bool__(self) -> bool:
        raise TypeError(
            f"{self!r} has no truth value by itself: call it with the state, `if predicate(state):`, and combine "
            "predicates with & | ~, not with `and`, `or`, `not`."
        )


kinds_of_classes[Predicate] = "predicate"


@dataclass(frozen=True, slots=True, repr=False)
class _And(Predicate):
    """True if both are."""

    left: Predicate
    right: Predicate

    def fires(self, state: TrainState) -> bool:
        return self.left.fires(state) and self.right.fires(state)

    def __repr__(self) -> str:
        return f"({self.left!r} & {self.right!r})"


@dataclass(frozen=True, slots=True, repr=False)
class _Or(Predicate):
    """True if one of the two is."""

    left: Predicate
    right: Predicate

    def fires(self, state: TrainState) -> bool:
        return self.left.fires(state) or self.right.fires(state)

    def __repr__(self) -> str:
        return f"({self.left!r} | {self.right!r})"


@dataclass(frozen=True, slots=True, repr=False)
class _Not(Predicate):
    """True if the inner one is not."""

    inner: Predicate

    def fires(self, state: TrainState) -> bool:
        return not self.inner.fires(state)

    def __repr__(self) -> str:
        return f"~{self.inner!r}"


@dataclass(frozen=True, slots=True, repr=False)
class predicate(Predicate):
    """Make a predicate from your own function of the state; also a decorator.

    >>> import looplib as ll
    >>> @ll.predicates.predicate
    ... def large_batch(state):
    ...     return state.batch_samples > 512
    >>> large_batch & ll.every_n_steps(10)
    (predicate(large_batch) & every_n_steps(10))

    Args:
        function: `function(state)`. Its result is converted to bool.

    Raises:
        TypeError: `function` is not callable.
    """

    function: Callable[[TrainState], Any]

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise TypeError(f"predicate: expected a function of the state, got {self.function!r}.")

    def fires(self, state: TrainState) -> bool:
        return bool(self.function(state))

    def __repr__(self) -> str:
        return f"predicate({getattr(self.function, '__qualname__', self.function)})"
