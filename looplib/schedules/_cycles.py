"""Schedules with cycles: cosine restarts and the one-cycle policy."""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass, field

from looplib.schedules._schedule import _SHAPES, Shape, _Ending, _mix, count, number, shape


@dataclass(frozen=True, slots=True)
class cosine_restarts(_Ending):
    """Cosine decay with warm restarts (SGDR): from `start` to `final`, `cycles` times in `total` steps.

    >>> import looplib as ll
    >>> [round(ll.schedules.cosine_restarts(1.0, total=8, cycles=2)(step), 3) for step in (0, 2, 3, 4, 6, 8)]
    [1.0, 0.5, 0.146, 1.0, 0.5, 0.0]

    From step `total` on the value is `final`. Each cycle is `growth` times as long as the one before it: 70 steps in
    3 cycles with a growth of 2 are cycles of 10, 20 and 40 steps.

    Args:
        start: value at the start of each cycle.
        total: number of steps.
        cycles: number of cycles.
        growth: ratio of the lengths of consecutive cycles, an int.
        final: value at the end of each cycle.

    Raises:
        ValueError: a number is not finite, or a count is not an int of at least 1.

    Source: https://arxiv.org/abs/1608.03983
    """

    start: float
    _: KW_ONLY
    total: int
    cycles: int
    growth: int = 1
    final: float = 0.0
    _parts: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self._check(start=number, total=count, cycles=count, growth=count, final=number)
        object.__setattr__(self, "_parts", sum(self.growth**cycle for cycle in range(self.cycles)))

    def __call__(self, step: int) -> float:
        if step >= self.total:
            return self.final
        # Count in fractions of a step, so that all cycles are complete: a rounded remainder would miss restarts.
        position, length = step * self._parts, self.total
        if self.growth == 1:
            position %= length
        while position >= length:
            position -= length
            length *= self.growth
        weight = 0.5 * (1.0 + math.cos(math.pi * (position / length)))
        return _mix(self.start, self.final, weight)


@dataclass(frozen=True, slots=True)
class one_cycle(_Ending):
    """One-cycle policy: from `start` to `peak`, then to `final`, which is used by the last of `total` updates.

    >>> import looplib as ll
    >>> lr = ll.schedules.one_cycle(1.0, total=100)
    >>> [round(lr(step), 2) for step in (0, 29, 64, 99)]
    [0.04, 1.0, 0.5, 0.0]

    **Momentum.** torch's OneCycleLR also cycles the momentum, or the first beta of Adam: `cycle_momentum=True` is its
    default, from `max_momentum=0.95` to `base_momentum=0.85` and back. In looplib it is a schedule of its own:

    >>> import torch
    >>> beta1 = ll.schedules.one_cycle(0.85, total=100, start=0.95, final=0.95)
    >>> adamw = ll.optimizer(torch.optim.AdamW, lr=lr, betas=(beta1, 0.999))
    >>> sgd = ll.optimizer(torch.optim.SGD, lr=lr, momentum=beta1)

    Args:
        peak: value at the peak.
        total: number of steps.
        rise: fraction of the steps before the peak.
        start: value at step 0. Defaults to `peak / 25`.
        final: value of the last update. Defaults to `start / 1e4`.
        shape: "cosine", "linear" or "1-sqrt".
        three_phase: if True, return to `start` as fast as it rose before going to `final`.

    Raises:
        ValueError: a number is not finite, `total` is not an int of at least 1, or `rise` is not in [0, 1) (with
            three phases: [0, 0.5]).

    Source: https://arxiv.org/abs/1708.07120
    """

    peak: float
    _: KW_ONLY
    total: int
    rise: float = 0.3
    start: float | None = None
    final: float | None = None
    shape: Shape = "cosine"
    three_phase: bool = False

    def __post_init__(self) -> None:
        self._check(peak=number)
        self._default(start=self.peak / 25)
        self._check(total=count, rise=number, start=number, shape=shape)
        self._default(final=self.start / 1e4)  # type: ignore[operator]
        self._check(final=number)
        if not (0 <= self.rise <= 0.5 if self.three_phase else 0 <= self.rise < 1):
            allowed = "[0, 0.5], with three phases" if self.three_phase else "[0, 1)"
            raise ValueError(f"one_cycle: rise must be a fraction in {allowed}, got {self.rise!r}.")

    def __call__(self, step: int) -> float:
        assert self.start is not None
        assert self.final is not None
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
