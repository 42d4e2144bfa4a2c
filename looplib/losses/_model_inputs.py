"""Arguments of a model, picked from a batch by the signature of its `forward`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from torch import nn

from looplib._core.checks import check, warn
from looplib._core.mappings import pick, without


def model_inputs(model: nn.Module, batch: Mapping[str, Any]) -> dict[str, Any]:
    """Columns of a batch that the model's `forward` takes, to call it with.

    >>> import looplib as ll, torch
    >>> class Net(torch.nn.Module):
    ...     def forward(self, pixels, mask=None):
    ...         return pixels.sum()
    >>> ll.losses.model_inputs(Net(), {"pixels": torch.ones(2), "mask": None})
    {'pixels': tensor([1., 1.]), 'mask': None}

    It looks through DDP, peft and torch.compile. If it leaves a column out, it warns about it by name, once for each
    set of columns. If `forward` has `**kwargs` beside other arguments, these get no columns, as in transformers'
    Trainer. If it has `**kwargs` alone, they get all.

    Args:
        model: the model that will be called with the result: `model(**ll.losses.model_inputs(model, batch))`.
        batch: columns by name.

    Raises:
        TypeError: the batch is not a mapping, or an argument of `forward` without a default is missing.
    """
    advice = "give a dict whose keys are arguments of the model"
    check(isinstance(batch, Mapping), f"the batch is a {type(batch).__name__}; {advice}", TypeError)
    inner: Any = innermost(model)
    return pick(batch, _taken(type(inner).forward, type(inner).__name__, tuple(map(str, batch))))


def innermost(model: Any) -> Any:
    """The model within peft, DDP or torch.compile."""
    while (inner := _inner(model)) is not None:
        model = inner
    return model


def _inner(model: Any) -> Any:
    if callable(get_base_model := getattr(model, "get_base_model", None)):  # peft
        return get_base_model()
    if compiled := getattr(model, "_orig_mod", None):
        return compiled
    return getattr(model, "module", None) if isinstance(model, _WRAPPERS) else None


_WRAPPERS = (nn.parallel.DistributedDataParallel, nn.DataParallel)


def text_columns(columns: Mapping[str, Any]) -> list[str]:
    """Names of columns of strings."""
    return [name for name, column in columns.items() if isinstance(_first(column), str)]


def _first(column: Any) -> Any:
    return next(iter(column), None) if isinstance(column, list | tuple) else column


@cache
def arguments_of(forward: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """Arguments that a `forward` takes by name, and "**" if it takes any other name."""
    parameters = [*inspect.signature(forward).parameters.values()][1:]  # after self
    return {
        "**" if p.kind is p.VAR_KEYWORD else p.name: p
        for p in parameters
        if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY, p.VAR_KEYWORD)
    }


@cache
def _taken(forward: Callable[..., Any], name: str, columns: tuple[str, ...]) -> tuple[str, ...]:
    arguments = arguments_of(forward)
    if [*arguments] == ["**"]:
        return columns
    named = without(arguments, {"**"})
    takes = f"{name}.forward takes {', '.join(named) or 'no arguments by name'}"
    required = [name for name, parameter in named.items() if parameter.default is parameter.empty]
    missing = ", ".join(name for name in required if name not in columns)
    given = ", ".join(columns) or "nothing"
    check(not missing, f"{takes}; the batch has {given}, but not {missing}", TypeError)
    if left_out := [name for name in columns if name not in named]:
        warn(f"columns left out of the batch: {', '.join(left_out)}; {takes}")
    return tuple(name for name in columns if name in named)
