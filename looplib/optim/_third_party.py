"""Updates of third-party classes: their own step, on an instance that is given a state and whose state is taken out."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence, Set
from copy import deepcopy
from functools import partial
from typing import Any

from looplib._core.mappings import detached_copies, mapped, pick, subset
from looplib._core.random import mix
from looplib._core.ranks import is_sharded
from looplib._core.torch_private import pytree
from looplib._core.trees import same
from looplib._core.updates import copied
from looplib.optim._first_state import first_state, with_created, without_state
from looplib.optim._lbfgs import Evaluate, closure_over
from looplib.optim._recipe import Recipe, restored_grads
from looplib.optim._state_probe import leaf_copies, own_attributes, packed, sample_gradient, streams_at, unpacked
from looplib.types import Params

STREAM = 0x0F71  # separates an update's random draws from those of a forward pass


def update_of_others(
    plan: Any,
    values: Sequence[Mapping[str, Any]],
    grads: Params,
    opt_state: Mapping[str, Any],
    params: Params,
    step: int,
    seed: int,
    evaluate: Evaluate | None,
) -> tuple[Params, dict[str, Any]]:
    """Run the step of a third-party class on these tensors, and return a new record of what it keeps."""
    recipe, makers = plan.recipe, plan.probe.makers
    tensors, late = pick(params, grads), without_state(recipe, opt_state, step)
    first = late & grads.keys()
    lent = _lent(plan, values, opt_state, params, tensors, late, first)
    instance = lent[0]
    run = partial(plan.step, instance)
    if recipe.needs_closure:
        run = partial(run, closure=closure_over(evaluate, recipe.cls, tensors, []))
    elif plan.probe.writes_grads:
        grads = copied(grads)
    created: dict[str, dict[str, Any]] = {}
    with restored_grads(tensors.values()), streams_at(mix(seed, step, STREAM), params.values()):
        for name, tensor in tensors.items():
            tensor.grad = grads[name]
        run()
    for name, tensor in tensors.items():
        created[name] = instance.state[tensor]
        if name in first or makers.get(name):
            created[name], makers[name] = packed(recipe, name, created[name])
    new = with_created(opt_state, created, first)
    if "groups" in opt_state:
        groups = zip(instance.param_groups, opt_state["groups"], strict=True)
        new["groups"] = [{key: copied(group.get(key)) for key in own} for group, own in groups]
    if "shared" in opt_state:
        new["shared"] = {key: instance.state.get(key) for key in opt_state["shared"]}
    plan.release(lent)
    return params, new


def _lent(
    plan: Any,
    values: Sequence[Mapping[str, Any]],
    opt_state: Mapping[str, Any],
    params: Params,
    tensors: Params,
    late: Set[str],
    first: Set[str],
) -> tuple[Any, dict[str, Any]]:
    """An instance over these tensors, with their state, or for a first update with what its constructor keeps."""
    states = opt_state["state"]
    if first or plan.recipe.needs_closure:  # its constructor may make state, or keep the parameters that it is given
        made = plan.recipe.build(params, plan.members)
        lent = made, own_attributes(made)
    else:
        lent = plan.acquire(params)
    instance = lent[0]
    for flag in plan.probe.flags:
        setattr(instance, flag, len(late) < len(states))
    for group, names, numbers in zip(instance.param_groups, plan.members, values, strict=True):
        group.update({k: deepcopy(v) if isinstance(v, (list, dict, set)) else v for k, v in numbers.items()})
        group["params"] = [tensors[name] for name in names if name in tensors]
    of_constructor, instance.state = instance.state, defaultdict(dict)
    for name, tensor in tensors.items():
        kept = of_constructor[tensor] if name in first else states[name]
        makers = plan.probe.makers.get(name)
        instance.state[tensor] = unpacked(kept, makers) if makers else dict(kept)
    instance.state.update({key: value for key, value in opt_state.get("shared", {}).items() if value is not None})
    return lent


def evaluated(recipe: Recipe, params: Params, opt_state: Any) -> Params:
    """Weights to evaluate with.

    Schedule-free optimizers train at one point and evaluate at another, which their `eval` computes.
    """
    if recipe.is_torch_optim or not callable(getattr(recipe.cls, "eval", None)):
        return params
    states = opt_state["state"]
    copies = detached_copies(pick(params, states))
    made = recipe.build(copies, recipe.members(copies))
    for name in states.keys() - without_state(recipe, opt_state, 1):
        made.state[copies[name]] = copied(states[name])
    for group, values in zip(made.param_groups, opt_state.get("groups", ()), strict=False):
        group.update({key: copied(value) for key, value in values.items() if value is not None})
    made.eval()
    return {**params, **copies}


# Comparison with a raw loop, before training starts

_STEPS = 3


def check_against_raw_loop(recipe: Recipe, params: Params, update: Callable[..., Any]) -> None:
    """Raise if a class's pure updates differ from its own `step()` in a raw loop.

    This reveals state that a class keeps out of sight: in closures, in attributes of its module, or in lists of
    parameters. A few steps on the smallest parameters of each group and number of dimensions are compared bit by bit.
    """
    falling = sorted(params, key=lambda name: params[name].numel(), reverse=True)
    chosen = {(recipe.group_of(name, params[name]), params[name].ndim): name for name in falling}
    smallest = leaf_copies(subset(params, {*chosen.values()}))
    if recipe.needs_closure or any(map(is_sharded, smallest.values())):
        return
    try:
        raw = _raw_loop(recipe, leaf_copies(smallest))
    except (RuntimeError, ValueError, ArithmeticError):
        return  # the class cannot step on these numbers, so the comparison shows nothing
    try:
        pure, structures = _pure_loop(recipe, smallest, update)
    except Exception as error:
        shown = f"which fails where a raw loop does not ({type(error).__name__}: {error})"
        raise _out_of_reach(recipe, shown) from error
    if changed := [name for name, tensor in raw.items() if not same(tensor.detach(), pure[name].detach())]:
        raise _out_of_reach(recipe, f"after {_STEPS} of which {changed[0]} is not what it is in a raw loop")
    if structures[0] != structures[-1]:
        raise _out_of_reach(recipe, "since it keeps more after some updates than after one")


def _raw_loop(recipe: Recipe, params: Params) -> Params:
    made = recipe.build(params, recipe.members(params))
    for step in range(_STEPS):
        for group, values in zip(made.param_groups, recipe.values_at(made.param_groups, {}, step), strict=True):
            group.update(values)
        for tensor in params.values():
            tensor.grad = sample_gradient(tensor, step)
        with streams_at(mix(0, step, STREAM), params.values()):
            made.step()
    return params


def _pure_loop(recipe: Recipe, params: Params, update: Callable[..., Any]) -> tuple[Params, list[Any]]:
    opt_state, structures = first_state(recipe, params), []
    for step in range(_STEPS):
        grads = mapped(partial(sample_gradient, phase=step), params)
        params, opt_state, _ = update(grads, opt_state, params, step)
        structures.append(pytree.tree_structure(opt_state))
    return params, structures


def _out_of_reach(recipe: Recipe, shown: str) -> TypeError:
    return TypeError(
        f"{recipe.cls.__name__} keeps something out of reach of a pure update, {shown}; looplib takes optimizers that "
        "keep their state in `state` and `param_groups`"
    )
