"""LBFGS state in tensors of fixed shapes, although torch's history grows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from looplib._core.mappings import mapped, pick
from looplib.optim._recipe import Recipe
from looplib.types import Params

_FLAT = ("d", "prev_flat_grad", "H_diag")  # LBFGS's tensors; the history is in tensors of `history_size` rows
_ROWS = ("old_dirs", "old_stps", "ro")


def is_lbfgs(recipe: Recipe) -> bool:
    """True for torch's LBFGS, whose history grows from update to update."""
    return recipe.cls is torch.optim.LBFGS


def first_state_of_lbfgs(
    recipe: Recipe, params: Params, members: Sequence[Sequence[str]]
) -> dict[str, dict[str, Any]]:
    """LBFGS state before the first update, in tensors that hold a full history, stored with the first parameter."""
    size = int(recipe.build(params, members).param_groups[0]["history_size"])
    flat = torch.cat([torch.view_as_real(t).flatten() if t.is_complex() else t.flatten() for t in params.values()])
    zeros, count = flat.new_zeros, flat.numel()
    state = {
        **{"func_evals": 0, "n_iter": 0, "history": 0, "t": 0.0, "prev_loss": 0.0},
        **{"d": zeros(count), "prev_flat_grad": zeros(count), "H_diag": zeros(())},
        **{"old_dirs": zeros(size, count), "old_stps": zeros(size, count), "ro": zeros(size)},
    }
    return {**{name: {} for name in params}, next(iter(params)): state}


def unpacked(kept: Mapping[str, Any]) -> dict[str, Any]:
    """The state as LBFGS expects it, with the history in lists.

    The tensors are copies, since BLAS may round a dot product differently if a vector is not aligned in memory.
    """
    if not kept["n_iter"]:
        return pick(kept, ("func_evals", "n_iter"))
    rows = {key: [*map(Tensor.clone, kept[key][: kept["history"]])] for key in _ROWS}
    flat = mapped(Tensor.clone, pick(kept, _FLAT))
    return {**pick(kept, ("func_evals", "n_iter", "t", "prev_loss")), **rows, **flat}


def packed_into(kept: Mapping[str, Any], state: Mapping[str, Any]) -> dict[str, Any]:
    """The state in its existing tensors of fixed shapes, which are overwritten."""
    packed = {**kept, **pick(state, ("func_evals", "n_iter"))}
    if "d" not in state:
        return packed  # it started at an optimum and has no direction
    with torch.no_grad():
        for key in _FLAT:
            packed[key].copy_(torch.as_tensor(state[key]))
        for key in _ROWS:
            for into, row in zip(packed[key], state[key], strict=False):
                into.copy_(row)
    return {**packed, "history": len(state["old_dirs"]), **mapped(float, pick(state, ("t", "prev_loss")))}
