"""Arguments of a model, picked from a batch by the signature of its `forward`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from torch import nn

from looplib._core.checks import check, warn
from looplib._core.mappings import without


def model_inputs(model: nn.Module, batch: Mapping[str, Any]) -> dict[str, Any]:
    """Columns of a batch that the model's `forward` takes, to call it with.

    >>> import looplib as ll, torch
    >>> class Net(torch.nn.Module):
    ...     def forward(self, pixels, mask=None):
    ...         return pixels.sum()
    >>> ll.losses.model_inputs(Net(), {"pixels": torch.ones(2), "mask": None})
    {'pixels': tensor([1., 1.]), 'mask': None}

    It looks through DDP, peft and torch.compile. If it leaves a column out, it warns about it by name. If `forward` has
    `**kwargs` beside other arguments, these get no columns, as in transformers' Trainer. If it has `**kwargs` alone, they
    get all.

    Args:
        model: the model that will be called with the result: `model(**ll.losses.model_inputs(model, batch))`.
        batch: columns by name.

    Raises:
        TypeError: the batch is not a mapping.
    """
    check_columns(batch)
    inner: Any = innermost(model)
    takes = arguments_of(type(inner).forward)
    if takes == {"**"}:
        return dict(batch)
    if left_out := [name for name in batch if name not in takes]:
        named = ", ".join(sorted(takes - {"**"})) or "no arguments by name"
        warn(f"columns left out of the batch: {', '.join(left_out)}; {type(inner).__name__}.forward takes {named}")
    return without(batch, left_out)


def check_columns(batch: Any) -> None:
    found = type(batch).__name__
    check(isinstance(batch, Mapping), f"the batch is a {found}; give a dict of arguments of the model", TypeError)


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
    return getattr(model, "module", None) if isinstance(model, nn.parallel.DistributedDataParallel) else None


@cache
def arguments_of(forward: Callable[..., Any]) -> frozenset[str]:
    """Names of the arguments of a `forward`, and "**" if it takes any other name."""
    parameters = [*inspect.signature(forward).parameters.values()][1:]  # after self
    return frozenset("**" if p.kind is p.VAR_KEYWORD else p.name for p in parameters)
