"""Sharded tensors, written and read with the planners of torch.distributed.checkpoint.

torch's planners decide which rank writes a shard that several ranks hold, and which saved chunks make up a shard of a
different mesh. looplib does the storage: a safetensors file for each rank and one manifest, with checksums, in an
entry that is renamed when all files are complete. (torch's own writer adds a pickle.)
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future

from looplib._core.collective import Together, named, raise_of
from looplib._core.ranks import is_sharded
from looplib.checkpoint import _directory
from looplib.checkpoint._directory import Entry
from looplib.checkpoint._format import DATA, SHARDED, local
from looplib.checkpoint._format_read import Reader
from looplib.checkpoint._format_write import Parts, runs_of, write_data, write_manifest


def put(
    ranks: Together,
    entry: Entry,
    parts: Parts,
    about: Mapping[str, Any],
    in_thread: bool,
) -> None:
    """Write a new entry on all ranks together. If one of them fails, nothing is left behind."""
    try:
        save(
            parts.sharded,
            storage_writer=_Writer(entry, parts, about, in_thread),
            planner=DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
            process_group=ranks.group,
        )
    except BaseException as error:
        if ranks.first:
            _directory.clear(entry.writing)
        if not isinstance(error, CheckpointException):
            raise
        failures = {rank: failure for rank, (failure, _) in error.failures.items()}
        of_this_rank = failures.get(ranks.rank)
        raise_of({rank: named(rank, failure) for rank, failure in failures.items()}, ranks.rank, of_this_rank)


class _Writer(StorageWriter):
    def __init__(self, entry: Entry, parts: Parts, about: Mapping[str, Any], in_thread: bool) -> None:
        self.entry, self.parts, self.about, self.in_thread = entry, parts, about, in_thread
        self.rank = distributed.get_rank()
        self.first = False
        self.data: dict[str, Any] = {}  # facts about the first rank's file of unsharded tensors
        self.size = 0

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self.first = is_coordinator

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        with _directory.naming_the_checkpoint(self.entry.target, self.parts.size()):
            self.entry.writing.mkdir()
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        results = []
        with _directory.naming_the_checkpoint(self.entry.target, self.parts.size()):
            if self.first:
                self.data, self.size = write_data(
                    self.entry.writing / DATA, self.parts.runs, self.parts.ready, self.in_thread
                )
            parts = {item.index.fqn: self.parts.locals[item.index.fqn] for item in plan.items}
            runs = runs_of({leaf_path: part for leaf_path, part in parts.items() if part.numel()})
            if runs:
                name = f"tensors-{self.rank:05d}.safetensors"
                data, size = write_data(self.entry.writing / name, runs, self.parts.ready, self.in_thread)
                for item in plan.items:
                    if (run := data.get(item.index.fqn)) is not None:
                        stored = {**run, "file": name}, list(parts[item.index.fqn].shape), size
                        results.append(WriteResult(item.index, run["bytes"], (self.rank, *stored)))
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        shards: dict[str, Any] = {}
        files: dict[str, int] = {}
        for leaf_path, about in metadata.state_dict_metadata.items():
            assert isinstance(about, TensorStorageMetadata)
            dtype = str(about.properties.dtype).removeprefix("torch.")
            shards[leaf_path] = {"dtype": dtype, "shape": list(about.size), "chunks": []}
        for result in (result for of_rank in results for result in of_rank):
            rank, run, sizes, size = result.storage_data
            name = f"{rank}{result.index.fqn}"
            self.data[name], files[run["file"]] = run, size
            offsets = list(result.index.offset or ())
            shards[result.index.fqn]["chunks"].append({"offsets": offsets, "sizes": sizes, "data": name})
        with _directory.naming_the_checkpoint(self.entry.target, self.parts.size()):
            described = {"bytes": self.size, "data": self.data, "files": files, "shards": shards}
            write_manifest(self.entry.writing, self.parts, {"format": SHARDED, **self.about, **described})
            _directory.take_place(self.entry)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return False


def read(reader: Reader, leaves: Mapping[str, Any]) -> dict[str, Tensor]:
    """Read this process's shard of each leaf, or all of an unsharded leaf, into new memory.

    A chunk that is needed even in part is read completely, and its checksum compared.
    """
    saved = {leaf_path: _saved(reader, leaf_path) for leaf_path in leaves}
    into = {
        leaf_path: torch.empty(
            local(leaf).shape if is_sharded(leaf) else saved[leaf_path].size, dtype=saved[leaf_path].properties.dtype
        )
        for leaf_path, leaf in leaves.items()
    }
    planner = _LoadPlanner(into)
    planner.set_up_planner(
        {leaf_path: leaf if is_sharded(leaf) else into[leaf_path] for leaf_path, leaf in leaves.items()},
        Metadata({**saved}),
    )
    plan = planner.finish_plan(planner.create_local_plan())  # each rank plans only for itself
    needed = [(item.storage_index.fqn, item.storage_index.index or 0) for item in plan.items]
    reader.verify((), needed)
    for item, (leaf_path, index) in zip(plan.items, needed, strict=True):
        chunk = reader.chunk(leaf_path, index)
        for axis, (low, size) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
            chunk = chunk.narrow(axis, low, size)
        planner.resolve_tensor(item).copy_(chunk)
    return into


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
