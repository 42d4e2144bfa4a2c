"""Activations between the forward and the backward pass: computed twice, or kept on the host.

Both replace the forward passes of chosen modules while the loss function runs. A module that is computed twice keeps
only its inputs and runs again when its gradient is needed. The second run must repeat the first one: with the same
random numbers, which torch takes care of, and with the buffers and hooks of that moment, which torch does not.
`recompute` therefore restores these for the second run and discards its changes to buffers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from operator import itemgetter
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from looplib._core import interrupts as _interrupts
from looplib._core import modules as _modules
from looplib._core import torch_private
from looplib._core.checks import check, is_plain
from looplib._core.graphs import functions_behind
from looplib._core.records import check_kind, with_repr
from looplib._core.tracing import may_offload, may_recompute

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
            _interrupts.waits.depth += 1
            try:
                for module, forward in zip(chosen, forwards, strict=True):
                    vars(module)["forward"] = forward
                    if forward is None:  # it had none of its own
                        del vars(module)["forward"]
            finally:
                _interrupts.waits.depth -= 1

    return with_repr(wrapped, made_by, loss_fn, modules)


def choice(modules: Any) -> Callable[[str, nn.Module], bool]:
    classes = modules if isinstance(modules, tuple) else (modules,)
    if all(isinstance(kind, type) for kind in classes):
        return lambda name, module: isinstance(module, classes)
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
    buffers and hooks are restored for the second run, and so are the weights of `ll.state.apply`. If the whole model is
    recomputed, a step takes about a third longer. A copy of each chosen module's buffers is kept until then. A good choice
    is the block that the model repeats. Chosen modules inside another chosen module are recomputed with it. Without
    gradients, as in evaluation, it has no effect.

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
    if not may_recompute():
        return forward

    def recomputed(*args: Any, **kwargs: Any) -> Any:
        # Pass them all by position: only there does torch look for devices whose random state to save.
        def run(*values: Any) -> Any:
            return forward(*values[: len(args)], **dict(zip(kwargs, values[len(args) :], strict=True)))

        places, lent = list(_places(module)), _modules.running.lent
        again = _replayed(run, places, [] if lent is None else lent.entries) if places or lent else run
        out = checkpoint(again, *args, *kwargs.values(), use_reentrant=False)
        if lent is not None:
            lent.run_again.update(functions_behind(out, (args, kwargs)))
        return out

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


def _replayed(run: Callable[..., R], places: list[Place], lent: list[Place]) -> Callable[..., R]:
    """Wrap `run` so that each later call finds the same values in these dictionaries as the first call did.

    The values of `places` are copied, as a forward pass may write them. Those of `lent` are the weights of a functional call.
    """
    kept = _copies(places)
    ran = False

    def replayed(*values: Any) -> R:
        nonlocal ran
        if not ran:
            ran = True
            return run(*values)
        now = [(owner, key, owner[key]) for owner, key, _ in (*lent, *places)]
        try:
            _put(lent)
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


def offload(
    loss_fn: Callable[[nn.Module, Any], R], modules: Classes | Callable[[str, nn.Module], bool]
) -> Callable[[nn.Module, Any], R]:
    """Activation offloading: keep the activations of chosen modules on the host until the backward pass.

    >>> import looplib as ll, torch
    >>> model = torch.nn.Sequential(*[torch.nn.TransformerEncoderLayer(8, 2, 16) for _ in range(4)])
    >>> def loss_fn(model, x):
    ...     return model(x).square().mean()
    >>> lean = ll.make_grad_fn(model, ll.losses.offload(loss_fn, torch.nn.TransformerEncoderLayer))
    >>> state, x = ll.init_state(model), torch.randn(5, 3, 8)
    >>> grads = ll.make_grad_fn(model, loss_fn)(state, x).grads
    >>> all(torch.equal(grad, grads[name]) for name, grad in lean(state, x).grads.items())
    True

    What a chosen module saves for its backward pass is copied to pinned memory of the host, and back when its
    gradient is needed. The values are the same, so gradients are too, with dropout and BatchNorm. (A view with gaps,
    such as one head of an attention layer, comes back without gaps; a kernel that adds up in another order for it may
    round differently.) Unlike `recompute`, it computes nothing twice. It costs the time of the copies, which are
    queued behind the computation without making the host wait. Pinned memory cannot be swapped out.

    Parameters, buffers and tensors that are on the host already stay where they are, and so do tensor subclasses, such
    as the DTensors of a tensor parallel plan. It has no effect without gradients, as in evaluation, in the graphs of
    `compile_step`, and in `vmap_step` and differentiable steps. `torch.func` refuses to differentiate through it. Under
    `torch.compile`, as in `block.compile()`, a chosen module breaks the graph.

    Other modules may be recomputed at the same time. If a module is in both, it is recomputed, and nothing is offloaded.

    Args:
        loss_fn: any loss function that `make_grad_fn` accepts.
        modules: a module class, a tuple of classes, or `(name, module) -> bool` with names as in `named_modules`.

    Raises:
        ValueError: when called, if the model has no such module.
        TypeError: `modules` is of a different type.

    Source: `torch.autograd.graph.save_on_cpu`, which also copies the parameters, and waits for each copy.
    """
    return with_forwards(loss_fn, modules, _offloaded, offload)


def _offloaded(module: nn.Module) -> Callable[..., Any]:
    forward = module.forward
    if not may_offload():
        return forward

    def offloaded(*args: Any, **kwargs: Any) -> Any:
        weights: set[int] = set()

        def to_host(tensor: Tensor) -> tuple[Tensor, torch.device, int]:
            device, copy = tensor.device, tensor
            if is_plain(tensor) and not tensor.is_cpu and tensor.untyped_storage().data_ptr() not in weights:
                # Nothing waits for the copies: the host reads neither, and they are in the order of their stream.
                copy = torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)
            return copy, device, torch_private.version(copy)

        with saved_tensors_hooks(to_host, _from_host):
            persistent = filter(is_plain, (*module.parameters(), *module.buffers()))
            weights.update(tensor.untyped_storage().data_ptr() for tensor in persistent)
            return forward(*args, **kwargs)

    return offloaded


def _from_host(packed: tuple[Tensor, torch.device, int]) -> Tensor:
    tensor, device, version = packed
    check(
        torch_private.version(tensor) == version,
        f"a tensor of shape {tuple(tensor.shape)} that the backward pass needs was changed in place after the forward "
        "pass of an offloaded module saved it: use an operation that returns a new tensor",
        RuntimeError,
    )
    return tensor.to(device, non_blocking=True)
