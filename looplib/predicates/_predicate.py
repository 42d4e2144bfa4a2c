"""When to do what: yes or no, as a function of the state that the step returned.

A predicate is asked once for each batch, after the step, and answers from the counts in the state alone. As
nothing in it counts, one predicate serves many runs, and a resumed run is answered as an uninterrupted one.
What must remember (a best score, patience) is a record in `state.extra`; what the clock decides is not pure,
and named `every_seconds` and `after_seconds`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from looplib.types import TrainState

Number = float | Fraction


class Predicate:
    """A function from a `TrainState` to bool that combines with others by ``&``, ``|`` and ``~``.

    >>> import looplib as ll
    >>> save_now = ll.every_n_steps(500) & ~ll.at_epoch_end() | ll.at_step(1)
    >>> save_now
    ((every_n_steps(500) & ~at_epoch_end()) | at_step(1))
    >>> save_now(ll.TrainState(step=1000, epoch=2, batch=10))
    True

    The right side is asked only where the left one leaves the answer open.

    Raises:
        TypeError: when called with something else than a state; when used as a truth value (``if predicate:``,
            ``and``, ``or``, ``not``); when combined with something that is no predicate.
    """

    __slots__ = ()

    def __call__(self, state: TrainState) -> bool:
        try:
            return self._fires(state)
        except AttributeError:
            if isinstance(state, TrainState):
                raise
        raise TypeError(
            f"{self!r} was called with {type(state).__name__}, and needs the TrainState that the step returned: "
            "predicate(state)."
        )

    def _fires(self, state: TrainState) -> bool:
        raise NotImplementedError

    def between(self, first: Number, last: Number = math.inf) -> Predicate:
        """The same, within a window of what the predicate counts: steps, epochs or samples, ends included.

        >>> import looplib as ll
        >>> ll.every_n_steps(5).between(8, 25)  # fires at 10, 15, 20 and 25
        every_n_steps(5).between(8, 25)

        Raises ValueError for a window with its end before its beginning, or in numbers that the predicate does
        not count in, and TypeError for a predicate that has no multiples to count.
        """
        raise TypeError(
            f"between({first!r}, {last!r}): a window of {self!r} has no unit, as one of every_n_steps has. Say it in "
            "steps, epochs or samples: predicate & after_steps(first) & ~after_steps(last + 1)."
        )

    def once(self) -> Predicate:
        """The first firing only, which for a predicate that counts is known beforehand.

        >>> import looplib as ll
        >>> ll.every_n_steps(5).between(8, 25).once()
        every_n_steps(5).between(10, 10)

        Raises TypeError for a predicate whose first firing cannot be told from the state.
        """
        raise TypeError(
            f"once(): the first firing of {self!r} cannot be told from the state. Keep a flag in state.extra: "
            'state = state.replace(extra={"fired": True}).'
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


@dataclass(frozen=True, slots=True, repr=False)
class _And(Predicate):
    left: Predicate
    right: Predicate

    def _fires(self, state: TrainState) -> bool:
        return self.left._fires(state) and self.right._fires(state)

    def __repr__(self) -> str:
        return f"({self.left!r} & {self.right!r})"


@dataclass(frozen=True, slots=True, repr=False)
class _Or(Predicate):
    left: Predicate
    right: Predicate

    def _fires(self, state: TrainState) -> bool:
        return self.left._fires(state) or self.right._fires(state)

    def __repr__(self) -> str:
        return f"({self.left!r} | {self.right!r})"


@dataclass(frozen=True, slots=True, repr=False)
class _Not(Predicate):
    inner: Predicate

    def _fires(self, state: TrainState) -> bool:
        return not self.inner._fires(state)

    def __repr__(self) -> str:
        return f"~{self.inner!r}"


@dataclass(frozen=True, slots=True, repr=False)
class predicate(Predicate):
    """Your own function of the state as a predicate; also a decorator.

    >>> import looplib as ll
    >>> @ll.predicates.predicate
    ... def large_batch(state):
    ...     return state.batch_samples > 512
    >>> large_batch & ll.every_n_steps(10)
    (predicate(large_batch) & every_n_steps(10))

    Args:
        function: `function(state)`, whose result is taken as a bool.

    Raises TypeError for what cannot be called.
    """

    function: Callable[[TrainState], Any]

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise TypeError(f"predicate: expected a function of the state, got {self.function!r}.")

    def _fires(self, state: TrainState) -> bool:
        return bool(self.function(state))

    def __repr__(self) -> str:
        return f"predicate({getattr(self.function, '__qualname__', self.function)})"
