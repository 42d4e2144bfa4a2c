"""Undo of a forward pass's in-place writes, to buffers and to parameters with `max_norm=`.

If an in-place step is skipped or fails, it must restore what its forward pass has written. It is not known in advance
which buffers that will be: a layer may run for the first time after thousands of steps. So small buffers (such as
normalization statistics) are copied before each step, and large ones (masks, position tables), which are usually
constant, only after a step has changed them. If a step that is not made writes a large buffer for the first time, its
old value is lost and an error names it. torch counts writes, except those of batch norm's kernels, so in a step that
is not made the checksums of large buffers are compared as well.

Parameters are copied if a module is known to write them (`nn.Embedding(max_norm=...)`) or the first step wrote them.
If other code writes a parameter for the first time in a later step that is then not made, the change stays.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Set
from typing import NoReturn

import torch
from torch import Tensor

from looplib._core import torch_private
from looplib._core.checksums import checksum, checksums, has_values
from looplib._core.mappings import pick, subset
from looplib._core.tracing import tracing

_SMALL = 1 << 16  # elements; batch norm has three buffers with one element per channel


class Saved:
    """Tensors that a step may write, with their previous values.

    Attributes:
        tensors: tensors that are checked for writes.
        copies: values before the step, for some of them.
        versions: number of writes counted by torch, for each.
        sums: checksum before the step, for tensors without a copy.
    """

    __slots__ = ("copies", "sums", "tensors", "versions")

    def __init__(self, tensors: Mapping[str, Tensor], copies: dict[str, Tensor], sums: Mapping[str, _Sum]) -> None:
        self.tensors = tensors
        self.copies = copies
        self.versions = dict(zip(tensors, map(torch_private.version, tensors.values()), strict=True))
        self.sums = sums

    def changed(self) -> set[str]:
        """Tensors that were written since, as counted by torch. Batch norm's kernels do not count."""
        versions = self.versions
        return {name for name, tensor in self.tensors.items() if torch_private.version(tensor) != versions[name]}

    def uncounted(self) -> set[str]:
        """Names of tensors with a checksum that were written although torch counted no write."""
        return {name for name, before in self.sums.items() if before.differs(self.tensors.get(name))}

    def watch_only(self, names: Set[str]) -> None:
        """Check only these tensors from now on: the update that follows may write the others."""
        self.tensors, self.sums = subset(self.tensors, names), subset(self.sums, names)

    def restore(self) -> set[str]:
        """Restore the values, and return the names of written tensors that cannot be restored."""
        lost = (self.changed() | self.uncounted()) - self.copies.keys()
        with torch.no_grad():
            for name, tensor in self.copies.items():
                self.tensors[name].copy_(tensor)
        return lost


def _copied(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Copies of buffers: on accelerators by one kernel for each dtype, since launching a kernel for each takes longer."""
    copies: dict[str, Tensor] = {}
    away: dict[tuple[torch.device, torch.dtype], dict[str, Tensor]] = {}
    for name, tensor in tensors:
        if tensor.is_cpu or type(tensor) is not Tensor:
            copies[name] = tensor.clone()
        else:
            away.setdefault((tensor.device, tensor.dtype), {})[name] = tensor.detach()
    for alike in away.values():
        into = [torch.empty_like(tensor) for tensor in alike.values()]
        torch_private.foreach_copy_(into, [*alike.values()])
        copies |= zip(alike, into, strict=True)
    return copies


class _Sum:
    """Checksum of a tensor, with the number of writes counted by torch at that time."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = weakref.ref(tensor)
        self.version = torch_private.version(tensor)
        self.value = checksum(tensor)

    def differs(self, tensor: Tensor | None) -> bool:
        """True if the same tensor has different values although torch counted no write. False for a different tensor."""
        if tensor is None or self.tensor() is not tensor or torch_private.version(tensor) != self.version:
            return False
        return not torch.equal(self.value, checksum(tensor))


# Shared by all models that write nothing, so that their steps do no extra work.
NOTHING = Saved({}, {}, {})
NO_NAMES: frozenset[str] = frozenset()


class Written:
    """Names of the buffers and parameters that a step function's forward pass writes.

    Attributes:
        buffers: names learned from the calls; None before the first.
        params: names known in advance, and those that the first call wrote.
        looks: True if there is something to check even in a step without buffers.
        sums: checksums of large buffers that have been constant so far.
    """

    def __init__(self, params: Iterable[str]) -> None:
        self.buffers: set[str] | None = None
        self.params = set(params)
        self.looks = True
        self.sums: dict[str, _Sum] = {}

    def save(self, buffers: Mapping[str, Tensor], params: Mapping[str, Tensor]) -> Saved:
        """Save values before a step."""
        known = self.buffers
        copies = _copied(
            (name, tensor)
            for name, tensor in buffers.items()
            if known is None or name in known or tensor.numel() <= _SMALL
        )
        if not self.looks:
            return Saved(buffers, copies, self.sums)
        copies |= {name: params[name].detach().clone() for name in self.params}
        watched = params if known is None else pick(params, self.params)
        if known is None:
            self.sums = {name: _Sum(tensor) for name, tensor in params.items() if has_values(tensor)}
        return Saved({**buffers, **watched}, copies, self.sums)

    def learn(self, saved: Saved, buffers: Mapping[str, Tensor]) -> Set[str]:
        """Learn from a forward pass: return all buffers that it or an earlier one has written."""
        changed = saved.changed()
        if self.buffers is None:  # the first step, of which there are checksums of all parameters
            changed |= saved.uncounted()
        if self.looks:
            self.params |= changed - buffers.keys()
            saved.watch_only(self.params | buffers.keys())
            self.looks = bool(self.params)
            changed &= buffers.keys()
        if self.buffers is None or not changed <= self.buffers:
            self.buffers = self._relearned(changed, saved, buffers)
        return self.buffers

    def _relearned(self, changed: set[str], saved: Saved, buffers: Mapping[str, Tensor]) -> set[str]:
        """All buffers written so far, after a write that torch counted to one that is not among them."""
        # Batch norm's kernels write without counting, but its module counts batches, so compare the values now.
        copied = saved.copies.keys() & buffers.keys()
        uncounted = {name for name in copied if not torch.equal(saved.copies[name], buffers[name])}
        written = (self.buffers or set()) | changed | uncounted
        large = [name for name in buffers.keys() - written if buffers[name].numel() > _SMALL]
        self.sums = {name: self.sums.get(name) or _Sum(buffers[name]) for name in large}
        return written


def explain(lost: set[str], buffers: Set[str]) -> str:
    what, reason = "buffer", f"and has more than {_SMALL:,} elements, of which no copy is kept"
    if not lost <= buffers:
        what, reason = "parameter", "of which no copy was kept before"
    return (
        f"the {what} {', '.join(sorted(lost))} was written for the first time in a step whose update is skipped, "
        f"{reason}, so its values before are gone: write it in the first step as well, or make the step with "
        "donate=False"
    )


class Unwritten:
    """Check that forward passes leave the parameters of a state unchanged.

    torch counts writes to a tensor, but not those to `tensor.data`, so the first call also compares the values.
    """

    def __init__(self) -> None:
        self.compared = False

    def begin(self, params: Mapping[str, Tensor]) -> tuple[list[int], dict[str, int]]:
        """Record what `check` compares after the forward pass."""
        return _versions(params), {} if self.compared or tracing() else _sums(params)

    def check(self, params: Mapping[str, Tensor], before: tuple[list[int], dict[str, int]]) -> None:
        """Raise if a parameter was written."""
        versions, sums = before
        if (after := _versions(params)) != versions:
            _refuse([name for name, old, new in zip(params, versions, after, strict=True) if old != new])
        if sums:
            if (now := _sums(params)) != sums:
                _refuse([name for name, value in sums.items() if now.get(name) != value])
            self.compared = True


def _versions(params: Mapping[str, Tensor]) -> list[int]:
    try:
        return [*map(torch_private.version, params.values())]
    except RuntimeError:  # tensors of torch.inference_mode(), whose writes are not counted
        return []


def _sums(params: Mapping[str, Tensor]) -> dict[str, int]:
    plain = {name: tensor for name, tensor in params.items() if has_values(tensor)}
    return dict(zip(plain, checksums(plain.values()), strict=True))


def _refuse(names: list[str]) -> NoReturn:
    raise RuntimeError(
        f"the forward pass wrote to the parameter {', '.join(names)} in place, as F.embedding(max_norm=...), "
        "weight.clamp_() or weight.data does, so the state that was given has changed. Use nn.Embedding(max_norm=...), "
        "of whose weights looplib lends a copy, or compute new values (weight.clamp()). A train step with donate=True "
        "may write to parameters, as a raw loop does"
    )
