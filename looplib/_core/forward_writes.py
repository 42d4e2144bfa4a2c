"""Writes of forward passes to the tensors of a state, and their undo.

A donated step runs on the state's own buffers: if it is skipped, or fails before its update, they get their values back
from copies. Parameters that it writes stay written, as in a raw loop, and the state is spent. A pure step, an evaluation
and a prediction leave the state as it is: see `Unwritten`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from typing import NamedTuple

import torch
from torch import Tensor

from looplib._core import torch_private
from looplib._core.checks import is_due, is_plain
from looplib._core.checksums import checksums
from looplib._core.copies import clones
from looplib._core.mappings import pairs
from looplib._core.torch_private import functorch_level_of
from looplib._core.torch_storage import identity_of_memory


def with_copies(tensors: Iterable[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Tensors with copies of their values, for `put_back`."""
    # torch writes to no tensor that is expanded.
    writable = [tensor for tensor in tensors if not _is_expanded(tensor)]
    return [*zip(writable, clones(writable), strict=True)] if writable else []


def _is_expanded(tensor: Tensor) -> bool:
    return is_plain(tensor) and any(
        step == 0 and n > 1 for n, step in zip(tensor.shape, tensor.stride(), strict=True)
    )


def put_back(copied: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Give tensors their values back from copies."""
    with torch.no_grad():
        for tensor, copy in copied:
            tensor.copy_(copy)


def has_values(tensor: Tensor) -> bool:
    """True for a plain tensor whose values can be read here: not a shard, and not inside a transform."""
    return is_plain(tensor) and not tensor.is_meta and not tensor.is_quantized and functorch_level_of(tensor) < 1


# What torch counts


def versions(params: Mapping[str, Tensor]) -> list[int]:
    """torch's count of the writes to each parameter."""
    try:
        return [*map(torch_private.version, params.values())]
    except RuntimeError:  # tensors of torch.inference_mode(), whose writes are not counted
        return []


def written_since(params: Mapping[str, Tensor], before: list[int]) -> list[str]:
    """Names of the parameters to which torch has counted a write since `versions` gave these counts.

    It counts none through `tensor.data` and by fused kernels.
    """
    if not before:  # no parameters, or some whose writes are not counted
        return []
    now = [*map(torch_private.version, params.values())]
    if now == before:
        return []
    return [name for name, old, new in pairs(params, before, now) if old != new]


# Forward passes that must not write parameters


class Guarded(NamedTuple):
    """The parameters on which a forward pass runs, and what is known of them before it.

    Attributes:
        params: the parameters.
        cloned: names of those that are copies of the state's.
        counts: torch's counts of the writes to them.
        contents: by name, what changes with a parameter's memory or with values that are written without a count.
        copies: by name, the memory of a parameter and a copy of its values.
    """

    params: dict[str, Tensor]
    cloned: Set[str]
    counts: list[int]
    contents: Mapping[str, object]
    copies: Mapping[str, tuple[Tensor, Tensor]]


class Unwritten:
    """Guard of a state's parameters against the forward passes of one function, which leave them as they are.

    Parameters that are known to be written, those of layers with `max_norm` and those found written by an earlier call,
    are copied for each pass. The calls 1, 2, 4, 8, ... find others: they compare values, since torch counts writes to a
    tensor, but not those to `tensor.data`, and undo the writes from copies. They take no copies of models above 1 GiB,
    whose memory may not hold them. All other calls find what torch counts, and undo nothing.
    """

    def __init__(self) -> None:
        self.calls = 0  # that have ended well
        self.names: set[str] = set()  # of parameters that are written

    def begin(self, params: dict[str, Tensor]) -> Guarded:
        """The parameters for a forward pass."""
        written: dict[str, Tensor] = {}
        if self.names:
            written = {name: tensor for name, tensor in params.items() if name in self.names and _is_leaf(tensor)}
            copies = clones([*written.values()])
            params = {**params, **dict(zip(written, copies, strict=True))}
            for copy, tensor in zip(copies, written.values(), strict=True):
                copy.requires_grad_(tensor.requires_grad)
        if not is_due(self.calls + 1):
            return Guarded(params, written.keys(), versions(params), {}, {})
        plain = {name: tensor for name, tensor in params.items() if has_values(tensor)}
        restorable: dict[str, tuple[Tensor, Tensor]] = {}
        if sum(tensor.nbytes for tensor in plain.values()) <= _MOST_COPIED:
            copied = zip(plain.values(), clones([*plain.values()]), strict=True)
            restorable = dict(zip(plain, ((tensor.detach(), copy) for tensor, copy in copied), strict=True))
        return Guarded(params, written.keys(), versions(params), _sums(plain), restorable)

    def on_leaves(self, guarded: Guarded, params: dict[str, Tensor]) -> Guarded:
        """The same parameters, some as leaves of the call's graphs, over the same memory."""
        return guarded._replace(params=params)

    def end(self, guarded: Guarded, of_state: Mapping[str, Tensor]) -> tuple[list[str], bool]:
        """Names of the parameters that were written, and True if those of the state have their values.

        To be called only if no step has written the state since.
        """
        params, cloned, counts, sums, copies = guarded
        names = written_since(params, counts)
        if not (names or sums):  # as after most calls that compare no values
            return [], True
        if sums:
            now = _sums({name: params[name] for name in sums})
            names = [name for name in params if name in {*names} or (name in sums and now[name] != sums[name])]
        self.names.update(names)
        changed = [name for name in names if name not in cloned]
        for name in changed:
            if name in copies:
                memory, copy = copies[name]
                with torch.no_grad():  # not around the loop: a signal as it is entered leaves gradients off
                    memory.copy_(copy)
                if of_state[name].data_ptr() != memory.data_ptr():
                    of_state[name].data = memory
        return names, all(name in copies for name in changed)

    def check(self, guarded: Guarded, of_state: Mapping[str, Tensor], may_write: bool = False) -> None:
        """Raise if a parameter was written; if the pass may write to its copies, only if the state has other values now."""
        names, intact = self.end(guarded, of_state)
        if names and not (may_write and intact):
            raise RuntimeError(WROTE.format(names=", ".join(names), state=INTACT if intact else _HAS_CHANGED))
        self.calls += 1


class UnwrittenInGraph:
    """The same guard in the trace of a step, whose tensors have no values to compare, to copy or to put back.

    It finds writes that torch counts, and another memory (`weight.data = ...`). Those to `weight.data` itself are found in
    the graph (`transforms._program`).
    """

    def begin(self, params: dict[str, Tensor]) -> Guarded:
        return Guarded(params, frozenset(), versions(params), _identities(params), {})

    def on_leaves(self, guarded: Guarded, params: dict[str, Tensor]) -> Guarded:
        """Of other memory than the parameters: in a trace, `detach()` gives a new one."""
        return self.begin(params)

    def end(self, guarded: Guarded, of_state: Mapping[str, Tensor]) -> tuple[list[str], bool]:
        params, now = guarded.params, _identities(guarded.params)
        written = {*written_since(params, guarded.counts)}
        return [name for name in params if name in written or now[name] != guarded.contents[name]], True

    def check(self, guarded: Guarded, of_state: Mapping[str, Tensor], may_write: bool = False) -> None:
        """Raise if a parameter was written, also for a pass that may write to copies: a graph has none."""
        names, _ = self.end(guarded, of_state)
        if names:
            raise RuntimeError(WROTE.format(names=", ".join(names), state=INTACT))


_MOST_COPIED = 1 << 30  # bytes


def _is_leaf(tensor: Tensor) -> bool:
    return tensor.is_leaf and has_values(tensor)


WROTE = (
    "the forward pass wrote to the parameter {names} in place, as F.embedding(max_norm=...), weight.clamp_() or "
    "weight.data does. {state}. Compute new values (weight.clamp(), torch.renorm). A train step with donate=True that is "
    "not compiled may write to parameters, as a raw loop does"
)
INTACT = "A pure step does not change the state that it is given, and its values are as they were"
_HAS_CHANGED = "So the state that was given has changed: no earlier call wrote there, and nothing was copied"


def _sums(params: Mapping[str, Tensor]) -> dict[str, object]:
    """The address and the checksum of each parameter."""
    addresses = [tensor.data_ptr() for tensor in params.values()]
    return dict(zip(params, zip(addresses, checksums(params.values()), strict=True), strict=True))


def _identities(params: Mapping[str, Tensor]) -> dict[str, object]:
    return {name: identity_of_memory(tensor) for name, tensor in params.items()}
