"""Sharded tensors: the part of a DTensor that this process holds, and which process writes it."""

from __future__ import annotations

import functools
import math
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from looplib._core.mappings import mapped
from looplib._core.ranks import is_sharded
from looplib.checkpoint._format import local

Box = tuple[tuple[int, int], ...]
"""A part of a tensor: the range of its indices in each dimension."""


def whole(shape: Sequence[int]) -> Box:
    """All of a tensor of this shape."""
    return tuple((0, size) for size in shape)


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
        return whole(leaf.shape)
    (chunk,) = leaf.__create_chunk_list__()  # the protocol of torch.distributed.checkpoint
    return tuple((first, first + size) for first, size in zip(chunk.offsets, chunk.sizes, strict=True))


def boxes_written_here(sharded: Mapping[str, Any]) -> dict[str, Box]:
    """The parts of DTensors, by path, that this process writes."""
    boxes = mapped(box_of, sharded)
    return {path: box for path, box in boxes.items() if size_of(box) and _is_written_here(path, sharded[path])}


def _is_written_here(path: str, leaf: Any) -> bool:
    """True on one of the ranks that hold the same part. Copies take turns, so that all ranks write some tensors.

    A mesh holds a whole tensor. If several meshes hold copies of it, the one with rank 0 writes.
    """
    mesh, index, copies = leaf.device_mesh, 0, 1
    if 0 not in _ranks_of(mesh):
        return False
    for coordinate, size, placement in zip(mesh.get_coordinate(), mesh.shape, leaf.placements, strict=True):
        if placement.is_replicate():
            index, copies = index * size + coordinate, copies * size
    return zlib.crc32(path.encode()) % copies == index


@functools.lru_cache(maxsize=16)
def _ranks_of(mesh: Any) -> frozenset[int]:
    return frozenset(mesh.mesh.flatten().tolist())


def new_like(leaf: Any) -> Any:
    """An uninitialized tensor with the dtype, device, strides and sharding of another one."""
    own = torch.empty_like(local(leaf))
    if not is_sharded(leaf):
        return own
    return type(leaf).from_local(
        own, leaf.device_mesh, leaf.placements, run_check=False, shape=leaf.shape, stride=leaf.stride()
    )
