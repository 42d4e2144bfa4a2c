"""A run that continues with another model or optimizer: layers added, untied, frozen, renamed or dropped."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from torch import Tensor

from looplib._core import trees
from looplib._core.checks import check, check_type, few
from looplib._core.mappings import fields_of
from looplib._core.ranks import is_sharded
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
        carried: leaf of the new state -> leaf of the old one whose value it has: `params.0.weight`.
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
        ValueError: a leaf of one state has none in the other and is not named; shapes, dtypes or plain values' types differ;
            a name in `rename`, `fresh` or `drop` is not there; a state is a stack; the new state has an `extra`; or the epoch has
            another length and the run is within one.
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
    old, new = _leaves(old_state), _leaves(new_state)
    names = {name: _old_name(name, rename) for name in {**new_state.params, **new_state.buffers}}
    moves = {key: name for key, name in rename.items() if key not in names} if isinstance(rename, Mapping) else {}
    unused = {*fresh, *drop, *moves}
    problems: list[str] = []
    sources: dict[trees.Path, trees.Path] = {}
    begun: list[str] = []
    for path, leaf in new.items():
        source, of_param = _source(path, names, moves, unused)
        if _is_named(path, fresh, unused) or (source not in old and of_param and of_param not in old_state.params):
            begun.append(title_of(path))
            if not _is_named(path, fresh, unused) and path[0] != "opt_state":
                problems.append(
                    f"{title_of(path)} is new: name it in fresh=, or where its value comes from in rename="
                )
        elif source not in old and of_param and not _has_leaves_of(of_param, old):
            begun.append(title_of(path))  # moments of a parameter that was frozen
        elif source not in old:
            problems.append(f"{title_of(path)} is in the new state alone: name it in fresh=, or in rename=")
        elif problem := _misfit(leaf, old[source]):
            problems.append(f"{title_of(path)} is {problem}: name it in fresh=, and {title_of(source)} in drop=")
        else:
            sources[path] = source
    taken = {*sources.values()}
    gone = [path for path in old if path not in taken]
    carried_params = {path[1] for path in taken if path[0] == "params"}
    for path in gone:
        name = next((each for each in path if each in old_state.params), None)
        of_update = path[0] == "opt_state" and name is not None
        is_frozen = of_update and name in carried_params and not _has_leaves_of(_new_name(str(name), names), new)
        is_lost = of_update and name not in carried_params
        if not (_is_named(path, drop, unused) or is_frozen or is_lost or title_of(path) in begun):
            problems.append(
                f"{title_of(path)} is in the old state alone: name it in drop=, or what takes it in rename="
            )
    problems += [f"{name} is named, and neither state has it so" for name in sorted(unused)]
    check(not problems, f"the states do not fit:\n  {few(problems, 10, chr(10) + '  ')}")
    values = {path: _copied(old[source], new[path]) for path, source in sources.items()}
    rest = iter([values.get(path, _copied(leaf, leaf)) for path, leaf in new.items()])
    grafted = {name: trees.map_leaves(lambda _: next(rest), getattr(new_state, name)) for name in _GRAFTED}
    length = old_state.epoch_length if new_state.epoch_length is None else new_state.epoch_length
    counts = {**fields_of(old_state, COUNTS), "epoch_length": length}
    run = dataclasses.replace(
        new_state.run,
        loaders=new_state.run.loaders or old_state.run.known_loaders,
        partly_read=old_state.run.partly_read,  # of the batch at which the counts stand
    )
    state = TrainState(**{**grafted, **counts, "extra": old_state.extra, "run": run})
    carried = {title_of(path): title_of(source) for path, source in sources.items()}
    return Grafted(state, carried, begun, [*map(title_of, gone)])


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
        f"{new.epoch_length}: leave loader= and epoch_length= out of its init_state, and convert the position by loader.resume(grafted.state.replace(...))",
    )


def _leaves(state: TrainState) -> dict[trees.Path, Any]:
    return {path: leaf for name in _GRAFTED for path, leaf in trees.leaves(getattr(state, name), path=(name,))}


def title_of(path: Iterable[Any]) -> str:
    """A path as a name: `params.0.weight`."""
    return ".".join(map(str, path))


def _old_name(name: str, rename: Mapping[str, str] | Callable[[str], str] | None) -> str:
    if callable(rename):
        return rename(name)
    return name if rename is None else rename.get(name, name)


def _new_name(name: str, names: Mapping[str, str]) -> str:
    return next((new for new, old in names.items() if old == name), name)


def _source(
    path: trees.Path, names: Mapping[str, str], moves: Mapping[str, str], unused: set[str]
) -> tuple[trees.Path, str | None]:
    """Path in the old state from which a leaf takes its value, and the old name of the parameter that it belongs to."""
    of_param = next((names[each] for each in path if each in names), None)
    source = tuple(names.get(each, each) if at else each for at, each in enumerate(path))
    for key, before in moves.items():
        parts, new_parts = key.split("."), before.split(".")
        if [*map(str, source[: len(parts)])] == parts:
            unused.discard(key)
            source = (*new_parts, *source[len(parts) :])
    return source, of_param


def _has_leaves_of(name: str, leaves: Mapping[trees.Path, Any]) -> bool:
    """True if the update keeps something of a parameter."""
    return any(path[0] == "opt_state" and name in path for path in leaves)


def _is_named(path: trees.Path, names: Collection[str], unused: set[str]) -> bool:
    """True if patterns name a leaf: its parameter, or a beginning of its place."""
    titles = {*map(str, path[1:]), *(title_of(path[:end]) for end in range(1, len(path) + 1))}
    matching = [each for each in names if any(title == each or fnmatchcase(title, each) for title in titles)]
    unused.difference_update(matching)
    return bool(matching)


def _misfit(leaf: Any, old: Any) -> str:
    """The difference between a leaf and its source, in words, or ""."""
    kinds = [_kind(leaf), _kind(old)]
    return "" if kinds[0] == kinds[1] else f"{kinds[0]} in the new state, {kinds[1]} in the old one"


def _kind(leaf: Any) -> str:
    if not isinstance(leaf, Tensor):
        return f"a {type(leaf).__name__}"
    sharded = " that is sharded" * is_sharded(leaf)
    return f"a {str(leaf.dtype).removeprefix('torch.')} tensor of shape {tuple(leaf.shape)}{sharded}"


def _copied(value: Any, like: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return value.detach().to(like.device, copy=True).requires_grad_(like.requires_grad)
