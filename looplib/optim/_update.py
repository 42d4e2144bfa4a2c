"""Eager update: a class's own step, or its fused kernel, on the state's tensors.

A pure update works on copies of what it writes, a donated one in place. Nothing of a run stays behind: a `Plan` holds
only what follows from the names, shapes, dtypes and devices of the parameters.
"""

from __future__ import annotations

import functools
import operator
from collections import defaultdict
from collections.abc import Mapping, Sequence, Set
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor

from looplib._core import ownership as _donation
from looplib._core import torch_private
from looplib._core.optimizer_states import makers_of
from looplib._core.random import mix
from looplib._core.ranks import is_sharded
from looplib.optim._closure import Evaluate, closure_over
from looplib.optim._columns import FUSED, Lists, kernels_of, update_columns
from looplib.optim._first_state import first_state, makes_state_late
from looplib.optim._kernels import PLAIN, aligned, check_fused, clone, fused_groups, listed_groups, realigned
from looplib.optim._mismatch import mismatch
from looplib.optim._recipe import Recipe, copied, value_at
from looplib.optim._rehearsal import Kept, own_attributes, packed, rehearse, streams_at, unpacked
from looplib.types import Grads, Params

States = dict[str, dict[str, Any]]


_dtype, _kind = operator.attrgetter("dtype"), operator.attrgetter("shape", "dtype", "layout")
# Classes whose initial state holds the learning rate of the update that creates it, and the key of that value.
LR_IN_STATE = {torch.optim.ASGD: "eta", torch.optim.Rprop: "step_size"}

STREAM = 0x0F71  # separates an update's random draws from those of a forward pass


class Plan:
    """Facts that follow from the parameters' names, shapes, dtypes and devices, and do not change during a run.

    Attributes:
        members: parameter names in each group.
        values: for each group, its hyperparameters as completed by the class.
        moving: for each group, those that are schedules or injected.
        fused: for each group, True if looplib uses the fused kernel, strides permitting.
        listed: for each group, True if looplib uses its function for lists, which has the bits of torch's default.
        asked: for each group, True if the user asked for the fused kernel.
        direct: True if all groups with a fused kernel may call it without the class's `step`.
        kernels: for each group, the function that is called instead of the class's `step`, or None.
        attributes: attributes of an instance, besides its groups and state.
        by_columns: True if updates usually do not need the class's own sorting of parameters (`_columns`).
        sharded: True if parameters are sharded over ranks.
        lists: what `_columns` has learned about the class.
        sample: keys under which the class keeps the state of the first parameter of each group.
        objects: name -> key -> class of an object that the class keeps for a parameter.
        idle: instances of the class that are not in use, each with its original attributes.
        fell_back: True if an update used torch's default kernel because strides did not permit the fused one.
    """

    def __init__(self, recipe: Recipe, params: Params, states: Mapping[str, Any], key: Any) -> None:
        self.recipe, self.key, self.fell_back = recipe, key, False
        self.members = recipe.members(params)
        check_fused(recipe, params, self.members)
        self.fused = fused_groups(recipe, params, self.members)
        self.listed = listed_groups(recipe, params, self.members)
        self.moving = recipe.moving
        made = recipe.build(params, self.members)
        self.values = [{key: value for key, value in group.items() if key != "params"} for group in made.param_groups]
        self.mutable = [{k for k, v in values.items() if isinstance(v, (list, dict, set))} for values in self.values]
        self.asked = [recipe.ours and bool(values.get("fused")) for values in self.values]
        self.direct = _calls_kernel(self, params)
        self.kernels = kernels_of(self)
        kept = self._rehearsed({names[0]: params[names[0]] for names in self.members if names})
        self.sample = {name: set(state) for name, state in kept.state.items()}
        self.flags = kept.flags
        self.late = makes_state_late(recipe)
        self.step = torch_private.eager_step(recipe.cls) if recipe.ours else recipe.cls.step
        self.differentiable = bool(recipe.defaults.get("differentiable", False))
        self.moves = any(self.moving)
        self.by_columns = _takes_columns(self)
        self.sharded = any(map(is_sharded, params.values()))
        self.lists: dict[Any, Lists | None] = {}
        nested = any(isinstance(value, dict) for state in states.values() for value in state.values())
        self.objects = self._rehearsed(params).objects if nested else {}
        self.one = _one(params)
        self.idle: list[tuple[Any, dict[str, Any]]] = []
        self.attributes = own_attributes(made)
        self.give_back((made, self.attributes))

    def _rehearsed(self, params: Params) -> Kept:
        """State that the class keeps for some of the parameters, found by a rehearsal."""
        if self.recipe.ours:
            return Kept(state=first_state(self.recipe, params)["state"])
        return rehearse(self.recipe, params, [[name for name in names if name in params] for names in self.members])

    def take(self, params: Params) -> tuple[Any, dict[str, Any]]:
        """An instance of the class for one update, so that updates in several threads share none."""
        if self.idle:
            return self.idle.pop()
        made = self.recipe.build(params, self.members)
        return made, own_attributes(made)

    def give_back(self, lent: tuple[Any, dict[str, Any]]) -> None:
        """Empty an instance: tensors belong to states, and attributes are restored."""
        instance, attributes = lent
        instance.state = defaultdict(dict)
        for group in instance.param_groups:
            group["params"] = []
        if not self.recipe.ours:
            vars(instance).update(attributes)
        # A class with a closure may keep its parameters elsewhere too.
        if len(self.idle) < 4 and not self.recipe.needs_closure:
            self.idle.append(lent)

    def values_at(self, opt_state: Mapping[str, Any], step: int) -> list[dict[str, Any]]:
        """Hyperparameters of each group at a step, with the numbers that the class keeps in its groups."""
        own = opt_state.get("groups")
        numbers = [
            {**v, **{k: value_at(m, step) for k, m in moving.items()}}
            for v, moving in zip(self.values, self.moving, strict=True)
        ]
        for values, injected in zip(numbers, opt_state.get("hyperparameters", ()), strict=False):
            values.update({key: value.item() for key, value in injected.items()})
        for values, kept in zip(numbers, own or (), strict=False):
            values.update({key: copied(value) for key, value in kept.items() if value is not None})
        return numbers


def _takes_columns(plan: Plan) -> bool:
    """True if an update usually does not need the class's own sorting of parameters."""
    makes_rates = plan.recipe.cls in LR_IN_STATE and plan.moves
    return plan.recipe.ours and not (plan.late or plan.differentiable or makes_rates)


def _calls_kernel(plan: Plan, params: Params) -> bool:
    """True if looplib may call the class's fused kernel itself."""
    capturable = any(values.get("capturable") for values in plan.values)
    return plan.recipe.cls in FUSED and _alike(params, plan.members) and not capturable


def _alike(params: Params, members: Sequence[Sequence[str]]) -> bool:
    """True if the parameters of each group share one device and one dtype."""
    return all(len({(params[name].device, params[name].dtype) for name in names}) < 2 for names in members)


def _one(params: Params) -> Tensor | None:
    """The 1 that counts of updates increase by, or None to add the number.

    On a CPU, adding a tensor takes half the time of adding a number; other backends may read the tensor.
    """
    return torch.ones(()) if all(param.device.type == "cpu" for param in params.values()) else None


def plan_for(plans: list[Plan], recipe: Recipe, params: Params, states: Mapping[str, Any]) -> Plan:
    """The plan for these parameters, created if none of the most recent ones fits."""
    names = [*states]
    tensors = [*map(params.__getitem__, names)]
    # Group predicates may depend on shapes; without groups nothing does.
    shapes = [tensor.shape for tensor in tensors] if recipe.groups else None
    # Models with the same names may be sharded or not, and their kernels differ.
    foreign = None if PLAIN.issuperset(map(type, tensors)) else {*map(type, tensors)} - PLAIN
    key = names, [*map(_dtype, tensors)], tensors[0].device, shapes, foreign
    for plan in plans:
        if plan.key == key:
            return plan
    plan = Plan(recipe, dict(zip(names, tensors, strict=True)), states, key)
    plans.insert(0, plan)
    del plans[8:]
    return plan


def check_state(recipe: Recipe, opt_state: Any, grads: Grads) -> None:
    """Raise for a state that has no entry for these gradients, or that belongs to a wrapped optimizer."""
    if not isinstance(opt_state, dict) or "state" not in opt_state:
        raise mismatch(recipe, opt_state)
    if not grads.keys() <= opt_state["state"].keys():
        raise ValueError(
            f"the optimizer's state has nothing for {sorted(grads.keys() - opt_state['state'].keys())}: make the state "
            "with the same model, and the same trainable=, as the gradient function"
        )


def check_keys(recipe: Recipe, opt_state: Mapping[str, Any], sample: Mapping[str, set[str]]) -> None:
    """Raise for a state that was created by a different class."""
    states = opt_state["state"]
    for name, kept in sample.items():
        found = states[name].keys()
        if found == kept or (not recipe.ours and (not kept or found & kept)):
            continue
        # The same class with a term that is 0, such as a stack's member without momentum, may have fewer keys.
        if not (kept < found and recipe.cls.__name__ in makers_of(frozenset(found))):
            raise mismatch(recipe, opt_state, name, kept)


def _check_dtypes(grads: Grads, params: Params) -> None:
    for name, grad in grads.items():
        if grad.dtype is not params[name].dtype:
            raise ValueError(
                f"the gradient of {name} is {grad.dtype}, the parameter {params[name].dtype}: to train weights "
                "of half precision on gradients in float32, wrap the optimizer, ll.optim.master_weights(optimizer)"
            )


def not_started(recipe: Recipe, opt_state: Mapping[str, Any], step: int) -> frozenset[str]:
    """Parameters that have had no update, for classes that create state in the first one."""
    started = opt_state.get("started")
    if started is None:  # a state saved before this entry existed, from a run that started with all parameters
        return frozenset(opt_state["state"]) if makes_state_late(recipe) and step == 0 else frozenset()
    if started.all():
        return frozenset()
    return frozenset(name for name, flag in zip(opt_state["state"], started.tolist(), strict=True) if not flag)


def eager_update(
    plans: list[Plan],
    recipe: Recipe,
    grads: Grads,
    opt_state: Any,
    params: Params,
    step: int,
    donate: bool,
    extra: Mapping[str, Any],
) -> tuple[Params, Any]:
    """The next parameters and state, computed by the class's own arithmetic."""
    states = opt_state["state"]
    plan = plan_for(plans, recipe, params, states)
    check_keys(recipe, opt_state, plan.sample)
    if [*map(_dtype, grads.values())] != plan.key[1]:
        _check_dtypes(grads, params)
    values = plan.values_at(opt_state, step) if plan.moves or "groups" in opt_state else plan.values
    if plan.by_columns and (made := update_columns(plan, values, grads, params, opt_state, donate)):
        return made
    if donate:
        tensors = {name: params[name] for name in grads}
        working: States = {name: states[name] for name in grads}
    else:
        tensors, working = _copies(grads, params, states)
    late, kept = _first_updates(plan, opt_state, step, grads, working, donate) if plan.late else (frozenset(), {})
    if recipe.cls in LR_IN_STATE:
        _take_rates(plan, values, tensors, working)
    new_state: dict[str, Any] = dict(opt_state)
    grad_mode = torch.is_grad_enabled()
    try:
        if recipe.ours:
            torch_private.set_grad_enabled(plan.differentiable)
            _run(plan, values, grads, tensors, working, params)
        else:
            evaluate = extra.get("evaluate")
            with streams_at(mix(extra.get("seed", 0), step, STREAM), params.values()):
                first = late & grads.keys()
                lent = _instance_of_others(plan, values, tensors, params, opt_state, late, first)
                new_state |= _run_others(plan, lent, grads, tensors, working, opt_state, first, donate, evaluate)
    finally:
        torch_private.set_grad_enabled(grad_mode)
    _donation.writes.count += donate
    if late:
        new_state |= _starts(opt_state, late, working, donate)
    for name, old in kept.items():
        working[name] = _into_old(working[name], old)
    new_state["state"] = {**states, **working}
    return dict(params) if donate else {**params, **tensors}, new_state


def _first_updates(
    plan: Plan, opt_state: Mapping[str, Any], step: int, grads: Grads, working: States, donate: bool
) -> tuple[frozenset[str], States]:
    """Parameters that have had no update, whose state is removed, and the tensors of a donated state."""
    late = not_started(plan.recipe, opt_state, step)
    kept = {name: dict(opt_state["state"][name]) for name in grads} if donate else {}
    for name in late & grads.keys():
        working[name] = {}
    return late, kept


def _take_rates(plan: Plan, values: Sequence[Mapping[str, Any]], tensors: Params, working: States) -> None:
    """Put this update's learning rate into an initial state that was made for a different one."""
    key = LR_IN_STATE[plan.recipe.cls]
    for moving, group, names in zip(plan.moving, values, plan.members, strict=True):
        for name in names if "lr" in moving else ():
            if name in tensors and not working[name]["step"]:
                rate = float(group["lr"])
                working[name][key].fill_(complex(rate, rate) if working[name][key].is_complex() else rate)


def _run(
    plan: Plan,
    values: Sequence[dict[str, Any]],
    grads: Grads,
    tensors: Params,
    working: States,
    params: Params,
) -> None:
    """Run the step of one of torch's classes on these tensors, in place."""
    lent = instance, _ = plan.take(params)
    given = dict(grads)
    for number, names in enumerate(plan.members):
        group = instance.param_groups[number]
        if len(tensors) < len(plan.key[0]):
            names = [name for name in names if name in tensors]
        group.update(values[number])
        group["params"] = [*map(tensors.__getitem__, names)]
        if plan.fused[number] and names:
            group["fused"] = _fits(names, grads, group["params"], working)
            plan.fell_back |= not group["fused"]
        elif plan.asked[number]:
            given |= {name: realigned(name, grads[name], tensors[name], working[name]) for name in names}
    instance.state = defaultdict(dict, {tensor: working[name] for name, tensor in tensors.items()})
    _step_with(plan, plan.step, lent, given, tensors)


def _fits(names: Sequence[str], grads: Grads, tensors: list[Tensor], working: States) -> bool:
    """True if parameters, gradients and moments have the strides that a fused kernel needs."""
    states = [*map(working.__getitem__, names)]
    if len({*map(len, states)}) > 1:
        return False
    lists = [tensors, [*map(grads.__getitem__, names)]]
    for key, value in states[0].items():
        if isinstance(value, Tensor) and key != "step":
            if not all(key in state for state in states):
                return False
            lists.append([state[key] for state in states])
    return aligned(lists)


def _run_others(
    plan: Plan,
    lent: tuple[Any, dict[str, Any]],
    grads: Grads,
    tensors: Params,
    working: States,
    opt_state: Mapping[str, Any],
    first: Set[str],
    donate: bool,
    evaluate: Evaluate | None,
) -> dict[str, Any]:
    """Run the step of a third-party class on these tensors, in place, and return what it keeps besides parameter state."""
    recipe, instance = plan.recipe, lent[0]
    for name in grads.keys() - first:
        kinds = plan.objects.get(name)
        instance.state[tensors[name]] = unpacked(working[name], kinds) if kinds else working[name]
    for key, value in opt_state.get("shared", {}).items():
        if value is not None:
            instance.state[key] = value if donate else copied(value)
    step = plan.step
    if recipe.needs_closure:
        step = functools.partial(step, closure=closure_over(evaluate, recipe.cls, tensors, []))
    state = _step_with(plan, step, lent, grads, tensors)
    for name, tensor in tensors.items():
        working[name] = state[tensor]
        if name in first or name in plan.objects:
            working[name], kinds = packed(recipe, name, state[tensor])
            plan.objects |= {name: kinds} if kinds else {}
    return _beside(instance, state, opt_state, donate)


def _beside(instance: Any, state: Any, opt_state: Mapping[str, Any], donate: bool) -> dict[str, Any]:
    """State that the class keeps for groups and for all parameters together."""
    kept: dict[str, Any] = {}
    if "groups" in opt_state:
        groups = zip(instance.param_groups, opt_state["groups"], strict=True)
        kept["groups"] = [{key: copied(group.get(key)) for key in own} for group, own in groups]
    if "shared" in opt_state:
        shared = {key: state.get(key) for key in opt_state["shared"]}
        kept["shared"] = _into_old(shared, opt_state["shared"]) if donate else shared
    return kept


def _instance_of_others(
    plan: Plan,
    values: Sequence[dict[str, Any]],
    tensors: Params,
    params: Params,
    opt_state: Mapping[str, Any],
    late: frozenset[str],
    first: Set[str],
) -> tuple[Any, dict[str, Any]]:
    """An instance over these tensors. Parameters that start now get what its constructor keeps for them."""
    recipe = plan.recipe
    whole = {name: tensors.get(name, params[name]) for name in opt_state["state"]}
    if first or recipe.needs_closure:  # it may keep references to the parameters it was created with
        made = recipe.build(whole, plan.members)
        lent = made, own_attributes(made)
    else:
        lent = plan.take(whole)
    instance = lent[0]
    for flag in plan.flags:
        setattr(instance, flag, len(late) < len(whole))
    for number, (group, names) in enumerate(zip(instance.param_groups, plan.members, strict=True)):
        group.update(values[number])
        group.update({key: deepcopy(values[number][key]) for key in plan.mutable[number]})
        group["params"] = [tensors[name] for name in names if name in tensors]
    instance.state = defaultdict(dict, {tensors[name]: dict(instance.state[tensors[name]]) for name in first})
    return lent


def _step_with(plan: Plan, step: Any, lent: tuple[Any, Any], grads: Grads, tensors: Params) -> Any:
    """Run an instance's step with these gradients, return its state, and leave the instance empty."""
    instance = lent[0]
    stale = [tensor.grad for tensor in tensors.values()]
    try:
        for name, grad in grads.items():
            tensors[name].grad = grad
        step(instance)
        return instance.state
    except RuntimeError as error:
        if "sparse" not in str(error).lower():
            raise
        kinds = {name: "sparse" if grad.is_sparse else "dense" for name, grad in grads.items()}
        raise ValueError(
            f"{plan.recipe.cls.__name__} cannot take these gradients ({error}): {kinds}. Sparse ones come from "
            "Embedding(sparse=True): SparseAdam takes nothing else (choose those parameters with trainable=), "
            "SGD and Adagrad take both kinds, the others dense ones only"
        ) from error
    finally:
        for tensor, before in zip(tensors.values(), stale, strict=True):
            tensor.grad = before
        plan.give_back(lent)


def _starts(opt_state: Mapping[str, Any], late: frozenset[str], working: States, donate: bool) -> dict[str, Any]:
    """Record which parameters have had an update. If the class has not created state yet, the old values stay."""
    states = opt_state["state"]
    begun = {name for name in late & working.keys() if working[name] or not states[name]}
    working |= {name: states[name] for name in late & working.keys() - begun}
    if "started" not in opt_state:
        return {}
    started = opt_state["started"] if donate else opt_state["started"].clone()
    for index, name in enumerate(states):
        if name in begun:
            started[index] = True
    return {"started": started}


def _into_old(new: dict[str, Any], old: Mapping[str, Any]) -> dict[str, Any]:
    """New values in the tensors of a donated state, so that one table covers all states that share them."""
    return {
        key: old[key].copy_(value)
        if isinstance(value, Tensor)
        and isinstance(old.get(key), Tensor)
        and old[key] is not value
        and _kind(old[key]) == _kind(value)
        else value
        for key, value in new.items()
    }


def _copies(grads: Grads, params: Params, states: Mapping[str, dict[str, Any]]) -> tuple[Params, States]:
    """Copies of what an update of these parameters writes, made together."""
    grad_mode = torch.is_grad_enabled()
    try:
        torch_private.set_grad_enabled(False)
        tensors = {name: clone(params[name]) for name in grads}
        working = {name: {key: copied(value) for key, value in states[name].items()} for name in grads}
    finally:
        torch_private.set_grad_enabled(grad_mode)
    for name, tensor in tensors.items():
        tensor.requires_grad_(params[name].requires_grad)
    return tensors, working
