"""Ownership of tensors that steps write in place: which states may still read them.

A run with donated steps is a chain: an object with a generation that increases at each write. A table maps each
written storage to its chain, and each state's mark records the generations at which it was made. A state is spent if
a chain of its tensors has advanced since. A donated step therefore costs one addition for any number of tensors, and
every record that shares them notices when it is read.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Set
from dataclasses import fields
from functools import partial
from operator import attrgetter
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from looplib._core import interrupts as _interrupts
from looplib._core import torch_private
from looplib._core.checks import check
from looplib._core.mappings import fields_of, pick
from looplib._core.overlap import share_elements
from looplib._core.torch_private import pytree

S = TypeVar("S")


class Chain:
    """States of one run that write the same tensors."""

    __slots__ = ("buffers", "generation", "params", "readers", "step", "storages", "writer")

    def __init__(self, writer: str) -> None:
        self.generation = 0
        self.writer = writer
        self.step: int | None = None  # position of the run, for the error
        self.params: set[str] = set()  # names of the tensors it owns
        self.buffers: set[str] = set()
        self.storages: set[int] = set()  # the storages it owns; none after another chain has taken over
        self.readers = 0  # number of readers known not to read its tensors

    def wrote(self) -> None:
        """Mark all states of earlier generations as spent."""
        self.generation += 1
        _process.clock += 1


class Mark:
    """A state's knowledge of the chains of its tensors.

    Attributes:
        at: the last time, on the process's clock, at which no tensor of the state was known to be overwritten.
        born: number of chains when the state was made. Of those, it knows all that concern it.
        seen: chains of its tensors, with their generations at that time.
        lane: the chain that owns everything its step writes, if known.
        heir: the mark that stands for this moment of the run, if it is not this one.
        successor: the next state, if an interrupt took it away from its caller.
        made_with: what the run is made with, passed on from state to state (`_core.made_with`); None if unknown.

    If an interrupt arrives before a step's result has a name, the argument, which is spent, takes its place, so that
    the caller's variable holds the run. Deleting the spent record then deletes the next one too.
    """

    __slots__ = ("__weakref__", "at", "born", "heir", "lane", "made_with", "seen", "successor")

    def __init__(
        self, seen: dict[Chain, int], lane: Chain | None = None, heir: Mark | None = None, made_with: Any = None
    ) -> None:
        self.at = _process.clock
        self.born = _process.chains
        self.seen = seen
        self.lane = lane
        self.heir = heir
        self.made_with = made_with
        self.successor: Any = None


class Marked:
    """A record with a mark."""

    __slots__ = ("__weakref__", "_mark")

    _mark: Mark


# A state's mark, which tells it from other states for as long as it is kept, and holds no tensors.
mark_of: Callable[[Marked], Mark] = attrgetter("_mark")


def made_with(state: Marked) -> Any:
    """Provenance of a run, as far as this state knows it, or None."""
    return state._mark.made_with


def note_made_with(state: Marked, made_with: Any) -> None:
    """Record what a run is made with, for this state and all that follow from it."""
    state._mark.made_with = made_with


class _Process:
    """Process-wide facts.

    Attributes:
        clock: number of writes and of new chains so far. What was readable at one time stays so until it moves on.
        chains: number of chains so far. A state made at an earlier count may share tensors with an unknown chain.
        in_flight: the last donated step, from its argument's mark to its result.
        reading: storages that are read in the background, with the future of each reader.
        readers: number of readers so far.
    """

    __slots__ = ("chains", "clock", "in_flight", "readers", "reading")

    def __init__(self) -> None:
        self.chains = 0
        self.clock = 0
        self.in_flight: tuple[weakref.ref[Mark], weakref.ref[Any]] | None = None
        self.reading: list[tuple[set[int], Any]] = []
        self.readers = 0


_process = _Process()


_owners: dict[int, tuple[Chain, weakref.ref[Tensor]]] = {}


class _Writes(threading.local):
    """Counter of this thread's updates that overwrote parameters; torch's fused kernels do not increase `_version`."""

    count = 0


writes = _Writes()


def _storage(tensor: Tensor) -> int:
    tensor = getattr(tensor, "_local_tensor", tensor)  # the local tensor holds a DTensor's memory
    try:
        return tensor.untyped_storage().data_ptr()
    except RuntimeError:  # sparse tensors and tensors of torch.func transforms have no storage to write in place
        return 0


def may_be_written(tensor: Tensor) -> bool:
    """True if a donated step may write to a tensor: a parameter, a view of one, or memory of a donated run.

    A `detach()` of a parameter counts from the run's first donated step on.
    """
    base = torch_private.view_base(tensor)
    source = tensor if base is None else base
    return (source.is_leaf and source.requires_grad) or (bool(_owners) and _storage(tensor) in _owners)


def tensors_in(tree: Any) -> Iterator[Tensor]:
    return (leaf for leaf in pytree.tree_iter(tree) if isinstance(leaf, Tensor))


def generations(trees: Iterable[Any]) -> dict[Chain, int]:
    """Chains of these tensors, with their current generations."""
    counts = {}
    if _owners:
        for tensor in tensors_in(tuple(trees)):
            owner = _owners.get(_storage(tensor))
            if owner is not None:
                counts[owner[0]] = owner[0].generation
    return counts


def _stale_chain(tree: Any, seen: dict[Chain, int]) -> Chain | None:
    """A chain that has written one of these tensors since `seen`, or None."""
    for chain, generation in generations((tree,)).items():
        if seen.get(chain, 0) != generation:
            return chain
    return None


# Writing


def own(chain: Chain, tensors: Iterable[Tensor]) -> None:
    """Make `chain` the writer of these tensors from now on."""
    _process.chains += 1
    _process.clock += 1
    tensors = list(tensors)
    wait_for_readers(tensors)
    for tensor in tensors:
        if key := _storage(tensor):
            if (before := _owners.get(key)) is not None:
                before[0].storages.discard(key)
            _owners[key] = (chain, weakref.ref(tensor, partial(_forget, key)))
            chain.storages.add(key)


@_interrupts.swallows
def _forget(key: int, reference: weakref.ref[Tensor]) -> None:
    if (owner := _owners.get(key)) is not None and owner[1] is reference:
        owner[0].storages.discard(key)
        del _owners[key]


def claim(writer: str, tensors: Iterable[Tensor]) -> Chain:
    """Own tensors that are written outside steps: `wrote()` of the chain marks all states that share one as spent."""
    chain = Chain(writer)
    own(chain, tensors)
    return chain


def owner(state: Any, params: Set[str], buffers: Set[str]) -> Chain:
    """Chain of this run, as the owner of everything its step has written."""
    mark: Mark = state._mark
    chain = mark.lane
    if chain is None or chain.generation != mark.seen.get(chain):
        chain = claim("a train step with donate=True", tensors_in(state.opt_state))
    if not (params <= chain.params and buffers <= chain.buffers):
        of_params, of_buffers = state.params, state.buffers  # each read checks all tensors
        own(chain, [of_params[name] for name in params - chain.params])
        own(chain, [of_buffers[name] for name in buffers - chain.buffers])
        chain.params |= params
        chain.buffers |= buffers
    return chain


def before_writing(state: Any, params: Set[str], buffers: Set[str]) -> Chain:
    """Chain of this run, whose step is about to write these tensors. Checks `extra` if it has not been checked yet."""
    mark: Mark = state._mark
    chain = mark.lane
    current = chain is not None and chain.generation == mark.seen.get(chain)
    if chain is not None and current and params <= chain.params and buffers <= chain.buffers:
        return chain  # later steps only do this
    _check_extra(state, params, buffers)
    return owner(state, params, buffers)


def _check_extra(state: Any, params: Set[str], buffers: Set[str]) -> None:
    """Raise if `extra` holds tensors that an in-place step would overwrite."""
    kept = list(_named_tensors("extra", state.extra))
    if not kept:
        return
    written: dict[int, list[tuple[str, Tensor]]] = {}
    trees = {"params": pick(state.params, params), "buffers": pick(state.buffers, buffers)}
    for field, tree in {**trees, "opt_state": state.opt_state}.items():
        for path, tensor in _named_tensors(field, tree):
            written.setdefault(_storage(tensor), []).append((path, tensor))
    written.pop(0, None)  # without memory
    for name, leaf in kept:
        for path, tensor in written.get(_storage(leaf), ()):
            check(
                not share_elements(tensor, leaf),
                f"{name} shares memory with {path}, which a step with donate=True writes in place, so that it would "
                "change with every step: keep a copy there, such as extra={'start': ll.copy_state(state).params} or "
                "tensor.detach().clone(), or make the step with donate=False",
            )


def _named_tensors(root: str, tree: Any) -> Iterator[tuple[str, Tensor]]:
    for path, leaf in pytree.tree_flatten_with_path(tree)[0]:
        if isinstance(leaf, Tensor):
            yield root + pytree.keystr(path), leaf


def spoil(state: Any, params: Set[str], buffers: Set[str] = frozenset()) -> None:
    """Mark a state as spent without a successor: a step has written some of these tensors and failed."""
    owner(state, params, buffers).wrote()


def in_flight(old: Any, new: Any) -> None:
    """Record that a step has made `new` from `old`, and that its caller does not hold it yet."""
    mark: Mark = old._mark
    _process.in_flight = weakref.ref(mark.heir or mark), weakref.ref(new)


def _rescue() -> None:
    if _process.in_flight is not None and (mark := _process.in_flight[0]()) is not None:
        mark.successor = _process.in_flight[1]()
        for watch_counts in _when_rescued:
            watch_counts()


_when_rescued: list[Callable[[], None]] = []  # for a first successor that is taken away; see `Guarded`

_interrupts.before_raising.append(_rescue)


# Reading in the background


def written_in_place(state: Any) -> bool:
    """True if the next step may overwrite these tensors: they belong to a donated run or to a module."""
    return bool(state._mark.seen) or any(isinstance(leaf, torch.nn.Parameter) for leaf in state.params.values())


def let_finish(storages: set[int], reading: Any) -> None:
    """Make the first in-place write to these storages wait until this future is done."""
    _process.reading.append((storages, reading))
    _process.readers += 1


def wait_for_readers(tree: Any) -> None:
    """Wait for background readers of these tensors, before they are written in place."""
    reading = _process.reading
    reading[:] = [(keys, future) for keys, future in reading if not future.done()]
    if reading:
        written = {_storage(tensor) for tensor in tensors_in(tree)}
        for keys, future in reading:
            if not keys.isdisjoint(written):
                future.exception()  # waits; the error is raised where the result is requested


def before_a_step(state: Any, trees: tuple[Any, ...]) -> int:
    """Wait for readers of the tensors that a step is about to write, and return the number of readers so far."""
    readers = _process.readers
    if _process.reading:
        lane = state._mark.lane
        if lane is None or lane.readers != readers:
            wait_for_readers(trees)
    return readers


# The fields of a record


class Guarded(Generic[S]):
    """Fields of a record whose trees cannot be read after their tensors have been overwritten.

    Each tree of the class becomes a property over its slot, which checks the mark first. A count stays a slot, since
    predicates read counts at every step, until an interrupt takes a successor away: from then on it is a property that
    looks for one. The slot of a field named `step` is `_step`. Records made here are known to be valid.

    Args:
        cls: a dataclass with slots that is a `Marked`.
        trees: names of its fields that hold tensors; the last is the user's, which no step writes.
        error: exception class for a record that is spent.
    """

    def __init__(self, cls: type[S], trees: tuple[str, ...], error: type[Exception]) -> None:
        self.cls, self.trees, self.error = cls, trees, error
        self.fields = tuple(field.name for field in fields(cls))  # type: ignore[arg-type]
        self.counts = tuple(name for name in self.fields if name not in trees)
        self._set_mark = vars(Marked)["_mark"].__set__
        slots = fields_of(cls, self.fields)
        for name, slot in slots.items():
            setattr(cls, f"_{name}", slot)  # the value itself, whatever the mark says
            if name in trees:
                setattr(cls, name, property(self._tree(name), slot.__set__, doc=slot.__doc__))
        _when_rescued.append(self._watch_counts)
        self._read = {name: attrgetter(f"_{name}") for name in self.fields}
        self._write = {name: slot.__set__ for name, slot in slots.items()}
        # A class with the same slots, whose attributes can be assigned: an instance is made into a state below.
        self.draft = type("Draft", (Marked,), {"__slots__": self.fields})
        self._trees_of_draft = attrgetter(*self.trees)

    def _tree(self, name: str) -> Any:
        read, check = attrgetter(f"_{name}"), self._check

        def guarded(state: Any) -> Any:
            if state._mark.at != _process.clock:
                check(state, (name,))
            return read(state)

        return guarded

    def check(self, state: Any) -> None:
        """Raise if one of its trees cannot be read."""
        if state._mark.at != _process.clock:
            self._check(state, self.trees)

    def _watch_counts(self) -> None:
        """Let counts look for a successor from now on."""
        for name in self.counts:
            slot = vars(self.cls)[f"_{name}"]
            setattr(self.cls, name, property(self._count(name), slot.__set__, doc=slot.__doc__))

    def _count(self, name: str) -> Any:
        read, heal = attrgetter(f"_{name}"), self._heal

        def guarded(state: Any) -> Any:
            heal(state)
            return read(state)

        return guarded

    def _heal(self, state: Any) -> None:
        """Turn a spent state whose successor an interrupt took away into that successor."""
        mark: Mark = state._mark
        if (new := (mark.heir or mark).successor) is not None:
            for name, write in self._write.items():
                write(state, self._read[name](new))
            self._set_mark(state, new._mark)

    def _check(self, state: Any, names: tuple[str, ...]) -> None:
        """Raise if one of these trees cannot be read. Called after something has been written since the last check."""
        mark, now = state._mark, _process.clock
        if mark.born == _process.chains and all(chain.generation == at for chain, at in mark.seen.items()):
            mark.at = now
            return
        self._heal(state)
        for name in names:
            self._check_tree(state, name)

    def _check_tree(self, state: Any, name: str) -> None:
        if (chain := _stale_chain(self._read[name](state), state._mark.seen)) is not None:
            now = "" if chain.step is None else f", and that run is at step {chain.step} now"
            pure = "" if chain.writer.startswith("ckpt.restore") else " or make the step with donate=False"
            raise self.error(
                f"{name} of the state at step {state.step} (epoch {state.epoch}, batch {state.batch}) was donated: "
                f"{chain.writer} has written over its tensors{now}. Continue with the state that it returned; to keep an "
                f"earlier one, copy it first (kept = ll.copy_state(state)){pure}"
            )

    def is_spent(self, state: Any) -> bool:
        """True if one of its trees cannot be read."""
        self._heal(state)
        return _stale_chain([self._read[name](state) for name in self.trees], state._mark.seen) is not None

    def mark(self, state: Any) -> None:
        """Attach a mark to a state whose fields are all set."""
        self._set_mark(state, Mark(generations([self._read[name](state) for name in self.trees])))

    def _made(self, draft: Any, mark: Mark) -> S:
        """The draft as a state, which can no longer be assigned to, without walking over its tensors."""
        draft._mark = mark
        draft.__class__ = self.cls
        return draft  # type: ignore[no-any-return]

    def replaced(self, state: Any, changes: dict[str, Any]) -> S:
        """A copy with these fields changed."""
        draft = self.draft()
        for name in self.fields:
            setattr(draft, name, changes[name] if name in changes else getattr(state, name))
        mark: Mark = state._mark
        new_trees = [name for name in self.trees if name in changes]
        # Kept trees were just read, so their marks are valid; only new trees must be searched. A chain that owns
        # nothing will not write anything.
        kept = mark.seen.items() if len(new_trees) < len(self.trees) else ()
        seen = {chain: at for chain, at in kept if chain.generation == at and chain.storages}
        found = generations([changes[name] for name in new_trees])
        seen |= found
        # Tensors that the run writes may have been put into `extra`, so the next in-place step must search it.
        lane = mark.lane if set(new_trees) <= {self.trees[-1]} and mark.lane not in found else None
        # A wrapper that changes `extra` passes such a copy to its step. A copy with a different seed or position
        # does not continue the run.
        heir = (mark.heir or mark) if changes.keys() <= {self.trees[-1]} else None
        return self._made(draft, Mark(seen, lane, heir, mark.made_with))

    def made(self, state: Any, draft: Any) -> S:
        """Result of a pure step."""
        mark: Mark = state._mark
        seen = mark.seen and generations(self._trees_of_draft(draft))
        return self._made(draft, Mark(seen, made_with=mark.made_with))

    def written(self, state: Any, draft: Any, chain: Chain, readers: int) -> S:
        """Result of a step that wrote the tensors of its chain. The old state is spent from now on."""
        chain.step, chain.readers = draft.step, readers
        chain.wrote()
        mark: Mark = state._mark
        seen = mark.seen
        if chain is not mark.lane:
            seen = {other: at for other, at in seen.items() if other.storages}
        new = self._made(draft, Mark({**seen, chain: chain.generation}, chain, None, mark.made_with))
        in_flight(state, new)
        return new

    def unwritten(self, state: Any, draft: Any) -> S:
        """Result of an in-place step that wrote no tensor."""
        mark: Mark = state._mark
        return self._made(draft, Mark(mark.seen, mark.lane, None, mark.made_with))
