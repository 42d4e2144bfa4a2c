"""Norms of gradients."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from looplib._core import torch_private
from looplib._core.checks import check, named
from looplib._core.mappings import stacked
from looplib._core.ranks import any_sharded


def global_norm(tensors: Iterable[Tensor], norm_type: float = 2.0) -> Tensor:
    """Norm of all elements of all tensors together, as a scalar tensor on the first tensor's device.

    >>> import looplib as ll, torch
    >>> ll.optim.global_norm([torch.tensor([3.0]), torch.tensor([4.0])])
    tensor(5.)

    Args:
        tensors: one or more tensors of any shapes. Those on other devices are copied to the first one's. Of a module's
            gradients, leave out those that are None: `[p.grad for p in model.parameters() if p.grad is not None]`.
        norm_type: order of the norm, such as 2 or `math.inf`.

    Raises:
        TypeError: a tensor is sparse, for which torch has no norm.
    """
    advice = "give tensors, such as grads.values(), or [p.grad for p in model.parameters() if p.grad is not None]"
    check(not isinstance(tensors, (Mapping, nn.Module)), f"global_norm got {named(tensors)}: {advice}", TypeError)
    tensors = list(tensors)
    try:
        return norm_of(tensors, norm_type)
    except NotImplementedError:
        sparse = any(tensor.is_sparse for tensor in tensors)
        advice = "give tensor.coalesce().values(), or leave out Embedding(sparse=True)"
        check(
            not sparse, f"the norm of a sparse tensor was asked for, which torch does not have: {advice}", TypeError
        )
        raise


def norm_of(tensors: list[Tensor], norm_type: float) -> Tensor:
    if any_sharded(tensors):
        return _norm_of_shards(tensors, norm_type)
    if len({tensor.dtype for tensor in tensors}) > 1:
        return torch.nn.utils.get_total_norm(tensors, norm_type)
    norms = torch_private.foreach_norm(tensors, norm_type)
    norm: Tensor = torch.linalg.vector_norm(stacked(norms), norm_type)
    return norm


def _norm_of_shards(tensors: list[Tensor], norm_type: float) -> Tensor:
    """Norm over all ranks' shards: first of each device mesh separately, then of all meshes."""
    by_mesh: dict[Any, list[Tensor]] = {}
    for tensor in tensors:
        by_mesh.setdefault(getattr(tensor, "device_mesh", None), []).append(tensor)
    norms: list[Any] = [torch.nn.utils.get_total_norm(alike, norm_type) for alike in by_mesh.values()]
    whole = [norm.full_tensor() if hasattr(norm, "full_tensor") else norm for norm in norms]
    norm: Tensor = torch.linalg.vector_norm(torch.stack(whole), norm_type) if len(whole) > 1 else whole[0]
    return norm
