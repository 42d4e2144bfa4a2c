"""Hyperparameters that differ between the members of a stack."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from looplib._core.checks import check

LEAST = 5e-324  # the smallest positive number


class per_member:
    """Hyperparameters per member of a stack: one value or schedule for each.

    >>> import looplib as ll, torch
    >>> optimizer = ll.optimizer(torch.optim.AdamW, lr=ll.transforms.per_member([1e-3, 3e-3, 1e-2]), weight_decay=0.1)

    Use it anywhere `ll.optimizer` takes a number or a schedule. If the value is 0 for some members and not for others
    (weight decay, momentum), the update of all members includes the term, multiplied by 0 for those.

    Such an optimizer creates one initial state for all members. Rprop and ASGD store the learning rate in it: for
    these, create each member's initial state with an optimizer that has its own rate, and the step with `per_member`.

    Args:
        values: one number or schedule for each member, in order.

    Raises:
        ValueError: there are no values; or, from the step, the state is not a stack or has a different number of
            members.
    """

    def __init__(self, values: Sequence[Any]) -> None:
        check(len(values), "per_member got no values; give one for each member")
        self.values = tuple(value if callable(value) else float(value) for value in values)

    def __repr__(self) -> str:
        return f"per_member({list(self.values)})"

    def __call__(self, step: int) -> float:
        asked = _asked.get()
        if asked is None:
            check(step == 0, f"{self} was asked for by a step of one state; make a step of a stack: ll.vmap_step")
            # The initial state is created with this value, and needs room for everything that any member keeps.
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
    """The member for which the host is asked.

    Attributes:
        number, count: index of the member, and number of members.
        without_zeros: True if hyperparameters that are 0 are to be returned as nonzero.
        own: True if a hyperparameter with a value per member was asked for.
    """

    number: int
    count: int
    without_zeros: bool
    own: bool = False


_asked: ContextVar[Asked | None] = ContextVar("looplib.transforms.asked", default=None)


@contextmanager
def asking(count: int, without_zeros: bool) -> Iterator[Asked]:
    """Ask for the members of a stack in turn: the caller increases `number`."""
    asked = Asked(0, count, without_zeros)
    token = _asked.set(asked)
    try:
        yield asked
    finally:
        _asked.reset(token)
