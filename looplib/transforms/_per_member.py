"""Hyperparameters that differ between the members of a stack."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_TREES = ("params", "buffers", "opt_state", "extra")

_LEAST = 5e-324  # the smallest number above 0


class per_member:
    """A hyperparameter with a value, or a schedule, of its own for each member of a stack.

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
        if _asked is None:
            if step:
                raise ValueError(f"{self} was asked for by a step of one state; make a step of a stack: ll.vmap_step")
            # A first state is made with it, which needs room for what any of the members keeps.
            return next(filter(None, (_at(value, 0) for value in self.values)), 0.0)
        if _asked.count != len(self.values):
            raise ValueError(
                f"{self} has {len(self.values)} values, and the stack {_asked.count} members: give one each"
            )
        _asked.own = True
        found = _at(self.values[_asked.number], step)
        return found or (_LEAST if _asked.without_zeros else found)


def _at(value: Any, step: int) -> float:
    return float(value(step) if callable(value) else value)


@dataclass
class _Asked:
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


_asked: _Asked | None = None
