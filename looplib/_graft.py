"""Grafting: a run that continues with a changed model or optimizer, of layers added, untied, frozen, renamed or dropped."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections import defaultdict
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from looplib._core import trees
from looplib._core.by_parameter import name_indices
from looplib._core.checks import check, check_type, few, is_plain
from looplib._core.mappings import fields_of, without
from looplib._core.patterns import Patterns
from looplib._core.ranks import is_sharded, local, whole
from looplib.types import COUNTS, TrainState, check_state

_GRAFTED = ("params", "buffers", "opt_state")


class Grafted(NamedTuple):
    """A state that `graft` made, and where each of its leaves comes from.

    >>> import looplib as ll, torch
    >>> state = ll.init_state(torch.nn.Linear(2, 1))
    >>> ll.state.graft(state, ll.init_state(torch.nn.Linear(2, 1))).carried["params.weight"]
    'params.weight'

    Attributes:
        state: the state to continue with.
        carried: leaf of the new state -> leaf of the old one whose value it has: `params.0.weight`. For an average that begins
            at a carried weight, it is this weight.
        fresh: leaves that have the values of the new state.
        dropped: leaves of the old state that no leaf has taken.
    """

    state: TrainState
    carried: dict[str, str]
    fresh: list[str]
    dropped: list[str]


def graft(
    old_state: TrainState,
    new_state: TrainState,
    rename: Mapping[str, str] | Callable[[str], str] | None = None,
    *,
    fresh: Collection[str] = (),
    drop: Collection[str] = (),
) -> Grafted:
    """Continue a run with a changed model or optimizer: carry weights, moments and counts over by name.

    >>> import looplib as ll, torch
    >>> def network(**more):
    ...     return torch.nn.ModuleDict({"body": torch.nn.Linear(2, 2), **more})
    >>> adam = ll.optimizer(torch.optim.Adam, lr=0.1)
    >>> state = ll.init_state(network(), adam).replace(step=7)
    >>> model = network(head=torch.nn.Linear(2, 2))
    >>> grafted = ll.state.graft(state, ll.init_state(model, adam), fresh=("head.*",))
    >>> grafted.state.step, grafted.fresh[:2], grafted.dropped
    (7, ['params.head.weight', 'params.head.bias'], [])
    >>> state = ll.bind(model, grafted.state)

    Each parameter of the new state takes the value of that of its name in the old one, and with it all that the update keeps
    of it. A copy has its own: `rename={"head.weight": "embedding.weight"}` unties a head, with a copy of the moments. What is
    kept of no parameter, such as counts of an average, is carried by its place in `opt_state`. Where a part stands in
    another place, rename that: `rename={"opt_state.partition.rest.Adam": "opt_state.Adam"}`.

    A new parameter is named in `fresh`, and one that is gone in `drop`; anything else that differs is refused by its name. Of a
    parameter that is carried, the moments are dropped if it is frozen by now, and fresh if it was frozen before.

    An average that is new, or that is of a parameter which was frozen before, begins at the carried weight. So does whatever a
    part of your own begins as a copy of the weights. Classes that make their state in a parameter's first update, as
    schedule-free ones do, make that of fresh parameters in their next one.

    Counts, position, seed and `extra` are those of the old state. Values are copied, so both states stay valid. The result is
    not bound to a module: `ll.bind(model, grafted.state)` does it.

    Args:
        old_state: the state of the run.
        new_state: `init_state` of the changed model and optimizer.
        rename: name in the new state -> name in the old one, for parameters, buffers and beginnings of places in `opt_state`;
            or a function of names of parameters and buffers.
        fresh: names or patterns of parameters, buffers or places in `opt_state` that begin as in `new_state`. `*` is as in
            file names.
        drop: names or patterns of those of the old state that are gone.

    Raises:
        ValueError: a leaf of one state has none in the other and is not named; shapes, dtypes, layouts over ranks or types of
            plain values differ; only a part of what a class makes in a parameter's first update is to be fresh; a part of
            your own keeps zeros for weights that are zero, which may be a copy of them; a name in `rename`, `fresh` or
            `drop` is not there; a state is a stack; the new state has an `extra`; or the epoch has another length and the run
            is within one.
        DonatedStateError: a state was donated to a step.
    """
    check_state(old_state, "ll.state.graft(old_state, new_state)")
    check_state(new_state, "ll.state.graft(old_state, new_state)")
    check_type(
        "rename is", rename, (Mapping, Callable, type(None)), "give a dict of new names to old ones, or a function"
    )
    for title, names in (("fresh", fresh), ("drop", drop)):
        check(not isinstance(names, str), f"{title} is {names!r}; give names, such as {title}=('head.*',)", TypeError)
    _check_positions(old_state, new_state)
    renaming, begins, drops = _Renaming(rename, new_state), Patterns(fresh), Patterns(drop)
    old, new = _leaves(old_state), _leaves(new_state)
    old_indices, new_indices = name_indices(old, _tensors(old_state)), name_indices(new, _tensors(new_state))
    kept_before, kept_now = _kept_by_update(old_indices), _kept_by_update(new_indices)
    copies, unclear = _copies_of_weights(new, new_indices, new_state)
    problems: list[str] = []
    sources: dict[trees.Path, trees.Path] = {}
    begun: list[trees.Path] = []
    moved: list[str] = []
    for path, leaf in new.items():
        index = new_indices.get(path)
        name = None if index is None else path[index]
        title, source = trees.dotted(path), renaming.source(path, index, old)
        is_named = begins.match(path, *_as_titles(name))
        # What is kept of a parameter that is new, or was frozen before
        of_new = path[0] == "opt_state" and name is not None and renaming.names[name] not in kept_before
        if is_named or (source not in old and of_new):
            begun.append(path)
            if (weight := copies.get(path)) in sources:  # what init keeps of a carried weight is the carried weight
                sources[path] = sources[weight]
                if path in unclear and whole(old[sources[path]]).any():
                    problems.append(
                        f"{title} is zero, as its weight is in the new state, and could begin as zeros or at the carried weight: load "
                        "the old weights into the new model before its init_state, "
                        "new_model.load_state_dict(ll.checkpoint.state_dict(old_model, old_state), strict=False)"
                    )
        elif source in old:
            sources[path] = source
            if _layout(leaf) != _layout(old[source]):
                moved.append(title)
            elif problem := _misfit(leaf, old[source]):
                old_title = trees.dotted(source)
                problems.append(f"{title} is {problem}: name it in fresh=, and {old_title} in drop=")
        elif path[0] == "opt_state":
            problems.append(f"{title} is in the new state alone: name it in fresh=, or in rename=")
        else:
            problems.append(f"{title} is new: name it in fresh=, or where its value comes from in rename=")
    check(
        not moved,
        f"{few(moved)} of one state, and not of the other, is sharded, or they are sharded in different ways: make both states "
        "with models that are wrapped in the same way. Checkpoints fit any layout, so for the old one: "
        "ckpt.restore(ll.init_state(old_model, old_optimizer)), with the old model sharded as the new one is",
    )
    problems += _begun_in_part(new_indices, sources, {*begun})
    problems += _flat_of_others(sources, renaming.names, old_state.opt_state, new_state.opt_state)
    taken = {*sources.values()}
    dropped = [path for path in old if path not in taken]
    carried_and_trained = {renaming.names[name] for name in kept_now if ("params", renaming.names[name]) in taken}
    for path in dropped:
        name = path[old_indices[path]] if path in old_indices else None
        is_named = drops.match(path, *_as_titles(name))
        # What was kept of a parameter that is gone, or is frozen by now
        of_gone = path[0] == "opt_state" and name in old_state.params and name not in carried_and_trained
        if not (is_named or of_gone or path in begun):
            title = trees.dotted(path)
            problems.append(f"{title} is in the old state alone: name it in drop=, or what takes it in rename=")
    unused = {*fresh, *drop, *renaming.moves} - begins.used - drops.used - renaming.used
    problems += [f"{name} is named, and neither state has it so" for name in sorted(unused)]
    check(not problems, f"the states do not fit:\n  {few(problems, 10, chr(10) + '  ')}")

    values = iter([_copied(old[sources[path]] if path in sources else leaf, leaf) for path, leaf in new.items()])
    grafted = {name: trees.map_leaves(lambda _: next(values), getattr(new_state, name)) for name in _GRAFTED}
    length = old_state.epoch_length if new_state.epoch_length is None else new_state.epoch_length
    counts = {**fields_of(old_state, COUNTS), "epoch_length": length}
    run = dataclasses.replace(
        new_state.run,
        loaders=new_state.run.loaders or old_state.run.known_loaders,
        partly_read=old_state.run.partly_read,  # of the batch at which the counts stand
    )
    state = TrainState(**{**grafted, **counts, "extra": old_state.extra, "run": run})
    carried = {trees.dotted(path): trees.dotted(source) for path, source in sources.items()}
    fresh_paths = [path for path in begun if path not in sources]
    return Grafted(state, carried, [*map(trees.dotted, fresh_paths)], [*map(trees.dotted, dropped)])


def _check_positions(old: TrainState, new: TrainState) -> None:
    check(
        not any(isinstance(state.seed, tuple) for state in (old, new)),
        "a state is a stack: graft the states of ll.transforms.unstack_states(stack) one by one",
    )
    check(
        new.extra is None,
        "the new state has an extra, and the run continues with that of the old one: change it afterwards, "
        "grafted.state.with_extra(name=value)",
    )
    check(
        not old.batch or new.epoch_length in (None, old.epoch_length),
        f"the old state is within an epoch of {old.epoch_length} batches, at batch {old.batch}, and the new one has epochs of "
        f"{new.epoch_length}: leave loader= and epoch_length= out of its init_state, and convert the position: "
        "loader.resume(grafted.state)",
    )


def _leaves(state: TrainState) -> dict[trees.Path, Any]:
    return {path: leaf for name in _GRAFTED for path, leaf in trees.leaves(getattr(state, name), path=(name,))}


def _tensors(state: TrainState) -> dict[str, Tensor]:
    """Parameters and buffers."""
    return {**state.buffers, **state.params}


def _as_titles(name: str | None) -> list[str]:
    return [] if name is None else [name]


def _kept_by_update(indices: Mapping[trees.Path, int]) -> set[str]:
    """Names of the parameters and buffers of which the update keeps something."""
    return {path[index] for path, index in indices.items() if path[0] == "opt_state"}


def _copies_of_weights(
    leaves: Mapping[trees.Path, Any], indices: Mapping[trees.Path, int], state: TrainState
) -> tuple[dict[trees.Path, trees.Path], set[trees.Path]]:
    """Leaves of the update that its `init` has made as copies of weights, each with its weight; and those that may be copies.

    Averages are. Of other trees, such as those of a user's part, nothing but the values is known: a tree that has the values of
    the weights for all of its parameters is one of copies, or if all are zeros, perhaps one of moments.
    """
    members: dict[trees.Path, dict[trees.Path, trees.Path]] = defaultdict(dict)  # tree -> leaf -> weight
    for path, index in indices.items():
        name, tree = path[index], (*path[:index], ..., *path[index + 1 :])
        if path[0] == "opt_state" and path[index - 1] not in ("state", "started", "sum"):  # which begin as zeros
            members[tree][path] = ("params" if name in state.params else "buffers", name)
    copies: dict[trees.Path, trees.Path] = {}
    unclear: set[trees.Path] = set()
    for tree, weights in members.items():
        if tree[-3:-1] in (("average", "params"), ("average", "buffers")):
            copies |= weights
        elif all(_is_copy(leaves[path], leaves[weight]) for path, weight in weights.items()):
            copies |= weights
            if not any(whole(leaves[path]).any() for path in weights):
                unclear.update(weights)
    return copies, unclear


def _entry(tree: Any, path: Sequence[Any]) -> Any:
    return functools.reduce(operator.getitem, path, tree)


def _begun_in_part(
    indices: Mapping[trees.Path, int], sources: Mapping[trees.Path, trees.Path], begun: Collection[trees.Path]
) -> list[str]:
    """Parameters of which only a part begins, of what their class makes as a whole in their first update."""
    members: dict[trees.Path, list[trees.Path]] = defaultdict(list)
    for path, index in indices.items():
        if path[index - 1] in ("state", "started"):
            members[(*path[: index - 1], path[index])].append(path)
    return [
        f"{few([*map(trees.dotted, fresh)])} would begin and {few([*map(trees.dotted, carried)])} be carried, and the class makes "
        f"all that it keeps of a parameter in its first update: name both or neither of {trees.dotted((*part, 'state', name))} "
        f"and {trees.dotted((*part, 'started', name))} in fresh="
        for (*part, name), paths in members.items()
        if (*part, "started", name) in indices
        and (fresh := [path for path in paths if path in begun])
        and (carried := [path for path in paths if path in sources])
    ]


def _flat_of_others(
    sources: Mapping[trees.Path, trees.Path], old_names: Mapping[str, str], old_opt_state: Any, new_opt_state: Any
) -> list[str]:
    """Vectors of LBFGS, in which all parameters stand one behind the other, that would be carried to other parameters."""
    problems = []
    for path, source in sources.items():
        if path[-1] == "prev_flat_grad":
            (_, *where, _, _), (_, *old_where, _, _) = path, source
            if [old_names[name] for name in _entry(new_opt_state, where)] != [*_entry(old_opt_state, old_where)]:
                problems.append(
                    f"{trees.dotted(path[:-1])} holds vectors of all parameters, one behind the other, and they are others, or "
                    f"in another order, than in the old state: name {trees.dotted(path[:-3])} in fresh="
                )
    return problems


class _Renaming:
    """Names and paths of the new state, as they are in the old one.

    Attributes:
        names: name of a parameter or buffer -> its name in the old state.
        moves: beginning of another path -> that of the path in the old state.
        used: those of `moves` that a path begins with.
    """

    def __init__(self, rename: Mapping[str, str] | Callable[[str], str] | None, new_state: TrainState) -> None:
        renamed = {} if rename is None or callable(rename) else rename
        names = _tensors(new_state)
        self.names = {name: rename(name) if callable(rename) else renamed.get(name, name) for name in names}
        self.moves = without(renamed, names)
        self.used: set[str] = set()

    def source(self, path: trees.Path, index: int | None, old_paths: Container[trees.Path]) -> trees.Path:
        """Path in the old state from which a leaf takes its value. `index` is that of its parameter's name."""
        source = path
        if index is not None:
            name, before, after = path[index], path[1:index], path[index + 1 :]
            old_name = self.names[name]
            source = (path[0], *before, old_name, *after)
            if source not in old_paths:  # a partition's label may be the same name
                source = (path[0], *(old_name if key == name else key for key in before), old_name, *after)
        for new, old in self.moves.items():
            beginning = new.split(".")
            if [*map(str, source[: len(beginning)])] == beginning:
                self.used.add(new)
                source = (*old.split("."), *source[len(beginning) :])
        return source


def _misfit(leaf: Any, old: Any) -> str:
    """The difference between a leaf and its source, in words, or ""."""
    kinds = [_kind(leaf), _kind(old)]
    return "" if kinds[0] == kinds[1] else f"{kinds[0]} in the new state, {kinds[1]} in the old one"


def _kind(leaf: Any) -> str:
    if not isinstance(leaf, Tensor):
        return f"a {type(leaf).__name__}"
    return f"a {str(leaf.dtype).removeprefix('torch.')} tensor of shape {tuple(leaf.shape)}"


def _is_copy(leaf: Any, weight: Tensor) -> bool:
    """True for a leaf with the values of a weight, in whatever precision."""
    if not isinstance(leaf, Tensor) or leaf.shape != weight.shape or _layout(leaf) != _layout(weight):
        return False
    if not (is_plain(local(leaf)) and is_plain(local(weight))):
        return False
    if (leaf.is_floating_point(), leaf.is_complex()) != (weight.is_floating_point(), weight.is_complex()):
        return False
    return torch.equal(whole(leaf), whole(weight).to(leaf.device, leaf.dtype))


def _layout(leaf: Any) -> Any:
    """Mesh and placements of a sharded tensor, or None."""
    return (leaf.device_mesh, leaf.placements) if is_sharded(leaf) else None


def _copied(value: Any, like: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return value.detach().to(like.device, like.dtype, copy=True).requires_grad_(like.requires_grad)
