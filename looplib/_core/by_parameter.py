"""Leaves of an optimizer's state that belong to one parameter or buffer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from looplib._core import trees

# Trees by name: of a state, its averages, what a class keeps, and the sums of `every`.
_TREES = {"params", "buffers", "state", "started", "sum"}
_LISTS = {"groups", "hyperparameters"}  # of dicts, one for each group of parameters


def name_indices(leaves: Mapping[trees.Path, Any], tensors: Mapping[str, Tensor]) -> dict[trees.Path, int]:
    """Index of the parameter's name in the path of each leaf that belongs to one.

    Names of parameters may also be words of a state: Adam keeps a `step`, an average has a tree `params`, and the labels of a
    partition are the user's.

    >>> import torch
    >>> adam = {("Adam", "state", name, key): 0 for name in ("step", "weight") for key in ("step", "exp_avg")}
    >>> name_indices({**adam, ("ema", "updates"): 0}, {"step": torch.ones(1), "weight": torch.ones(2)})
    {('Adam', 'state', 'step', 'step'): 2, ('Adam', 'state', 'step', 'exp_avg'): 2, ('Adam', 'state', 'weight', 'step'): 2, \
('Adam', 'state', 'weight', 'exp_avg'): 2}

    Args:
        leaves: leaves of a state, or of an optimizer's state, by path.
        tensors: parameters and buffers.
    """
    keys: dict[trees.Path, set[Any]] = {}
    for path in leaves:
        for index, key in enumerate(path):
            keys.setdefault(path[:index], set()).add(key)
    indices = {path: _name_index(path, leaf, keys, tensors) for path, leaf in leaves.items()}
    return {path: index for path, index in indices.items() if index is not None}


def _name_index(
    path: trees.Path, leaf: Any, keys: Mapping[trees.Path, set[Any]], tensors: Mapping[str, Tensor]
) -> int | None:
    of_group = [index for index, key in enumerate(path[:-2]) if key in _LISTS and isinstance(path[index + 1], int)]
    candidates = [index for index, key in enumerate(path) if key in tensors and index - 2 not in of_group]
    for index in candidates:
        if path[:index] and path[index - 1] in _TREES:
            return index
    # In the state of a user's part: a dict whose keys are all names, of those directly within each other the largest.
    by_name = [index for index in candidates if keys[path[:index]] <= tensors.keys()]
    if by_name:
        index = by_name[-1]
        while index - 1 in by_name and len(keys[path[: index - 1]]) > len(keys[path[:index]]):
            index -= 1
        return index
    # Beside counts and the like, values of a parameter have its shape. A number may as well be one of these.
    is_value = (
        candidates and isinstance(leaf, Tensor) and leaf.ndim and leaf.shape == tensors[path[candidates[-1]]].shape
    )
    return candidates[-1] if is_value else None
