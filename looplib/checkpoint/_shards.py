"""Sharded tensors: each rank writes its chunks and describes them, and reads the chunks that overlap with its shards.

torch's planners decide which part of a tensor a rank holds, and which saved chunks make up a shard of a different mesh.
looplib does the storage: a safetensors file and a description for each rank, and one manifest, with checksums, in an
entry that is renamed when all files are complete. Ranks send each other no description of a tensor: the first rank
gets a few numbers from each, whatever the number of tensors.
"""

from __future__ import annotations

import functools
import math
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import orjson
import torch
from torch import Tensor, distributed
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem, WriteItem
from torch.distributed.tensor import DTensor

from looplib._core.checks import check
from looplib._core.collective import Together
from looplib._core.mappings import mapped, pick
from looplib._core.ranks import is_sharded, running
from looplib.checkpoint import _directory
from looplib.checkpoint._directory import Entry
from looplib.checkpoint._format import DATA, SHARDED, WEIGHTS, DamagedCheckpointError, local
from looplib.checkpoint._format_read import Chunk, Reader
from looplib.checkpoint._format_write import Parts, runs_of, write_data, write_file, write_manifest

_Files = tuple[dict[str, int], dict[str, dict[str, int]]]


def put(
    ranks: Together,
    entry: Entry,
    parts: Parts,
    about: Mapping[str, Any],
    in_thread: bool,
) -> None:
    """Write a new entry on all ranks together. If one of them fails, nothing is left behind."""

    def begin() -> None:
        with _directory.naming_the_checkpoint(entry.target, parts.size()):
            entry.writing.mkdir()

    def write_own() -> tuple[dict[str, Any], int, _Files]:
        with _directory.naming_the_checkpoint(entry.target, parts.size()):
            data: dict[str, Any] = {}
            size = 0
            if ranks.first:  # which writes the unsharded tensors
                data, size = write_data(entry.writing / DATA, parts.runs, parts.ready, in_thread)
            return data, size, _write_chunks(ranks.rank, entry, parts, in_thread)

    def finish() -> None:
        files: dict[str, int] = {}
        described: dict[str, dict[str, int]] = {}
        for sizes, checksums in of_ranks:
            files |= sizes
            described |= checksums
        facts = {"bytes": size, "data": data, "files": files, "described": described, "shards": parts.shards()}
        with _directory.naming_the_checkpoint(entry.target, parts.size()):
            write_manifest(entry.writing, parts, {"format": SHARDED, **about, **facts})
            _directory.take_place(entry)

    try:
        ranks.on_first(begin)
        data, size, own = ranks.on_each(write_own)
        of_ranks = ranks.gather(own)
        ranks.on_first(finish)
    except BaseException:
        if ranks.first:
            _directory.clear(entry.writing)
        raise


def _write_chunks(rank: int, entry: Entry, parts: Parts, in_thread: bool) -> _Files:
    """Write the chunks that this rank is responsible for, and their description. Returns what the manifest needs."""
    items = _own_items(parts.sharded)
    written = [path for path in items if parts.locals[path].numel() and _is_written_here(path, parts.sharded[path])]
    runs = runs_of(pick(parts.locals, written))
    if not runs:
        return {}, {}
    name, description = f"tensors-{rank:05d}.safetensors", f"chunks-{rank:05d}.json"
    data, size = write_data(entry.writing / name, runs, parts.ready, in_thread)
    chunks = mapped(_placed, pick(items, written))
    text = orjson.dumps({"file": name, "data": data, "chunks": chunks})
    write_file(entry.writing / description, text)
    weights = {path: [chunks[path], run["crc32"]] for path, run in data.items() if path.startswith(WEIGHTS)}
    checksums = {"crc32": zlib.crc32(text), "weights": zlib.crc32(orjson.dumps(weights))}
    return {name: size, description: len(text)}, {description: checksums}


def _own_items(leaves: Mapping[str, Any]) -> dict[str, WriteItem]:
    """The part of each DTensor that this rank holds, by path, as torch's planner describes it."""
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(leaves), is_coordinator=False)
    return {item.index.fqn: item for item in planner.create_local_plan().items}


def _chunk(item: WriteItem) -> ChunkStorageMetadata:
    assert item.tensor_data is not None
    return item.tensor_data.chunk


def _placed(item: WriteItem) -> dict[str, list[int]]:
    chunk = _chunk(item)
    return {"offsets": list(chunk.offsets), "sizes": list(chunk.sizes)}


def _is_written_here(leaf_path: str, leaf: Any) -> bool:
    """True on one of the ranks that hold the same chunk. Copies take turns, so that all ranks write some tensors.

    A mesh holds a whole tensor. If several meshes hold copies of it, the one with rank 0 writes.
    """
    mesh, index, copies = leaf.device_mesh, 0, 1
    if 0 not in _ranks_of(mesh):
        return False
    for coordinate, size, placement in zip(mesh.get_coordinate(), mesh.shape, leaf.placements, strict=True):
        if placement.is_replicate():
            index, copies = index * size + coordinate, copies * size
    return zlib.crc32(leaf_path.encode()) % copies == index


@functools.lru_cache(maxsize=16)
def _ranks_of(mesh: Any) -> frozenset[int]:
    return frozenset(mesh.mesh.flatten().tolist())


def read(reader: Reader, leaves: Mapping[str, Any]) -> dict[str, Tensor]:
    """Read this process's shard of each leaf, or all of an unsharded leaf, into new memory.

    A chunk that is needed even in part is read completely, and its checksum compared.
    """
    _describe(reader, leaves)
    saved = {leaf_path: _saved(reader, leaf_path) for leaf_path in leaves}
    into = {leaf_path: _memory_for(leaf, saved[leaf_path]) for leaf_path, leaf in leaves.items()}
    planner = _LoadPlanner(into)
    planner.set_up_planner(
        {leaf_path: leaf if is_sharded(leaf) else into[leaf_path] for leaf_path, leaf in leaves.items()},
        Metadata({**saved}),
    )
    plan = planner.finish_plan(planner.create_local_plan())  # each rank plans only for itself
    reader.verify((), {(item.storage_index.fqn, item.storage_index.index or 0) for item in plan.items})
    for item in plan.items:
        planner.resolve_tensor(item).copy_(_needed(reader, item))
    return into


def _memory_for(leaf: Any, saved: TensorStorageMetadata) -> Tensor:
    shape = local(leaf).shape if is_sharded(leaf) else saved.size
    return torch.empty(shape, dtype=saved.properties.dtype)


def _needed(reader: Reader, item: ReadItem) -> Tensor:
    """The part of a chunk that goes into a shard."""
    chunk = reader.chunk(item.storage_index.fqn, item.storage_index.index or 0)
    for axis, (low, size) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
        chunk = chunk.narrow(axis, low, size)
    return chunk


def _count(sizes: Sequence[int]) -> int:
    return int(torch.Size(sizes).numel())


def _describe(reader: Reader, leaves: Mapping[str, Any]) -> None:
    """Read descriptions until they cover what this rank holds: on the mesh of the save, only its own."""
    boxes = _boxes(reader, leaves)
    undescribed = {leaf_path for leaf_path, shards in reader.shards.items() if "chunks" not in shards}
    counts = {leaf_path: _count(sizes) for leaf_path, (_, sizes) in boxes.items() if leaf_path in undescribed}
    missing = {leaf_path: count for leaf_path, count in counts.items() if count}
    seen: set[Any] = set()
    for name in _nearest(sorted(reader.described)):
        if not missing:
            break
        for leaf_path, saved in reader.describe(name):
            if leaf_path in missing and (leaf_path, saved[0]) not in seen:
                seen.add((leaf_path, saved[0]))
                missing[leaf_path] -= _overlap(boxes[leaf_path], saved)
                if not missing[leaf_path]:
                    del missing[leaf_path]
    check(not missing, f"{reader.directory} has not all chunks of {', '.join(missing)}", DamagedCheckpointError)


def _nearest(names: Sequence[str]) -> list[str]:
    """Names of ranks' files, beginning with the ones that are most likely to hold what this rank holds."""
    rank, ranks = (distributed.get_rank(), distributed.get_world_size()) if running() else (0, 1)
    indices = sorted(range(len(names)), key=lambda index: abs(index - rank * len(names) // ranks))
    return [names[index] for index in indices]


def _boxes(reader: Reader, leaves: Mapping[str, Any]) -> dict[str, Chunk]:
    """The part of each leaf that this process holds: all of an unsharded one."""
    items = _own_items({leaf_path: leaf for leaf_path, leaf in leaves.items() if is_sharded(leaf)})
    boxes: dict[str, Chunk] = {}
    for leaf_path, leaf in leaves.items():
        if leaf_path in items:
            chunk = _chunk(items[leaf_path])
            boxes[leaf_path] = tuple(chunk.offsets), tuple(chunk.sizes)
        elif not is_sharded(leaf) and (about := reader.about(leaf_path)) is not None:
            boxes[leaf_path] = (0,) * len(about["shape"]), tuple(about["shape"])
    return boxes


def _overlap(one: Chunk, other: Chunk) -> int:
    """Number of elements in both of two boxes (offsets, sizes)."""
    return math.prod(
        max(0, min(low + size, other_low + other_size) - max(low, other_low))
        for low, size, other_low, other_size in zip(*one, *other, strict=True)
    )


def _saved(reader: Reader, leaf_path: str) -> TensorStorageMetadata:
    """A checkpoint's leaf in the form of torch's planner."""
    about = reader.about(leaf_path) or {}
    shape = about["shape"]
    chunks = [
        ChunkStorageMetadata(
            torch.Size(chunk.get("offsets", [0] * len(shape))), torch.Size(chunk.get("sizes", shape))
        )
        for chunk in reader.chunks(leaf_path)
    ]
    return TensorStorageMetadata(TensorProperties(getattr(torch, about["dtype"])), torch.Size(shape), chunks)


class _LoadPlanner(DefaultLoadPlanner):
    def __init__(self, into: Mapping[str, Tensor]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.into = into

    def lookup_tensor(self, index: Any) -> Tensor:
        return self.into[index.fqn]


def like(leaf: Any, part: Tensor) -> Tensor:
    """A new DTensor with the layout of `leaf`, from this process's shard."""
    return DTensor.from_local(
        part, leaf.device_mesh, leaf.placements, run_check=False, shape=leaf.shape, stride=leaf.stride()
    )
