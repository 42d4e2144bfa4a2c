"""Undo of a forward pass's writes in place.

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


class Kept:
    """Values from before a donated step's forward pass: of all buffers, and of the parameters that it is known to write.

    `written` has the names of these parameters, to which torch has counted a write in an earlier step. A step adds to
    it what it finds.
    """

    __slots__ = ("_copies", "_tensors", "_versions", "_written", "buffers", "params")

    def __init__(self, params: Mapping[str, Tensor], buffers: Mapping[str, Tensor], written: set[str]) -> None:
        self.params, self.buffers, self._written = params, buffers, written
        self._tensors = {**buffers, **{name: params[name] for name in written}} if written else buffers
        self._copies = clones([*self._tensors.values()])
        self._versions = _versions(params)

    def learn(self) -> None:
        """Remember the parameters that the forward pass has written, for the steps that follow."""
        self._written |= self._counted()

    def _counted(self) -> set[str]:
        """Names of the parameters to which torch has counted a write since."""
        now = _versions(self.params)
        if now == self._versions:
            return set()
        names = zip(self.params, self._versions, now, strict=False)
        return {name for name, before, after in names if before != after}

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
        return sorted(self._counted() - self._tensors.keys())


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
        "weight.clamp_() or weight.data does, so the state that was given has changed. Compute new values "
        "(weight.clamp(), torch.renorm). A train step with donate=True may write to parameters, as a raw loop does"
    )


NOTHING = Kept({}, {}, set())
