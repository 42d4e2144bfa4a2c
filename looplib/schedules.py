"""Hyperparameters as functions of the step.

A schedule is called with the number of updates made so far (the first update uses ``schedule(0)``) and
returns a float, so there is no scheduler object to step, save or forget. Those here are frozen records that
print as the code that makes them; any other ``Callable[[int], float]``, a lambda too, will do as well, and
each is as good for a momentum or a weight decay as for a learning rate.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields
from itertools import pairwise
from typing import Any, Literal

Schedule = Callable[[int], float]
"""A hyperparameter as a function of the updates made so far.

>>> import looplib as ll, torch
>>> def rising(step):
...     return 1e-4 * (step + 1)
>>> optimizer = ll.optimizer(torch.optim.SGD, lr=rising, momentum=lambda step: min(0.9, step / 100))
"""
Shape = Literal["linear", "cosine", "1-sqrt"]
Natural = int  # at least 0, where a plain int is at least 1

# What is left to fall after a fraction of the way; a rise is the same curve run backwards.
_SHAPES: dict[Shape, Callable[[float], float]] = {
    "linear": lambda progress: 1.0 - progress,
    "cosine": lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)),
    "1-sqrt": lambda progress: 1.0 - math.sqrt(progress),
}


# Two values are mixed as weight * a + (1 - weight) * b, not b + weight * (a - b): that is exact at both ends.
def _mix(start: float, final: float, weight: float) -> float:
    return weight * start + (1.0 - weight) * final


class _Schedule:
    """What they share: every field is checked by its annotation, and numbers are made Python floats."""

    __slots__ = ()

    def __post_init__(self) -> None:
        for item in fields(self):  # type: ignore[arg-type]
            if item.init:
                name = f"{type(self).__name__}: {item.name}"
                value = _checked(name, str(item.type), getattr(self, item.name))
                object.__setattr__(self, item.name, value)


def _checked(name: str, kind: str, value: Any) -> Any:
    if kind == "float | Schedule":
        kind = "Schedule" if callable(value) else "float"
    match kind:
        case "float":
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
                raise ValueError(f"{name} must be a finite number, got {value!r}.")
            return float(value)
        case "int" | "Natural":
            lowest = 1 if kind == "int" else 0
            if type(value) is not int or value < lowest:
                raise ValueError(f"{name} must be an int of at least {lowest}, got {value!r}.")
        case "Sequence[int]":
            value = tuple(value)
            if any(type(step) is not int for step in value) or any(a >= b for a, b in pairwise((0, *value))):
                raise ValueError(f"{name} must be ints of at least 1 that increase, got {value!r}.")
        case "Schedule":
            if not callable(value):
                raise TypeError(f"{name}: expected a function of the step (ll.constant(x) is one), got {value!r}.")
        case "Sequence[Schedule]":
            return tuple(_checked(name, "Schedule", inner) for inner in value)
        case "Shape":
            if value not in _SHAPES:
                raise ValueError(f"{name} must be one of {', '.join(map(repr, _SHAPES))}, got {value!r}.")
    return value


@dataclass(frozen=True, slots=True)
class constant(_Schedule):
    """The same `value` at every step.

    >>> import looplib as ll
    >>> ll.constant(3e-4)(1000)
    0.0003

    Raises ValueError for a number that is not finite.
    """

    value: float

    def __call__(self, step: int) -> float:
        return self.value


@dataclass(frozen=True, slots=True)
class linear(_Schedule):
    """A straight line from `start` at step 0 to `final` at step `total`, and `final` from then on.

    >>> import looplib as ll
    >>> [ll.linear(1.0, total=4)(step) for step in (0, 1, 2, 4, 100)]
    [1.0, 0.75, 0.5, 0.0, 0.0]

    Raises ValueError for a number that is not finite, or a `total` that is no int of at least 1.
    """

    start: float
    final: float = 0.0
    _: KW_ONLY
    total: int

    def __call__(self, step: int) -> float:
        weight = max(0, self.total - step) / self.total
        return weight * self.start + (1.0 - weight) * self.final


@dataclass(frozen=True, slots=True)
class cosine(_Schedule):
    """Half a cosine wave from `start` at step 0 to `final` at step `total`, and `final` from then on.

    >>> import looplib as ll
    >>> [round(ll.cosine(1.0, total=4)(step), 3) for step in (0, 1, 2, 4, 100)]
    [1.0, 0.854, 0.5, 0.0, 0.0]

    Another number of `cycles` goes up and down between the two, and stays where it is at step `total`.
    Raises ValueError for a number that is not finite, or a `total` that is no int of at least 1.
    Source: https://arxiv.org/abs/1608.03983
    """

    start: float
    final: float = 0.0
    _: KW_ONLY
    total: int
    cycles: float = 0.5

    def __call__(self, step: int) -> float:
        angle = 2.0 * math.pi * self.cycles * (min(step, self.total) / self.total)
        weight = 0.5 * (1.0 + math.cos(angle))
        return weight * self.start + (1.0 - weight) * self.final


@dataclass(frozen=True, slots=True)
class polynomial(_Schedule):
    """From `start` to `final` as a power of what is left of `total` steps, and `final` from then on.

    >>> import looplib as ll
    >>> [ll.polynomial(1.0, total=4, power=2.0)(step) for step in (0, 1, 2, 4, 100)]
    [1.0, 0.5625, 0.25, 0.0, 0.0]

    Raises ValueError for a number that is not finite, a `total` that is no int of at least 1, or a `power`
    that is not positive.
    """

    start: float
    final: float = 0.0
    _: KW_ONLY
    total: int
    power: float = 1.0

    def __post_init__(self) -> None:
        _Schedule.__post_init__(self)
        if self.power <= 0:
            raise ValueError(f"polynomial: power must be above 0, got {self.power!r}.")

    def __call__(self, step: int) -> float:
        weight: float = (max(0, self.total - step) / self.total) ** self.power
        return weight * self.start + (1.0 - weight) * self.final


@dataclass(frozen=True, slots=True)
class exponential(_Schedule):
    """`start` times `factor` to the power of the step.

    >>> import looplib as ll
    >>> [ll.exponential(1.0, factor=0.5)(step) for step in (0, 1, 3)]
    [1.0, 0.5, 0.125]

    Raises ValueError for a number that is not finite.
    """

    start: float
    _: KW_ONLY
    factor: float

    def __call__(self, step: int) -> float:
        return self.start * self.factor**step


@dataclass(frozen=True, slots=True)
class step_decay(_Schedule):
    """`start`, multiplied by `factor` after every `every` steps.

    >>> import looplib as ll
    >>> [ll.step_decay(1.0, every=30, factor=0.5)(step) for step in (0, 29, 30, 60)]
    [1.0, 1.0, 0.5, 0.25]

    Raises ValueError for a number that is not finite, or an `every` that is no int of at least 1.
    """

    start: float
    _: KW_ONLY
    every: int
    factor: float = 0.1

    def __call__(self, step: int) -> float:
        return self.start * self.factor ** (step // self.every)


@dataclass(frozen=True, slots=True)
class multistep_decay(_Schedule):
    """`start`, multiplied by `factor` at each of the `boundaries`.

    >>> import looplib as ll
    >>> [ll.multistep_decay(1.0, boundaries=[30, 80], factor=0.5)(step) for step in (0, 29, 30, 80)]
    [1.0, 1.0, 0.5, 0.25]

    Raises ValueError for a number that is not finite, or `boundaries` that are not increasing ints.
    """

    start: float
    _: KW_ONLY
    boundaries: Sequence[int]
    factor: float = 0.1

    def __call__(self, step: int) -> float:
        return self.start * self.factor ** bisect_right(self.boundaries, step)


@dataclass(frozen=True, slots=True)
class inverse_sqrt(_Schedule):
    """`start` over the root of ``1 + step / timescale``: half of it after three times the timescale.

    >>> import looplib as ll
    >>> [ll.inverse_sqrt(1.0, timescale=100)(step) for step in (0, 300, 1500)]
    [1.0, 0.5, 0.25]

    The schedule of the Transformer is ``ll.warmup(ll.inverse_sqrt(peak, timescale=n), n)``.
    Raises ValueError for a number that is not finite, or a `timescale` that is no int of at least 1.
    Source: https://arxiv.org/abs/1706.03762
    """

    start: float
    _: KW_ONLY
    timescale: int

    def __call__(self, step: int) -> float:
        return self.start / math.sqrt((step + self.timescale) / self.timescale)


@dataclass(frozen=True, slots=True)
class cosine_restarts(_Schedule):
    """Falls from `start` to `final` along a cosine, `cycles` times in `total` steps; `final` from then on.

    >>> import looplib as ll
    >>> [round(ll.cosine_restarts(1.0, total=8, cycles=2)(step), 3) for step in (0, 2, 3, 4, 6, 8)]
    [1.0, 0.5, 0.146, 1.0, 0.5, 0.0]

    Each cycle is `growth` (an int) times as long as the one before it: 70 steps in 3 cycles with a growth
    of 2 are cycles of 10, 20 and 40 steps.
    Raises ValueError for a number that is not finite, or a count that is no int of at least 1.
    Source: https://arxiv.org/abs/1608.03983
    """

    start: float
    final: float = 0.0
    _: KW_ONLY
    total: int
    cycles: int
    growth: int = 1
    _parts: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        _Schedule.__post_init__(self)
        object.__setattr__(self, "_parts", sum(self.growth**cycle for cycle in range(self.cycles)))

    def __call__(self, step: int) -> float:
        if step >= self.total:
            return self.final
        # In parts of a step, so that every cycle is whole: a rounded remainder would miss restarts.
        place, length = step * self._parts, self.total
        if self.growth == 1:
            place %= length
        while place >= length:
            place -= length
            length *= self.growth
        weight = 0.5 * (1.0 + math.cos(math.pi * (place / length)))
        return weight * self.start + (1.0 - weight) * self.final


@dataclass(frozen=True, slots=True)
class cyclic(_Schedule):
    """Straight lines from `start` up to `peak` in `rise` steps and back in `fall` steps, without end.

    >>> import looplib as ll
    >>> [ll.cyclic(0.0, 1.0, rise=2, fall=4, cycle_factor=0.5)(step) for step in (0, 1, 2, 4, 6, 8)]
    [0.0, 0.5, 1.0, 0.5, 0.0, 0.5]

    The height above `start` is multiplied by `cycle_factor` after every cycle (0.5 is torch's
    "triangular2") and by `step_factor` at every step (torch's "exp_range").
    Raises ValueError for a number that is not finite, or a count that is no int of at least 1.
    Source: https://arxiv.org/abs/1506.01186
    """

    start: float
    peak: float
    _: KW_ONLY
    rise: int
    fall: int
    cycle_factor: float = 1.0
    step_factor: float = 1.0

    def __call__(self, step: int) -> float:
        cycle, place = divmod(step, self.rise + self.fall)
        height = min(place / self.rise, (self.rise + self.fall - place) / self.fall)
        weight = height * self.cycle_factor**cycle * self.step_factor**step
        return weight * self.peak + (1.0 - weight) * self.start


@dataclass(frozen=True, slots=True)
class one_cycle(_Schedule):
    """From `start` to `peak`, then to `final`, which the last of `total` updates uses.

    >>> import looplib as ll
    >>> lr = ll.one_cycle(0.04, 1.0, 0.0, total=100)
    >>> [round(lr(step), 2) for step in (0, 29, 64, 99)]
    [0.04, 1.0, 0.5, 0.0]
    >>> momentum = ll.one_cycle(0.95, 0.85, 0.95, total=100)

    torch's own numbers are ``start = peak / 25`` and ``final = start / 1e4``. `rise` is the fraction of the
    steps before the peak, `shape` is "cosine", "linear" or "1-sqrt", and `three_phase` goes back to `start`
    as fast as it rose before it goes to `final`.
    Raises ValueError for a number that is not finite, a `total` that is no int of at least 1, or a `rise`
    not in [0, 1) (with three phases: [0, 0.5]).
    Source: https://arxiv.org/abs/1708.07120
    """

    start: float
    peak: float
    final: float
    _: KW_ONLY
    total: int
    rise: float = 0.3
    shape: Shape = "cosine"
    three_phase: bool = False

    def __post_init__(self) -> None:
        _Schedule.__post_init__(self)
        if not (0 <= self.rise <= 0.5 if self.three_phase else 0 <= self.rise < 1):
            allowed = "[0, 0.5], with three phases" if self.three_phase else "[0, 1)"
            raise ValueError(f"one_cycle: rise must be a fraction in {allowed}, got {self.rise!r}.")

    def __call__(self, step: int) -> float:
        end = self.total - 1
        if step >= end:
            return self.final
        left = _SHAPES[self.shape]
        top = self.rise * self.total - 1.0
        if step < top:
            return _mix(self.start, self.peak, left(step / top))
        if not self.three_phase:
            return _mix(self.peak, self.final, left((step - top) / (end - top)))
        if step < 2.0 * top:
            return _mix(self.peak, self.start, left((step - top) / top))
        return _mix(self.start, self.final, left((step - 2.0 * top) / (end - 2.0 * top)))


@dataclass(frozen=True, slots=True)
class warmup(_Schedule):
    """A straight line from `start` to where the schedule begins, in `steps` steps, and then the schedule.

    >>> import looplib as ll
    >>> lr = ll.warmup(ll.linear(1.0, total=10), steps=4)
    >>> [lr(step) for step in (0, 2, 4, 9, 14)]
    [0.0, 0.5, 1.0, 0.5, 0.0]

    The schedule's own step 0 is at the end of the warmup: step `steps` gives ``schedule(0)``, and a
    schedule of 10 steps ends after ``steps + 10``. No steps are no warmup.
    Raises TypeError for a `schedule` that cannot be called, and ValueError for a `start` that is not
    finite or `steps` that are no int of at least 0.
    """

    schedule: Schedule
    steps: Natural
    start: float = 0.0

    def __call__(self, step: int) -> float:
        if step < self.steps:
            return _mix(self.schedule(0), self.start, step / self.steps)
        return self.schedule(step - self.steps)


@dataclass(frozen=True, slots=True)
class warmup_linear(_Schedule):
    """From 0 to `peak` in `warmup` steps, then along a line to `final` at step `total` and after it.

    >>> import looplib as ll
    >>> lr = ll.warmup_linear(1.0, warmup=2, total=6)
    >>> [lr(step) for step in (0, 1, 2, 4, 6, 100)]
    [0.0, 0.5, 1.0, 0.5, 0.0, 0.0]

    Raises ValueError for a number that is not finite, a count that is no int, or a `warmup` above `total`.
    """

    peak: float
    _: KW_ONLY
    warmup: Natural
    total: int
    final: float = 0.0

    def __post_init__(self) -> None:
        _Schedule.__post_init__(self)
        if self.warmup > self.total:
            raise ValueError(
                f"{type(self).__name__}: warmup={self.warmup} is above total={self.total}; total counts the "
                "steps of the warmup too."
            )

    def __call__(self, step: int) -> float:
        if step < self.warmup:
            return self.peak * (step / self.warmup)
        if step >= self.total:
            return self.final
        weight = (self.total - step) / (self.total - self.warmup)
        return weight * self.peak + (1.0 - weight) * self.final


@dataclass(frozen=True, slots=True)
class warmup_cosine(warmup_linear):
    """From 0 to `peak` in `warmup` steps, then along a cosine to `final` at step `total` and after it.

    >>> import looplib as ll
    >>> lr = ll.warmup_cosine(3e-4, warmup=100, total=2000)
    >>> [lr(step) for step in (0, 50, 100, 1050, 2000)]
    [0.0, 0.00015, 0.0003, 0.00015, 0.0]
    >>> lr
    warmup_cosine(peak=0.0003, warmup=100, total=2000, final=0.0)

    Raises ValueError for a number that is not finite, a count that is no int, or a `warmup` above `total`.
    """

    def __call__(self, step: int) -> float:
        if step < self.warmup:
            return self.peak * (step / self.warmup)
        if step >= self.total:
            return self.final
        angle = math.pi * ((step - self.warmup) / (self.total - self.warmup))
        weight = 0.5 * (1.0 + math.cos(angle))
        return weight * self.peak + (1.0 - weight) * self.final


@dataclass(frozen=True, slots=True)
class warmup_stable_decay(_Schedule):
    """Up to `peak` in `warmup` steps, level, and in the last `decay` of `total` steps down to `final`.

    >>> import looplib as ll
    >>> lr = ll.warmup_stable_decay(1.0, warmup=2, decay=4, total=10)
    >>> [round(lr(step), 3) for step in (0, 1, 2, 6, 7, 8, 10)]
    [0.0, 0.5, 1.0, 1.0, 0.854, 0.5, 0.0]

    `warmup_shape` and `decay_shape` are "linear", "cosine" or "1-sqrt"; the warmup begins at `start`.
    Raises ValueError for a number that is not finite, a count that is no int, an unknown shape, or a
    `warmup` and `decay` that are more than `total` together.
    Source: https://arxiv.org/abs/2404.06395, and for "1-sqrt" https://arxiv.org/abs/2405.18392
    """

    peak: float
    _: KW_ONLY
    warmup: Natural
    decay: Natural
    total: int
    start: float = 0.0
    final: float = 0.0
    warmup_shape: Shape = "linear"
    decay_shape: Shape = "cosine"

    def __post_init__(self) -> None:
        _Schedule.__post_init__(self)
        if self.warmup + self.decay > self.total:
            raise ValueError(
                f"warmup_stable_decay: warmup={self.warmup} and decay={self.decay} are more than "
                f"total={self.total} together."
            )

    def __call__(self, step: int) -> float:
        if step < self.warmup:
            weight = _SHAPES[self.warmup_shape](1.0 - step / self.warmup)
            return _mix(self.peak, self.start, weight)
        if step >= self.total:
            return self.final
        done = step - (self.total - self.decay)
        if done < 0:
            return self.peak
        return _mix(self.peak, self.final, _SHAPES[self.decay_shape](done / self.decay))


@dataclass(frozen=True, slots=True)
class join(_Schedule):
    """One schedule after another: each begins at its own step 0 where the one before it ends.

    >>> import looplib as ll
    >>> lr = ll.join([ll.constant(1.0), ll.linear(1.0, total=10)], boundaries=[100])
    >>> [lr(step) for step in (0, 99, 100, 105, 110)]
    [1.0, 1.0, 1.0, 0.5, 0.0]

    `boundaries` are the steps at which the second of the `schedules` begins, the third, and so on.
    Raises TypeError for a schedule that cannot be called, and ValueError for `boundaries` that are not
    increasing ints, or not one fewer than the schedules.
    """

    schedules: Sequence[Schedule]
    boundaries: Sequence[int]

    def __post_init__(self) -> None:
        _Schedule.__post_init__(self)
        if len(self.schedules) != len(self.boundaries) + 1:
            raise ValueError(
                f"join: there is one boundary between two schedules, got {len(self.schedules)} schedules and "
                f"{len(self.boundaries)} boundaries."
            )

    def __call__(self, step: int) -> float:
        index = bisect_right(self.boundaries, step)
        return self.schedules[index](step - self.boundaries[index - 1] if index else step)


@dataclass(frozen=True, slots=True)
class scaled(_Schedule):
    """A schedule times a number, or times another schedule.

    >>> import looplib as ll
    >>> lr = ll.linear(1.0, total=4)
    >>> [ll.scaled(lr, 0.1)(2), ll.scaled(lr, lr)(2)]
    [0.05, 0.25]

    Raises TypeError for a `schedule` that cannot be called, and ValueError for a `factor` that is neither a
    schedule nor a finite number.
    """

    schedule: Schedule
    factor: float | Schedule

    def __call__(self, step: int) -> float:
        factor = self.factor(step) if callable(self.factor) else self.factor
        return self.schedule(step) * factor
