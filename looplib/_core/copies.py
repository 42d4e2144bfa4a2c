"""Copies of trees of tensors, which an update may then write."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from looplib._core import torch_private
from looplib._core.checks import PLAIN

leaves_of: Callable[[Any], list[Any]] = torch_private.pytree.tree_leaves


def own_copies(names: Iterable[str], params: Mapping[str, Tensor], opt_state: Any) -> tuple[dict[str, Tensor], Any]:
    """All parameters with copies in place of these, and a copy of the optimizer's state: what an update may write."""
    originals = {name: params[name] for name in names}
    copies = iter(clones([*originals.values(), *_tensors_in(opt_state)]))
    copied = dict(zip(originals, copies, strict=False))
    for name, copy in copied.items():
        copy.requires_grad_(originals[name].requires_grad)
    return {**params, **copied}, _rebuilt(opt_state, copies)


def copy_tree(tree: Any) -> Any:
    """A pytree with copies of its tensors, and with containers of its own."""
    return _rebuilt(tree, iter(clones(_tensors_in(tree))))


def _tensors_in(tree: Any) -> list[Tensor]:
    if isinstance(tree, Tensor):
        return [tree]
    if type(tree) is not dict:
        return [leaf for leaf in leaves_of(tree) if isinstance(leaf, Tensor)]
    tensors: list[Tensor] = []
    for value in tree.values():
        if type(value) in PLAIN:
            tensors.append(value)
        # A row: what a class keeps for a parameter. A call for each of thousands would take most of the time.
        elif type(value) is dict and PLAIN.issuperset(map(type, value.values())):
            tensors += value.values()
        else:
            tensors += _tensors_in(value)
    return tensors


def _rebuilt(tree: Any, copies: Iterator[Tensor]) -> Any:
    """The tree, with the next copies in place of its tensors."""
    if type(tree) is not dict:
        return torch_private.pytree.tree_map_only(Tensor, lambda _: next(copies), tree)
    new: dict[Any, Any] = {}
    for key, value in tree.items():
        if type(value) in PLAIN:
            new[key] = next(copies)
        elif type(value) is dict and PLAIN.issuperset(map(type, value.values())):
            new[key] = dict(zip(value, copies, strict=False))  # which takes no more copies than there are keys
        else:
            new[key] = _rebuilt(value, copies)
    return new


def is_shared(tensor: Tensor) -> bool:
    """True for a tensor of a stack that all members share: one in memory, expanded over the first dimension."""
    strided = tensor.layout is torch.strided and tensor.dim() > 0
    return strided and len(tensor) > 1 and tensor.stride(0) == 0


def shared_copy(tensor: Tensor) -> Tensor:
    """A copy of a tensor without its history, which the members of a stack share if they shared the tensor."""
    tensor = tensor.detach()
    return tensor[0].clone().expand(tensor.shape) if is_shared(tensor) else tensor.clone()


_is_cpu = operator.attrgetter("is_cpu")


def clones(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies of tensors with their strides, outside of any graph."""
    if not tensors:
        return []
    grad_mode = torch.is_grad_enabled()
    try:  # a signal may arrive as soon as the mode is set
        torch_private.set_grad_enabled(False)
        if PLAIN.issuperset(map(type, tensors)) and _all_contiguous(tensors):
            on_cpu = all(map(_is_cpu, tensors))
            return list(torch_private.foreach_clone(tensors)) if on_cpu else _copied_by_kernels(tensors)
        return [_clone(tensor) for tensor in tensors]
    finally:
        torch_private.set_grad_enabled(grad_mode)


def _all_contiguous(tensors: Sequence[Tensor]) -> bool:
    try:
        return all(map(Tensor.is_contiguous, tensors))
    except RuntimeError:  # of compressed sparse tensors, which have no strides
        return False


def _copied_by_kernels(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies on accelerators, by one kernel for each device and dtype: launching one for each tensor takes longer."""
    copies = [torch.empty_like(tensor) for tensor in tensors]
    groups: dict[Any, tuple[list[Tensor], list[Tensor]]] = {}
    for copy, tensor in zip(copies, tensors, strict=True):
        into, of = groups.setdefault((tensor.device, tensor.dtype), ([], []))
        into.append(copy)
        of.append(tensor.detach())
    for into, of in groups.values():
        torch_private.foreach_copy_(into, of)
    return copies


def _clone(tensor: Tensor) -> Tensor:
    """A copy with the same strides even if there are gaps, so that sums run in the same order."""
    if type(tensor) not in PLAIN or tensor.layout is not torch.strided or 0 in tensor.stride():
        return tensor.clone()
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device).copy_(tensor)
