"""Undo of a forward pass's writes in place: to buffers, and to parameters with `max_norm=`.

A donated step runs on the state's own buffers. If it is skipped, or fails before its update, they get their values back
from copies. A pure step runs on copies, and checks that its forward pass has left the parameters alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor

from looplib._core import torch_private
from looplib._core.checksums import checksums, has_values
from looplib._core.lease import overwritten, spend
from looplib._core.ranks import is_sharded, shards
from looplib._core.tracing import tracing
from looplib._core.updates import clones


def with_copies(tensors: Iterable[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Tensors with copies of their values, for `put_back`."""
    given = [*tensors]
    return [*zip(given, clones(given), strict=True)]


def put_back(copied: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Give tensors their values back from copies."""
    with torch.no_grad():
        for tensor, copy in copied:
            tensor.copy_(copy)


class Writes:
    """Names of what the forward passes of a donated step write, learned from its calls.

    torch counts writes, but not those of batch norm's kernels or through `.data`. So the first call compares the values of
    all buffers, and a later one does if torch counts a write to a buffer that was not written before: batch norm counts
    its batches. Parameters are known from `max_norm=`, or once torch has counted a write.

    Attributes:
        params, buffers: their names; None for buffers before the first call.
    """

    def __init__(self, params: Iterable[str]) -> None:
        self.params = set(params)
        self.buffers: set[str] | None = None

    def learn(self, kept: Kept) -> None:
        if self.buffers is not None and _versions(kept.params, kept.buffers) == kept.versions:
            return
        counted = kept.counted()
        self.params |= counted & kept.params.keys()
        in_buffers = counted & kept.buffers.keys()
        if self.buffers is None or not in_buffers <= self.buffers:
            self.buffers = (self.buffers or set()) | in_buffers | kept.differing()


class Kept:
    """Values from before a forward pass: of all buffers, and of the parameters that it is known to write."""

    __slots__ = ("_copies", "_tensors", "buffers", "params", "versions")

    def __init__(self, params: Mapping[str, Tensor], buffers: Mapping[str, Tensor], writes: Writes) -> None:
        self.params, self.buffers = params, buffers
        self._tensors = {**buffers, **{name: params[name] for name in writes.params}} if writes.params else buffers
        self._copies = clones([*self._tensors.values()])
        self.versions = _versions(params, buffers)

    def counted(self) -> set[str]:
        """Names of parameters and buffers of which torch has counted a write since."""
        now = _versions(self.params, self.buffers)
        if now == self.versions:
            return set()
        names = zip((*self.params, *self.buffers), self.versions, now, strict=False)
        return {name for name, old, new in names if old != new}

    def differing(self) -> set[str]:
        """Names of buffers that do not have the values of before."""
        copies = zip(self._tensors, self._copies, strict=True)
        return {name for name, copy in copies if name in self.buffers and not _same(self._tensors[name], copy)}

    def restore(self) -> None:
        """Put the values back. Raise if the forward pass has written a parameter of which there is no copy."""
        put_back(zip(self._tensors.values(), self._copies, strict=True))
        if lost := self._lost():
            raise RuntimeError(
                f"the forward pass wrote to the parameter {', '.join(lost)} in place, for the first time in a step whose "
                "update is skipped, so its values before are gone: write it in the first step as well, of which looplib "
                "then keeps a copy in each step, or make the step with donate=False"
            )

    def restore_after_failure(self, state: Any) -> None:
        """Put the values back, and spend the state if that is not possible.

        If the state was given up meanwhile, by its own update or by another step, its memory is no longer this step's.
        """
        if not self._tensors and not self.params:
            return
        if overwritten(state, (self.params, self.buffers)) is not None:
            return
        lost = self._lost()
        put_back(zip(self._tensors.values(), self._copies, strict=True))
        if lost:
            spend(state)

    def _lost(self) -> list[str]:
        return sorted(self.counted() - self._tensors.keys())


def _same(one: Tensor, other: Tensor) -> bool:
    if is_sharded(one):
        one, other = shards((one, other))
    return torch.equal(one, other)


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


_NOTHING: dict[str, Tensor] = {}


def _versions(params: Mapping[str, Tensor], buffers: Mapping[str, Tensor] = _NOTHING) -> list[int]:
    try:
        return [*map(torch_private.version, params.values()), *map(torch_private.version, buffers.values())]
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


NOTHING = Kept({}, {}, Writes(()))
