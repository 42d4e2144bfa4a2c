"""Comparison of tensors that several ranks should hold alike."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from looplib._core.checksums import checksums
from looplib._core.collective import RankGroup
from looplib._core.ranks import is_sharded, shards


class Version(NamedTuple):
    """A value, and the ranks that hold it."""

    value: Any
    ranks: list[int]


def checksums_by_name(tensors: Mapping[str, Tensor]) -> tuple[dict[str, str], dict[str, str]]:
    """Checksums by name: those of tensors that all ranks share, and those of shards, whose names say which one."""
    tensors = {name: part for whole, tensor in tensors.items() for name, part in _strided(whole, tensor)}
    everywhere, in_shards = dict[str, str](), dict[str, str]()
    for name, tensor, number in zip(tensors, tensors.values(), checksums(shards(tensors.values())), strict=True):
        index = _shard(tensor)
        (in_shards if index else everywhere)[name + index] = f"{number % 2**64:016x}"
    return everywhere, in_shards


def different(
    ranks: RankGroup, everywhere: Mapping[str, Any], in_shards: Mapping[str, Any]
) -> dict[str, list[Version]]:
    """Values that differ between ranks by name, the most common version first. All ranks call this.

    A shard is compared with the shards of the same index. Each rank sends 32 bytes, and the names and values only if
    something differs.
    """
    digests = ranks.gather((_digest(everywhere), _digest(list(in_shards)), _digest(in_shards)))
    shards_of = {shards: values for _, shards, values in digests}
    if all(digest[0] == digests[0][0] and shards_of[digest[1]] == digest[2] for digest in digests):
        return {}
    versions: dict[str, dict[Any, list[int]]] = {}
    everyone: Sequence[tuple[dict[str, Any], dict[str, Any]]] = ranks.gather(({**everywhere}, {**in_shards}))
    shared = dict.fromkeys(name for facts, _ in everyone for name in facts)
    for rank, (facts, of_shards) in enumerate(everyone):
        for name, value in {**dict.fromkeys(shared), **facts, **of_shards}.items():
            versions.setdefault(name, {}).setdefault(value, []).append(rank)
    return {
        name: sorted((Version(*version) for version in of_name.items()), key=lambda version: -len(version.ranks))
        for name, of_name in versions.items()
        if len(of_name) > 1
    }


def _strided(name: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
    """The tensor, or the indices and values of a sparse one, which may be too large as a dense one."""
    if tensor.layout is not torch.sparse_coo:
        return [(name, tensor)]
    tensor = tensor.coalesce()
    return [(f"{name} (indices)", tensor.indices()), (name, tensor.values())]


def _shard(leaf: Tensor) -> str:
    """Index of a shard within its tensor, the same on all ranks that hold a copy of it; "" for a whole tensor."""
    if not is_sharded(leaf):
        return ""
    coordinate = leaf.device_mesh.get_coordinate() or ()
    index = [
        here for here, placement in zip(coordinate, leaf.placements, strict=False) if not placement.is_replicate()
    ]
    return f" (shard {', '.join(map(str, index))})" if index else ""


def _digest(facts: Any) -> int:
    return zlib.crc32(repr(facts).encode())
