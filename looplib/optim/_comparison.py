"""Comparison of a third-party class with its own raw loop, on a few small parameters, before training starts."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from looplib._core.checks import check
from looplib._core.mappings import mapped, subset
from looplib._core.random import mix
from looplib._core.ranks import is_sharded
from looplib._core.torch_private import pytree
from looplib._core.trees import same
from looplib._core.updates import copied, copied_params
from looplib.optim._first_state import first_state
from looplib.optim._recipe import Recipe
from looplib.optim._rehearsal import leaf_copies, sample_gradient, streams_at
from looplib.optim._update import STREAM, Plan, eager_update
from looplib.types import Params

_STEPS = 3


def check_against_raw_loop(recipe: Recipe, params: Params) -> None:
    """Raise if a class's pure updates differ from its own `step()` in a raw loop.

    This reveals state that a class keeps out of sight: in closures, in attributes of its module, or in lists of
    parameters. A few steps on the smallest parameters of each group and number of dimensions are compared bit by bit.
    """
    chosen = _small(recipe, params)
    if recipe.needs_closure or any(map(is_sharded, chosen.values())):
        return
    raw = _raw_loop(recipe, chosen)
    if raw is None:
        return  # the class cannot step on these numbers, so the comparison shows nothing
    try:
        pure = _pure_loop(recipe, chosen)
    except Exception as error:
        shown = f"which fails where a raw loop does not ({type(error).__name__}: {error})"
        raise _out_of_reach(recipe, shown) from error
    if changed := [name for name, tensor in raw.items() if not same(tensor, pure[name].detach())]:
        raise _out_of_reach(recipe, f"after {_STEPS} of which {changed[0]} is not what it is in a raw loop")


def _out_of_reach(recipe: Recipe, shown: str) -> TypeError:
    return TypeError(
        f"{recipe.cls.__name__} keeps something out of reach of a pure update, {shown}; looplib takes optimizers that "
        "keep their state in `state` and `param_groups`"
    )


def _pure_loop(recipe: Recipe, params: Params) -> Params:
    """Parameters after a few pure updates."""
    plans: list[Plan] = []
    opt_state, structures = first_state(recipe, params), []
    for step in range(_STEPS):
        grads = mapped(partial(sample_gradient, phase=step), params)
        own = copied_params(grads, params), copied(opt_state)
        params, opt_state = eager_update(plans, recipe, grads, own[1], own[0], step)
        structures.append(pytree.tree_structure(opt_state))
    message = "it keeps more after some updates than after one, and an opt_state has one structure"
    check(structures[0] == structures[-1], message)
    return params


def _small(recipe: Recipe, params: Params) -> Params:
    """Copies of the smallest parameters of each group, one for each number of dimensions."""
    falling = sorted(params, key=lambda name: params[name].numel(), reverse=True)
    last_of_each = {(recipe.group_of(name, params[name]), params[name].ndim): name for name in falling}
    return leaf_copies(subset(params, {*last_of_each.values()}))


def _raw_loop(recipe: Recipe, params: Params) -> Params | None:
    """Parameters after a few steps of the class itself."""
    copies = leaf_copies(params)
    made = recipe.build(copies, recipe.members(copies))
    try:
        for step in range(_STEPS):
            recipe.move(made, step)
            for tensor in copies.values():
                tensor.grad = sample_gradient(tensor, step)
            with streams_at(mix(0, step, STREAM), copies.values()):
                made.step()
    except (RuntimeError, ValueError, ArithmeticError):
        return None
    return mapped(Tensor.detach, copies)
