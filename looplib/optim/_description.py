"""Optimizer descriptions for checkpoints: the class and its hyperparameters. Wrappers add theirs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from looplib._core.descriptions import described


def description_of(cls: type, hyperparameters: Mapping[str, Any], groups: Any) -> dict[str, Any]:
    """The class, the given hyperparameters, and those of the groups in order."""
    description = {"class": described(cls), **described(hyperparameters)}
    for number, (predicate, values) in enumerate(groups):
        description[f"group {number}"] = {"members": described(predicate), **described(values)}
    return description
