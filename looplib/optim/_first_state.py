"""Initial optimizer state: what a class keeps for parameters before any update, and at a parameter's own first one."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Set
from typing import Any, NamedTuple

import torch
from torch import Tensor

from looplib._core import torch_private
from looplib._core.checks import check
from looplib._core.mappings import mapped, subset, without
from looplib._core.torch_private import pytree
from looplib.optim._hyperparameters import injected
from looplib.optim._kernels import fused_groups
from looplib.optim._lbfgs import first_state_of_lbfgs
from looplib.optim._recipe import Recipe, chosen_by_kind
from looplib.optim._state_probe import probe
from looplib.types import Params

States = dict[str, dict[str, Any]]


def first_state(recipe: Recipe, params: Params) -> dict[str, Any]:
    """State before the first update, with the structure that it keeps for the whole run.

    `state` holds what the class keeps for each parameter, by name. If the class creates those values only in a
    parameter's own first update, they are zeros until then, and `started` records which parameters have had an
    update. `groups` and `shared` hold what the class keeps for a group and for all parameters, and `hyperparameters`
    holds the injected ones.
    """
    check(params, f"{recipe.cls.__name__} got no parameters to optimize")
    chosen_by_kind(recipe.group_of, params, "group")
    members = recipe.members(params)
    params = mapped(Tensor.detach, params)
    kept: dict[str, Any] = {}
    if recipe.is_torch_optim:
        made = recipe.build(params, members, fused_groups(recipe, params, members))
        kept["state"] = _OF_CLASS.get(recipe.cls, _of_torch)(recipe, made, params)
    else:
        found = probe(recipe, params, members)
        kept["state"] = pytree.tree_map_only(Tensor, torch.zeros_like, found.state)
        kept |= {"groups": found.groups} if any(found.groups) else {}
        kept |= {"shared": found.shared} if found.shared else {}
    if recipe.makes_state_late:
        kept["started"] = torch.zeros(len(params), dtype=torch.bool)
    numbers = [_injected(values) for values in recipe.moving]
    return {**kept, "hyperparameters": numbers} if any(numbers) else kept


def _injected(moving: Mapping[str, Any]) -> dict[str, Tensor]:
    """Injected hyperparameters as they are kept in the state."""
    for key, value in moving.items():
        check(
            callable(value) or injected not in map(type, value),
            f"{key} has an injected member: injected stands for a hyperparameter as a whole, so give a number or a "
            "schedule there",
            TypeError,
        )
    values = {key: value.value for key, value in moving.items() if isinstance(value, injected)}
    return {key: torch.tensor(value, dtype=torch.float64) for key, value in values.items()}


def _of_sgd(recipe: Recipe, made: Any, params: Params) -> States:
    """Momentum buffers for SGD, if there is momentum or a schedule may introduce it.

    A buffer starts as -0.0: applying momentum and adding the first gradient then gives the gradient's own bits, for
    0.0 and -0.0 as well. So the first update is not a special case, at whatever step a parameter has it.
    """
    has_momentum = recipe.group_values("momentum", 0)
    return {
        name: {"momentum_buffer": torch.full_like(p, -0.0)} if has_momentum[recipe.group_of(name, p)] else {}
        for name, p in params.items()
    }


def _of_sparse_adam(recipe: Recipe, made: Any, params: Params) -> States:
    zeros = torch.zeros_like
    return {name: {"step": 0, "exp_avg": zeros(p), "exp_avg_sq": zeros(p)} for name, p in params.items()}


def _of_torch(recipe: Recipe, made: Any, params: Params) -> States:
    """State that torch's classes create at a parameter's first gradient, of which only the presence matters."""
    for tensor in params.values():
        tensor.grad = tensor.new_zeros(()).expand_as(tensor)  # only its presence is checked, so it takes no memory
    init_group = torch_private.init_group(made)
    lists = len(inspect.signature(init_group).parameters) - 1
    for group in made.param_groups:
        init_group(group, *([] for _ in range(lists)))
    return {name: dict(made.state[tensor]) for name, tensor in params.items()}


# Classes that create state in another way than the others of torch.optim.
_OF_CLASS: dict[Any, Callable[[Recipe, Any, Params], States]] = {
    torch.optim.SGD: _of_sgd,
    torch.optim.SparseAdam: _of_sparse_adam,
    torch.optim.LBFGS: first_state_of_lbfgs,
}


# Parameters whose state the class creates in their own first update


def without_state(recipe: Recipe, opt_state: Mapping[str, Any], step: int) -> frozenset[str]:
    """Parameters that have had no update, for classes that create state in the first one."""
    started = opt_state.get("started")
    if started is None:  # a state that was loaded from torch, which has none for parameters without an update
        return frozenset(opt_state["state"]) if recipe.makes_state_late and step == 0 else frozenset()
    if started.all():
        return frozenset()
    return frozenset(name for name, flag in zip(opt_state["state"], started.tolist(), strict=True) if not flag)


def with_created(opt_state: Mapping[str, Any], created: States, first: Set[str]) -> dict[str, Any]:
    """A new record with what a class has made in an update, the first one of some of the parameters.

    If the class has not created state yet, the old values stay.
    """
    states = opt_state["state"]
    new = {name: state for name, state in created.items() if state or not states[name]}
    for index, name in enumerate(states if first else ()):
        if name in first and name in new:
            opt_state["started"][index] = True
    return {**opt_state, "state": {**states, **new}}


# Conversion to and from plain torch


class Kept(NamedTuple):
    """State that a class keeps for parameters.

    Attributes:
        entries: for each parameter, values with the keys and types of the real ones.
        late: parameters without state so far, because they have had no update.
        empty: True if no parameter has state yet, although a state has the structure.
    """

    entries: States
    late: frozenset[str]
    empty: bool


def kept_by_class(
    cls: type,
    group: Mapping[str, Any],
    params: Mapping[str, Tensor],
    names: Iterable[str],
    opt_state: Mapping[str, Any],
    step: int,
) -> Kept:
    """State that a class keeps for these parameters after `step` updates; `group` is one of its `param_groups`."""
    recipe = Recipe(cls, without(subset(group, inspect.signature(cls).parameters), {"params"}))
    tiny = {  # with one element each
        name: torch.zeros((1,) * params[name].ndim, dtype=params[name].dtype, device=params[name].device)
        for name in names
    }
    entries: States = first_state(recipe, tiny)["state"]
    return Kept(entries, without_state(recipe, opt_state, step), empty=step == 0 and cls is torch.optim.SGD)
