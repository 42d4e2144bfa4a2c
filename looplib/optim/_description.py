"""Descriptions of optimizers, for checkpoints to hold: the class, its hyperparameters, and what wraps it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from looplib._core.descriptions import closure_settings, described
from looplib.types import Optimizer


def description_of(cls: type, hyperparameters: Mapping[str, Any], groups: Any) -> dict[str, Any]:
    """The class, the hyperparameters that were given, and those of the groups in their order."""
    description = {"class": described(cls), **described(hyperparameters)}
    for number, (predicate, values) in enumerate(groups):
        description[f"group {number}"] = {"members": described(predicate), **described(values)}
    return description


def description_of_wrapper(optimizer: Optimizer, update: Any) -> dict[str, Any]:
    """The description of a wrapped optimizer, with the name and the settings of what wraps it."""
    wrapper = update.__qualname__.partition(".")[0].lstrip("_")
    return {**optimizer.description, wrapper: {"wraps": True, **closure_settings(update)}}
