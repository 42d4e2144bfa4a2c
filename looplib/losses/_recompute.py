"""Activation checkpointing: trade time for memory.

A chosen module keeps only its inputs and runs again when its gradient is needed. The second run must repeat the first
one: with the same random numbers, which torch takes care of, and with the buffers and hooks of that moment, which
torch does not. `recompute` therefore restores these for the second run and discards its changes to buffers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from operator import itemgetter
from typing import Any, TypeAlias, TypeVar

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from looplib._core import torch_private
from looplib._core import tracing as _tracing
from looplib.losses._chosen_modules import Classes, with_forwards

R = TypeVar("R")

# A module's dictionary, a key in it, and its value when the module started to run.
Place: TypeAlias = tuple[dict[str, Any], str, Any]


def recompute(
    loss_fn: Callable[[nn.Module, Any], R], modules: Classes | Callable[[str, nn.Module], bool]
) -> Callable[[nn.Module, Any], R]:
    """Activation checkpointing: recompute the activations of chosen modules in the backward pass.

    >>> import looplib as ll, torch
    >>> model = torch.nn.Sequential(*[torch.nn.TransformerEncoderLayer(8, 2, 16) for _ in range(4)])
    >>> def loss_fn(model, x):
    ...     return model(x).square().mean()
    >>> lean = ll.make_grad_fn(model, ll.losses.recompute(loss_fn, torch.nn.TransformerEncoderLayer))
    >>> state, x = ll.init_state(model), torch.randn(5, 3, 8)
    >>> grads = ll.make_grad_fn(model, loss_fn)(state, x).grads
    >>> all(torch.equal(grad, grads[name]) for name, grad in lean(state, x).grads.items())
    True

    Gradients and buffers are bitwise the same as without it, dropout and BatchNorm included, because random numbers,
    buffers and hooks are restored for the second run. If the whole model is recomputed, a step takes about a third
    longer. A copy of each chosen module's buffers is kept until then. A good choice is the block that the model repeats.
    Chosen modules inside another chosen module are recomputed with it. Without gradients, as in evaluation, it has no
    effect.

    The model itself is unchanged after the loss, and so are its parameter names. Hooks inside a chosen module also
    run in the second run. `torch.func` cannot differentiate through it. Under `torch.compile`, a chosen module with
    buffers or hooks breaks the graph.

    Args:
        loss_fn: any loss function that `make_grad_fn` accepts.
        modules: a module class, a tuple of classes, or `(name, module) -> bool` with names as in `named_modules`.

    Raises:
        ValueError: when called, if the model has no such module.
        TypeError: `modules` is of a different type.

    Source: Chen et al., "Training deep nets with sublinear memory cost", 2016; `torch.utils.checkpoint`.
    """
    return with_forwards(loss_fn, modules, _recomputed, recompute)


def _recomputed(module: nn.Module) -> Callable[..., Any]:
    forward = module.forward
    if _tracing.differentiated():  # derivatives of a whole step need the whole graph
        return forward

    def recomputed(*args: Any, **kwargs: Any) -> Any:
        # Pass them all by position: only there does torch look for devices whose random state to save.
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
        buffers = torch_private.own_buffers(inner)
        yield from _entries(buffers, buffers)
        if inner is not module:
            yield from filter(itemgetter(2), _entries(vars(inner), _HOOKS))


def _entries(owner: dict[str, Any], keys: Iterable[str]) -> list[Place]:
    return [(owner, key, owner[key]) for key in keys]


def _replayed(run: Callable[..., R], places: list[Place]) -> Callable[..., R]:
    """Wrap `run` so that each later call finds the same values in these dictionaries as the first call did."""
    kept = _copies(places)
    ran = False

    def replayed(*values: Any) -> R:
        nonlocal ran
        if not ran:
            ran = True
            return run(*values)
        now = [(owner, key, owner[key]) for owner, key, _ in places]
        try:
            _put(_copies(kept))
            return run(*values)
        finally:
            _put(now)

    return replayed


def _copies(places: list[Place]) -> list[Place]:
    """The same entries with copied values; entries that share a value share its copy."""
    values = {id(value): value for _, _, value in places}
    copies = {key: v.detach().clone() if isinstance(v, Tensor) else copy.copy(v) for key, v in values.items()}
    return [(owner, key, copies[id(value)]) for owner, key, value in places]


def _put(places: list[Place]) -> None:
    for owner, key, value in places:
        owner[key] = value
