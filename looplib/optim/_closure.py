"""Optimizers that evaluate the loss at different parameters: LBFGS, and third-party classes that require a closure.

For this, `update` is given `evaluate(params) -> (loss, grads)`, as `optax.lbfgs` is given `value_fn`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from looplib._core.checks import check
from looplib._core.mappings import mapped
from looplib._objective import loss_over_ranks
from looplib.optim._lbfgs_state import packed_into, unpacked
from looplib.optim._mismatch import mismatch
from looplib.optim._recipe import Recipe, drop_grads
from looplib.types import Grads, Params

Evaluate = Callable[[Params], tuple[Any, Grads]]
_grad = operator.attrgetter("grad")


def closure_over(evaluate: Any, cls: type, tensors: Params, known: list[Any]) -> Callable[[], Any]:
    """Make the `closure()` that a step calls: it returns the loss at the current tensors and sets their `.grad`.

    `known` holds losses and gradients that need not be computed, with the next one last.
    """
    check(
        evaluate,
        f"{cls.__name__} evaluates the loss at other parameters, so its update needs evaluate=: a function "
        "from params to (loss, grads). A train step gives one; a wrapper hands it on with **extra",
        TypeError,
    )

    def closure() -> Any:
        drop_grads(tensors.values())
        with torch.enable_grad():
            loss, grads = known.pop() if known else evaluate(dict(tensors))
        for name, tensor in tensors.items():
            tensor.grad = grads.get(name)
        return loss

    return closure


def check_lbfgs(recipe: Recipe, opt_state: Any, grads: Grads) -> None:
    """Raise for the state of another optimizer."""
    states = opt_state.get("state") if isinstance(opt_state, dict) else None
    first = next(iter(states), None) if states else None
    if not states or "old_dirs" not in states[first]:
        raise mismatch(recipe, opt_state, first, ["old_dirs", "old_stps", "prev_flat_grad"])


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
    states = opt_state["state"]
    first = next(iter(states))
    tensors = {name: params[name] for name in states}
    instance = recipe.build(tensors, recipe.members(tensors))
    injected = opt_state.get("hyperparameters", [{}])[0]
    recipe.move(instance, step)
    instance.param_groups[0].update(mapped(Tensor.item, injected))
    instance.state[tensors[first]] = unpacked(states[first])
    # The first evaluation is at the parameters where the gradients were taken.
    known = [(loss_over_ranks(metrics), grads)] if metrics else []
    stale = mapped(_grad, tensors)
    try:
        instance.step(closure_over(evaluate, recipe.cls, tensors, known))
    finally:
        for name, tensor in tensors.items():
            tensor.grad = stale[name]
    states[first] = packed_into(states[first], instance.state[tensors[first]])
    return params, opt_state
