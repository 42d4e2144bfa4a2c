"""Sharded tensors: the part of a DTensor that this process holds, which process writes it, and whole tensors again."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from looplib._core.ranks import is_sharded, local, whole

Box = tuple[tuple[int, int], ...]
"""A part of a tensor: the range of its indices in each dimension."""


def full_box(shape: Sequence[int]) -> Box:
    """All of a tensor of this shape."""
    return tuple((0, size) for size in shape)


def first_of(shape: Sequence[int]) -> Box:
    """The first of a tensor's rows."""
    return ((0, 1), *full_box(shape)[1:])


def shape_of(box: Box) -> list[int]:
    """Shape of a part of a tensor."""
    return [end - begin for begin, end in box]


def size_of(box: Box) -> int:
    """Number of elements in a part of a tensor; 0 for two parts without any in common."""
    return math.prod(max(0, end - begin) for begin, end in box)


def common(one: Box, other: Box) -> Box:
    """The elements that two parts of a tensor have in common."""
    return tuple((max(a, b), min(c, d)) for (a, c), (b, d) in zip(one, other, strict=True))


def within(part: Box, box: Box) -> tuple[slice, ...]:
    """Slices that take a part of a tensor from a larger part of it."""
    return tuple(slice(begin - first, end - first) for (begin, end), (first, _) in zip(part, box, strict=True))


def box_of(leaf: Any) -> Box:
    """The part of a tensor that this process holds."""
    if not is_sharded(leaf):
        return full_box(leaf.shape)
    (chunk,) = leaf.__create_chunk_list__()  # the protocol of torch.distributed.checkpoint
    return tuple((first, first + size) for first, size in zip(chunk.offsets, chunk.sizes, strict=True))


def is_written_here(leaf: Any, first: bool) -> bool:
    """True on the rank that writes this part of a tensor: the first one for tensors that are not sharded.

    If several ranks of a mesh have copies of a part, the first of them writes. A mesh holds a whole tensor. If several
    meshes hold copies of it, the one with rank 0 writes.
    """
    if not is_sharded(leaf):
        return first
    mesh = leaf.device_mesh
    places = zip(mesh.get_coordinate(), leaf.placements, strict=True)
    is_copy = any(placement.is_replicate() and coordinate for coordinate, placement in places)
    return 0 in mesh.mesh and not is_copy and size_of(box_of(leaf)) > 0


def copied_like(value: Tensor, like: Tensor) -> Tensor:
    """Copy a value with the dtype, device, strides and sharding of `like`."""
    copied = torch.empty_like(like.detach())
    with torch.no_grad():
        if not is_sharded(like):
            value = whole(value)
        elif not is_sharded(value) or (value.device_mesh, value.placements) != (like.device_mesh, like.placements):
            from torch.distributed.tensor import distribute_tensor

            # This sends nothing.
            value = distribute_tensor(whole(value).detach(), like.device_mesh, like.placements, src_data_rank=None)
        local(copied).copy_(local(value))
    return copied
