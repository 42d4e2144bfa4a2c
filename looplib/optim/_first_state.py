"""Initial optimizer state: what a class keeps for parameters before any update."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from looplib._core import torch_private
from looplib._core.checks import check
from looplib._core.mappings import mapped
from looplib._core.torch_private import pytree
from looplib.optim._hyperparameters import injected
from looplib.optim._kernels import fused_groups
from looplib.optim._lbfgs_state import first_state_of_lbfgs
from looplib.optim._recipe import Recipe, chosen_by_kind
from looplib.optim._rehearsal import rehearse
from looplib.types import Params


def first_state(recipe: Recipe, params: Params) -> dict[str, Any]:
    """State before the first update, with the structure that it keeps for the whole run.

    `state` holds what the class keeps for each parameter, by name. If the class creates those values only in a
    parameter's own first update, they are zeros until then, and `started` records which parameters have had an
    update. `groups` and `shared` hold what the class keeps for a group and for all parameters, and `hyperparameters`
    holds the injected ones.
    """
    check(params, f"{recipe.cls.__name__} got no parameters to optimize")
    numbers = _injected(recipe)
    chosen_by_kind(recipe.group_of, params, "group")
    members = recipe.members(params)
    params = mapped(Tensor.detach, params)
    if not recipe.ours:
        return {**_of_others(recipe, params, members), **numbers}
    state = _OF_CLASS.get(recipe.cls, _of_torch)(recipe, params, members)
    starts = {"started": _none_yet(params)} if dampened(recipe) else {}
    return {"state": state, **starts, **numbers}


def dampened(recipe: Recipe) -> bool:
    """True for SGD with dampening, whose first momentum buffer is not an average with zeros."""
    return recipe.cls is torch.optim.SGD and any(map(bool, recipe.group_values("dampening")))


def makes_state_late(recipe: Recipe) -> bool:
    """True if the values of a parameter's state are known only in its own first update."""
    return dampened(recipe) or not recipe.ours


def _injected(recipe: Recipe) -> dict[str, Any]:
    numbers = [dict(filter(None, map(_number_of, values, values.values()))) for values in recipe.moving]
    return {"hyperparameters": numbers} if any(numbers) else {}


def _number_of(key: str, value: Any) -> tuple[str, Tensor] | None:
    """An injected hyperparameter as it is kept in the state; None for a schedule, or a tuple with some."""
    if isinstance(value, injected):
        return key, torch.tensor(value.value, dtype=torch.float64)
    check(
        callable(value) or injected not in map(type, value),
        f"{key} has an injected member: injected stands for a hyperparameter as a whole, so give a number or a "
        "schedule there",
        TypeError,
    )
    return None


def _none_yet(params: Params) -> Tensor:
    return torch.zeros(len(params), dtype=torch.bool)


State = dict[str, dict[str, Any]]


def _of_sgd(recipe: Recipe, params: Params, members: Sequence[Sequence[str]]) -> State:
    """Momentum buffers for SGD, if there is momentum or a schedule may introduce it.

    A buffer starts as -0.0: applying momentum and adding the first gradient then gives the gradient's own bits, for
    0.0 and -0.0 as well. So the first update is not a special case, at whatever step a parameter has it.
    """
    recipe.build(params, members)  # for what it refuses
    state: State = {name: {} for name in params}
    for names, momentum in zip(members, recipe.group_values("momentum", 0), strict=True):
        for name in names if momentum else ():
            state[name]["momentum_buffer"] = torch.full_like(params[name], -0.0)
    return state


def _of_sparse_adam(recipe: Recipe, params: Params, members: Sequence[Sequence[str]]) -> State:
    recipe.build(params, members)  # for what it refuses
    zeros = torch.zeros_like
    return {name: {"step": 0, "exp_avg": zeros(p), "exp_avg_sq": zeros(p)} for name, p in params.items()}


def _of_torch(recipe: Recipe, params: Params, members: Sequence[Sequence[str]]) -> State:
    """State that torch's classes create at a parameter's first gradient, of which only the presence matters."""
    made = recipe.build(params, members, fused_groups(recipe, params, members))
    for tensor in params.values():
        tensor.grad = tensor.new_zeros(()).expand_as(tensor)  # only its presence is checked, so it takes no memory
    init_group = torch_private.init_group(made)
    lists = len(inspect.signature(init_group).parameters) - 1
    for group in made.param_groups:
        init_group(group, *([] for _ in range(lists)))
    return {name: dict(made.state[tensor]) for name, tensor in params.items()}


# Classes that create state in another way than the others of torch.optim.
_OF_CLASS: dict[Any, Callable[[Recipe, Params, Sequence[Sequence[str]]], State]] = {
    torch.optim.SGD: _of_sgd,
    torch.optim.SparseAdam: _of_sparse_adam,
    torch.optim.LBFGS: first_state_of_lbfgs,
}


def _of_others(recipe: Recipe, params: Params, members: Sequence[Sequence[str]]) -> dict[str, Any]:
    kept = rehearse(recipe, params, members)
    empty = pytree.tree_map_only(Tensor, torch.zeros_like, kept.state)
    groups = {"groups": kept.groups} if any(kept.groups) else {}
    shared = {"shared": kept.shared} if kept.shared else {}
    return {"state": empty, "started": _none_yet(params), **groups, **shared}
