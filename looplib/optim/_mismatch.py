"""Errors for a state that was created by a different optimizer."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch

from looplib.optim._first_state import first_state
from looplib.optim._recipe import Recipe


def mismatch(recipe: Recipe, opt_state: Any, name: str | None = None, expected: Any = None) -> Exception:
    """Error for an `opt_state` that this class cannot continue. `name` is a parameter whose state shows the mismatch."""
    own = recipe.cls.__name__
    advice = (
        f"Make the state with this optimizer, ll.init_state(model, ll.optimizer({own}, ...)), or a new opt_state by "
        "optimizer.init(params)"
    )
    if opt_state is None:
        return ValueError(f"the state was made without an optimizer, and {own} is to update it. {advice}")
    if not isinstance(opt_state, Mapping) or not isinstance(opt_state.get("state"), Mapping):
        wrapped = isinstance(opt_state, Mapping) and {"inner_state", "inner_states"} & opt_state.keys()
        kind = "that of a wrapped optimizer" if wrapped else f"a {type(opt_state).__name__}"
        keys = f" with {', '.join(map(str, opt_state))}" if isinstance(opt_state, Mapping) else ""
        return ValueError(f"opt_state is {kind}{keys}, and {own} without a wrapper is to update it. {advice}")
    kept = opt_state["state"].get(name, {})
    makers = " or ".join(makers_of(frozenset(kept))) or "another optimizer"
    return ValueError(
        f"opt_state is that of {makers}, and {own} is to update it: for {name} it holds "
        f"{', '.join(map(str, kept)) or 'nothing'}, and {own} keeps {', '.join(map(str, expected or ())) or 'nothing'}. "
        f"{advice}"
    )


def makers_of(keys: frozenset[str]) -> list[str]:
    """The torch.optim classes that keep these keys for a parameter."""
    return [name for name, kept in _keys_of_torch().items() if keys in kept]


@functools.cache
def _keys_of_torch() -> dict[str, list[frozenset[str]]]:
    options: dict[str, list[dict[str, Any]]] = {
        "SGD": [{}, {"momentum": 0.9}],
        "Adam": [{}, {"amsgrad": True}],
        "AdamW": [{}, {"amsgrad": True}],
        "RMSprop": [{}, {"momentum": 0.9}, {"centered": True}, {"momentum": 0.9, "centered": True}],
    }
    names = (
        "SGD",
        "Adam",
        "AdamW",
        "RMSprop",
        "Adadelta",
        "Adafactor",
        "Adagrad",
        "Adamax",
        "ASGD",
        "NAdam",
        "RAdam",
    )
    return {
        name: [
            frozenset(
                first_state(Recipe(getattr(torch.optim, name), {"lr": 0.1, **chosen}), {"": torch.ones(2, 2)})[
                    "state"
                ][""]
            )
            for chosen in options.get(name, [{}])
        ]
        for name in (*names, "Rprop", "Muon", "SparseAdam")
        if hasattr(torch.optim, name)
    }
