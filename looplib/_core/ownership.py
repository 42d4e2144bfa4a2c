"""Who may still read a tensor that a step writes in place.

A run whose steps are donated is a chain: one object with a generation, counted up at each write. A table leads
from each storage that is written to its chain, and each state remembers the generations it was made at. A
state is spent when a chain of its tensors has moved on since. So a donated step costs one addition, however
many tensors there are, and every record that shares them, by whatever way, finds out when it looks.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from looplib._core import interrupts as _interrupts
from looplib._core.torch_private import pytree


class Chain:
    """The states of one run that write the same tensors."""

    __slots__ = ("buffers", "generation", "params", "readers", "step", "writer")

    def __init__(self, writer: str) -> None:
        self.generation = 0
        self.writer = writer
        self.step: int | None = None  # where the run stands, for the error
        self.params: set[str] = set()  # the names of those it owns
        self.buffers: set[str] = set()
        self.readers = 0  # how many of those that ever read were made sure not to read its tensors


_owners: dict[int, tuple[Chain, weakref.ref[Tensor]]] = {}


updates = 0  # that wrote over parameters; torch's fused kernels do so without counting up `_version`


chains = 0  # chains made so far: a state made at an earlier count may share tensors with one it does not know


def _storage(tensor: Tensor) -> int:
    tensor = getattr(tensor, "_local_tensor", tensor)  # a DTensor has its memory there
    try:
        return tensor.untyped_storage().data_ptr()
    except RuntimeError:  # sparse, or a tensor of a torch.func transform: it has no storage to write in place
        return 0


def tensors_in(tree: Any) -> Iterator[Tensor]:
    return (leaf for leaf in pytree.tree_iter(tree) if isinstance(leaf, Tensor))


def generations(trees: Iterable[Any]) -> dict[Chain, int]:
    """The chains of these tensors and where each stands now."""
    found = {}
    if _owners:
        for tensor in tensors_in(tuple(trees)):
            owner = _owners.get(_storage(tensor))
            if owner is not None:
                found[owner[0]] = owner[0].generation
    return found


def stale_chain(tree: Any, seen: dict[Chain, int]) -> Chain | None:
    """A chain that has written one of these tensors since `seen`, or None."""
    for chain, generation in generations((tree,)).items():
        if seen.get(chain, 0) != generation:
            return chain
    return None


def own(chain: Chain, tensors: Iterable[Tensor]) -> None:
    """From now on these tensors are written by `chain`."""
    global chains
    chains += 1
    tensors = list(tensors)
    wait_for_readers(tensors)
    for tensor in tensors:
        if key := _storage(tensor):

            def forget(reference: weakref.ref[Tensor], key: int = key) -> None:
                if (owner := _owners.get(key)) is not None and owner[1] is reference:
                    del _owners[key]

            _owners[key] = (chain, weakref.ref(tensor, forget))


class Heir:
    """Shared by the records of one moment of a run: the next one, if an interrupt took it from its caller.

    When an interrupt strikes before a step's result has a name, the argument, which is spent, takes its place,
    so that the caller's variable holds the run. Who lets go of the spent record lets go of the next one too.
    """

    __slots__ = ("__weakref__", "state")

    def __init__(self) -> None:
        self.state: Any | None = None


_in_flight: tuple[weakref.ref[Heir], weakref.ref[Any]] | None = None  # the last donated step


rescued = False  # ever, in this process


def in_flight(old: Any, new: Any) -> None:
    global _in_flight
    _in_flight = (weakref.ref(old._heir), weakref.ref(new))


def _rescue() -> None:
    global rescued
    if _in_flight is not None and (heir := _in_flight[0]()) is not None:
        heir.state = _in_flight[1]()
        rescued = True


_interrupts.before_raising.append(_rescue)


def written_in_place(state: Any) -> bool:
    """Whether the next step may write over these tensors: they belong to a donated run, or to a module."""
    return bool(state._seen) or any(isinstance(leaf, torch.nn.Parameter) for leaf in state.params.values())


_reading: list[tuple[set[int], Any]] = []


readers = 0  # so far


def let_finish(storages: set[int], reading: Any) -> None:
    """Until this future is done, whoever is about to write these storages in place for the first time waits."""
    global readers
    _reading.append((storages, reading))
    readers += 1


def wait_for_readers(tree: Any) -> None:
    """Before these tensors are written in place."""
    _reading[:] = [(keys, reading) for keys, reading in _reading if not reading.done()]
    if _reading:
        written = {_storage(tensor) for tensor in tensors_in(tree)}
        for keys, reading in _reading:
            if not keys.isdisjoint(written):
                reading.exception()  # waits; the error is for whoever asks for it
