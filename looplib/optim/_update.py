"""Eager update: a class's own step, or the fused kernel that it would call, on tensors that belong to the caller.

Everything is written in place. Nothing of a run stays behind: a `Plan` holds only what follows from the names, shapes,
dtypes and devices of the parameters.
"""

from __future__ import annotations

import functools
import inspect
import operator
from collections import defaultdict
from collections.abc import Mapping, Sequence, Set
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor

from looplib._core import torch_private
from looplib._core.optimizer_states import makers_of
from looplib._core.random import mix
from looplib._core.updates import copied
from looplib.optim._closure import Evaluate, closure_over
from looplib.optim._first_state import first_state, makes_state_late
from looplib.optim._kernels import (
    PLAIN,
    Columns,
    aligned,
    check_fused,
    columns_of,
    direct_kernels,
    fused_groups,
    launch,
    realigned,
)
from looplib.optim._mismatch import mismatch
from looplib.optim._recipe import Recipe, as_kept, value_at
from looplib.optim._rehearsal import Rehearsed, own_attributes, packed, rehearse, streams_at, unpacked
from looplib.types import Grads, Params

States = dict[str, dict[str, Any]]

_dtype = operator.attrgetter("dtype")
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
        asked: for each group, True if the user asked for the fused kernel.
        kernels: for each group, the fused kernel to call instead of the class's `step`, or None.
        step: the class's step, for torch's classes without its hooks.
        sample: keys under which the class keeps the state of the first parameter of each group.
        flags: attributes of an instance that record that it has started.
        late: True if the class creates a parameter's state only in its first update.
        objects: name -> key -> function that makes an object or tensor subclass that the class keeps for a parameter.
        idle: instances of the class that are not in use, each with its original attributes.
        fell_back: True if an update used torch's default kernel because strides did not permit the fused one.
    """

    def __init__(self, recipe: Recipe, params: Params, states: Mapping[str, Any], key: Any) -> None:
        self.recipe, self.key, self.fell_back = recipe, key, False
        self.members = recipe.members(params)
        check_fused(recipe, params, self.members)
        self.fused = fused_groups(recipe, params, self.members)
        self.moving = recipe.moving
        made = recipe.build(params, self.members)
        self.values = [{key: value for key, value in group.items() if key != "params"} for group in made.param_groups]
        self.mutable = [{k for k, v in values.items() if isinstance(v, (list, dict, set))} for values in self.values]
        self.asked = [recipe.ours and bool(values.get("fused")) for values in self.values]
        self.late = makes_state_late(recipe)
        self.differentiable = bool(recipe.defaults.get("differentiable", False))
        self.moves = any(self.moving)
        no_kernel = self.late or self.differentiable or (recipe.cls in LR_IN_STATE and self.moves)
        self.kernels = [None] * len(self.members) if no_kernel else direct_kernels(self, params)
        kept = self._rehearsed({names[0]: params[names[0]] for names in self.members if names})
        self.sample = {name: set(state) for name, state in kept.state.items()}
        self.flags = kept.flags
        self.step = inspect.unwrap(recipe.cls.step) if recipe.ours else recipe.cls.step
        nested = any(isinstance(value, dict) for state in states.values() for value in state.values())
        self.objects = self._rehearsed(params).objects if nested else {}
        self.idle: list[tuple[Any, dict[str, Any]]] = []
        self.give_back((made, own_attributes(made)))

    def _rehearsed(self, params: Params) -> Rehearsed:
        """State that the class keeps for some of the parameters, found by a rehearsal."""
        if self.recipe.ours:
            return Rehearsed(state=first_state(self.recipe, params)["state"])
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
            {**v, **{k: as_kept(value_at(m, step), v[k]) for k, m in moving.items()}}
            for v, moving in zip(self.values, self.moving, strict=True)
        ]
        for values, injected in zip(numbers, opt_state.get("hyperparameters", ()), strict=False):
            values.update({key: as_kept(value.item(), values[key]) for key, value in injected.items()})
        for values, kept in zip(numbers, own or (), strict=False):
            values.update({key: copied(value) for key, value in kept.items() if value is not None})
        return numbers


def plan_for(plans: list[Plan], recipe: Recipe, params: Params, states: Mapping[str, Any]) -> Plan:
    """The plan for these parameters, created if none of the most recent ones fits."""
    names = [*states]
    tensors = [*map(params.__getitem__, names)]
    # Predicates of groups may depend on shapes, and so may the entries that Adafactor or a third party's class keeps.
    by_shape = recipe.groups or not recipe.ours or recipe.cls is torch.optim.Adafactor
    shapes = [tensor.shape for tensor in tensors] if by_shape else None
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


# Before anything is written


def check_update(plans: list[Plan], recipe: Recipe, grads: Grads, opt_state: Any, params: Params) -> None:
    """Raise for a state of another optimizer, and for gradients that the class cannot take."""
    check_state(recipe, opt_state, grads)
    plan = plan_for(plans, recipe, params, opt_state["state"])
    check_keys(recipe, opt_state, plan.sample)
    if [*map(_dtype, grads.values())] != plan.key[1]:
        _check_dtypes(grads, params)
    sparse = {*map(_is_sparse, grads.values())}
    if recipe.ours and recipe.cls not in _TAKE_BOTH and not sparse <= {recipe.cls is torch.optim.SparseAdam}:
        kinds = {name: "sparse" if grad.is_sparse else "dense" for name, grad in grads.items()}
        raise ValueError(
            f"{recipe.cls.__name__} cannot take these gradients: {kinds}. Sparse ones come from "
            "Embedding(sparse=True): SparseAdam takes nothing else (choose those parameters with trainable=), "
            "SGD and Adagrad take both kinds, the others dense ones only"
        )


_is_sparse = operator.attrgetter("is_sparse")
_TAKE_BOTH: set[Any] = {torch.optim.SGD, torch.optim.Adagrad}


def _check_dtypes(grads: Grads, params: Params) -> None:
    for name, grad in grads.items():
        if grad.dtype is not params[name].dtype:
            raise ValueError(
                f"the gradient of {name} is {grad.dtype}, the parameter {params[name].dtype}: to train weights "
                "of half precision on gradients in float32, wrap the optimizer, ll.optim.master_weights(optimizer)"
            )


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


# The update


def eager_update(
    plans: list[Plan],
    recipe: Recipe,
    grads: Grads,
    opt_state: Any,
    params: Params,
    step: int,
    seed: int = 0,
    evaluate: Evaluate | None = None,
) -> tuple[Params, Any]:
    """Update these parameters and this state by the class's own arithmetic, in place."""
    states: States = opt_state["state"]
    plan = plan_for(plans, recipe, params, states)
    values = plan.values_at(opt_state, step) if plan.moves or "groups" in opt_state else plan.values
    grad_mode = torch.is_grad_enabled()
    torch_private.set_grad_enabled(plan.differentiable)
    try:
        if not recipe.ours:
            with streams_at(mix(seed, step, STREAM), params.values()):
                return _update_of_others(plan, values, grads, opt_state, params, step, evaluate)
        left = _by_kernels(plan, values, grads, params, states)
        if left:
            _by_class(plan, values, left, grads, opt_state, params, step)
    finally:
        torch_private.set_grad_enabled(grad_mode)
    return params, opt_state


def _by_kernels(
    plan: Plan, values: Sequence[dict[str, Any]], grads: Grads, params: Params, states: States
) -> dict[int, list[str]]:
    """Update groups by their fused kernels, and return the names in the other groups."""
    left: dict[int, list[str]] = {}
    ready: list[Columns] = []
    for number, names in enumerate(plan.members):
        if len(grads) < len(states):
            names = [name for name in names if name in grads]
        if not names:
            continue
        columns = None
        if plan.kernels[number] is not None:
            columns = columns_of(number, names, params, grads, states)
        if columns is None:
            left[number] = names
        else:
            ready.append(columns)
    for columns in ready:  # after all groups were looked at
        kernel = plan.kernels[columns.number]
        assert kernel is not None
        launch(kernel, values[columns.number], columns)
    return left


def _by_class(
    plan: Plan,
    values: Sequence[dict[str, Any]],
    groups: Mapping[int, Sequence[str]],
    grads: Grads,
    opt_state: Mapping[str, Any],
    params: Params,
    step: int,
) -> None:
    """Update groups by the step of one of torch's classes."""
    states: States = opt_state["state"]
    lent = instance, _ = plan.take(params)
    late = not_started(plan.recipe, opt_state, step) if plan.late else frozenset()
    tensors = {name: params[name] for names in groups.values() for name in names}
    given = dict(grads) if len(tensors) == len(grads) else {name: grads[name] for name in tensors}
    working = {name: {} if name in late else states[name] for name in tensors} if late else states
    for number, group in enumerate(instance.param_groups):
        names = groups.get(number, ())
        group.update(values[number])
        group["params"] = [params[name] for name in names]
        if plan.fused[number] and names:
            group["fused"] = _fits(names, grads, params, working)
            plan.fell_back |= not group["fused"]
        elif plan.asked[number]:
            given.update({name: realigned(name, grads[name], params[name], working[name]) for name in names})
    if plan.recipe.cls in LR_IN_STATE:
        _take_rates(plan, values, tensors, states)
    instance.state = defaultdict(dict, zip(tensors.values(), map(working.__getitem__, tensors), strict=True))
    _step_with(plan, plan.step, lent, given, tensors)
    if late:
        _started(opt_state, late & tensors.keys(), working)


def _take_rates(plan: Plan, values: Sequence[Mapping[str, Any]], tensors: Params, states: States) -> None:
    """Put this update's learning rate into an initial state that was made for a different one."""
    key = LR_IN_STATE[plan.recipe.cls]
    for moving, group, names in zip(plan.moving, values, plan.members, strict=True):
        for name in names if "lr" in moving else ():
            if name in tensors and not states[name]["step"]:
                rate = float(group["lr"])
                states[name][key].fill_(complex(rate, rate) if states[name][key].is_complex() else rate)


def _fits(names: Sequence[str], grads: Grads, params: Params, states: States) -> bool:
    """True if parameters, gradients and moments have the strides that a fused kernel needs."""
    if len({*map(len, map(states.__getitem__, names))}) > 1:
        return False
    lists = [[params[name] for name in names], [grads[name] for name in names]]
    for key, value in states[names[0]].items():
        if isinstance(value, Tensor) and key != "step":
            if not all(key in states[name] for name in names):
                return False
            lists.append([states[name][key] for name in names])
    return aligned(lists)


def _step_with(plan: Plan, step: Any, lent: tuple[Any, Any], grads: Grads, tensors: Params) -> Any:
    """Run an instance's step with these gradients, return its state, and leave the instance empty."""
    instance = lent[0]
    stale = [tensor.grad for tensor in tensors.values()]
    try:
        for name, grad in grads.items():
            tensors[name].grad = grad
        step(instance)
        return instance.state
    finally:
        for tensor, before in zip(tensors.values(), stale, strict=True):
            tensor.grad = before
        plan.give_back(lent)


# Parameters whose state the class creates in their own first update


def not_started(recipe: Recipe, opt_state: Mapping[str, Any], step: int) -> frozenset[str]:
    """Parameters that have had no update, for classes that create state in the first one."""
    started = opt_state.get("started")
    if started is None:  # a state saved before this entry existed, from a run that started with all parameters
        return frozenset(opt_state["state"]) if makes_state_late(recipe) and step == 0 else frozenset()
    if started.all():
        return frozenset()
    return frozenset(name for name, flag in zip(opt_state["state"], started.tolist(), strict=True) if not flag)


def _started(opt_state: Mapping[str, Any], first: Set[str], working: States) -> None:
    """Keep what the class has created, and record which parameters have had an update.

    If the class has not created state yet, the old values stay.
    """
    states = opt_state["state"]
    begun = {name for name in first if working[name] or not states[name]}
    for name in begun:
        _put_into(states[name], working[name])
    if "started" in opt_state:
        for index, name in enumerate(states):
            if name in begun:
                opt_state["started"][index] = True


_kind = operator.attrgetter("shape", "dtype", "layout")


def _put_into(old: dict[str, Any], new: Mapping[str, Any]) -> None:
    """Put new values into a state: into its own tensors where they fit, since these are the ones that a run's lease covers."""
    for key, value in new.items():
        into = old.get(key)
        if (
            isinstance(value, Tensor)
            and isinstance(into, Tensor)
            and into is not value
            and _kind(into) == _kind(value)
        ):
            into.copy_(value)
        else:
            old[key] = value


# Third-party classes


def _update_of_others(
    plan: Plan,
    values: Sequence[dict[str, Any]],
    grads: Grads,
    opt_state: Mapping[str, Any],
    params: Params,
    step: int,
    evaluate: Evaluate | None,
) -> tuple[Params, dict[str, Any]]:
    """Run the step of a third-party class on these tensors, and return what it keeps."""
    recipe, states = plan.recipe, opt_state["state"]
    tensors = {name: params[name] for name in grads}
    late = not_started(recipe, opt_state, step)
    first = late & grads.keys()
    lent = _instance_of_others(plan, values, tensors, params, opt_state, late, first)
    instance = lent[0]
    for name in grads.keys() - first:
        kinds = plan.objects.get(name)
        instance.state[tensors[name]] = unpacked(states[name], kinds) if kinds else states[name]
    for key, value in opt_state.get("shared", {}).items():
        if value is not None:
            instance.state[key] = value
    run = plan.step
    if recipe.needs_closure:
        run = functools.partial(run, closure=closure_over(evaluate, recipe.cls, tensors, []))
    state = _step_with(plan, run, lent, grads, tensors)
    working: States = {}
    for name, tensor in tensors.items():
        working[name] = state[tensor]
        if name in first or name in plan.objects:
            working[name], kinds = packed(recipe, name, state[tensor])
            plan.objects |= {name: kinds} if kinds else {}
    _started(opt_state, first, working)
    kept = {name: own for name, own in working.items() if name not in first}
    new = {**opt_state, "state": {**states, **kept}}
    if "groups" in opt_state:
        groups = zip(instance.param_groups, opt_state["groups"], strict=True)
        new["groups"] = [{key: copied(group.get(key)) for key in own} for group, own in groups]
    if "shared" in opt_state:
        new["shared"] = {key: state.get(key) for key in opt_state["shared"]}
    return params, new  # a new record, since the class may have made new tensors


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
