"""State of torch's classes before the first update, and of any class at a parameter's own first one."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence, Set
from typing import Any

import torch
from torch import Tensor

from looplib._core import torch_private
from looplib.optim._lbfgs import first_state_of_lbfgs
from looplib.optim._recipe import Recipe
from looplib.types import Params

States = dict[str, dict[str, Any]]
Members = Sequence[Sequence[str]]


def states_of_torch(recipe: Recipe, params: Params, members: Members, fused: Set[int] = frozenset()) -> States:
    """State that one of torch's classes keeps for each parameter. `fused` has the groups that take a fused kernel."""
    if recipe.cls is torch.optim.LBFGS:
        return first_state_of_lbfgs(recipe, params, members)
    if recipe.cls is torch.optim.SGD:
        return _of_sgd(recipe, params, members)
    if recipe.cls is torch.optim.SparseAdam:
        zeros = torch.zeros_like
        return {name: {"step": 0, "exp_avg": zeros(p), "exp_avg_sq": zeros(p)} for name, p in params.items()}
    # The others create state at a parameter's first gradient, of which only the presence matters.
    made = recipe.build(params, members)
    for number in fused:  # on which device Adam counts depends on the kernel
        made.param_groups[number]["fused"] = True
    for tensor in params.values():
        tensor.grad = tensor.new_zeros(()).expand_as(tensor)  # only its presence is checked, so it takes no memory
    init_group = torch_private.init_group(made)
    lists = len(inspect.signature(init_group).parameters) - 1
    for group in made.param_groups:
        init_group(group, *([] for _ in range(lists)))
    return {name: dict(made.state[tensor]) for name, tensor in params.items()}


def _of_sgd(recipe: Recipe, params: Params, members: Members) -> States:
    """Momentum buffers for SGD, if there is momentum or a schedule may introduce it.

    A buffer starts as -0.0: applying momentum and adding the first gradient then gives the gradient's own bits, for
    0.0 and -0.0 as well. So the first update is not a special case, at whatever step a parameter has it.
    """
    states: States = {name: {} for name in params}
    for momentum, names in zip(recipe.group_values("momentum"), members, strict=True):
        for name in names if momentum else ():
            states[name] = {"momentum_buffer": torch.full_like(params[name], -0.0)}
    return states


# Parameters whose state the class creates in their own first update


def without_state(opt_state: Mapping[str, Any]) -> frozenset[str]:
    """Parameters that have had no update, for classes that create state in the first one."""
    started: Tensor | None = opt_state.get("started")
    if started is None or started.all():
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
