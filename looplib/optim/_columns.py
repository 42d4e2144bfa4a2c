"""Column update: a torch class's arithmetic on lists of tensors, without a Python loop over the parameters.

A class's `step` first sorts parameters, gradients and each entry of their state into lists, and then passes the lists
to one function. Here they are sorted by C functions, and go to the same function, or straight to the fused kernel. A
pure update copies them list by list. What this cannot handle (sparse gradients, entries that differ between
parameters, strides that a kernel would get wrong) is left to the class's own `step`.
"""

from __future__ import annotations

import functools
import inspect
import operator
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import chain, repeat
from typing import Any, NamedTuple

import torch
from torch import Tensor

from looplib._core import ownership, torch_private
from looplib._core.mappings import as_record, pairs
from looplib._core.ranks import shards
from looplib.optim._kernels import PLAIN, aligned, clone
from looplib.optim._list_functions import IN_LISTS, RAGGED, Kernel, is_uniform, ragged
from looplib.optim._recipe import copied
from looplib.types import Grads, Params

Plan = Any  # of `_update`, which imports this module

_is_sparse, _requires_grad = map(operator.attrgetter, ("is_sparse", "requires_grad"))
_is_contiguous = Tensor.is_contiguous

# Hyperparameters that do not decide which entries of the state a class reads. The others must not be schedules.
_MAY_MOVE = {"lr", "weight_decay", "betas"}


class Columns(NamedTuple):
    """Tensors of one group, one for each of its parameters.

    Attributes:
        number: index of the group.
        names: names of the parameters.
        entries: key of the parameters' states -> column.
        kernel: a fused kernel or a function for lists to call directly, or None for the class's step.
    """

    number: int
    names: Sequence[str]
    params: list[Tensor]
    grads: list[Tensor]
    entries: dict[str, Sequence[Any]]
    kernel: Kernel | None


class Lists(NamedTuple):
    """Result of a class's `_init_group`: the column in each list that it filled (None for empty ones), and its value."""

    keys: list[str | None]
    result: Any


def update_columns(
    plan: Plan,
    values: Sequence[dict[str, Any]],
    grads: Grads,
    params: Params,
    opt_state: dict[str, Any],
    donate: bool,
) -> tuple[Params, dict[str, Any]] | None:
    """The next parameters and the optimizer's next state, or None, with nothing written, if the class's `step` is needed.

    Donated ones are those that were given, with other numbers in their tensors.
    """
    groups: list[Columns] = []
    states = opt_state["state"]
    whole = len(grads) == len(plan.key[0])
    for number, names in enumerate(plan.members):
        if not whole:
            names = [name for name in names if name in grads]
        if names:
            columns = _columns(plan, values[number], number, names, grads, params, states)
            if columns is None:
                return None
            groups.append(columns)
    grad_mode = torch.is_grad_enabled()
    try:
        torch_private.set_grad_enabled(False)
        working = groups if donate else [_copies(plan, columns) for columns in groups]
        others = []
        for columns in working:
            if columns.kernel is None:
                others.append(columns)
            else:
                _launch(plan, values[columns.number], columns, donate)
        if others:
            _run(plan, values, others)
    finally:
        torch_private.set_grad_enabled(grad_mode)
    if donate:
        ownership.writes.count += 1
        return params, opt_state
    new_params, new_states = _next(params, states, groups, working)
    return new_params, {**opt_state, "state": new_states}


def _columns(
    plan: Plan,
    values: dict[str, Any],
    number: int,
    names: Sequence[str],
    grads: Grads,
    params: Params,
    states: Mapping[str, dict[str, Any]],
) -> Columns | None:
    rows = [*map(states.__getitem__, names)]
    own, given = [*map(params.__getitem__, names)], [*map(grads.__getitem__, names)]
    entries = ragged(rows) if plan.recipe.cls in RAGGED else _entries(rows)
    if entries is None:
        return None
    kernel = plan.kernels[number]
    if plan.fused[number] or plan.asked[number]:
        lists = [own, given, *map(entries.__getitem__, _without_step(tuple(entries)))]
        if not aligned([shards(tensors) for tensors in lists] if plan.sharded else lists):
            return None
    elif any(map(_is_sparse, given)):
        return None
    elif kernel is not None and not _fits(plan, values, number, entries):
        kernel = None
    columns = as_record(Columns, (number, names, own, given, entries, kernel))
    if kernel is None and _lists(plan, values, columns) is None:
        return None
    return columns


def _fits(plan: Plan, values: Mapping[str, Any], number: int, entries: Mapping[str, Sequence[Any]]) -> bool:
    """True if a function for lists may compute with these hyperparameters, which must be numbers, and these entries."""
    if any(isinstance(values[key], (Tensor, tuple)) for key in plan.moving[number]):
        return False
    return is_uniform(plan.recipe.cls, entries)


def _entries(rows: Sequence[dict[str, Any]]) -> dict[str, Sequence[Any]] | None:
    """The parameters' states as columns, or None if their keys differ."""
    keys = tuple(rows[0])
    if {*map(len, rows)} != {len(keys)}:
        return None
    try:
        if len(keys) < 2:
            return {key: [*map(operator.itemgetter(key), rows)] for key in keys}
        return dict(pairs(keys, pairs(*map(_values(keys), rows))))
    except KeyError:
        return None


@functools.lru_cache(maxsize=64)
def _values(keys: tuple[str, ...]) -> Callable[[dict[str, Any]], tuple[Any, ...]]:
    return operator.itemgetter(*keys)


@functools.lru_cache(maxsize=64)
def _without_step(keys: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(key for key in keys if key != "step")


def _copies(plan: Plan, columns: Columns) -> Columns:
    """Columns to write to. A fused kernel's columns are dense. Counts need no copy: adding one makes new ones."""
    number, names, params, grads, entries, kernel = columns
    direct, count = kernel is not None, len(params)
    keys = _without_step(tuple(entries))  # on the parameters' device
    copies = _cloned(
        [*params, *chain(*map(entries.__getitem__, keys))], direct and not (plan.key[-1] or plan.listed[number])
    )
    working = dict(entries)
    for place, key in enumerate(keys, 1):
        working[key] = copies[place * count : (place + 1) * count]
    if not direct and "step" in entries:
        working["step"] = _cloned(entries["step"], False)
    return as_record(Columns, (number, names, copies[:count], grads, working, kernel))


def _cloned(values: Sequence[Any], dense: bool) -> list[Any]:
    """Copies of values, by one call for all tensors: of a call for each list, each takes 1% of a small step."""
    if dense or (PLAIN.issuperset(map(type, values)) and all(map(_is_contiguous, values))):
        return torch_private.foreach_clone(values)
    if any(map(operator.is_, values, repeat(None))):  # of `ragged`
        copies = iter(_cloned([value for value in values if value is not None], False))
        return [value if value is None else next(copies) for value in values]
    return [clone(value) if isinstance(value, Tensor) else copied(value) for value in values]


def _next(
    params: Params, states: Mapping[str, dict[str, Any]], groups: Sequence[Columns], working: Sequence[Columns]
) -> tuple[Params, dict[str, dict[str, Any]]]:
    """New parameters and states, from the columns of a pure update."""
    new_params, new_states = dict(params), dict(states)
    for old, new in pairs(groups, working):
        any(map(setattr, new.params, repeat("requires_grad"), map(_requires_grad, old.params)))  # each returns None
        new_params.update(pairs(new.names, new.params))
        rows = pairs(*new.entries.values())
        new_states.update(pairs(new.names, map(dict, map(pairs, repeat([*new.entries]), rows))))
        if {*map(len, map(states.__getitem__, new.names))} != {len(new.entries)}:  # of `ragged`
            for name in new.names:
                new_states[name] = {key: new_states[name][key] for key in states[name]}
    return new_params, new_states


# The class's own function


def _run(plan: Plan, values: Sequence[dict[str, Any]], groups: Sequence[Columns]) -> None:
    """Run the class's step on these columns: that of an instance made for it, whose `_init_group` has them at hand."""
    waiting = iter(groups)

    def fill(group: dict[str, Any], *lists: list[Any]) -> Any:
        columns = next(waiting)
        known = plan.lists[_kind(plan, columns)]
        assert known is not None
        any(map(list.extend, lists, map(_named(columns).__getitem__, known.keys)))  # each returns None
        return known.result

    hyperparameters = [values[columns.number] for columns in groups]
    if any(plan.fused):
        for place, columns in enumerate(groups):
            if plan.fused[columns.number]:
                hyperparameters[place] = {**hyperparameters[place], "fused": True}
    plan.step(torch_private.stand_in(plan.recipe.cls, plan.attributes, hyperparameters, fill))


def _named(columns: Columns) -> dict[Any, Sequence[Any]]:
    """The columns by key, and an empty one for lists that the class leaves empty."""
    return {None: (), "params": columns.params, "grads": columns.grads, **columns.entries}


def _lists(plan: Plan, values: dict[str, Any], columns: Columns) -> Lists | None:
    """Which column belongs in which of the class's lists, found by running its `_init_group` once."""
    key = _kind(plan, columns)
    if key not in plan.lists:
        settled = plan.moving[columns.number].keys() <= _MAY_MOVE and hasattr(plan.recipe.cls, "_init_group")
        plan.lists[key] = _learned(plan, values, columns) if settled else None
    known: Lists | None = plan.lists[key]
    return known


def _kind(plan: Plan, columns: Columns) -> tuple[Any, ...]:
    """Key of lists: `_init_group` also says if there are complex numbers, which only some of the parameters may have."""
    partial = columns.names is not plan.members[columns.number]
    return columns.number, any(map(torch.is_complex, columns.params)) if partial else None, *columns.entries


def _learned(plan: Plan, values: dict[str, Any], columns: Columns) -> Lists | None:
    lent = instance, _ = plan.take(dict(zip(columns.names, columns.params, strict=True)))
    init_group = torch_private.init_group(instance)
    lists: list[list[Any]] = [[] for _ in range(len(inspect.signature(init_group).parameters) - 1)]
    rows = [{key: column[index] for key, column in columns.entries.items()} for index in range(len(columns.params))]
    stale = [tensor.grad for tensor in columns.params]
    try:
        instance.state = defaultdict(dict, zip(columns.params, rows, strict=True))
        for tensor, grad in zip(columns.params, columns.grads, strict=True):
            tensor.grad = grad
        group = {**instance.param_groups[columns.number], **values, "params": columns.params}
        result = init_group(group, *lists)
    finally:
        for tensor, before in zip(columns.params, stale, strict=True):
            tensor.grad = before
        plan.give_back(lent)
    found = [_key_of(tensors, columns) for tensors in lists]
    return None if _UNKNOWN in found else Lists(found, result)


_UNKNOWN = "no column"


def _key_of(tensors: list[Any], columns: Columns) -> Any:
    if not tensors:
        return None
    for key, column in _named(columns).items():
        if key is not None and len(tensors) == len(column) and all(map(operator.is_, tensors, column)):
            return key
    return _UNKNOWN


# Fused kernels and functions for lists


def kernels_of(plan: Plan) -> list[Kernel | None]:
    """For each group, the function that updates its columns, or None for the class's step."""
    cls = plan.recipe.cls
    fused = [(ours or asked) and plan.direct for ours, asked in zip(plan.fused, plan.asked, strict=True)]
    return [
        FUSED[cls] if direct else IN_LISTS[cls] if listed else None
        for direct, listed in zip(fused, plan.listed, strict=True)
    ]


def _launch(plan: Plan, values: Mapping[str, Any], columns: Columns, donate: bool) -> None:
    """Count the update and call the kernel, on this rank's shards of sharded tensors: it is elementwise."""
    _, _, params, grads, entries, kernel = columns
    assert kernel is not None
    if "step" in entries:
        add = torch_private.foreach_add_ if donate else torch_private.foreach_add
        # With `alpha`, torch takes the tensor as one instead of reading its number.
        counts: Any = add(entries["step"], 1) if plan.one is None else add(entries["step"], plan.one, alpha=1)
        if not donate:
            entries["step"] = counts
    if plan.sharded:
        params, grads = shards(params), shards(grads)
        entries = {key: column if key == "step" else shards(column) for key, column in entries.items()}
    kernel(values, params, grads, entries)


def _adam(
    values: Mapping[str, Any],
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    entries: Mapping[str, Sequence[Tensor]],
) -> None:
    kernel: Any = torch_private.fused_adamw_ if values["decoupled_weight_decay"] else torch_private.fused_adam_
    kernel(
        params,
        grads,
        entries["exp_avg"],
        entries["exp_avg_sq"],
        entries["max_exp_avg_sq"] if values["amsgrad"] else [],
        entries["step"],
        lr=values["lr"],
        beta1=values["betas"][0],
        beta2=values["betas"][1],
        weight_decay=values["weight_decay"],
        eps=values["eps"],
        amsgrad=values["amsgrad"],
        maximize=values["maximize"],
    )


def _adagrad(
    values: Mapping[str, Any],
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    entries: Mapping[str, Sequence[Tensor]],
) -> None:
    torch_private.fused_adagrad_(
        params,
        grads,
        entries["sum"],
        entries["step"],
        lr=values["lr"],
        lr_decay=values["lr_decay"],
        weight_decay=values["weight_decay"],
        eps=values["eps"],
        maximize=values["maximize"],
    )


def _sgd(
    values: Mapping[str, Any],
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    entries: Mapping[str, Sequence[Tensor]],
) -> None:
    torch_private.fused_sgd_(
        params,
        grads,
        entries["momentum_buffer"] if values["momentum"] else [],
        weight_decay=values["weight_decay"],
        momentum=values["momentum"],
        lr=values["lr"],
        dampening=values["dampening"],
        nesterov=values["nesterov"],
        maximize=values["maximize"],
        is_first_step=False,
    )


# Classes whose fused kernel is called directly: their functions first sort the lists again by device and dtype.
FUSED: dict[type, Kernel] = {
    torch.optim.SGD: _sgd,
    torch.optim.Adam: _adam,
    torch.optim.AdamW: _adam,
    torch.optim.Adagrad: _adagrad,
}
