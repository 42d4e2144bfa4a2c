"""Arguments of a model, picked from a batch by the signature of its `forward`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from torch import nn

from looplib._core.notices import warn


def model_inputs(model: nn.Module, batch: Mapping[str, Any]) -> dict[str, Any]:
    """Columns of a batch that the model's `forward` takes, to call it with.

    >>> import looplib as ll, torch
    >>> class Net(torch.nn.Module):
    ...     def forward(self, pixels, mask=None):
    ...         return pixels.sum()
    >>> ll.losses.model_inputs(Net(), {"pixels": torch.ones(2), "mask": None})
    {'pixels': tensor([1., 1.]), 'mask': None}

    It looks through DDP, peft and torch.compile. If it leaves a column out, it warns about it by name, once for each set
    of columns. `**kwargs` of a `forward` with other arguments take no columns, as in transformers' Trainer; a `forward`
    of `**kwargs` alone takes all.

    Args:
        model: the model that will be called with the result: `model(**ll.losses.model_inputs(model, batch))`.
        batch: columns by name.

    Raises:
        TypeError: the batch is not a mapping, or an argument of `forward` without a default is missing.
    """
    if not isinstance(batch, Mapping):
        raise TypeError(f"the batch is a {type(batch).__name__}; give a dict whose keys are arguments of the model")
    inner: Any = innermost(model)
    taken = _taken(type(inner).forward, type(inner).__name__, tuple(map(str, batch)))
    return {name: batch[name] for name in taken}


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
    return [
        name
        for name, column in columns.items()
        if isinstance(column, str) or (isinstance(column, list | tuple) and column and isinstance(column[0], str))
    ]


def parameters_of(forward: Callable[..., Any]) -> list[inspect.Parameter]:
    """Parameters of a `forward` after self."""
    return list(inspect.signature(forward).parameters.values())[1:]


@cache
def _taken(forward: Callable[..., Any], name: str, columns: tuple[str, ...]) -> tuple[str, ...]:
    parameters = parameters_of(forward)
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    if not named and any(p.kind is p.VAR_KEYWORD for p in parameters):
        return columns
    takes = f"{name}.forward takes {', '.join(p.name for p in named) or 'no arguments by name'}"
    if missing := [p.name for p in named if p.default is p.empty and p.name not in columns]:
        raise TypeError(f"{takes}; the batch has {', '.join(columns) or 'nothing'}, but not {', '.join(missing)}")
    taken = {p.name for p in named} & set(columns)
    if left_out := [column for column in columns if column not in taken]:
        warn(f"columns left out of the batch: {', '.join(left_out)}; {takes}")
    return tuple(column for column in columns if column in taken)
