"""Iterations of loaders, remembered to warn of a position in the data that does not follow from them.

- A loop that makes several train steps with each batch, and forgets `same_batch=True`: epochs end too early.
- A loop that applies gradients, and forgets `samples=`: the position stays, and the same epoch comes again.
- A restored loop over a plain DataLoader, which starts the epoch again.

This file does nothing else. It holds counts alone, for as long as there are states of the run, and no loader or state.
`ll.debug.warn_of_misuse(False)` switches it off.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from looplib._core.checks import warn
from looplib._core.ranks import rank
from looplib._core.switch import warnings_of_misuse

_MOST_STEPS = 8  # on one batch, of several networks
_RECENT = 8  # iterations of which each is known, since several may be read in turns
_MOST_SPANS = 64
_ENDLESS = 1 << 40  # stands for the batches of an epoch without a length, more than any has

Span = tuple[int, int]  # first and last position


@dataclass(slots=True)
class Iteration:
    """A loader's iteration over the rest of an epoch.

    Attributes:
        begin: position of the state at which it began, in batches since the start of the run.
        step: step of that state.
        drawn: number of batches drawn so far.
        ended: True once there are no more.
    """

    begin: int = 0
    step: int = 0
    drawn: int = 0
    ended: bool = False

    @property
    def span(self) -> Span:
        """Positions that follow if each batch is used for a train step, or left out."""
        return self.begin, self.begin + self.drawn


@dataclass(slots=True)
class _Positions:
    """Positions at which the states of one run can be, as far as loaders have led there.

    The states of a run may be branches of it: some that have come far, and others that start again.

    Attributes:
        epoch_length: the one that they count by.
        recent: the latest iterations, the last one last.
        earlier: spans of those before them, merged where they meet.
    """

    epoch_length: int | None
    recent: list[Iteration] = field(default_factory=list)
    earlier: list[Span] = field(default_factory=list)

    def add(self, iteration: Iteration) -> None:
        self.recent.append(iteration)
        if len(self.recent) > _RECENT:
            self.earlier = _merged([*self.earlier, self.recent.pop(0).span])[-_MOST_SPANS:]

    def lead_to(self, position: int) -> bool:
        spans = [*self.earlier, *(iteration.span for iteration in self.recent)]
        return any(first <= position <= last for first, last in spans)


# Of each run (`types.Run`) that has states.
_of_runs: WeakKeyDictionary[Any, _Positions] = WeakKeyDictionary()


def begin_iteration(state: Any) -> Iteration:
    """Remember that a loader begins to yield batches for a state. The loader counts them in the result."""
    iteration = Iteration(_position(state), state.step)
    if warnings_of_misuse.on:
        positions = _of_runs.get(state.run)
        if positions is None or positions.epoch_length != state.epoch_length:
            positions = _of_runs[state.run] = _Positions(state.epoch_length)
        positions.add(iteration)
    return iteration


def warn_of_position(state: Any) -> None:
    """Warn if a state has moved by several batches for each batch that a loader has yielded for its run, or by none.

    A batch may be trained on many times on purpose, so it takes two batches, with the same few steps for each. It stays
    where it was on purpose if the updates within the epoch belong to no batch and the epoch is not read to its end. A
    branch of the run stands where an earlier iteration has led.
    """
    positions = _of_runs.get(state.run) if warnings_of_misuse.on else None
    if positions is None or positions.epoch_length != state.epoch_length or rank():
        return
    last, position = positions.recent[-1], _position(state)
    if last.drawn < 2:
        return
    if position == last.begin:
        if state.no_batch and last.ended and state.step > last.step:
            warn(
                f"the loader has given all {last.drawn} batches of the epoch, and the state is still at batch "
                f"{state.batch}, so the same epoch comes again: ll.apply_gradients leaves the position in the data unless "
                "it is told that the update consumes a batch, ll.apply_gradients(..., samples=len(batch))"
            )
        return
    steps, rest = divmod(position - last.begin, last.drawn)
    if 1 < steps <= _MOST_STEPS and not rest and not positions.lead_to(position):
        warn(
            f"the state has moved by {steps} batches for each batch of the loader, so epochs end too early, "
            "and a resumed run leaves samples out: if several train steps use one batch, make all but the first by "
            "ll.make_train_step(..., same_batch=True)"
        )


def is_of_loader(state: Any) -> bool:
    """True if batches that a loader has yielded for its run are known to lead to a state."""
    positions = _of_runs.get(state.run)
    return (
        positions is not None and positions.epoch_length == state.epoch_length and positions.lead_to(_position(state))
    )


def _position(state: Any) -> int:
    """Batches since the start of the run."""
    position: int = state.epoch * (state.epoch_length or _ENDLESS) + state.batch
    return position


def _merged(spans: Iterable[Span]) -> list[Span]:
    """The spans in order, those that meet as one.

    >>> _merged([(4, 6), (0, 2), (2, 3)])
    [(0, 3), (4, 6)]
    """
    merged: list[Span] = []
    for first, last in sorted(spans):
        if merged and first <= merged[-1][1]:
            first, last = merged[-1][0], max(last, merged.pop()[1])
        merged.append((first, last))
    return merged
