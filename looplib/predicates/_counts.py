"""Predicates on counts: steps, batches, samples and epochs.

Ask a predicate once per batch, after the step. It uses only the counts in the state and keeps none of its own, so one
predicate can serve many runs, and a resumed run gets the same answers as an uninterrupted one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import NoReturn, Self

from looplib._core.checks import check, is_count
from looplib.predicates._predicate import Number, Predicate
from looplib.types import TrainState


class _Every(Predicate):
    """Fires at the points n, 2n, 3n, ... of a count, from `first` to `last`."""

    __slots__ = ()
    n: Number
    first: Number
    last: Number

    def between(self, first: Number, last: Number = math.inf) -> Self:
        window = replace(self, first=first, last=last)  # type: ignore[type-var]
        return replace(window, first=max(first, self.first), last=min(last, self.last))  # type: ignore[type-var]

    def _check_window(self) -> None:
        if self.first > self.last:
            raise ValueError(f"{self!r}: the window ends before it begins.")

    def __repr__(self) -> str:
        last = "" if self.last == math.inf else f", {self.last!r}"
        window = f".between({self.first!r}{last})" if self.first or last else ""
        return f"{type(self).__name__}({self.n!r}){window}"


def _crossed(now: int, taken: int, n: int, first: float, last: float) -> bool:
    """True if a multiple of n in the window lies in (now - taken, now]."""
    if now % n >= taken:  # a loop asks at every step, and the answer is nearly always no
        return False
    top = min(now, last)
    point = top - top % n
    return now - taken < point >= first and point > 0


def _fraction(value: Number) -> Fraction:
    # 0.1 means one tenth, not the nearest double.
    return value if isinstance(value, Fraction) else Fraction(value).limit_denominator(1_000_000)


def _epochs(predicate: Predicate, value: Number) -> Fraction:
    """A number of epochs as a fraction, if it is one."""
    if isinstance(value, bool) or not isinstance(value, (int, float, Fraction)) or not 0 <= value < math.inf:
        raise ValueError(f"{predicate!r}: expected numbers of epochs, at least 0 and finite, got {value!r}.")
    return _fraction(value)


def _length(predicate: Predicate, state: TrainState, instead: str) -> int:
    """Number of batches in an epoch, needed to count a fraction of one."""
    if state.epoch_length is None:
        raise ValueError(
            f"{predicate!r}: a fraction of an epoch needs state.epoch_length, which a stream does not have; use "
            f"{instead}, or ll.init_state(..., epoch_length=...)."
        )
    return state.epoch_length


@dataclass(frozen=True, slots=True, repr=False)
class _EveryCount(_Every):
    """Every n of what is counted in whole numbers."""

    n: int
    first: int = field(default=0, kw_only=True)
    last: float = field(default=math.inf, kw_only=True)

    def __post_init__(self) -> None:
        for name, lowest in (("n", 1), ("first", 0), ("last", 0)):
            value = getattr(self, name)
            if not is_count(value, lowest) and (name, value) != ("last", math.inf):
                raise ValueError(f"{self!r}: {name} must be an int of at least {lowest}, got {value!r}.")
        self._check_window()


@dataclass(frozen=True, slots=True, repr=False)
class every_n_steps(_EveryCount):
    """Fires every n optimizer steps: when the last batch brought `step` to a multiple of n.

    >>> import looplib as ll
    >>> log_now = ll.every_n_steps(50)
    >>> log_now(ll.TrainState(step=100)), log_now(ll.TrainState(step=101))
    (True, False)
    >>> log_now(ll.TrainState(step=100, batch_steps=0))  # no update: step 100 has fired before
    False
    >>> ll.every_n_steps(50).between(101, 200)  # 150, 200
    every_n_steps(50).between(101, 200)

    It never fires at step 0. In a loop of your own, ask `every_n_steps(50)(ll.TrainState(step=step))` after each update. For
    other steps, such as 1, 51 and 101, write a `predicate`. If you make several updates
    on a batch (`same_batch`), ask once, after the last of them.

    Args:
        n: number of steps between firings, at least 1.
        first, last: see `between`, in steps.

    Raises:
        ValueError: a value is not an int or is out of range.
    """

    def fires(self, state: TrainState) -> bool:
        return _crossed(state.step, state.batch_steps, self.n, self.first, self.last)


@dataclass(frozen=True, slots=True, repr=False)
class every_n_samples(_EveryCount):
    """Fires every n samples: when the last batch reached or crossed a multiple of n samples.

    >>> import looplib as ll
    >>> eval_now = ll.predicates.every_n_samples(100)
    >>> eval_now(ll.TrainState(samples=128, batch_samples=64)), eval_now(ll.TrainState(samples=192, batch_samples=64))
    (True, False)

    A batch counts even if its update was skipped. In a loop of your own, give both `samples` and `batch_samples`, the
    number in the last batch.

    Args:
        n: number of samples between points, at least 1. A batch that crosses several points fires once.
        first, last: see `between`. The window applies to the multiple that is crossed, not to the count after the
            batch.

    Raises:
        ValueError: a value is not an int or is out of range; or, when called, the state has samples and says of no batch that
            it had any.
    """

    def fires(self, state: TrainState) -> bool:
        # No run has such a state. Without batch_samples, the predicate would never fire.
        if not state.batch_samples and state.samples and not (state.batch or state.epoch):
            raise ValueError(
                f"{self!r}: the state has samples={state.samples} and batch_samples=0; give both, "
                "ll.TrainState(samples=samples, batch_samples=len(x))."
            )
        return not state.no_batch and _crossed(state.samples, state.batch_samples, self.n, self.first, self.last)


@dataclass(frozen=True, slots=True, repr=False)
class every_n_batches(_EveryCount):
    """Fires every n batches of an epoch: after its n-th batch, its 2n-th, and so on, counted from 1 in each epoch.

    >>> import looplib as ll
    >>> log_now = ll.predicates.every_n_batches(4)
    >>> [batch for batch in range(1, 10) if log_now(ll.TrainState(batch=batch, epoch_length=10))]
    [4, 8]
    >>> log_now(ll.TrainState(epoch=1, batch=0, epoch_length=8))  # after the last batch, the eighth
    True

    These are the batches for which `index % n == 0` in `for index, batch in enumerate(batches, 1)`. `state.batch` is 0 after
    the last batch of an epoch, and the predicate counts it as number `epoch_length`. It fires there only if that is a
    multiple of n. For the end of every epoch as well, write `every_n_batches(4) | at_epoch_end()`.

    A batch counts even if its update was skipped. For a stream, ask before `ll.state.end_epoch`; the state that `end_epoch` returns
    has no batch, so the predicate does not fire for it. In a loop of your own, ask
    `every_n_batches(4)(ll.TrainState(batch=index))`, counted from 1.

    Args:
        n: number of batches between firings, at least 1.
        first, last: see `between`, in batches of the epoch.

    Raises:
        ValueError: a value is not an int or is out of range.
    """

    def fires(self, state: TrainState) -> bool:
        number = state.batch or (state.epoch_length or 0 if state.epoch else 0)
        return not state.no_batch and _crossed(number, 1, self.n, self.first, self.last)


@dataclass(frozen=True, slots=True, repr=False)
class every_n_epochs(_Every):
    """Fires every n epochs: at the end of every n-th epoch or, for a fraction, within epochs.

    >>> import looplib as ll
    >>> eval_now = ll.every_n_epochs(0.25)
    >>> [batch for batch in range(1, 10) if eval_now(ll.TrainState(batch=batch, epoch_length=10))]
    [3, 5, 8]
    >>> ll.every_n_epochs(2)(ll.TrainState(epoch=4))
    True

    A batch counts even if its update was skipped. In a loop of your own, give `epoch`, the number of epochs completed, and
    `batch`, the number of batches since then; for a fraction, `epoch_length` too.

    Args:
        n: number of epochs between points. A fraction fires at the batch that reaches or crosses the point, and needs
            a state with an `epoch_length`. It is rounded to a millionth, so that 0.1 is one tenth.
        first, last: see `between`, in epochs.

    Raises:
        ValueError: `n` is not above 0 and finite, the window is out of range, or, when called, `n` is a fraction and
            the state is that of a stream.
    """

    n: Number
    first: Number = field(default=0, kw_only=True)
    last: Number = field(default=math.inf, kw_only=True)
    # n, first and last as integers in units of 1/parts of an epoch, and the number of parts.
    _parts: tuple[int, int, float, int] = field(init=False, compare=False)

    def __post_init__(self) -> None:
        numbers = [self.n, self.first] + ([] if self.last == math.inf else [self.last])
        exact = [_epochs(self, value) for value in numbers]
        if exact[0] == 0:
            raise ValueError(f"{self!r}: n must be above 0, and at least a millionth of an epoch.")
        self._check_window()
        per_epoch = math.lcm(*(value.denominator for value in exact))
        n, first, *last = [int(value * per_epoch) for value in exact]
        object.__setattr__(self, "_parts", (n, first, last[0] if last else math.inf, per_epoch))

    def fires(self, state: TrainState) -> bool:
        n, first, last, per_epoch = self._parts
        if state.no_batch:
            return False
        if per_epoch == 1:  # only at ends of epochs, so streams work too
            return not state.batch and _crossed(state.epoch, 1, n, first, last)
        length = _length(self, state, "every_n_steps or every_n_samples")
        now = (state.epoch * length + state.batch) * per_epoch
        return _crossed(now, per_epoch, n * length, first * length, last * length)


@dataclass(frozen=True, slots=True, repr=False, init=False)
class at_epoch_end(Predicate):
    """Fires at the end of each epoch: `batch == 0 and epoch > 0`, unless `no_batch`.

    >>> import looplib as ll
    >>> ll.at_epoch_end()(ll.TrainState(epoch=1)), ll.at_epoch_end()(ll.TrainState(epoch=1, batch=1))
    (True, False)

    In a loop of your own, give both counts. For a stream, ask it about the state returned by `ll.state.end_epoch`. It is
    equivalent to `every_n_epochs(1)`.
    """

    def __init__(self, *state: NoReturn) -> None:
        check(
            not state, "at_epoch_end() takes nothing and gives a predicate: write ll.at_epoch_end()(state)", TypeError
        )

    def fires(self, state: TrainState) -> bool:
        return state.batch == 0 and state.epoch > 0 and not state.no_batch

    def between(self, first: Number, last: Number = math.inf) -> Predicate:
        return every_n_epochs(1).between(first, last)

    def __repr__(self) -> str:
        return "at_epoch_end()"


@dataclass(frozen=True, slots=True, repr=False, init=False)
class at_step(Predicate):
    """Fires at the given optimizer steps.

    >>> import looplib as ll
    >>> profile_now = ll.predicates.at_step(10, 100, 1000)
    >>> profile_now(ll.TrainState(step=100)), profile_now(ll.TrainState(step=101))
    (True, False)

    Args:
        steps: values of `state.step`. The first update brings it to 1.

    Raises:
        ValueError: there are no steps, or one is not an int of at least 1.
    """

    steps: frozenset[int]

    def __init__(self, *steps: int) -> None:
        if not steps or not all(map(is_count, steps)):
            raise ValueError(f"at_step{steps!r}: expected one or more steps, ints of at least 1.")
        object.__setattr__(self, "steps", frozenset(steps))

    def fires(self, state: TrainState) -> bool:
        now, made = state.step, state.batch_steps
        return now in self.steps if made == 1 else not self.steps.isdisjoint(range(now - made + 1, now + 1))

    def __repr__(self) -> str:
        return f"at_step({', '.join(map(str, sorted(self.steps)))})"


@dataclass(frozen=True, slots=True, repr=False)
class _After(Predicate):
    """True from a count on."""

    n: Number

    def __post_init__(self) -> None:
        if not is_count(self.n, 0):
            raise ValueError(f"{self!r}: n must be an int of at least 0.")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.n!r})"


@dataclass(frozen=True, slots=True, repr=False)
class after_steps(_After):
    """True once n optimizer steps have been made, and from then on.

    >>> import looplib as ll
    >>> done = ll.after_steps(1000)
    >>> done(ll.TrainState(step=999)), done(ll.TrainState(step=1000)), done(ll.TrainState(step=1001))
    (False, True, True)

    The step may lie within an epoch, so ask in the `for` too. With `while` alone, the loop runs to the end of the epoch:

        while not done(state):
            for batch in loader(state):
                state, metrics = train_step(state, batch)
                if done(state):
                    break

    `after_steps(0)` is always true.

    Args:
        n: number of steps, an int of at least 0.

    Raises:
        ValueError: `n` is out of range.
    """

    def fires(self, state: TrainState) -> bool:
        return state.step >= self.n


@dataclass(frozen=True, slots=True, repr=False)
class after_epochs(_After):
    """True once n epochs have been completed, and from then on.

    >>> import looplib as ll
    >>> done = ll.after_epochs(10)
    >>> done(ll.TrainState(epoch=9, batch=99)), done(ll.TrainState(epoch=10))
    (False, True)
    >>> done = ll.after_epochs(1.5)
    >>> [batch for batch in range(5) if done(ll.TrainState(epoch=1, batch=batch, epoch_length=5))]
    [3, 4]

    `after_epochs(0)` is always true. Epochs are counted by the step if the state has an `epoch_length`, and otherwise
    only by `ll.state.end_epoch`: with neither, as over a plain DataLoader, the state stays in epoch 0 and this stays False. In a
    loop of your own, give `ll.TrainState(epoch=epoch)`.

    Args:
        n: number of epochs, at least 0. A fraction becomes true within an epoch, at the batch that reaches or crosses
            the point, so the loop must ask after each step and break. It needs a state with an `epoch_length` and is
            rounded to a millionth, so that 0.1 is one tenth.

    Raises:
        ValueError: `n` is negative or not finite, or, when called, `n` is a fraction and the state is that of a
            stream.
    """

    # n as an integer in units of 1/parts of an epoch, and the number of parts.
    _parts: tuple[int, int] = field(init=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_parts", _epochs(self, self.n).as_integer_ratio())

    def fires(self, state: TrainState) -> bool:
        n, per_epoch = self._parts
        if per_epoch == 1:  # at the end of an epoch, so streams work too
            return state.epoch >= n
        length = _length(self, state, "after_steps or after_samples")
        return (state.epoch * length + state.batch) * per_epoch >= n * length


@dataclass(frozen=True, slots=True, repr=False)
class after_samples(_After):
    """True once n samples have been consumed, and from then on.

    >>> import looplib as ll
    >>> done = ll.predicates.after_samples(1000)
    >>> done(ll.TrainState(samples=960)), done(ll.TrainState(samples=1024))
    (False, True)

    `after_samples(0)` is always true. In a loop of your own, give `ll.TrainState(samples=samples)`.

    Args:
        n: number of samples, an int of at least 0.

    Raises:
        ValueError: `n` is out of range.
    """

    def fires(self, state: TrainState) -> bool:
        return state.samples >= self.n
