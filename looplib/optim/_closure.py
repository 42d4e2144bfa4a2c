"""Optimizers that evaluate the loss at different parameters: LBFGS, and third-party classes that require a closure.

For this, `update` is given `evaluate(params) -> (loss, grads)`, as `optax.lbfgs` is given `value_fn`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from looplib._core import torch_private
from looplib._core.checks import check
from looplib._core.mappings import mapped, pick
from looplib._objective import loss_over_ranks
from looplib.optim._kernels import clone
from looplib.optim._lbfgs_state import packed_into, unpacked
from looplib.optim._mismatch import mismatch
from looplib.optim._recipe import Recipe, drop_grads
from looplib.types import Grads, Params

Evaluate = Callable[[Params], tuple[Any, Grads]]


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


def lbfgs_update(
    recipe: Recipe,
    grads: Grads,
    opt_state: Mapping[str, Any],
    params: Params,
    step: int,
    donate: bool,
    extra: Mapping[str, Any],
) -> tuple[Params, dict[str, Any]]:
    """LBFGS update by torch's own step. `extra` holds `evaluate`, and the metrics of `grads` if they are known.

    The step works on copies, so that the given state stays as it is if an evaluation fails.
    """
    states = opt_state["state"]
    first = next(iter(states))
    if "old_dirs" not in states[first]:
        raise mismatch(recipe, opt_state, first, ["old_dirs", "old_stps", "prev_flat_grad"])
    tensors = {name: clone(params[name].detach()).requires_grad_(params[name].requires_grad) for name in states}
    instance = recipe.build(tensors, recipe.members(tensors))
    injected = opt_state.get("hyperparameters", [{}])[0]
    recipe.move(instance, step)
    instance.param_groups[0].update(mapped(Tensor.item, injected))
    instance.state[tensors[first]] = unpacked(states[first])
    # The first evaluation is at the parameters where the gradients were taken.
    known = [(loss_over_ranks(extra["metrics"]), grads)] if "metrics" in extra else []
    instance.step(closure_over(extra.get("evaluate"), recipe.cls, tensors, known))
    packed = packed_into(states[first], instance.state[tensors[first]], donate)
    drop_grads(tensors.values())
    if donate:
        with torch.no_grad():
            torch_private.foreach_copy_([*pick(params, tensors).values()], [*tensors.values()])
        tensors = {}
    return {**params, **tensors}, {**opt_state, "state": {**states, first: packed}}
