"""Leases: which states may still be read after a step has written their tensors in place.

The memory that a donated run writes carries the run's lease, which knows when it was last written. A state knows when it
was last found valid, and is spent once any of its memory has been written since. A lease lies on the storage itself, so
views, detached tensors and other states see it however they came to share the memory, and it ends with the memory.

Memory that is shared through numpy or DLPack has another storage, and another lease.

Writes that looplib does not make, such as yours to a module's weights, are not recorded: as in a raw loop, a bound state
has what the module has.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Set
from typing import Any

from torch import Tensor

from looplib._core import torch_private
from looplib._core.checks import check
from looplib._core.mappings import pick
from looplib._core.overlap import share_elements
from looplib._core.torch_private import pytree


class Lease:
    """The right of one run to write its tensors.

    Attributes:
        writer: what writes, for messages.
        written: time of its last write, on the clock of the process.
        step: step of the state that the last write led to; None while the write is under way, and if it failed.
        params: names of the parameters that it covers, beside all buffers and the optimizer's state.
    """

    __slots__ = ("params", "step", "writer", "written")

    def __init__(self, writer: str, params: Iterable[str] = ()) -> None:
        self.writer, self.params = writer, {*params}
        self.written = 0
        self.step: int | None = None

    def write(self) -> None:
        """Spend all states that share its memory. Whatever is written afterwards, none of them can be read."""
        with _tick:
            clock.time += 1
            self.written = clock.time
        self.step = None


class _Clock:
    """Number of writes in place so far, in the whole process."""

    time = 0


clock = _Clock()
_tick = threading.Lock()


class Leased:
    """A record of tensors that another may overwrite.

    Attributes:
        _at: time at which it was last known to be valid.
        _lease: the lease that covers everything that a step of this run writes, if that is known.
        _provenance: what the run was made with (see `_core.provenance`), passed on from state to state.
    """

    __slots__ = ("__weakref__", "_at", "_lease", "_provenance")

    _at: int
    _lease: Lease | None
    _provenance: Any

    def __post_init__(self) -> None:
        """A record is valid from now on."""
        _set_time(self, clock.time)
        _set_lease(self, None)
        _set_provenance(self, None)


_set_time, _set_lease, _set_provenance = (
    vars(Leased)[name].__set__ for name in ("_at", "_lease", "_provenance")
)  # of a record that does not let its attributes be assigned


def follows(record: Any, before: Any, lease: Lease | None) -> None:
    """A record continues the run of another one, under this lease if that can cover all that the run writes.

    An update, or a decision against one, may have put new tensors into the optimizer's state, such as a count, and a
    forward pass may have assigned a new buffer.
    """
    covered = lease is not None and all(
        _covers(lease, getattr(record, tree), getattr(before, tree)) for tree in ("_opt_state", "_buffers")
    )
    _set_lease(record, lease if covered else None)
    _set_provenance(record, before._provenance)


def lease_of(record: Leased) -> Lease | None:
    """The lease that covers what a step of this run writes, if that is known."""
    return record._lease


def provenance(record: Leased) -> Any:
    """Provenance of a run, as far as this state knows it, or None."""
    return record._provenance


def note_provenance(record: Leased, value: Any) -> None:
    """Record what a run was made with, for this state and all that follow from it."""
    _set_provenance(record, value)


def lease_on(tensor: Tensor) -> Lease | None:
    """The lease on a tensor's memory, if a run has written it."""
    storage = _storage(tensor)
    return None if storage is None else getattr(storage, "looplib_lease", None)


def last_write(tensor: Tensor) -> int:
    """Time of the last write to a tensor's memory by a donated run; 0 if there was none."""
    lease = lease_on(tensor)
    return 0 if lease is None else lease.written


def lies_on(lease: Lease | None, tree: Any) -> bool:
    """True if a tensor of a tree has memory that this lease covers."""
    return lease is not None and any(lease_on(tensor) is lease for tensor in tensors_in(tree))


def _storage(tensor: Tensor) -> Any:
    tensor = getattr(tensor, "_local_tensor", tensor)  # which holds a DTensor's memory
    try:
        return tensor.untyped_storage()
    except RuntimeError:  # sparse tensors, and those of torch.func's transforms, have no storage to write in place
        return None


def memory_of(tensor: Tensor) -> Any:
    """Address of the memory of a tensor; None without any."""
    storage = _storage(tensor)
    return None if storage is None else storage.data_ptr() or None


def tensors_in(tree: Any) -> Iterator[Tensor]:
    return (leaf for leaf in pytree.tree_iter(tree) if isinstance(leaf, Tensor))


def overwritten(record: Leased, trees: Iterable[Any]) -> Lease | None:
    """The lease by which a tensor of these trees was written since the record was last found valid, or None."""
    at = record._at
    for tree in trees:
        for tensor in tensors_in(tree):
            lease = lease_on(tensor)
            if lease is not None and lease.written > at:
                return lease
    return None


def given_up(record: Leased) -> Lease | None:
    """The lease under which the record itself was given up, whatever tensors its dicts hold by now, or None."""
    own = record._lease
    return own if own is not None and own.written > record._at else None


def found_valid(record: Leased, now: int) -> None:
    """No tensor of the record had been overwritten at this time."""
    _set_time(record, now)


def may_be_written(tensor: Tensor) -> bool:
    """True if a donated step may write to a tensor: a parameter, a view of one, or memory of a donated run."""
    base = torch_private.view_base(tensor)
    source = tensor if base is None else base
    return (source.is_leaf and source.requires_grad) or lease_on(tensor) is not None


# Writing


def give_up(state: Any, params: Set[str]) -> tuple[Lease, int]:
    """Spend a state, whose step writes these parameters, its buffers and the optimizer's state. See `check_unwritten`.

    Returns the lease of the run, and when it was written before. Raises ValueError, with nothing spent, if `extra` holds
    memory that the step would write.
    """
    lease: Lease | None = state._lease
    if lease is None or not params <= lease.params:
        names = {*params} if lease is None else params | lease.params
        of_model = {"params": pick(state.params, names), "buffers": state.buffers}
        trees = {**of_model, "opt_state": state.opt_state}
        _check_shared("extra", state.extra, trees, "extra={'start': ll.copy_state(state).params}")
        _check_shared("opt_state", state.opt_state, of_model, "params[name].detach().clone()")
        lease = lease_over("a train step with donate=True", tensors_in(trees), names)
        _set_lease(state, lease)
    before = lease.written
    lease.write()
    return lease, before


def apart_from(lease: Lease, tree: Any, before: Any) -> Any:
    """The tree, with copies of tensors that are not in the one before it and share memory that this lease covers.

    A decision may have put parameters into the optimizer's state, where the update would write over them.
    """
    if tree is before or not any(lease_on(tensor) is lease for tensor in _new_tensors(tree, before)):
        return tree
    known = {id(tensor) for tensor in tensors_in(before)}

    def own(leaf: Any) -> Any:
        shares = isinstance(leaf, Tensor) and id(leaf) not in known and lease_on(leaf) is lease
        return leaf.detach().clone() if shares else leaf

    return pytree.tree_map(own, tree)


def check_unwritten(state: Any) -> None:
    """Raise DonatedStateError if a state has been written since its step began, by another thread or within the loss."""
    if state._at != clock.time:
        for tree in ("params", "buffers", "opt_state"):
            getattr(state, tree)  # raises if it was this tree


def _covers(lease: Lease, tree: Any, before: Any) -> bool:
    """Let a lease cover the tensors of a tree that are not in the one before it, which it covers already.

    Returns False if one of them shares memory with others, so that the next step must take a new lease.
    """
    if tree is before:  # as after most updates in place
        return True
    for tensor in _new_tensors(tree, before):
        storage = _storage(tensor)
        if storage is not None:
            if getattr(storage, "looplib_lease", None) is not None:
                return False
            storage.looplib_lease = lease
    return True


def _new_tensors(tree: Any, before: Any) -> Iterator[Tensor]:
    if isinstance(tree, dict) and isinstance(before, dict):
        for key, value in tree.items():
            if value is not before.get(key):
                yield from _new_tensors(value, before.get(key))
    elif tree is not before:
        yield from tensors_in(tree)


def spend(state: Any) -> None:
    """Spend a state that was written before its step could give it up."""
    lease_over("a train step with donate=True", tensors_in((state._params, state._buffers))).write()


def lease_over(writer: str, tensors: Iterable[Tensor], params: Iterable[str] = ()) -> Lease:
    """A new lease over these tensors, of which the first `write` must follow at once."""
    lease = Lease(writer, params)
    for tensor in tensors:
        storage = _storage(tensor)
        if storage is not None:
            # Older states that share this memory are told by the new lease from its first write on, but some of them may
            # be spent already: until then, the new lease is as late as the one before it.
            lease.written = max(lease.written, last_write(tensor))
            storage.looplib_lease = lease
    return lease


def _check_shared(root: str, tree: Any, trees: dict[str, Any], instead: str) -> None:
    """Raise if a tree that keeps values holds tensors that an in-place step would overwrite as parts of others."""
    storages = {id(_storage(tensor)) for tensor in tensors_in(trees)} - {id(None)}
    if not any(id(_storage(tensor)) in storages for tensor in tensors_in(tree)):
        return
    kept = _named_tensors(root, tree)
    written: dict[int, list[tuple[str, Tensor]]] = {}
    for field, others in trees.items():
        for path, tensor in _named_tensors(field, others):
            written.setdefault(id(_storage(tensor)), []).append((path, tensor))
    written.pop(id(None), None)  # without memory
    for name, leaf in kept:
        for path, tensor in written.get(id(_storage(leaf)), ()):
            check(
                not share_elements(tensor, leaf),
                f"{name} shares memory with {path}, which a step with donate=True writes in place, so that it would "
                f"change with every step: keep a copy there, such as {instead} or tensor.detach().clone(), or make the "
                "step with donate=False",
            )


def _named_tensors(root: str, tree: Any) -> Iterator[tuple[str, Tensor]]:
    for path, leaf in pytree.tree_flatten_with_path(tree)[0]:
        if isinstance(leaf, Tensor):
            yield root + pytree.keystr(path), leaf
