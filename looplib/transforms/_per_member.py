"""Hyperparameters that differ between the members of a stack."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

LEAST = 5e-324  # the smallest number above 0


class per_member:
    """Hyperparameters per member of a stack: a value, or a schedule, for each.

    >>> import looplib as ll, torch
    >>> optimizer = ll.optimizer(torch.optim.AdamW, lr=ll.transforms.per_member([1e-3, 3e-3, 1e-2]), weight_decay=0.1)

    It stands where `ll.optimizer` takes a number or a schedule. Where it is 0 for some members and not for others
    (a weight decay, a momentum), these have the term too, times 0.

    Such an optimizer makes one first state for all members. Rprop and ASGD put the learning rate into theirs: for
    these, make each member's first state by an optimizer with its own, and the step by one with `per_member`.

    Args:
        values: one for each member, in their order: numbers or schedules.

    Raises ValueError for no values; the step raises it when the stack has another number of members, or is none.
    """

    def __init__(self, values: Sequence[Any]) -> None:
        if not len(values):
            raise ValueError("per_member got no values; give one for each member")
        self.values = tuple(value if callable(value) else float(value) for value in values)

    def __repr__(self) -> str:
        return f"per_member({list(self.values)})"

    def __call__(self, step: int) -> float:
        asked = _asked.get()
        if asked is None:
            if step:
                raise ValueError(f"{self} was asked for by a step of one state; make a step of a stack: ll.vmap_step")
            # A first state is made with it, which needs room for what any of the members keeps.
            return next(filter(None, (_at(value, 0) for value in self.values)), 0.0)
        if asked.count != len(self.values):
            raise ValueError(
                f"{self} has {len(self.values)} values, and the stack {asked.count} members: give one each"
            )
        asked.own = True
        value = _at(self.values[asked.number], step)
        return value or (LEAST if asked.without_zeros else value)


def _at(value: Any, step: int) -> float:
    return float(value(step) if callable(value) else value)


@dataclass
class Asked:
    """The member whose answer the host is asked for.

    Attributes:
        number, count: which, of how many.
        without_zeros: hyperparameters that are 0 are to be given as if they were not.
        own: whether a hyperparameter of its own was asked for.
    """

    number: int
    count: int
    without_zeros: bool
    own: bool = False


_asked: ContextVar[Asked | None] = ContextVar("looplib.transforms.asked", default=None)


@contextmanager
def asking(count: int, without_zeros: bool) -> Iterator[Asked]:
    """Ask for the members of a stack, one after another: the caller counts `number` up."""
    asked = Asked(0, count, without_zeros)
    token = _asked.set(asked)
    try:
        yield asked
    finally:
        _asked.reset(token)
