"""Optimizers whose step evaluates the loss at other parameters: LBFGS, and third parties' that require a closure.

`update` is given `evaluate(params) -> (loss, grads)` for that, as `optax.lbfgs` is given its `value_fn`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from looplib.optim._kernels import clone
from looplib.optim._mismatch import mismatch
from looplib.optim._recipe import Recipe, value_at
from looplib.types import Grads, Params

Evaluate = Callable[[Params], tuple[Any, Grads]]

_FLAT = ("d", "prev_flat_grad", "H_diag")  # tensors of LBFGS's; the history is in tensors of `history_size` rows
_ROWS = ("old_dirs", "old_stps", "ro")


def is_lbfgs(recipe: Recipe) -> bool:
    """Whether this is torch's LBFGS, whose history grows from update to update."""
    return recipe.cls is torch.optim.LBFGS


def closure_over(evaluate: Evaluate | None, cls: type, tensors: Params, known: list[Any]) -> Callable[[], Any]:
    """`closure()` as a step calls it: the loss at the tensors as they are now, with their gradients in `.grad`.

    `known` holds losses and gradients that need not be evaluated, the next one last.
    """
    if evaluate is None:
        raise TypeError(
            f"{cls.__name__} evaluates the loss at other parameters, so its update needs evaluate=: a function "
            "from params to (loss, grads). A train step gives one; a wrapper hands it on with **extra"
        )

    def closure() -> Any:
        for tensor in tensors.values():
            tensor.grad = None
        with torch.enable_grad():
            loss, grads = known.pop() if known else evaluate(dict(tensors))
        for name, tensor in tensors.items():
            tensor.grad = grads.get(name)
        return loss

    return closure


def first_state_of_lbfgs(recipe: Recipe, params: Params) -> dict[str, dict[str, Any]]:
    """LBFGS's state before its first update, in tensors that hold a full history. It stands at the first parameter."""
    made = recipe.build(params, recipe.members(params))
    size = int(made.param_groups[0]["history_size"])
    real = [torch.view_as_real(tensor) if tensor.is_complex() else tensor for tensor in params.values()]
    dtype = functools.reduce(torch.promote_types, [tensor.dtype for tensor in real])
    count = sum(tensor.numel() for tensor in real)

    def zeros(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=real[0].device)

    state = {
        **{"func_evals": 0, "n_iter": 0, "history": 0, "t": 0.0, "prev_loss": 0.0},
        **{"d": zeros(count), "prev_flat_grad": zeros(count), "H_diag": zeros()},
        **{"old_dirs": zeros(size, count), "old_stps": zeros(size, count), "ro": zeros(size)},
    }
    return {name: state if index == 0 else {} for index, name in enumerate(params)}


def lbfgs_update(
    recipe: Recipe,
    grads: Grads,
    opt_state: Mapping[str, Any],
    params: Params,
    step: int,
    donate: bool,
    extra: Mapping[str, Any],
) -> tuple[Params, dict[str, Any]]:
    """An update of LBFGS by its own step; `extra` holds `evaluate`, and the metrics of `grads` if these are known."""
    states = opt_state["state"]
    first = next(iter(states))
    if "old_dirs" not in states[first]:
        raise mismatch(recipe, opt_state, first, ["old_dirs", "old_stps", "prev_flat_grad"])
    tensors = {name: params[name] for name in states}
    with torch.no_grad():
        copies = {name: clone(tensor) for name, tensor in tensors.items()}
    if not donate:
        tensors = {name: copies[name].requires_grad_(tensor.requires_grad) for name, tensor in tensors.items()}
    instance = recipe.build(tensors, recipe.members(tensors))
    group, own = instance.param_groups[0], opt_state.get("hyperparameters", [{}])[0]
    group.update({key: value_at(value, step) for key, value in recipe.moving[0].items()})
    group.update({key: value.item() for key, value in own.items()})
    instance.state[tensors[first]] = _unpacked(states[first])
    # The first evaluation is at the parameters that the gradients are of.
    known = [(extra["metrics"]["loss"].compute(), grads)] if "metrics" in extra else []
    stale = {name: tensor.grad for name, tensor in tensors.items()}
    try:
        instance.step(closure_over(extra.get("evaluate"), recipe.cls, tensors, known))
    except BaseException:
        if donate:  # the state that was given stays as it was
            with torch.no_grad():
                for name, tensor in tensors.items():
                    tensor.copy_(copies[name])
        raise
    finally:
        for name, tensor in tensors.items():
            tensor.grad = stale[name]
    packed = _packed(instance.state[tensors[first]], states[first], donate)
    return {**params, **tensors}, {**opt_state, "state": {**states, first: packed}}


def _unpacked(kept: Mapping[str, Any]) -> dict[str, Any]:
    """The state as LBFGS has it, with the history in lists.

    Copies, since BLAS may round a dot product otherwise where a vector does not begin at an aligned address.
    """
    counts = {key: kept[key] for key in ("func_evals", "n_iter")}
    if not kept["n_iter"]:
        return counts
    rows = {key: [row.clone() for row in kept[key][: kept["history"]]] for key in _ROWS}
    flat = {key: kept[key].clone() for key in _FLAT}
    return {**counts, **rows, **flat, "t": kept["t"], "prev_loss": kept["prev_loss"]}


def _packed(state: Mapping[str, Any], kept: Mapping[str, Any], donate: bool) -> dict[str, Any]:
    """The state in tensors of fixed shapes; with `donate`, in those that were there."""
    packed = {**kept, "func_evals": state["func_evals"], "n_iter": state["n_iter"]}
    if "d" not in state:
        return packed  # it began at an optimum, and made no direction
    with torch.no_grad():
        for key in _FLAT:
            value = torch.as_tensor(state[key], dtype=kept[key].dtype, device=kept[key].device)
            packed[key] = kept[key].copy_(value) if donate else value.clone()
        for key in _ROWS:
            packed[key] = into = kept[key] if donate else torch.zeros_like(kept[key])
            for index, row in enumerate(state[key]):
                into[index].copy_(row)
    return {
        **packed,
        "history": len(state["old_dirs"]),
        "t": float(state["t"]),
        "prev_loss": float(state["prev_loss"]),
    }
