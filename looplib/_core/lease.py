"""Leases: which states may still be read after a step has written their tensors in place.

The memory that a donated run writes carries the run's lease, which knows when it was last written. A state knows when it
was last found valid, and is spent once any of its memory has been written since. A lease lies on the memory itself
(`_core.torch_storage`), so views, detached tensors and other states see it however they came to share the memory, and it
ends with the memory.

Memory that is shared through numpy or DLPack has another storage, and another lease.

Writes that looplib does not make, such as yours to a module's weights, are not recorded: as in a raw loop, a bound state
has what the module has. Those of a forward pass are in `_core.forward_writes`.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any, Generic, TypeVar, overload

import torch
from torch import Tensor

from looplib._core.checks import check, named
from looplib._core.mappings import pick
from looplib._core.memory import named_tensors, overlaps, tensors_in
from looplib._core.torch_private import pytree
from looplib._core.torch_storage import lease_on, memory_of, set_lease_on, take

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
    """

    __slots__ = ("__weakref__", "_at", "_lease")

    _at: int
    _lease: Lease | None

    def __post_init__(self) -> None:
        """A record is valid from now on."""
        _set_time(self, clock.time)
        _set_lease(self, None)


# Of a record that does not let its attributes be assigned.
_set_time, _set_lease = (vars(Leased)[name].__set__ for name in ("_at", "_lease"))


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
        """Set the value of a record that is being made. Users cannot assign it later."""
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


lease_of = operator.attrgetter("_lease")  # that covers what a step of the state's run writes; None if it is not known


def last_write(tensor: Tensor) -> int:
    """Time of the last write to a tensor's memory by a donated run; 0 if there was none."""
    lease: Lease | None = lease_on(tensor)
    return 0 if lease is None else lease.written


def lies_on(lease: Lease | None, tree: Any) -> bool:
    """True if a tensor of a tree has memory that this lease covers."""
    return lease is not None and any(lease_on(tensor) is lease for tensor in tensors_in(tree))


def overwritten(record: Leased, trees: Iterable[Any]) -> Lease | None:
    """The lease by which a tensor of these trees was written since the record was last found valid, or None."""
    at = record._at
    for tree in trees:
        for tensor in tensors_in(tree):
            lease: Lease | None = lease_on(tensor)
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
        check_state(state, call, _STEP_OF_MODULE)
        raise
    if written_since:
        check_valid(state)
    return state._params, state._buffers, state._opt_state


def check_valid(state: Any, names: Sequence[str] = TREES) -> None:
    """Raise DonatedStateError if a tensor of one of these trees was overwritten."""
    now, lease = clock.time, state._lease
    # Given up by its own run, it is spent whatever tensors its dicts hold by now.
    given_up = lease is not None and lease.written > state._at
    for name in names:
        writer = lease if given_up and name != "extra" else overwritten(state, (getattr(state, f"_{name}"),))
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


_STEP_OF_MODULE = (
    "In a loop with torch's own optimizer, ll.grads.backward(grad_fn, model, batch, step=step) takes the module"
)


def check_state(
    value: Any,
    call: str,
    of_module: str = "Of a module in a loop of your own, that is ll.init_state(model), made at each call",
) -> None:
    """Raise TypeError unless this is a state; `call` shows how the function is called."""
    if isinstance(value, Leased):
        return
    if isinstance(value, (tuple, dict)):
        call += ". A train step returns two values, in this order: state, metrics = train_step(state, batch)"
    if isinstance(value, int):
        call += ". In a loop of your own, give its counts, ll.TrainState(step=step, epoch=epoch, batch=batch)"
    if isinstance(value, torch.nn.Module):
        call += f". {of_module}"
    raise TypeError(f"state is {named(value)}; give a TrainState, as ll.init_state returns: {call}")


def check_assigned(state: Any) -> None:
    """Raise ValueError if somebody has put other tensors into the params of a state of a donated run."""
    run = state._lease
    if run is None:
        return
    params = state._params
    # Memory that is not known has no lease.
    other = [name for name in run.params if lease_on(params[name]) is not run and memory_of(params[name])]
    check(not other, _ASSIGNED.format(name=other and min(other)))


def lease_replaced(state: Any) -> None:
    """Put the lease of a donated run on the memory that a forward pass has given a parameter (`weight.data = ...`)."""
    run = state._lease
    if run is not None:
        for name in run.params:
            take(state._params[name], run)


_ASSIGNED = (
    "state.params[{name!r}] is another tensor than the step put there. A state does not change, and its dicts are those of "
    "other states too: write state = state.replace(params={{**state.params, {name!r}: tensor}}), or write into the tensor, "
    "state.params[{name!r}].copy_(...) under torch.no_grad()"
)


# Writing


def give_up(state: Any, params: Set[str]) -> tuple[Lease, int]:
    """Spend a state, whose step writes these parameters, its buffers and the optimizer's state.

    Returns the lease of the run, and when it was written before: a graph that has put the same values back resets it to
    that time. Raises ValueError, with nothing spent, if a tensor of the state shares memory that the step would write.
    """
    lease: Lease | None = state._lease
    # Somebody may have put a tensor that the run writes into the dict `extra` of a state.
    shared = state._extra is not None and lies_on(lease, state._extra)
    if lease is None or shared or not params <= lease.params:
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
    return all(take(tensor, lease) for tensor in _new_tensors(tree, before))


def _new_tensors(tree: Any, before: Any) -> Iterator[Tensor]:
    if isinstance(tree, dict) and isinstance(before, dict):
        for key, value in tree.items():
            if value is not before.get(key):
                yield from _new_tensors(value, before.get(key))
    elif tree is before:
        return
    elif isinstance(tree, Tensor):
        yield tree
    else:
        yield from tensors_in(tree)


def lease_over(writer: str, tensors: Iterable[Tensor], params: Iterable[str] = ()) -> Lease:
    """A new lease over these tensors, of which the first `write` must follow at once."""
    lease = Lease(writer, params)
    for tensor in tensors:
        # Older states that share this memory are told by the new lease from its first write on, but some of them may be
        # spent already: until then, the new lease is as late as the one before it.
        lease.written = max(lease.written, last_write(tensor))
        set_lease_on(tensor, lease)
    return lease


def _check_shared(trees: Mapping[str, Any], written: Mapping[str, Tensor]) -> None:
    """Raise if a tensor shares memory that an in-place step would write as part of another one.

    Buffers may share theirs with each other and with frozen parameters, as tensors within the optimizer's state may.
    """
    root_of: dict[str, str] = {}
    tensors: dict[str, Tensor] = {}
    for root, tree in trees.items():
        named_here = named_tensors(root, tree)
        tensors |= named_here
        root_of |= dict.fromkeys(named_here, root)
    trained = named_tensors("params", written).keys()
    for path, name in overlaps(tensors):
        if name in trained:
            path, name = name, path
        root = root_of[name]
        spans_fields = root in ("opt_state", "extra") and root_of[path] not in (root, "params")
        check(
            not (spans_fields or trained & {path, name}),
            f"{name} shares memory with {path}, which a step with donate=True writes in place, so that it would "
            f"change with every step: keep a copy there, tensor.detach().clone() or, of all parameters, "
            "ll.copy_state(state).params, or make the step with donate=False",
        )
