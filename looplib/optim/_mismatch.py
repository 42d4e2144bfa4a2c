"""Errors for a state that was created by a different optimizer."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from looplib._core.checks import few
from looplib._core.optimizer_states import in_words, kept_in, makers_of
from looplib.optim._recipe import Recipe


def mismatch(recipe: Recipe, opt_state: Any, name: str | None = None, expected: Collection[str] = ()) -> Exception:
    """Error for an `opt_state` that this class cannot continue. `name` is a parameter whose state shows the mismatch."""
    title = recipe.cls.__name__
    advice = (
        f"Make the state with this optimizer, ll.init_state(model, ll.optimizer({title}, ...)), or a new opt_state by "
        "optimizer.init(params)"
    )
    if opt_state is None:
        return ValueError(f"the state was made without an optimizer, and {title} is to update it. {advice}")
    if not isinstance(opt_state, Mapping) or not isinstance(opt_state.get("state"), Mapping):
        title += " without a wrapper" if kept_in(opt_state) else ""
        return ValueError(f"opt_state is {in_words(opt_state)}, and {title} is to update it. {advice}")
    kept = opt_state["state"].get(name, {})
    makers = " or ".join(makers_of(frozenset(kept))) or "another optimizer"
    return ValueError(
        f"opt_state is that of {makers}, and {title} is to update it: for {name} it holds "
        f"{few(kept, 20)}, and {title} keeps {few(expected, 20)}. {advice}"
    )
