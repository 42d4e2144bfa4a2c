"""Eager update: a class's own step, or the fused kernel that it would call, on tensors that belong to the caller.

Everything is written in place. Nothing of a run stays behind: a `Plan` holds only what follows from the names, shapes,
dtypes and devices of the parameters.
"""

from __future__ import annotations

import inspect
import operator
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from looplib._core import torch_private
from looplib._core.mappings import pick, without
from looplib._core.tracing import entered, tracing
from looplib.optim._first_state import States, first_state, with_created, without_state
from looplib.optim._kernels import (
    PLAIN,
    check_fused,
    columns_of,
    count_update,
    direct_kernel,
    fused_groups,
    realigned,
)
from looplib.optim._lbfgs import Evaluate
from looplib.optim._recipe import Recipe, restored_grads
from looplib.optim._state_probe import Probe, own_attributes, probe
from looplib.optim._third_party import update_of_others
from looplib.optim._wrong_state import wrong_state
from looplib.types import Grads, Params

_dtype = operator.attrgetter("dtype")
_is_sparse = operator.attrgetter("is_sparse")
_TAKE_BOTH: set[Any] = {torch.optim.SGD, torch.optim.Adagrad}

# Classes whose initial state holds the learning rate of the update that creates it, and the key of that value.
LR_IN_STATE = {torch.optim.ASGD: "eta", torch.optim.Rprop: "step_size"}


class Plan:
    """Facts that follow from the parameters' names, shapes, dtypes and devices, and do not change during a run.

    Attributes:
        members: parameter names in each group.
        values: for each group, its hyperparameters as completed by the class.
        fused: for each group, True if looplib uses the fused kernel, strides permitting.
        taken: True if looplib has chosen a fused kernel, and False if it has chosen torch's default, for the repr.
        kernels: for each group, the fused kernel to call instead of the class's `step`, or None.
        step: the class's step, for torch's classes without its hooks.
        probe: what a third party's class keeps.
        sample: keys under which the class keeps the state of the first parameter of each group.
        pool: instances of the class that are not in use, each with its original attributes.
    """

    def __init__(self, recipe: Recipe, params: Params, states: Mapping[str, Any], key: Any) -> None:
        self.recipe, self.key = recipe, key
        self.members = recipe.members(params)
        check_fused(recipe, params, self.members)
        made = recipe.build(params, self.members)
        self.values = [without(group, {"params"}) for group in made.param_groups]
        self.fused = fused_groups(recipe, params, self.members)
        self.taken = {fused for names, fused in zip(self.members, self.fused, strict=True) if names}
        self.kernels = [
            direct_kernel(recipe, [params[name] for name in names], values, fused)
            for names, values, fused in zip(self.members, self.values, self.fused, strict=True)
        ]
        self.probe, self.sample = _sample(recipe, params, self.members, states)
        self.step = inspect.unwrap(recipe.cls.step) if recipe.is_torch_optim else recipe.cls.step
        self.pool: list[tuple[Any, dict[str, Any]]] = []
        self.release((made, own_attributes(made)))

    def acquire(self, params: Params) -> tuple[Any, dict[str, Any]]:
        """An instance of the class for one update, so that updates in several threads share none."""
        if self.pool:
            return self.pool.pop()
        made = self.recipe.build(params, self.members)
        return made, own_attributes(made)

    def release(self, lent: tuple[Any, dict[str, Any]]) -> None:
        """Empty an instance: tensors belong to states, and attributes are restored."""
        instance, attributes = lent
        instance.state = defaultdict(dict)
        for group in instance.param_groups:
            group["params"] = []
        vars(instance).update(attributes)
        # A class with a closure may keep its parameters elsewhere too.
        if len(self.pool) < 4 and not self.recipe.needs_closure:
            self.pool.append(lent)


def _sample(
    recipe: Recipe, params: Params, members: Sequence[Sequence[str]], states: Mapping[str, Any]
) -> tuple[Probe, dict[str, Any]]:
    """Probe of a third party's class, and the keys of the state of the first parameter of each group."""
    first = [names[0] for names in members if names]
    if recipe.is_torch_optim:
        found, kept = Probe(), first_state(recipe, pick(params, first))["state"]
    else:
        nested = [name for name, state in states.items() if any(isinstance(value, dict) for value in state.values())]
        probed = pick(params, dict.fromkeys([*first, *nested]))
        found = probe(recipe, probed, recipe.members(probed))
        kept = found.state
    return found, {name: kept[name].keys() for name in first}


def plan_for(plans: list[Plan], recipe: Recipe, params: Params, states: Mapping[str, Any]) -> Plan:
    """The plan for these parameters, created if none of the most recent ones fits."""
    names = [*states]
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
    plan = Plan(recipe, dict(zip(names, tensors, strict=True)), states, key)
    plans.insert(0, plan)
    del plans[8:]
    return plan


def check_update(plans: list[Plan], recipe: Recipe, grads: Grads, opt_state: Any, params: Params) -> None:
    """Raise for a state of another optimizer, and for gradients that the class cannot take, before anything is written."""
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
    plan = plan_for(plans, recipe, params, states)
    for name, kept in plan.sample.items():
        if states[name].keys() != kept and not _continues(recipe, states[name].keys(), kept):
            raise wrong_state(opt_state, cls, kept)
    if [*map(_dtype, grads.values())] != plan.key[1]:
        _check_dtypes(grads, params)
    sparse = {*map(_is_sparse, grads.values())}
    if (
        recipe.is_torch_optim
        and recipe.cls not in _TAKE_BOTH
        and not sparse <= {recipe.cls is torch.optim.SparseAdam}
    ):
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
                f"the gradient of {name} is {grad.dtype}, the parameter {params[name].dtype}: to train weights "
                "of half precision on gradients in float32, wrap the optimizer, ll.optim.master_weights(optimizer)"
            )


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
    moving = "groups" in opt_state or any(recipe.moving)
    values = recipe.values_at(plan.values, opt_state, step) if moving else plan.values
    grad_mode = torch.is_grad_enabled()
    torch_private.set_grad_enabled(bool(recipe.defaults.get("differentiable")))
    try:
        if not recipe.is_torch_optim:
            return update_of_others(plan, values, grads, opt_state, params, step, seed, evaluate)
        ready: list[Any] = []
        left: dict[int, list[str]] = {}  # groups that the class's own step updates
        for number, names in enumerate(plan.members):
            if len(grads) < len(states):
                names = [name for name in names if name in grads]
            if not names:
                continue
            columns = columns_of(names, params, grads, states) if plan.kernels[number] else None
            if columns is None:
                left[number] = names
            else:
                ready.append((plan.kernels[number], values[number], columns))
        for kernel, numbers, (own, given, entries) in ready:  # after all groups were looked at
            if "step" in entries:
                count_update(entries["step"])
            kernel(numbers, own, given, entries)
        return params, _by_class(plan, values, left, grads, opt_state, params, step) if left else opt_state
    finally:
        torch_private.set_grad_enabled(grad_mode)


def _by_class(
    plan: Plan,
    values: Sequence[dict[str, Any]],
    groups: Mapping[int, Sequence[str]],
    grads: Grads,
    opt_state: Any,
    params: Params,
    step: int,
) -> Any:
    """Update groups by the step of one of torch's classes, and return the state."""
    states: States = opt_state["state"]
    late = without_state(plan.recipe, opt_state, step)
    lent = instance, _ = plan.acquire(params)
    used = {name: params[name] for names in groups.values() for name in names}
    with restored_grads(used.values()):
        for number, group in enumerate(instance.param_groups):
            names = groups.get(number, ())
            tensors = [used[name] for name in names]
            rows = {name: {} if name in late else states[name] for name in names}
            instance.state.update(zip(tensors, rows.values(), strict=True))
            group.update(values[number], params=tensors)
            for name, tensor in zip(names, tensors, strict=True):
                asked = group.get("fused")
                tensor.grad = realigned(name, grads[name], tensor, rows[name]) if asked else grads[name]
            if plan.fused[number] and names:
                group["fused"] = columns_of(names, params, grads, rows) is not None
                plan.taken.add(group["fused"])
        if plan.recipe.cls in LR_IN_STATE:
            _take_rates(plan, values, groups, states)
        plan.step(instance)
        first = late & used.keys()
        if first:
            opt_state = with_created(opt_state, {name: instance.state[used[name]] for name in first}, first)
    plan.release(lent)
    return opt_state


def _take_rates(
    plan: Plan, values: Sequence[Mapping[str, Any]], groups: Mapping[int, Sequence[str]], states: States
) -> None:
    """Put this update's learning rate into an initial state that was made for a different one."""
    key = LR_IN_STATE[plan.recipe.cls]
    for number, names in groups.items():
        for name in names if "lr" in plan.recipe.moving[number] else ():
            if not states[name]["step"]:
                rate, old = float(values[number]["lr"]), states[name][key]
                old.fill_(complex(rate, rate) if old.is_complex() else rate)
