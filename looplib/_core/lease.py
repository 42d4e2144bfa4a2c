"""Leases: which states may still be read after a step has written their tensors in place.

The memory that a donated run writes carries the run's lease, which knows when it was last written. A state knows when it
was last found valid, and is spent once any of its memory has been written since. A lease lies on the storage itself, so
views, detached tensors and other states see it however they came to share the memory, and it ends with the memory.

Memory that is shared through numpy or DLPack has another storage, and another lease.

Writes that looplib does not make, such as yours to a module's weights, are not recorded: as in a raw loop, a bound state
has what the module has.

A forward pass may write as well. A donated step runs on the state's own buffers: if it is skipped, or fails before its
update, they get their values back from copies. Parameters that it writes stay written, as in a raw loop, and the state
is spent. A pure step, an evaluation and a prediction leave the state as it is: see `Unwritten`.
"""

from __future__ import annotations

import operator
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any, Generic, NamedTuple, TypeVar, overload

import torch
from torch import Tensor

from looplib._core import torch_private
from looplib._core.checks import PLAIN, check, is_plain, named, parts_of
from looplib._core.checksums import checksums
from looplib._core.copies import clones
from looplib._core.mappings import pairs, pick
from looplib._core.torch_private import functorch_level_of, pytree
from looplib._core.tracing import tracing

T = TypeVar("T")


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


class Tree(Generic[T]):
    """A field of a record that holds tensors: reading it raises DonatedStateError once a step has written one of them.

    Its value is in the attribute with an underscore before the name. `make` makes the value that None stands for.
    """

    def __init__(self, make: Callable[[], Any] | None = None) -> None:
        self._make = make

    def __set_name__(self, owner: type, name: str) -> None:
        self._name, self._own = name, f"_{name}"

    @overload
    def __get__(self, record: None, owner: type) -> Any: ...
    @overload
    def __get__(self, record: Leased, owner: type) -> T: ...
    def __get__(self, record: Leased | None, owner: type) -> Any:
        if record is None:  # the default of the field, for `dataclass`
            return None
        if record._at != clock.time:
            check_valid(record, (self._name,))
        return vars(record)[self._own]

    def __set__(self, record: Leased, value: Any) -> None:
        """Only when the record is made, which does not let its attributes be assigned later."""
        vars(record)[self._own] = self._make() if value is None and self._make is not None else value


def follows(record: Any, before: Any, lease: Lease | None) -> None:
    """A record continues the run of another one, under this lease if that can cover all that the run writes.

    An update, or a decision against one, may have put new tensors into the optimizer's state, such as a count, and a
    forward pass may have assigned a new buffer.
    """
    if lease is not None:
        for tree, old in ((record._opt_state, before._opt_state), (record._buffers, before._buffers)):
            # The same one after most updates in place, and often empty.
            if tree and tree is not old and not _covers(lease, tree, old):
                lease = None
                break
    _set_lease(record, lease)
    _set_provenance(record, before._provenance)


lease_of = operator.attrgetter("_lease")  # that covers what a step of the state's run writes; None if it is not known
provenance = operator.attrgetter("_provenance")  # of the state's run; None if it is not known


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
    """Address of the memory of a tensor; None without any. Of a subclass, that of the first tensor in it."""
    storage = _storage(tensor if type(tensor) in PLAIN else (*parts_of(tensor), tensor)[0])
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


# Reading a state


TREES = ("params", "buffers", "opt_state", "extra")  # fields of a state that hold tensors


class DonatedStateError(RuntimeError):
    """A state was used after a donated step had overwritten its tensors."""

    __module__ = "looplib.types"  # where it is public


def trees_of(state: Any, call: str = "step(state, batch)") -> tuple[dict[str, Tensor], dict[str, Tensor], Any]:
    """The `params`, `buffers` and `opt_state` of a state, checked once for all. `call` is for messages."""
    try:
        written_since = state._at != clock.time
    except AttributeError:
        check_state(state, call)
        raise
    if written_since:
        check_valid(state)
    return state._params, state._buffers, state._opt_state


def check_valid(state: Any, names: Sequence[str] = TREES) -> None:
    """Raise DonatedStateError if a tensor of one of these trees was overwritten."""
    now, own = clock.time, state._lease
    # Given up by its own run, it is spent whatever tensors its dicts hold by now.
    given_up = own is not None and own.written > state._at
    for name in names:
        writer = own if given_up and name != "extra" else overwritten(state, (getattr(state, f"_{name}"),))
        if writer is not None:
            raise DonatedStateError(_spent(state, name, writer))
    if len(names) == len(TREES):
        _set_time(state, now)  # at which all of it was valid


def _spent(state: Any, name: str, writer: Lease) -> str:
    moment = f"step {state.step} (epoch {state.epoch}, batch {state.batch})"
    at = f"the state at {moment} was donated, and its {name} can no longer be read"
    if writer.step is None:
        return (
            f"{at}: {writer.writer} was writing over its tensors when it failed, so there is no state after it. "
            "Continue from a checkpoint, or from a copy (kept = ll.copy_state(state)) or a pure step's state"
        )
    at += f": {writer.writer} has written over its tensors, and that run is at step {writer.step} now. "
    return (
        f"{at}Continue with the state that it returned. If that is lost, as when a notebook cell begins with state = start, "
        "a module that the state was bound to still has the weights, and the last checkpoint the rest. To keep an earlier "
        "state, copy it first: kept = ll.copy_state(state)"
    )


# Also of a state that is spent: no step writes it.
extra_of = operator.attrgetter("_extra")


def check_state(value: Any, call: str) -> None:
    """Raise TypeError unless this is a state; `call` shows how the function is called."""
    if isinstance(value, Leased):
        return
    if isinstance(value, (tuple, dict)):
        call += ". A train step returns two values, in this order: state, metrics = train_step(state, batch)"
    if isinstance(value, torch.nn.Module):
        call += ". In a loop with torch's own optimizer, ll.grads.backward(grad_fn, model, batch, step=step) takes the module"
    raise TypeError(f"state is {named(value)}; give a TrainState, as ll.init_state returns: {call}")


# Writing


def give_up(state: Any, params: Set[str]) -> tuple[Lease, int]:
    """Spend a state, whose step writes these parameters, its buffers and the optimizer's state.

    Returns the lease of the run, and when it was written before: a graph that has put the same values back resets it to
    that time. Raises ValueError, with nothing spent, if a tensor of the state shares memory that the step would write.
    """
    lease: Lease | None = state._lease
    if lease is None or not params <= lease.params:
        names = {*params} if lease is None else params | lease.params
        written = pick(state.params, names)
        _check_shared({name: getattr(state, name) for name in TREES}, written)
        lease = lease_over(
            "a train step with donate=True", tensors_in((written, state.buffers, state.opt_state)), names
        )
        _set_lease(state, lease)
    before = lease.written
    lease.write()
    return lease, before


def with_own_tensors(tree: Any, before: Any) -> Any:
    """The tree, with copies of the tensors that are not in the same place of the one before it.

    A decision may have put parameters there, or others of the tree's tensors, over which the update would write.
    """
    if tree is before:
        return tree
    if isinstance(tree, dict) and isinstance(before, dict):
        return {key: with_own_tensors(value, before.get(key)) for key, value in tree.items()}
    return pytree.tree_map_only(Tensor, lambda tensor: tensor.detach().clone(), tree)


def _covers(lease: Lease, tree: Any, before: Any) -> bool:
    """Let a lease cover the tensors of a tree that are not in the one before it, which it covers already.

    Returns False if one of them shares memory with others, so that the next step must take a new lease.
    """
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


def _check_shared(trees: Mapping[str, Any], written: Mapping[str, Tensor]) -> None:
    """Raise if a tensor shares memory that an in-place step would write as part of another one.

    Buffers may share theirs with each other and with frozen parameters, as tensors within the optimizer's state may.
    """
    root_of: dict[str, str] = {}
    tensors: dict[str, Tensor] = {}
    for root, tree in trees.items():
        found = named_tensors(root, tree)
        tensors |= found
        root_of |= dict.fromkeys(found, root)
    trained = named_tensors("params", written).keys()
    for path, name in overlaps(tensors):
        if name in trained:
            path, name = name, path
        root = root_of[name]
        kept = root in ("opt_state", "extra") and root_of[path] not in (root, "params")
        check(
            not (kept or trained & {path, name}),
            f"{name} shares memory with {path}, which a step with donate=True writes in place, so that it would "
            f"change with every step: keep a copy there, tensor.detach().clone() or, of all parameters, "
            "ll.copy_state(state).params, or make the step with donate=False",
        )


def named_tensors(root: str, tree: Any) -> dict[str, Tensor]:
    """The tensors of a tree by their paths, which start with the name of its root."""
    leaves = pytree.tree_flatten_with_path(tree)[0]
    return {root + pytree.keystr(path): leaf for path, leaf in leaves if isinstance(leaf, Tensor)}


# Tensors that share memory without being the same tensor


def overlaps(tensors: Mapping[str, Tensor]) -> list[tuple[str, str]]:
    """Names of each two tensors whose ranges in one memory overlap, in their order.

    The columns of a matrix count as overlapping too, though none of their elements is the same.
    """
    spans: list[tuple[int, int, int, int]] = []
    for number, tensor in enumerate(tensors.values()):
        # Of other classes and layouts the range is not known.
        begin, end = byte_range(tensor) if is_plain(tensor) else (0, sys.maxsize)
        if (address := memory_of(tensor)) is not None and begin < end:
            spans.append((address, begin, end, number))
    found: list[tuple[int, int]] = []
    # Of each earlier tensor that ends after this one begins: its memory, end and number.
    reaching: list[tuple[int, int, int]] = []
    for address, begin, end, number in sorted(spans):
        reaching = [span for span in reaching if span[0] == address and span[1] > begin]
        found += [(max(other, number), min(other, number)) for _, _, other in reaching]
        reaching.append((address, end, number))
    names = [*tensors]
    return [(names[first], names[second]) for second, first in sorted(found)]


def byte_range(tensor: Tensor) -> tuple[int, int]:
    """The first byte of a tensor in its storage, and one past the last."""
    size, begin = tensor.element_size(), int(tensor.storage_offset())
    if not tensor.numel():
        return begin * size, begin * size
    last = begin + sum(int((n - 1) * step) for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return begin * size, (last + 1) * size


# Undo of a forward pass's writes in place


def with_copies(tensors: Iterable[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Tensors with copies of their values, for `put_back`."""
    # torch writes to no tensor that is expanded.
    given = [tensor for tensor in tensors if not _is_expanded(tensor)]
    return [*zip(given, clones(given), strict=True)] if given else []


def _is_expanded(tensor: Tensor) -> bool:
    return is_plain(tensor) and any(
        step == 0 and n > 1 for n, step in zip(tensor.shape, tensor.stride(), strict=True)
    )


def put_back(copied: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Give tensors their values back from copies."""
    with torch.no_grad():
        for tensor, copy in copied:
            tensor.copy_(copy)


class Guarded(NamedTuple):
    """The parameters on which a forward pass runs, and what is known of them before it."""

    params: dict[str, Tensor]
    cloned: Set[str]  # those that are copies of the state's
    counts: list[int]
    sums: dict[str, tuple[int, int]]
    copies: dict[str, tuple[Tensor, Tensor]]  # by name: the memory of a parameter and a copy of its values


class Unwritten:
    """Guard of a state's parameters against the forward passes of one function, which leave them as they are.

    Parameters that are known to be written, those of layers with `max_norm` and those found written by an earlier call,
    are copied for each pass. The first call finds others: it compares their values, since torch counts writes to a
    tensor, but not those to `tensor.data`, and undoes the writes from copies. It takes no copies of models above 1 GiB,
    whose memory may not hold them. Later calls find what torch counts, and undo nothing.
    """

    def __init__(self) -> None:
        self.called = False
        self.names: set[str] = set()  # of parameters that are written

    def begin(self, params: dict[str, Tensor]) -> Guarded:
        """The parameters for a forward pass."""
        if tracing():
            return Guarded(params, set(), versions(params), _sums(params), {})
        written: dict[str, Tensor] = {}
        if self.names:
            written = {name: tensor for name, tensor in params.items() if name in self.names and _is_leaf(tensor)}
            copies = clones([*written.values()])
            params = {**params, **dict(zip(written, copies, strict=True))}
            for copy, tensor in zip(copies, written.values(), strict=True):
                copy.requires_grad_(tensor.requires_grad)
        if self.called:
            return Guarded(params, written.keys(), versions(params), {}, {})
        plain = {name: tensor for name, tensor in params.items() if has_values(tensor)}
        kept: dict[str, tuple[Tensor, Tensor]] = {}
        if sum(tensor.nbytes for tensor in plain.values()) <= _MOST_COPIED:
            copied = zip(plain.values(), clones([*plain.values()]), strict=True)
            kept = dict(zip(plain, ((tensor.detach(), copy) for tensor, copy in copied), strict=True))
        return Guarded(params, written.keys(), versions(params), _sums(plain), kept)

    def end(self, guarded: Guarded, given: Mapping[str, Tensor]) -> tuple[list[str], bool]:
        """Names of the parameters that were written, and True if those of the state have their values.

        To be called only if no step has written the state since.
        """
        params, cloned, counts, sums, copies = guarded
        names = written_since(params, counts)
        if not (names or sums):  # as after most calls
            return [], True
        if sums:
            now = _sums({name: params[name] for name in sums})
            names = [name for name in params if name in {*names} or (name in sums and now[name] != sums[name])]
        self.names.update(names)
        changed = [name for name in names if name not in cloned]
        with torch.no_grad():
            for name in changed:
                if name in copies:
                    memory, copy = copies[name]
                    memory.copy_(copy)
                    if given[name].data_ptr() != memory.data_ptr():
                        given[name].data = memory
        return names, tracing() or all(name in copies for name in changed)

    def check(self, guarded: Guarded, given: Mapping[str, Tensor], of_state: bool = False) -> None:
        """Raise if a parameter was written; with `of_state`, only if one of the state has other values now."""
        names, intact = self.end(guarded, given)
        if names and (tracing() or not (of_state and intact)):
            raise RuntimeError(WROTE.format(names=", ".join(names), state=INTACT if intact else _HAS_CHANGED))
        if not tracing():
            self.called = True


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


def _sums(params: Mapping[str, Tensor]) -> dict[str, tuple[int, int]]:
    """The address and the checksum of each parameter. In a trace they have no values."""
    if tracing():
        storages = {name: _storage(tensor) for name, tensor in params.items()}
        return {
            name: (torch_private.identity_of_storage(storage), 0) for name, storage in storages.items() if storage
        }
    addresses = [tensor.data_ptr() for tensor in params.values()]
    return dict(zip(params, zip(addresses, checksums(params.values()), strict=True), strict=True))


def has_values(tensor: Tensor) -> bool:
    """True for a plain tensor whose values can be read here: not a shard, and not inside a transform."""
    return is_plain(tensor) and not tensor.is_meta and not tensor.is_quantized and functorch_level_of(tensor) < 1
