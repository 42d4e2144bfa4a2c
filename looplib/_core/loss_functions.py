"""Checks of functions of a model and a batch before they are called: `loss_fn`, `metric_fn`, `predict_fn`."""

from __future__ import annotations

import inspect
from traceback import walk_tb
from typing import Any

from torch import Tensor, nn

from looplib._core.checks import check, named
from looplib._core.kinds import MODELS, check_kind, positional
from looplib._core.memory import out_of_memory

_RETURNS = {
    "loss_fn": "return nn.functional.cross_entropy(model(inputs), targets)",
    "metric_fn": 'return {"loss": nn.functional.cross_entropy(model(inputs), targets)}',
    "predict_fn": "return model(inputs)",
}


def check_function_of_model(model: Any, function: Any, who: str, name: str) -> None:
    """Raise TypeError unless `who(model, function)` was given a module and a function `name(model, batch)`."""
    swapped = isinstance(function, nn.Module) and not isinstance(model, nn.Module) and callable(model)
    check(not swapped, f"{who} takes the model first: write {who}(model, {name})", TypeError)
    check(
        not _of_torch(function),
        f"{who} got {named(function)}, which takes outputs and targets; {name} is called as {name}(model, batch). "
        f"Write a function around it:\n    def {name}(model, batch):\n        inputs, targets = batch\n"
        f"        {_RETURNS[name]}",
        TypeError,
    )
    names = positional(function, required=True) if inspect.isroutine(function) else []
    listed = ", ".join(names)
    reverse = f"{who} got {name}({listed}); the model comes first: def {name}({', '.join(names[::-1])})"
    check([name in MODELS for name in names] != [False, True], reverse, TypeError)
    check(
        len(names) <= 2,
        f"{who} got {name}({listed}), which is called as {name}(model, batch): take the batch as one argument, and unpack "
        f"it inside, {', '.join(names[1:])} = batch",
        TypeError,
    )
    check_kind(function, who, "loss_fn")


def _of_torch(function: Any) -> bool:
    """True for torch's own losses and functions: a module, a class of modules, or a plain function."""
    cls = function if isinstance(function, type) else type(function)
    package = str(getattr(function, "__module__", "")).partition(".")[0]
    return issubclass(cls, nn.Module) or (inspect.isroutine(function) and package == "torch")


def note_batch(error: Exception, batch: Any) -> None:
    """Add a description of the batch to an error from the user's function or torch."""
    if not _raised_here(error) and not out_of_memory(error):
        note = f"The batch was {described_batch(batch)}."
        if note not in getattr(error, "__notes__", ()):
            error.add_note(note)


def _raised_here(error: Exception) -> bool:
    """True if looplib itself raised the error."""
    modules = [str(frame.f_globals.get("__name__")) for frame, _ in walk_tb(error.__traceback__)]
    return "".join(modules[-1:]).startswith("looplib.")


def described_batch(batch: Any) -> str:
    """Description of a batch in words.

    >>> import torch
    >>> described_batch((torch.zeros(6, 4), {"label": torch.zeros(6, dtype=torch.int64)}))
    'a tuple (float32 (6, 4), a dict {label: int64 (6,)})'
    """
    if isinstance(batch, Tensor):
        return f"{str(batch.dtype).removeprefix('torch.')} {tuple(batch.shape)}"
    if isinstance(batch, dict):
        members = [f"{key}: {described_batch(value)}" for key, value in batch.items()]
        return f"a dict {{{', '.join(members[:20])}}}"
    if isinstance(batch, (tuple, list)):
        return f"{named(batch)} ({', '.join(map(described_batch, batch[:20]))})"
    return named(batch)
