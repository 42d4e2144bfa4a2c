"""Structure of an optimizer class's state, for conversion to and from plain torch."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from looplib._core.mappings import subset, without
from looplib.optim._first_state import first_state
from looplib.optim._recipe import Recipe
from looplib.optim._update import not_started


class Kept(NamedTuple):
    """State that a class keeps for parameters.

    Attributes:
        entries: for each parameter, values with the keys and types of the real ones.
        late: parameters without state so far, because they have had no update.
        empty: True if no parameter has state yet, although a state has the structure.
    """

    entries: dict[str, dict[str, Any]]
    late: frozenset[str]
    empty: bool


def kept_by_class(
    cls: type,
    group: Mapping[str, Any],
    params: Mapping[str, Tensor],
    names: Iterable[str],
    opt_state: Mapping[str, Any],
    step: int,
) -> Kept:
    """State that a class keeps for these parameters after `step` updates; `group` is one of its `param_groups`."""
    recipe = Recipe(cls, without(subset(group, inspect.signature(cls).parameters), {"params"}))
    tiny = {  # with one element each
        name: torch.zeros((1,) * params[name].ndim, dtype=params[name].dtype, device=params[name].device)
        for name in names
    }
    entries: dict[str, dict[str, Any]] = first_state(recipe, tiny)["state"]
    return Kept(entries, not_started(recipe, opt_state, step), empty=step == 0 and cls is torch.optim.SGD)
