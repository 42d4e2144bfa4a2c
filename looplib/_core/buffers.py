"""What a forward pass writes in place, and the values before it: buffers, and parameters with `max_norm=`.

A step in place that is skipped or fails has to put back what its forward pass has written. Which buffers that will be
nobody knows beforehand: a layer may run for the first time after thousands of steps. So small buffers are copied before
each step (statistics of normalization are small), and large ones (masks, tables of positions), which are constants as
a rule, from the step on at which one has changed. A large one that is written for the first time in a step that is
not made is lost, which is said by name. torch counts writes, but not those of batch norm's kernels, so the checksums of
large buffers are compared as well, in a step that is not made.

Parameters are copied where a module is known to write them (`nn.Embedding(max_norm=...)`), or where the first step
wrote them. What other code writes into a parameter for the first time in a later step, which is then not made, stays.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Set

import torch
from torch import Tensor

from looplib._core import torch_private
from looplib._core.checksums import checksum

_SMALL = 1 << 16  # elements: a batch norm has three buffers of one for each channel


class Saved:
    """Tensors that one step may write, with their values before it.

    Attributes:
        tensors: those whose writes are looked at.
        copies: the values before the step, of some of them.
        versions: how many writes torch had counted, of each.
        sums: of tensors without a copy, the checksum before the step.
    """

    __slots__ = ("copies", "sums", "tensors", "versions")

    def __init__(self, tensors: Mapping[str, Tensor], copies: dict[str, Tensor], sums: Mapping[str, _Sum]) -> None:
        self.tensors = tensors
        self.copies = copies
        self.versions = [torch_private.version(tensor) for tensor in tensors.values()]
        self.sums = sums

    def changed(self) -> set[str]:
        """The tensors that were written since, as far as torch counts; the kernels of batch norm do not."""
        pairs = zip(self.tensors.items(), self.versions, strict=True)
        return {name for (name, tensor), version in pairs if torch_private.version(tensor) != version}

    def restore(self) -> set[str]:
        """Put the values back; the names of those that were written and cannot be put back."""
        uncounted = {name for name, before in self.sums.items() if before.differs(self.tensors.get(name))}
        lost = (self.changed() | uncounted) - self.copies.keys()
        with torch.no_grad():
            for name, tensor in self.copies.items():
                self.tensors[name].copy_(tensor)
        return lost


class _Sum:
    """The checksum of a tensor, with the writes that torch had counted then."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = weakref.ref(tensor)
        self.version = torch_private.version(tensor)
        self.value = checksum(tensor)

    def differs(self, tensor: Tensor | None) -> bool:
        """Whether the same tensor has other values, and torch counted no write: False for another tensor."""
        same = tensor is not None and self.tensor() is tensor and torch_private.version(tensor) == self.version
        return same and not torch.equal(self.value, checksum(tensor))


# Of a model that writes nothing, for which a step does nothing else.
NOTHING = Saved({}, {}, {})
NO_NAMES: frozenset[str] = frozenset()


class Written:
    """The names of the buffers and parameters that the forward pass of one step function writes.

    Attributes:
        buffers: names learnt from the calls; None before the first.
        params: names known beforehand, and those that the first call wrote.
        looks: whether a step without buffers has something to look at too.
        sums: of large buffers that were constants so far.
    """

    def __init__(self, params: Iterable[str]) -> None:
        self.buffers: set[str] | None = None
        self.params = set(params)
        self.looks = True
        self.sums: dict[str, _Sum] = {}

    def save(self, buffers: Mapping[str, Tensor], params: Mapping[str, Tensor]) -> Saved:
        """Before a step."""
        known = self.buffers
        copies = {
            name: tensor.clone()
            for name, tensor in buffers.items()
            if known is None or name in known or tensor.numel() <= _SMALL
        }
        if not self.looks:
            return Saved(buffers, copies, self.sums)
        copies |= {name: params[name].detach().clone() for name in self.params}
        watched = params if known is None else {name: params[name] for name in self.params}
        return Saved({**buffers, **watched}, copies, self.sums)

    def learn(self, saved: Saved, buffers: Mapping[str, Tensor], trained: Set[str]) -> Set[str]:
        """After a forward pass: all buffers that it or one before it has written."""
        changed = saved.changed()
        if self.looks:
            self._learn_params(changed - buffers.keys(), trained)
            changed &= buffers.keys()
        if self.buffers is None or not changed <= self.buffers:
            # Batch norm's kernels write uncounted, and its module counts: now is the time to compare the values.
            uncounted = {
                name for name, old in saved.copies.items() if name in buffers and not torch.equal(old, buffers[name])
            }
            self.buffers = (self.buffers or set()) | changed | uncounted
            large = {name: buffers[name] for name in buffers.keys() - self.buffers if name in buffers}
            self.sums = {
                name: self.sums.get(name) or _Sum(tensor) for name, tensor in large.items() if tensor.numel() > _SMALL
            }
        return self.buffers

    def _learn_params(self, changed: set[str], trained: Set[str]) -> None:
        if strange := changed - trained:
            raise RuntimeError(
                f"the forward pass wrote to the parameter {', '.join(sorted(strange))}, which is not trained and may "
                "belong to other states as well: let it write to no parameter, or use nn.Embedding(max_norm=...)"
            )
        self.params |= changed
        self.looks = bool(self.params)


def explain(lost: set[str], buffers: Set[str]) -> str:
    what, reason = "buffer", f"and has more than {_SMALL:,} elements, of which no copy is kept"
    if not lost <= buffers:
        what, reason = "parameter", "of which no copy was kept before"
    return (
        f"the {what} {', '.join(sorted(lost))} was written for the first time in a step whose update is skipped, "
        f"{reason}, so its values before are gone: write it in the first step as well, or make the step with "
        "donate=False"
    )


def versions(params: Mapping[str, Tensor]) -> list[int]:
    """How many writes torch has counted to each parameter, before a forward pass that is to write none."""
    try:
        return [*map(torch_private.version, params.values())]
    except RuntimeError:  # of torch.inference_mode(), where nothing is counted
        return []


def check_unwritten(params: Mapping[str, Tensor], before: list[int]) -> None:
    """Raise if a forward pass has written to the parameters of a state that is to stay as it is."""
    after = versions(params)
    if after != before:
        names = [name for name, old, new in zip(params, before, after, strict=True) if old != new]
        raise RuntimeError(
            f"the forward pass wrote to the parameter {', '.join(names)} in place, as F.embedding(max_norm=...) or "
            "weight.clamp_() does, so the state that was given has changed. Use nn.Embedding(max_norm=...), of whose "
            "weights looplib lends a copy, or compute new values (weight.clamp()). A train step with donate=True may "
            "write to what it trains"
        )
