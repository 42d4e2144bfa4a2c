"""Memory for time: activations that the backward pass makes anew.

A chosen module keeps its inputs alone, and runs again when its gradient is wanted. The second run has to be the
first one over again: with the same random numbers, which torch sees to, and with the buffers and hooks of that
moment, which it does not; so they are put back for it, and what it does to buffers is thrown away.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from looplib._core import interrupts as _interrupts
from looplib._core import modules as _modules
from looplib._core import torch_private
from looplib._core import tracing as _tracing
from looplib._core.kinds import check_kind

R = TypeVar("R")


Classes: TypeAlias = type[nn.Module] | tuple[type[nn.Module], ...]


# A place in a dictionary of some module, with what stood there when the module began to run.
Place: TypeAlias = tuple[dict[str, Any], str, Any]


def recompute(
    loss_fn: Callable[[nn.Module, Any], R], modules: Classes | Callable[[str, nn.Module], bool]
) -> Callable[[nn.Module, Any], R]:
    """Keep no activations of the chosen modules, and compute them again in the backward pass.

    >>> import looplib as ll, torch
    >>> model = torch.nn.Sequential(*[torch.nn.TransformerEncoderLayer(8, 2, 16) for _ in range(4)])
    >>> def loss_fn(model, x):
    ...     return model(x).square().mean()
    >>> lean = ll.make_grad_fn(model, ll.losses.recompute(loss_fn, torch.nn.TransformerEncoderLayer))
    >>> state, x = ll.init_state(model), torch.randn(5, 3, 8)
    >>> grads = ll.make_grad_fn(model, loss_fn)(state, x).grads
    >>> all(torch.equal(grad, grads[name]) for name, grad in lean(state, x).grads.items())
    True

    Gradients and buffers have the same bits as without it, dropout and BatchNorm included; a step takes about a
    third longer when all of the model is recomputed. A good choice is the block that the model repeats. A chosen
    module within a chosen one is part of it. Where no gradient is taken, it does nothing.

    The model is as it was after the loss, with all its names. Hooks within a chosen module run in the second run too.
    `torch.func`, and so an ensemble, cannot differentiate through it. Under `torch.compile` a chosen module with
    buffers or hooks breaks the graph.

    Args:
        loss_fn: any kind that `make_grad_fn` takes.
        modules: a class of modules, a tuple of them, or `(name, module) -> bool`, with names as in `named_modules`.

    Raises:
        ValueError: when it is called, and the model has no such module.
        TypeError: `modules` of another kind.

    Source: Chen et al., "Training deep nets with sublinear memory cost", 2016; `torch.utils.checkpoint`.
    """
    check_kind(loss_fn, "recompute", "loss_fn")
    choose = choice(modules)

    def recomputing(model: nn.Module, batch: Any) -> R:
        if not torch.is_grad_enabled() or _tracing.differentiated():  # whose graph is held in whole
            return loss_fn(model, batch)
        chosen = outermost(model, choose, "recompute")
        own = [vars(module).get("forward") for module in chosen]
        thread = threading.get_ident()
        try:
            for module in chosen:
                vars(module)["forward"] = _recomputed(module)
            return loss_fn(model, batch)
        finally:
            _interrupts.begin_hold(thread)
            try:
                for module, forward in zip(chosen, own, strict=True):
                    vars(module)["forward"] = forward
                    if forward is None:
                        del vars(module)["forward"]
            finally:
                _interrupts.end_hold(thread)
                _interrupts.deliver()

    return recomputing


def choice(modules: Any) -> Callable[[str, nn.Module], bool]:
    classes = modules if isinstance(modules, tuple) else (modules,)
    if classes and all(isinstance(cls, type) and issubclass(cls, nn.Module) for cls in classes):
        return lambda name, module: isinstance(module, classes)
    if not callable(modules) or isinstance(modules, (type, nn.Module)):
        raise TypeError(
            f"modules is {modules!r}; give a class of modules, a tuple of classes, or a function "
            "(name, module) -> bool"
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


def _recomputed(module: nn.Module) -> Callable[..., Any]:
    forward = module.forward

    def recomputed(*args: Any, **kwargs: Any) -> Any:
        # By place all of them: torch looks at these alone for the devices whose random numbers it keeps.
        def run(*values: Any) -> Any:
            return forward(*values[: len(args)], **dict(zip(kwargs, values[len(args) :], strict=True)))

        places = list(_places(module))
        again = _replayed(run, places) if places else run
        return checkpoint(again, *args, *kwargs.values(), use_reentrant=False)

    return recomputed


_HOOKS = (
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
)


def _places(module: nn.Module) -> Iterator[Place]:
    for inner in module.modules():
        for key, buffer in torch_private.own_buffers(inner).items():
            yield torch_private.own_buffers(inner), key, buffer
        for key in _HOOKS:
            if inner is not module and (hooks := vars(inner)[key]):
                yield vars(inner), key, hooks


def _replayed(run: Callable[..., R], places: list[Place]) -> Callable[..., R]:
    """A function that finds in these places, each time after the first, what it found there the first time."""
    kept = _copies(places)
    ran = False

    def replayed(*values: Any) -> R:
        nonlocal kept, ran
        if not ran:
            ran, versions = True, [getattr(value, "_version", None) for _, _, value in places]
            out = run(*values)
            kept = [
                place if _unwritten(place[2], version) else saved
                for saved, place, version in zip(kept, places, versions, strict=True)
            ]
            return out
        now = [(owner, key, owner[key]) for owner, key, _ in places]
        try:
            _put(_copies(kept))
            return run(*values)
        finally:
            _put(now)

    return replayed


def _unwritten(value: Any, version: int | None) -> bool:
    # Such as a causal mask, which may be large and needs no copy. torch counts the writes to a tensor, but batch
    # norm's kernels write their float statistics uncounted.
    return isinstance(value, Tensor) and not value.is_floating_point() and torch_private.version(value) == version


def _copies(places: list[Place]) -> list[Place]:
    """The places with copies of their values, one for all that share a value."""
    copies: dict[int, Any] = {}
    for _, _, value in places:
        if id(value) not in copies:
            copies[id(value)] = value.detach().clone() if isinstance(value, Tensor) else copy.copy(value)
    return [(owner, key, copies[id(value)]) for owner, key, value in places]


def _put(places: list[Place]) -> None:
    for owner, key, value in places:
        owner[key] = value
