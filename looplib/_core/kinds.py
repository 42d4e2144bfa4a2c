"""Kinds of functions: gradient function, step, predicate, logger, and so on.

A function that looplib made has its kind in its record. Of a plain function, only the parameters can be inspected.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from torch import nn

from looplib._core.checks import check, named
from looplib._core.records import made

T = TypeVar("T")
C = TypeVar("C")

# Kinds of arguments: a name for messages, the number of arguments, and the function that makes them.
KINDS = {
    "grad_fn": (
        "a grad_fn",
        3,
        "a grad_fn(state, batch, request) -> Gradients, as ll.make_grad_fn(model, loss_fn) returns",
    ),
    "train_step": (
        "a train step",
        2,
        "a train step(state, batch) -> (state, metrics), as ll.make_train_step(grad_fn, optimizer) returns",
    ),
    "eval_step": (
        "an eval step",
        2,
        'an eval step(state, batch) -> {"loss": ll.Mean(total, weight)}, as ll.make_eval_step(model, metric_fn) returns',
    ),
    "predict_step": ("a predict step", 2, "a predict step, as ll.make_predict_step(model, predict_fn) returns"),
    "optimizer": (
        "an optimizer",
        None,
        "what ll.optimizer returns, such as ll.optimizer(torch.optim.AdamW, lr=1e-3)",
    ),
    "model": ("a module", None, "a torch.nn.Module"),
    "loss_fn": ("a loss function", 2, "a function (model, batch) -> loss"),
    "predicate": ("a predicate", 1, "a predicate, such as ll.every_n_steps(100)"),
    "schedule": ("a schedule", 1, "a number or a schedule, such as ll.warmup_cosine(...)"),
    "logger": ("a logger", 2, "a logger, such as ll.jsonl(path)"),
    "loader": ("a loader", 1, "a loader, as ll.make_loader returns"),
    "state": ("a state", None, "a state, as ll.init_state returns"),
}

# Usual names of the first parameter of a function of a model.
MODELS = {"model", "module", "net", "network"}

_classes: dict[type, str] = {nn.Module: "model"}


def instances_are(kind: str) -> Callable[[type[C]], type[C]]:
    """Class decorator: set the kind of a class's instances."""

    def register(cls: type[C]) -> type[C]:
        _classes[cls] = kind
        return cls

    return register


def kind_of(value: Any) -> str | None:
    """One of `KINDS`, or None if it is not certain."""
    for cls in type(value).__mro__:
        if cls in _classes:
            return _classes[cls]
    if (record := made(value)) is not None and record.kind is not None:
        return record.kind
    first, second, *_ = [*positional(value), "", ""]
    if second and first in MODELS:
        return "loss_fn"
    return "logger" if second == "values" else None


def check_kind(value: T, who: str, *expected: str, advice: str = "") -> T:
    """Return a value of one of these kinds, or a plain callable that may be. Raises TypeError for another."""
    kind = kind_of(value)
    plain = kind is None and callable(value) and not isinstance(value, type)
    counts = [count for name in expected if (count := KINDS[name][1]) is not None]
    if kind not in expected and not (plain and any(_takes(value, count) for count in counts)):
        wanted = " or ".join(KINDS[name][2] for name in expected)
        raise TypeError(f"{who} got {_named(value, kind)}; give {wanted}{advice}")
    return value


def _takes(value: Any, count: int) -> bool:
    """True if a function can be called with `count` arguments, as far as can be determined."""
    try:
        inspect.signature(value).bind(*[None] * count)
    except TypeError:
        return False
    except ValueError:
        return True  # it has no signature, as some functions in C
    return True


def _named(value: Any, kind: str | None) -> str:
    if (record := made(value)) is not None and record.kind is not None:
        return f"{KINDS[record.kind][0]} (of {record.name})"
    if not inspect.isroutine(value) and record is None:
        return f"a {type(value).__name__}"
    called = f"{getattr(value, '__name__', 'a function')}({', '.join(positional(value))})"
    return called if kind is None else f"{called}, which looks like {KINDS[kind][0]}"


def positional(value: Any, required: bool = False) -> list[str]:
    """Names of the parameters that can be passed by position, or of those that must be."""
    if isinstance(value, type) or not callable(value):
        return []
    allowed = [p for p in parameters_of(value).values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return [p.name for p in allowed if not required or p.default is p.empty]


def parameters_of(function: Any) -> Mapping[str, inspect.Parameter]:
    """Parameters of a function by name; none if Python cannot tell, as for some functions in C."""
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):
        return {}


_ENDINGS = {
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
        f"        {_ENDINGS[name]}",
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
