"""Chosen modules whose forward passes a loss wrapper replaces while its loss function runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

import torch
from torch import nn

from looplib._core import modules as _modules
from looplib._core.checks import check
from looplib._core.kinds import check_kind
from looplib._core.records import with_repr

R = TypeVar("R")

Classes: TypeAlias = type[nn.Module] | tuple[type[nn.Module], ...]


def with_forwards(
    loss_fn: Callable[[nn.Module, Any], R],
    modules: Classes | Callable[[str, nn.Module], bool],
    wrap: Callable[[nn.Module], Callable[..., Any]],
    made_by: Callable[..., Any],
) -> Callable[[nn.Module, Any], R]:
    """A loss function during which `wrap(module)` replaces the forward pass of each outermost chosen module.

    Without gradients, as in evaluation, nothing is replaced.
    """
    name = made_by.__name__
    check_kind(loss_fn, name, "loss_fn")
    choose = choice(modules)

    def wrapped(model: nn.Module, batch: Any) -> R:
        if not torch.is_grad_enabled():
            return loss_fn(model, batch)
        chosen = outermost(model, choose, name)
        forwards = [vars(module).get("forward") for module in chosen]
        try:
            for module in chosen:
                vars(module)["forward"] = wrap(module)
            return loss_fn(model, batch)
        finally:
            _hold_signals = True
            for module, forward in zip(chosen, forwards, strict=True):
                vars(module)["forward"] = forward
                if forward is None:  # it had none of its own
                    del vars(module)["forward"]

    return with_repr(wrapped, made_by, loss_fn, modules)


def choice(modules: Any) -> Callable[[str, nn.Module], bool]:
    if isinstance(modules, (type, tuple)):
        return lambda name, module: isinstance(module, modules)
    check(
        callable(modules) and not isinstance(modules, nn.Module),
        f"modules is {modules!r}; give a class of modules, a tuple of classes, or a function (name, module) -> bool",
        TypeError,
    )
    predicate: Callable[[str, nn.Module], bool] = modules
    return predicate


def outermost(model: nn.Module, choose: Callable[[str, nn.Module], bool], who: str) -> list[nn.Module]:
    modules = list(_modules.named_modules(model))
    chosen = [module for name, module in modules if choose(name, module)]
    if not chosen:
        classes = sorted({type(module).__name__ for _, module in modules})
        raise ValueError(
            f"{who} chose no module of this {type(model).__name__}, which has the classes "
            f"{', '.join(classes)}: choose one of these, most often the block that the model repeats"
        )
    within = {inner for module in chosen for inner in module.modules() if inner is not module}
    return [module for module in chosen if module not in within]
