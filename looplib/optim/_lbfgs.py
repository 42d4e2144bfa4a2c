"""LBFGS, which evaluates the loss at different parameters.

For this, `update` is given `evaluate(params) -> (loss, grads)`, as `optax.lbfgs` is given `value_fn`. LBFGS's history is
kept in lists of a fixed length, although torch's grows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from looplib._core.checks import check
from looplib._core.mappings import pick
from looplib._objective import loss_over_ranks
from looplib.optim._recipe import Recipe, drop_grads, restored_grads
from looplib.types import Grads, Params

_NUMBERS = ("func_evals", "n_iter", "t", "prev_loss", "H_diag")
_ROWS = ("old_dirs", "old_stps", "ro")  # the history: lists of `history_size` tensors, of which the first are in use


def first_state_of_lbfgs(recipe: Recipe, params: Params, members: Any) -> dict[str, dict[str, Any]]:
    """LBFGS state before the first update, with a full history, stored with the first parameter."""
    size = recipe.build(params, members).param_groups[0]["history_size"]
    flat = torch.cat([torch.view_as_real(t).flatten() if t.is_complex() else t.flatten() for t in params.values()])
    zero, vector = flat.new_zeros(()), torch.zeros_like(flat)
    state = {
        "func_evals": 0,
        "n_iter": 0,
        "history": 0,
        "t": 0.0,
        "prev_loss": 0.0,
        "H_diag": 0.0,
        "d": vector,
        "prev_flat_grad": vector.clone(),
        **{key: [(zero if key == "ro" else vector).clone() for _ in range(size)] for key in _ROWS},
    }
    return {**{name: {} for name in params}, next(iter(params)): state}


def lbfgs_update(
    recipe: Recipe,
    grads: Grads,
    opt_state: Any,
    params: Params,
    step: int,
    metrics: Mapping[str, Any] | None,
    evaluate: Any,
) -> tuple[Params, Any]:
    """LBFGS update by torch's own step, in place. `metrics` are those of `grads`, if they are known."""
    check(
        evaluate,
        "LBFGS evaluates the loss at other parameters, so its update needs evaluate=: a function from params to (loss, "
        "grads). A train step gives one; ll.apply_gradients takes one",
        TypeError,
    )
    states = opt_state["state"]
    starts, first = pick(params, states), next(iter(states))
    # The direction is one vector of all parameters. Those without a gradient are copies, so that they stay as they are.
    tensors = {name: tensor if name in grads else tensor.detach().clone() for name, tensor in starts.items()}
    instance = recipe.build(tensors, recipe.members(tensors))
    instance.param_groups[0].update(recipe.values_at(instance.param_groups, opt_state, step)[0])
    # With its history alone in the lists. Before its first iteration, LBFGS reads none of it.
    entry = states[first]
    instance.state[tensors[first]] = {**entry, **{key: entry[key][: entry["history"]] for key in _ROWS}}
    # The first evaluation is at the parameters where the gradients were taken.
    first_evaluation = [(loss_over_ranks(metrics), grads)] if metrics else []

    def closure() -> Any:
        drop_grads(tensors.values())
        with torch.enable_grad():
            loss, at_tensors = first_evaluation.pop() if first_evaluation else evaluate(dict(starts))
        for name in grads:
            tensors[name].grad = at_tensors.get(name)
        return loss

    with restored_grads(tensors.values()):
        instance.step(closure)
    # The state after the step, with the structure of the one before it.
    state = instance.state[tensors[first]]
    history = len(state["old_dirs"])
    rows = {key: [*state[key], *entry[key][history:]] for key in _ROWS}
    numbers = {key: type(entry[key])(state[key]) for key in _NUMBERS}  # torch has tensors for some of them
    states[first] = {**pick(state, entry), **rows, **numbers, "history": history}
    return params, opt_state
