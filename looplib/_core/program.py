"""Description of a train step, for the comparison of ranks at the first step: its optimizer and gradient wrappers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from looplib._core import kinds
from looplib._core.descriptions import described
from looplib._core.first_step import of_optimizer

_FREE = {"retry_on_oom", "gradient_histograms"}  # may differ between ranks, since they do not change the gradient


def program_of(grad_fn: Any, description: Mapping[str, Any]) -> dict[str, Any]:
    """Facts about the step of a gradient function and an optimizer, given by its description."""
    return {**of_optimizer(described(description)), "grad_fn": _wrappers(grad_fn)}


def _wrappers(grad_fn: Any) -> str:
    """Wrappers that change the gradient of the whole step, as far as they are marked, with their settings.

    Those of a rank's own part, such as `accumulate`, may have different settings where devices have different memory.
    """
    names = []
    while (made := kinds.made(grad_fn)) is not None:
        if made.whole_step and made.name not in _FREE:
            names.append(f"{made.name}({', '.join(['...', *_settings(grad_fn)])})")
        grad_fn = made.inner
    return " around ".join(names) or "not wrapped"


def _settings(grad_fn: Any) -> list[str]:
    if (call := getattr(grad_fn, "call", None)) is None:
        return []
    named = [f"{name}={described(value)}" for name, value in call.settings.items()]
    return [*map(str, map(described, call.args[1:])), *named]
