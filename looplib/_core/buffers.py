"""Buffers that a forward pass writes in place, and their values before it.

A step in place that is skipped or fails has to put back what its forward pass has written. Which buffers that will be
nobody knows beforehand: a layer may run for the first time after thousands of steps. So small buffers are copied before
each step (statistics of normalization are small), and large ones (masks, tables of positions), which are constants as
a rule, from the step on at which one has changed. A large one that is written for the first time in a step that is
not made is lost, which is said by name.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from looplib._core import torch_private

_SMALL = 1 << 16  # elements: a batch norm has three buffers of one for each channel


class Saved:
    """The buffers of one step, with their values before it."""

    __slots__ = ("buffers", "copies", "versions")

    def __init__(self, buffers: Mapping[str, Tensor], copies: dict[str, Tensor]) -> None:
        self.buffers = buffers
        self.copies = copies
        self.versions = [torch_private.version(tensor) for tensor in buffers.values()]

    def changed(self) -> set[str]:
        """The buffers that were written since, as far as torch counts; the kernels of batch norm do not."""
        pairs = zip(self.buffers.items(), self.versions, strict=True)
        return {name for (name, tensor), version in pairs if torch_private.version(tensor) != version}

    def restore(self) -> set[str]:
        """Put the values back; the names of those that were written and cannot be put back."""
        lost = self.changed() - self.copies.keys()
        with torch.no_grad():
            for name, tensor in self.copies.items():
                self.buffers[name].copy_(tensor)
        return lost


# Of a model without buffers, for which a step does nothing else.
NOTHING = Saved({}, {})
NO_NAMES: frozenset[str] = frozenset()


class Written:
    """The names of the buffers that the forward pass of one step function writes, learnt from its calls."""

    def __init__(self) -> None:
        self.names: set[str] | None = None

    def save(self, buffers: Mapping[str, Tensor]) -> Saved:
        """Before a step."""
        known = self.names
        copies = {
            name: tensor.clone()
            for name, tensor in buffers.items()
            if known is None or name in known or tensor.numel() <= _SMALL
        }
        return Saved(buffers, copies)

    def learn(self, saved: Saved) -> set[str]:
        """After a step: all that it or a step before it has written."""
        changed = saved.changed()
        if self.names is None or not changed <= self.names:
            # Batch norm's kernels write uncounted, and its module counts: now is the time to compare the values.
            uncounted = {name for name, old in saved.copies.items() if not torch.equal(old, saved.buffers[name])}
            self.names = (self.names or set()) | changed | uncounted
        return self.names


def explain(lost: set[str]) -> str:
    return (
        f"the buffer {', '.join(sorted(lost))} was written for the first time in a step whose update is skipped, and "
        f"has more than {_SMALL:,} elements, of which no copy is kept, so its values before are gone: write it in the "
        "first step as well, or make the step with donate=False"
    )
