"""The record that a run is.

Everything a run must remember stands in one immutable `TrainState`: counts, position in the data, tensors by
name, the optimizer's state, the seed, and whatever the user adds. A step takes one and gives the next, so a
run is kept, forked, replayed or stored by keeping, passing or storing a value.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from looplib import _donation, _modules

if TYPE_CHECKING:
    from looplib.optimizer import Optimizer


class DonatedStateError(RuntimeError):
    """A state was touched whose tensors a donated step has since written over."""


class _Marked:
    __slots__ = ("__weakref__", "_born", "_heir", "_lane", "_seen")

    if TYPE_CHECKING:
        _born: int  # chains there were when the state was made: of those it knows all that concern it
        _seen: dict[_donation.Chain, int]  # the chains of its tensors, and the generation of each then
        _lane: _donation.Chain | None  # the chain that owns all its step writes, if that is known
        _heir: _donation.Heir


@dataclasses.dataclass(frozen=True, slots=True, eq=False, repr=False)
class TrainState(_Marked):
    """A training run at one moment, immutable.

    >>> import looplib as ll, torch
    >>> model = torch.nn.Linear(2, 1)
    >>> state = ll.init_state(model, ll.optimizer(torch.optim.SGD, lr=0.1), epoch_length=10)
    >>> state
    TrainState(step=0, epoch=0, batch=0/10, samples=0, params=2 tensors (3 numbers), seed=0)
    >>> state.replace(step=7).step
    7

    It is a pytree: the tensors of `params`, `buffers`, `opt_state` and `extra` are its leaves, the counts and
    the seed belong to its structure, so that `torch.func` and `tree_map` see tensors alone.

    Attributes:
        step: optimizer updates completed.
        epoch: epochs completed.
        batch: batches consumed in this epoch.
        epoch_length: batches in an epoch, or None for a stream.
        samples: examples consumed.
        batch_samples: examples in the batch consumed last.
        batch_steps: updates made on the batch consumed last: 1, or 0 if it was skipped, or more (`same_batch`).
        params, buffers: name -> tensor, as `named_parameters` and `named_buffers` give them.
        opt_state: the optimizer's pytree.
        seed: what all randomness of the run comes from.
        extra: the user's own pytree (EMA weights, an early-stopping record, ...), checkpointed with the rest.

    Raises:
        DonatedStateError: when `params`, `buffers`, `opt_state` or `extra` is read after a donated step wrote
            over one of its tensors.
    """

    step: int = 0
    epoch: int = 0
    batch: int = 0
    epoch_length: int | None = None
    samples: int = 0
    batch_samples: int = 0
    batch_steps: int = 1
    params: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    buffers: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    opt_state: Any = None
    seed: int = 0
    extra: Any = None

    def __post_init__(self) -> None:
        trees = [_read[name](self) for name in _TREES]
        object.__setattr__(self, "_seen", _donation.generations(trees))
        object.__setattr__(self, "_born", _donation.chains)
        object.__setattr__(self, "_lane", None)
        object.__setattr__(self, "_heir", _donation.Heir())

    @property
    def skipped(self) -> bool:
        """Whether the batch consumed last made no update, so that `step` did not move."""
        return self.batch_steps == 0

    def replace(self, **changes: Any) -> TrainState:
        """A copy with these fields changed; it shares every tensor that is not.

        >>> TrainState(step=3).replace(step=4, extra={"note": "kept"}).extra
        {'note': 'kept'}

        What is computed from parameters that require a gradient has a graph behind it, which steps refuse unless they
        are `ll.differentiable`: write `with torch.no_grad():` around, as in a raw loop.

        Raises:
            TypeError: a field that a TrainState does not have.
            DonatedStateError: a field that is not changed was donated.
        """
        if unknown := changes.keys() - set(_FIELDS):
            raise TypeError(f"a TrainState has no field {sorted(unknown)}; it has {', '.join(_FIELDS)}")
        values = {name: changes[name] if name in changes else getattr(self, name) for name in _FIELDS}
        # What is kept was read just now, so its marks hold; only new trees must be looked through.
        seen = {chain: at for chain, at in self._seen.items() if chain.generation == at}
        seen |= _donation.generations([changes[name] for name in _TREES if name in changes])
        lane = None if changes.keys() & {"params", "buffers", "opt_state"} else self._lane
        # A step wrapped by one that changes `extra` is given such a copy. A copy with another seed, or at another
        # place, is not what the run goes on from.
        return make(values, seen, lane, self._heir if changes.keys() <= {"extra"} else None)

    def __repr__(self) -> str:
        _heal(self)
        position = self.batch if self.epoch_length is None else f"{self.batch}/{self.epoch_length}"
        parts = [f"step={self.step}", f"epoch={self.epoch}", f"batch={position}", f"samples={self.samples}"]
        if _spent_by(self, _TREES) is not None:
            return f"TrainState({', '.join(parts)}, donated)"
        parts += [
            f"{name}={len(tensors)} tensors ({sum(tensor.numel() for tensor in tensors.values()):,} numbers)"
            for name in ("params", "buffers")
            if (tensors := getattr(self, name))
        ]
        parts.append(f"seed={self.seed}")
        if self.extra is not None:
            keys = f" of {', '.join(map(str, self.extra))}" if isinstance(self.extra, dict) else ""
            parts.append(f"extra={type(self.extra).__name__}{keys}")
        return f"TrainState({', '.join(parts)})"

    def __reduce__(self) -> tuple[Any, ...]:
        return TrainState, tuple(getattr(self, name) for name in _FIELDS)


_FIELDS = tuple(field.name for field in dataclasses.fields(TrainState))
_TREES = ("params", "buffers", "opt_state", "extra")
_COUNTS = tuple(name for name in _FIELDS if name not in _TREES)
_slots = {name: getattr(TrainState, name) for name in _FIELDS}
_read = {name: slot.__get__ for name, slot in _slots.items()}
_write = tuple((name, slot.__set__) for name, slot in _slots.items())
_read_counts = tuple((name, _read[name]) for name in _COUNTS)
_marks = ("_born", "_seen", "_lane", "_heir")
_set_born, _set_seen, _set_lane, _set_heir = (vars(_Marked)[name].__set__ for name in _marks)


def make(
    values: dict[str, Any],
    seen: dict[_donation.Chain, int],
    lane: _donation.Chain | None = None,
    heir: _donation.Heir | None = None,
) -> TrainState:
    """A state of all its fields, whose marks are known: without the walk over its tensors."""
    state = object.__new__(TrainState)
    for name, write in _write:
        write(state, values[name])
    _set_seen(state, seen)
    _set_born(state, _donation.chains)
    _set_lane(state, lane)
    _set_heir(state, heir or _donation.Heir())
    return state


def counts_of(state: TrainState) -> dict[str, Any]:
    """All but the trees, of a state that is known to be good."""
    return {name: read(state) for name, read in _read_counts}


def _heal(state: TrainState) -> None:
    """Turn a spent state whose successor an interrupt took away into that successor."""
    if (new := state._heir.state) is not None:
        for name, write in _write:
            write(state, _read[name](new))
        _set_seen(state, new._seen)
        _set_born(state, new._born)
        _set_lane(state, new._lane)
        _set_heir(state, new._heir)


def _spent_by(state: TrainState, trees: tuple[str, ...]) -> _donation.Chain | None:
    return _donation.stale_chain([_read[name](state) for name in trees], state._seen)


def _check(state: TrainState, name: str) -> None:
    _heal(state)
    if (chain := _spent_by(state, (name,))) is not None:
        now = "" if chain.step is None else f", and that run is at step {chain.step} now"
        pure = "" if chain.writer.startswith("ckpt.restore") else " or make the step with donate=False"
        raise DonatedStateError(
            f"{name} of the state at step {state.step} (epoch {state.epoch}, batch {state.batch}) was donated: "
            f"{chain.writer} has written over its tensors{now}. Go on with the state that it returned; to keep an "
            f"earlier one, copy it first (kept = ll.copy_state(state)){pure}"
        )


def _guard_tree(name: str) -> property:
    read = _read[name]

    def guarded(self: TrainState) -> Any:
        if self._born != _donation.chains:
            _check(self, name)
        else:
            for chain, generation in self._seen.items():
                if chain.generation != generation:
                    _check(self, name)
        return read(self)

    return property(guarded, _slots[name].__set__, doc=_slots[name].__doc__)


def _guard_count(name: str) -> property:
    read = _read[name]

    def guarded(self: TrainState) -> Any:
        if _donation.rescued:
            _heal(self)
        return read(self)

    return property(guarded, _slots[name].__set__, doc=_slots[name].__doc__)


for _name in _FIELDS:
    setattr(TrainState, _name, (_guard_tree if _name in _TREES else _guard_count)(_name))


def _flatten(state: TrainState) -> tuple[list[Any], Any]:
    # None is a leaf to torch's pytrees, so a tree that is not there belongs to the structure.
    trees = {name: tree for name in _TREES if (tree := getattr(state, name)) is not None}
    return list(trees.values()), (tuple(trees), {name: getattr(state, name) for name in _COUNTS})


def _flatten_with_keys(state: TrainState) -> tuple[list[Any], Any]:
    trees, (names, counts) = _flatten(state)
    keys = map(torch.utils._pytree.GetAttrKey, names)
    return list(zip(keys, trees, strict=True)), (names, counts)


def _unflatten(trees: Any, structure: Any) -> TrainState:
    names, counts = structure
    return TrainState(**{**dict.fromkeys(_TREES), **dict(zip(names, trees, strict=True)), **counts})


torch.utils._pytree.register_pytree_node(
    TrainState,
    _flatten,
    _unflatten,
    flatten_with_keys_fn=_flatten_with_keys,
    serialized_type_name="looplib.TrainState",
)


def init_state(
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    seed: int = 0,
    epoch_length: int | None = None,
    trainable: Callable[[str, Tensor], bool] | None = None,
    extra: Any = None,
) -> TrainState:
    """The first state of a run, bound to `model`: it holds the module's own tensors, uncopied.

    >>> import looplib as ll, torch
    >>> model = torch.nn.Linear(2, 1)
    >>> state = ll.init_state(model, ll.optimizer(torch.optim.AdamW, lr=1e-3), seed=0)
    >>> state.params["weight"] is model.weight
    True

    Args:
        model: the module, wrapped or not; names are the innermost module's own.
        optimizer: its `init` makes `opt_state`; None for a state to evaluate with.
        seed: what dropout and every other random draw of the steps come from.
        epoch_length: batches in an epoch (`len(loader)`), or None for a stream.
        trainable: `(name, tensor) -> bool`, the parameters to train, as given to `make_grad_fn`; without it
            those that require a gradient.
        extra: a pytree of the user's own.

    Raises:
        TypeError: `model` is no module, or `optimizer` no `ll.optimizer(...)`.
        ValueError: a lazy parameter without a shape, no trainable parameter, an epoch of no batches.
    """
    slots = _modules.members(model)
    if epoch_length is not None and epoch_length < 1:
        raise ValueError(f"epoch_length is {epoch_length}; an epoch has 1 batch or more, or give None for a stream")
    params, buffers = _modules.tensors(slots.params), _modules.tensors(slots.buffers)
    opt_state = None
    if optimizer is not None:
        if not hasattr(optimizer, "init"):
            raise TypeError(
                f"optimizer is {_describe(optimizer)}; init_state needs what ll.optimizer returns, "
                "such as ll.optimizer(torch.optim.AdamW, lr=1e-3)"
            )
        names = _modules.trainable_names(model, trainable)
        opt_state = optimizer.init({name: params[name] for name in names}, buffers=buffers)
    return TrainState(
        epoch_length=epoch_length, params=params, buffers=buffers, opt_state=opt_state, seed=seed, extra=extra
    )


def _describe(thing: Any) -> str:
    return f"the class {thing.__name__}" if isinstance(thing, type) else f"an instance of {type(thing).__name__}"


def copy_state(state: TrainState) -> TrainState:
    """A state equal to `state` that shares no tensor with it, so that a donated step may spend either.

    >>> import looplib as ll, torch
    >>> state = ll.init_state(torch.nn.Linear(2, 1))
    >>> kept = ll.copy_state(state)
    >>> kept.params["weight"] is state.params["weight"]
    False

    Tensors that stand in it twice stand in the copy twice. Raises DonatedStateError for a spent state.
    """
    copies: dict[int, Tensor] = {}

    def copy(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if id(leaf) not in copies:
            copies[id(leaf)] = leaf.detach().clone().requires_grad_(leaf.requires_grad)
        return copies[id(leaf)]

    return state.replace(**{name: torch.utils._pytree.tree_map(copy, getattr(state, name)) for name in _TREES})


def bind(model: nn.Module, state: TrainState) -> TrainState:
    """Copy a state's values into the module, and return the state bound to it.

    >>> import looplib as ll, torch
    >>> model = torch.nn.Linear(2, 1)
    >>> kept = ll.copy_state(ll.init_state(model))
    >>> _ = torch.nn.init.zeros_(model.weight)
    >>> state = ll.bind(model, kept)
    >>> state.params["weight"] is model.weight, torch.equal(model.weight, kept.params["weight"])
    (True, True)

    The state returned shares nothing with the one given, which therefore stays good. Other states that were
    bound to the module are spent. A state that is bound to it already is returned as it is.

    Args:
        model: the module, wrapped or not.
        state: with the module's names and shapes, in any dtypes and on any devices.

    Raises:
        ValueError: names or shapes that are not the module's; nothing is copied then.
        DonatedStateError: the state is spent.
    """
    slots = _modules.members(model)
    _modules.check_names("parameters", state.params, slots.params, model)
    _modules.check_names("buffers", state.buffers, slots.buffers, model)
    own = {"params": _modules.tensors(slots.params), "buffers": _modules.tensors(slots.buffers)}
    if all(getattr(state, tree)[name] is own[tree][name] for tree in own for name in own[tree]):
        return state
    bound = copy_state(state)
    chain = _donation.Chain("ll.bind(model, state)")
    _donation.own(chain, _donation.tensors_in(own))
    chain.generation = 1
    with torch.no_grad():
        for tree, values in own.items():
            for name, tensor in values.items():
                tensor.copy_(getattr(bound, tree)[name])
    return bound.replace(**own)


def end_epoch(state: TrainState) -> TrainState:
    """The state at the start of the next epoch: call it after the `for` loop over a stream.

    A loader with a length ends its epochs by itself, since the step knows `epoch_length`; a stream's end is
    known only when it comes.

    >>> import looplib as ll
    >>> state = ll.end_epoch(ll.TrainState(batch=3, step=3))
    >>> state.epoch, state.batch
    (1, 0)

    Args:
        state: of a stream, after its last batch.

    Raises ValueError for a state with an `epoch_length`.
    """
    if state.epoch_length is not None:
        raise ValueError(
            f"the state has epoch_length={state.epoch_length}, so train_step ends its epochs; "
            "end_epoch is for streams, whose states are made with epoch_length=None"
        )
    return state.replace(epoch=state.epoch + 1, batch=0, batch_samples=0)  # no batch, so no multiple is crossed
