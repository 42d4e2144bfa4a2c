"""Argument checks for `ll.optimizer`, each with a message that says what to write instead."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from enum import Enum
from typing import Any, NoReturn

import torch
from torch.optim.lr_scheduler import LRScheduler

from looplib._core.advice import SCHEDULES
from looplib._core.checks import check, few, named
from looplib._core.updates import keywords


class NotGiven(Enum):
    """Default of `lr`, since no learning rate is right for all models."""

    LR = "no lr"

    def __repr__(self) -> str:  # in signatures that editors show
        return "required"


_NO_RATES = bool, str, list, tuple, Mapping, type(None)


def check_class(cls: Any = None, *parameters: Any, **_: Any) -> None:
    """Raise TypeError for anything but an optimizer class without parameters."""
    name = type(cls).__name__
    check(
        not isinstance(cls, torch.optim.Optimizer),
        f"ll.optimizer needs the class, found an instance of {name}: write ll.optimizer(torch.optim.{name}, lr=...)"
        ", without the parameters. They are in the state",
        TypeError,
    )
    near = dict(zip(map(str.lower, dir(torch.optim)), dir(torch.optim), strict=True))
    in_the_state = "The parameters are in the state, ll.init_state(model, optimizer)"
    check(
        isinstance(cls, type),
        f"ll.optimizer needs an optimizer class, found {named(cls)}: write ll.optimizer(torch.optim."
        f"{near.get(str(cls).lower(), 'AdamW')}, lr=...). {in_the_state}",
        TypeError,
    )
    check(
        not any(kind.__module__.startswith("torch.distributed.optim") for kind in cls.__mro__),
        f"{cls.__name__} makes another optimizer's update and talks to the other ranks itself, about its own parameters: "
        "give the class that makes the update, ll.optimizer(torch.optim.AdamW, lr=...). To divide its state among the "
        "ranks, shard the model with fully_shard",
        TypeError,
    )
    check(
        callable(getattr(cls, "step", None)),
        f"{cls.__name__} is no optimizer class: it needs the interface of torch.optim.Optimizer",
        TypeError,
    )
    taken = [*inspect.signature(cls).parameters]
    check(
        "params" in taken,
        f"{cls.__name__} takes {', '.join(taken[:1]) or 'nothing'} where optimizers take params. If it wraps another "
        "optimizer, parameters and state are in that one, out of reach of a pure update: give the class that it "
        "wraps; looplib's own wrappers are in ll.optim and ll.contrib",
        TypeError,
    )
    check(
        not parameters,
        f"ll.optimizer takes no parameters, found {few([*map(named, parameters)], 1)} after the class: write "
        f"ll.optimizer({cls.__name__}, lr=...). {in_the_state}",
        TypeError,
    )


def check_lr(lr: Any) -> None:
    """Raise TypeError for an `lr` that is neither a number nor a function of the step."""
    advice = "a number such as 1e-3, or a schedule such as ll.warmup_cosine(1e-3, warmup=100, total=2000)"
    check(lr is not NotGiven.LR, f"ll.optimizer needs a learning rate: give lr=, {advice}", TypeError)
    scheduler = lr if isinstance(lr, type) else type(lr)
    if issubclass(scheduler, LRScheduler):
        instead = SCHEDULES.get(scheduler.__name__, SCHEDULES["LRScheduler"])
        raise TypeError(
            f"lr is {named(lr)}, which changes an optimizer in place; give a schedule, a function of the step. In "
            f"place of {scheduler.__name__}: lr={instead}. There is no step() to call"
        )
    check(not isinstance(lr, _NO_RATES), f"lr is {named(lr)}; give {advice}", TypeError)
    if callable(lr):
        try:
            first = lr(0)
        except TypeError as error:
            raise TypeError(f"lr is {named(lr)}, and lr(0) raised {error}; give {advice}") from error
        what = f"lr(0) is {named(first)}; a schedule gives a number for each step"
        check(not isinstance(first, _NO_RATES), what, TypeError)


def check_groups(groups: Any) -> None:
    """Raise TypeError for groups that are not (predicate, hyperparameters)."""
    for group in groups:
        match group:
            case (predicate, Mapping()) if callable(predicate):
                continue
        raise TypeError(
            "a group is (predicate(name, tensor), {hyperparameter: value}), such as (lambda name, tensor: "
            f'tensor.ndim < 2, {{"weight_decay": 0.0}}), in a list of them; found {group!r}'
        )


def refuse_hyperparameters(cls: type, error: TypeError, values: Mapping[str, Any]) -> NoReturn:
    """Raise TypeError for a class that could not be created with these hyperparameters."""
    known = [*inspect.signature(cls).parameters]
    taken = keywords(cls)
    if unknown := [name for name in values if name not in (taken or values)]:
        known.remove("params")
        message = f"{cls.__name__} has no hyperparameter {', '.join(unknown)}; it takes {', '.join(known)}"
        raise TypeError(message) from error
    given = ", ".join(f"{name}={value!r}" for name, value in values.items())
    raise TypeError(f"{cls.__name__} cannot be made with {given}: {error}") from error
