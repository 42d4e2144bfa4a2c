"""Optimizer descriptions for checkpoints: the class, its hyperparameters, and its wrappers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from looplib._core.descriptions import closure_settings, described
from looplib.types import Optimizer


def description_of(cls: type, hyperparameters: Mapping[str, Any], groups: Any) -> dict[str, Any]:
    """The class, the given hyperparameters, and those of the groups in order."""
    description = {"class": described(cls), **described(hyperparameters)}
    for number, (predicate, values) in enumerate(groups):
        description[f"group {number}"] = {"members": described(predicate), **described(values)}
    return description


def description_of_wrapper(optimizer: Optimizer, update: Any) -> dict[str, Any]:
    """Description of a wrapped optimizer, with the wrapper's name and settings."""
    wrapper = update.__qualname__.partition(".")[0].lstrip("_")
    return {**optimizer.description, wrapper: {"wraps": True, **closure_settings(update)}}
