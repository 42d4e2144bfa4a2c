"""Activation offloading: keep activations in the host's memory between the forward and the backward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from looplib._core import torch_private
from looplib._core import tracing as _tracing
from looplib._core.checks import check, is_plain
from looplib.losses._chosen_modules import Classes, with_forwards

R = TypeVar("R")


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
    if _tracing.tracing() or _tracing.differentiated():  # a graph plans its memory itself
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
