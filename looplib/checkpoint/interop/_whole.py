"""Gathering: tensors outside a state are unsharded, so ranks gather their shards."""

from __future__ import annotations

import torch
from torch import Tensor

from looplib._core.ranks import is_sharded
from looplib.checkpoint._format import local
from looplib.checkpoint._shards import new_like


def whole(tensor: Tensor, *, trim: bool = False) -> Tensor:
    """Return the unsharded tensor. If it is sharded, all ranks gather it together."""
    if not is_sharded(tensor):
        return tensor
    meeting = tensor.device_mesh.device_type
    with torch.no_grad():
        shard = tensor if tensor.device.type == meeting else tensor.to(meeting)  # offloaded
        gathered: Tensor = shard.full_tensor().detach().to(tensor.device)
    # Shards of unequal size are padded for sending, and torch.save would write the padding too.
    oversized = gathered.untyped_storage().nbytes() > gathered.nbytes
    return gathered.clone() if trim and oversized else gathered


def copied_like(value: Tensor, like: Tensor) -> Tensor:
    """Copy a value with the dtype, device, strides and sharding of `like`."""
    copied = new_like(like)
    with torch.no_grad():
        if not is_sharded(like):
            value = whole(value)
        elif not is_sharded(value) or (value.device_mesh, value.placements) != (like.device_mesh, like.placements):
            from torch.distributed.tensor import distribute_tensor

            full = whole(value).detach()
            value = distribute_tensor(full, like.device_mesh, like.placements, src_data_rank=None)  # sends nothing
        local(copied).copy_(local(value))
    return copied  # type: ignore[no-any-return]


def same_values(one: Tensor, other: Tensor, like: Tensor) -> bool:
    """True if two values are the same after conversion to the state's tensor."""
    one, other = (whole(value).detach().to(like.device, like.dtype) for value in (one, other))
    return torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)


def shape_of(tensor: Tensor) -> str:
    """Shape of a state's tensor, for messages."""
    advice = ", of which each rank holds a part: give it whole" if is_sharded(tensor) else ""
    return f"{tuple(tensor.shape)}{advice}"
