"""Eager update: a class's own step, or the fused kernel that it would call, on tensors that belong to the caller.

Everything is written in place. Nothing of a run stays behind: a `Plan` holds only what follows from the names, shapes,
dtypes and devices of the parameters.
"""

from __future__ import annotations

import functools
import inspect
import operator
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from looplib._core import torch_private
from looplib._core.checks import warn
from looplib._core.mappings import mapped, pick, subset, without
from looplib._core.torch_private import pytree
from looplib._core.tracing import entered, tracing
from looplib.optim._first_state import States, states_of_torch, with_created, without_state
from looplib.optim._hyperparameters import values_to_inject
from looplib.optim._kernels import PLAIN, columns_of, laid_out_like, parts_of
from looplib.optim._recipe import Recipe, chosen_by_kind, restored_grads
from looplib.optim._third_party import Probe, probe, update_of_others
from looplib.optim._wrap import wrong_state
from looplib.types import Grads, Params

_dtype = operator.attrgetter("dtype")
_is_sparse = operator.attrgetter("is_sparse")
_TAKE_BOTH: set[Any] = {torch.optim.SGD, torch.optim.Adagrad}
_SETTLED = (int, float, complex, str, type(None))


class Plan:
    """Facts that follow from the parameters' names, shapes, dtypes and devices, and do not change during a run.

    Attributes:
        members: parameter names in each group.
        values: for each group, its hyperparameters as completed by the class.
        parts: parameters that are updated together, each with its kernel.
        probe: what a third party's class keeps.
        keys: keys under which the class keeps the state of the first parameter of each group.
        step: the class's step, for torch's classes without its hooks.
        attributes: those that the class's constructor gives an instance beside its state and its groups; None if some of
            them may change.
    """

    def __init__(self, recipe: Recipe, params: Params, key: Any = None) -> None:
        self.recipe, self.key = recipe, key
        self.members = recipe.members(params)
        made = recipe.build(params, self.members)
        self.values = [without(group, {"params"}) for group in made.param_groups]
        self.parts = parts_of(recipe, params, self.members)
        first = [[*names[:1]] for names in self.members]
        if recipe.is_torch_optim:
            states = states_of_torch(recipe, {name: _tiny(params[name]) for (name,) in filter(None, first)}, first)
            self.probe, self.step = Probe(), inspect.unwrap(recipe.cls.step)
        else:
            self.probe, self.step = probe(recipe, params, self.members), recipe.cls.step
            states = self.probe.state
        self.keys = {name: states[name].keys() for (name,) in filter(None, first)}
        attributes = without(vars(made), {"state", "param_groups"})
        settled = all(isinstance(value, _SETTLED) for value in without(attributes, _given_by_torch()).values())
        self.attributes = attributes if settled else None

    def instance(self, values: Sequence[dict[str, Any]]) -> Any:
        """An instance for one update, so that updates in several threads share none. Calling the class takes longer."""
        instance = object.__new__(self.recipe.cls)
        vars(instance).update(self.attributes or {}, state=defaultdict(dict), param_groups=[*map(dict, values)])
        return instance


@functools.cache
def _given_by_torch() -> frozenset[str]:
    """Attributes that torch.optim.Optimizer gives. Computed late, since creating the first one imports much of torch."""
    return frozenset(vars(torch.optim.SGD([torch.zeros(1)], lr=1.0)))


def _tiny(tensor: Tensor) -> Tensor:
    """A tensor of as many dimensions, with one element."""
    return torch.zeros((1,) * tensor.ndim, dtype=tensor.dtype, device=tensor.device)


def plan_for(plans: list[Plan], recipe: Recipe, params: Params, names: Iterable[str]) -> Plan:
    """The plan for these parameters, created if none of the most recent ones fits."""
    names = [*names]
    tensors = [*map(params.__getitem__, names)]
    # Predicates of groups may depend on shapes, and so may the entries that Adafactor or a third party's class keeps.
    by_shape = recipe.groups or not recipe.is_torch_optim or recipe.cls is torch.optim.Adafactor
    shapes = [tensor.shape for tensor in tensors] if by_shape else None
    # Models with the same names may be sharded or not, and their kernels differ.
    foreign = None if PLAIN.issuperset(map(type, tensors)) else {*map(type, tensors)} - PLAIN
    key = names, [*map(_dtype, tensors)], tensors[0].device, shapes, foreign
    for plan in plans:
        if plan.key == key:
            return plan
    plan = Plan(recipe, dict(zip(names, tensors, strict=True)), key)
    plans.insert(0, plan)
    del plans[8:]
    return plan


def first_state(plan: Plan, params: Params) -> dict[str, Any]:
    """State before the first update, with the structure that it keeps for the whole run.

    `state` holds what the class keeps for each parameter, by name. If the class creates those values only in a
    parameter's own first update, they are zeros until then, and `started` records which parameters have had an
    update. `groups` holds what the class keeps for a group, and `hyperparameters` the injected ones.
    """
    recipe, found = plan.recipe, plan.probe
    chosen_by_kind(recipe.group_of, params, "group")
    kept: dict[str, Any] = {}
    if recipe.is_torch_optim:
        fused = {part.group for part in plan.parts if part.kernel}
        kept["state"] = states_of_torch(recipe, mapped(Tensor.detach, params), plan.members, fused)
    else:
        kept["state"] = pytree.tree_map_only(Tensor, torch.zeros_like, found.state)
        kept |= {"groups": found.groups} if any(found.groups) else {}
    if recipe.makes_state_late:
        kept["started"] = torch.zeros(len(params), dtype=torch.bool)
    numbers = [*map(values_to_inject, recipe.moving)]
    return {**kept, "hyperparameters": numbers} if any(numbers) else kept


def check_update(plans: list[Plan], recipe: Recipe, grads: Grads, opt_state: Any, params: Params, step: int) -> None:
    """Raise for a state of another optimizer, and for gradients that the class cannot take, before anything is written.

    Warn at the end of a learning rate that is 0 from there on.
    """
    cls = recipe.cls.__name__
    if not isinstance(opt_state, dict) or "state" not in opt_state:
        raise wrong_state(opt_state, cls, ["state, without a wrapper"])
    states = opt_state["state"]
    if not grads.keys() <= states.keys():
        raise ValueError(
            f"the optimizer's state has nothing for {sorted(grads.keys() - states.keys())}: make the state "
            "with the same model, and the same trainable=, as the gradient function"
        )
    if entered and tracing():
        return
    if step == recipe.end:
        warn(
            f"the learning rate, {recipe.defaults['lr']!r}, is 0 from step {step} on, so this update and later ones change "
            "nothing: give total= all steps of the run, such as epochs * len(loader), or a final= rate to continue with"
        )
    plan = plan_for(plans, recipe, params, states)
    for name, kept in plan.keys.items():
        if states[name].keys() != kept and not _continues(recipe, states[name].keys(), kept):
            raise wrong_state(opt_state, cls, kept)
    if [*map(_dtype, grads.values())] != plan.key[1]:
        _check_dtypes(grads, params)
    unfit = recipe.cls is not torch.optim.SparseAdam  # what `is_sparse` is for a gradient that the class cannot take
    if recipe.is_torch_optim and recipe.cls not in _TAKE_BOTH and unfit in map(_is_sparse, grads.values()):
        kinds = {name: "sparse" if grad.is_sparse else "dense" for name, grad in grads.items()}
        raise ValueError(
            f"{cls} cannot take these gradients: {kinds}. Sparse ones come from "
            "Embedding(sparse=True): SparseAdam takes nothing else (choose those parameters with trainable=), "
            "SGD and Adagrad take both kinds, the others dense ones only"
        )


def _continues(recipe: Recipe, found: Any, kept: Any) -> bool:
    """True if a class can continue a state with other keys than those that it would create."""
    if not recipe.is_torch_optim:  # it may keep further keys later, or for some parameters
        return not kept or bool(found & kept)
    # A term may be 0 here and not where the state was made, as for a member of a stack without momentum.
    return bool(found > kept and found - kept <= {"momentum_buffer", "grad_avg", "max_exp_avg_sq"})


def _check_dtypes(grads: Grads, params: Params) -> None:
    for name, grad in grads.items():
        if grad.dtype is not params[name].dtype:
            raise ValueError(
                f"the gradient of {name} is {grad.dtype}, the parameter {params[name].dtype}: keep the weights in float32, "
                "and compute in half precision by ll.autocast(loss_fn, dtype)"
            )


def eager_update(
    plans: list[Plan],
    recipe: Recipe,
    grads: Grads,
    opt_state: Any,
    params: Params,
    step: int,
    seed: int = 0,
) -> tuple[Params, Any]:
    """Update these parameters and this state by the class's own arithmetic, in place."""
    states: States = opt_state["state"]
    plan = plan_for(plans, recipe, params, states)
    grad_mode = torch.is_grad_enabled()
    torch_private.set_grad_enabled(bool(recipe.defaults.get("differentiable")))
    try:
        if not recipe.is_torch_optim:
            return params, update_of_others(plan, grads, opt_state, params, step, seed)
        values = recipe.values_at(plan.values, opt_state, step) if any(recipe.moving) else plan.values
        ready: list[Any] = []
        left: list[list[str]] = [[] for _ in values]  # parameters of each group that the class's own step updates
        for number, names, kernel, asked in plan.parts:
            if len(grads) < len(states):
                names = [name for name in names if name in grads]
            columns = columns_of(names, params, grads, states, asked) if kernel and names else None
            if columns is None:
                left[number] += names
            else:
                ready.append((kernel, values[number], columns))
        for kernel, numbers, (own, given, entries) in ready:  # after all parts were looked at
            kernel(numbers, own, given, entries)
        return params, _by_class(plan, values, left, grads, opt_state, params) if any(left) else opt_state
    finally:
        torch_private.set_grad_enabled(grad_mode)


def _by_class(
    plan: Plan,
    values: Sequence[dict[str, Any]],
    members: Sequence[Sequence[str]],
    grads: Grads,
    opt_state: Any,
    params: Params,
) -> Any:
    """Update these parameters of each group by the step of one of torch's classes, and return the state."""
    states: States = opt_state["state"]
    late = without_state(opt_state)
    used = {name: params[name] for names in members for name in names}
    instance = plan.instance(values)
    for group, names in zip(instance.param_groups, members, strict=True):
        group["params"] = [used[name] for name in names]
    instance.state.update({tensor: {} if name in late else states[name] for name, tensor in used.items()})
    with restored_grads(used.values()):
        for numbers, names in zip(values, members, strict=True):
            for name in names:
                used[name].grad = laid_out_like(used[name], grads[name]) if numbers.get("fused") else grads[name]
        plan.step(instance)
    first = late & used.keys()
    return (
        with_created(opt_state, {name: instance.state[used[name]] for name in first}, first) if first else opt_state
    )


# Conversion to and from plain torch


class ClassState(NamedTuple):
    """State that a class keeps for parameters.

    Attributes:
        entries: for each parameter, values with the keys and types of the real ones.
        late: parameters without state so far, because they have had no update.
        empty: True if no parameter has state yet, although a state has the structure.
    """

    entries: States
    late: frozenset[str]
    empty: bool


def state_of_class(
    cls: type,
    group: Mapping[str, Any],
    params: Mapping[str, Tensor],
    names: Iterable[str],
    opt_state: Mapping[str, Any],
    step: int,
) -> ClassState:
    """State that a class keeps for these parameters after `step` updates; `group` is one of its `param_groups`."""
    recipe = Recipe(cls, without(subset(group, inspect.signature(cls).parameters), {"params"}))
    tiny = mapped(_tiny, pick(params, names))
    entries: States = first_state(Plan(recipe, tiny), tiny)["state"]
    return ClassState(entries, without_state(opt_state), empty=step == 0 and cls is torch.optim.SGD)
