"""Chosen modules whose forward passes a loss wrapper replaces while its loss function runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

import torch
from torch import nn

from looplib._core import modules as _modules
from looplib._core.checks import check

R = TypeVar("R")

Classes: TypeAlias = type[nn.Module] | tuple[type[nn.Module], ...]


def with_forwards(
    loss_fn: Callable[[nn.Module, Any], R],
    modules: Classes | Callable[[str, nn.Module], bool],
    wrap: Callable[[nn.Module], Callable[..., Any]],
    who: str,
) -> Callable[[nn.Module, Any], R]:
    """A loss function during which `wrap(module)` replaces the forward pass of each outermost chosen module.

    Without gradients, as in evaluation, nothing is replaced.
    """
    choose = choice(modules)

    def wrapped(model: nn.Module, batch: Any) -> R:
        if not torch.is_grad_enabled():
            return loss_fn(model, batch)
        chosen = outermost(model, choose, who)
        forwards = [vars(module).get("forward") for module in chosen]
        try:
            for module in chosen:
                vars(module)["forward"] = wrap(module)
            return loss_fn(model, batch)
        finally:
            _hold_signals = True
            _put_back(chosen, forwards)

    return wrapped


def _put_back(modules: list[nn.Module], forwards: list[Any]) -> None:
    """Restore the entries `forward` of modules' dictionaries. None stands for a module that had none."""
    for module, forward in zip(modules, forwards, strict=True):
        vars(module)["forward"] = forward
        if forward is None:
            del vars(module)["forward"]


def choice(modules: Any) -> Callable[[str, nn.Module], bool]:
    classes = modules if isinstance(modules, tuple) else (modules,)
    if classes and all(map(_is_module_class, classes)):
        return lambda name, module: isinstance(module, classes)
    check(
        callable(modules) and not isinstance(modules, (type, nn.Module)),
        f"modules is {modules!r}; give a class of modules, a tuple of classes, or a function (name, module) -> bool",
        TypeError,
    )
    predicate: Callable[[str, nn.Module], bool] = modules
    return predicate


def _is_module_class(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, nn.Module)


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
