"""Errors for a state that was created by a different optimizer."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from looplib._core.checks import few
from looplib._core.optimizer_states import kept_in, wrong_state
from looplib.optim._recipe import Recipe


def mismatch(recipe: Recipe, opt_state: Any, name: str | None = None, expected: Collection[str] = ()) -> ValueError:
    """Error for an `opt_state` that this class cannot continue. `name` is a parameter whose state shows the mismatch."""
    title = recipe.cls.__name__
    if name is None:
        return wrong_state(opt_state, title + " without a wrapper" * bool(kept_in(opt_state)))
    kept = few(opt_state["state"].get(name, {}), 20)
    return wrong_state(opt_state, title, f": for {name} it holds {kept}, and {title} keeps {few(expected, 20)}")
