"""Checkpoint reading: JSON is parsed and memory is mapped, and nothing in a file is executed.

A manifest is verified when it is read, and a data file when something in it is needed, each as a whole. Headers say in
which files that is, so they are read before.
"""

from __future__ import annotations

import mmap
import os
import zlib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import orjson
import torch
from torch import Tensor

from looplib._core.checks import check
from looplib._core.mappings import mapped, without
from looplib.checkpoint._format import (
    FORMAT,
    MANIFEST,
    CheckpointVersionError,
    DamagedCheckpointError,
    decoded,
    words,
)
from looplib.checkpoint._shards import Box, box_of, common, full_box, size_of, within


@contextmanager
def errors_as_damage(path: Path) -> Iterator[None]:
    """Turn errors for a missing file, or for a content that no save writes, into a DamagedCheckpointError."""
    try:
        yield
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, LookupError, TypeError, ValueError) as error:
        raise DamagedCheckpointError(f"{path} is damaged ({error})") from error


def read_manifest(directory: Path) -> tuple[dict[str, Any], int]:
    """Read a manifest, compare its checksum, and return both."""
    path = directory / MANIFEST
    with errors_as_damage(path):
        stored = orjson.loads(path.read_bytes())
        checksum, manifest = stored["crc32"], without(stored, ("crc32",))
        check(zlib.crc32(orjson.dumps(manifest)) == checksum, "its checksum is wrong")
    version = manifest["format"]
    message = f"{path} is of format {version}, and this looplib reads format {FORMAT}: use the looplib that wrote it"
    check(version == FORMAT, message, CheckpointVersionError)
    return manifest, checksum


class _Chunk(NamedTuple):
    """A part of a tensor in a file: which one, and where it begins."""

    file: str
    begin: int
    box: Box


class Reader:
    """Lazy checkpoint reader, which reads tensors on demand.

    Attributes:
        values: the plain values, by path.
        tensors: dtype and shape of each tensor that is stored, by path.
        ties: path of a tensor -> path of the same tensor in `tensors`.
    """

    def __init__(self, directory: Path, manifest: Mapping[str, Any]) -> None:
        self.directory = directory
        self.values = mapped(decoded, manifest["values"])
        self.tensors: dict[str, dict[str, Any]] = manifest["tensors"]
        self.ties: dict[str, str] = manifest["ties"]
        self._checksums: dict[str, int] = {name: file["crc32"] for name, file in manifest["files"].items()}
        self._chunks: dict[str, list[_Chunk]] = defaultdict(list)
        for name, file in manifest["files"].items():
            self._read_header(name, file["bytes"])

    def _read_header(self, name: str, size: int) -> None:
        """List the chunks of a file. If a header is damaged, its file is found to be so, or a tensor to be incomplete."""
        path = self.directory / name
        with errors_as_damage(path), open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            check(length < size, "the header is longer than the file")
            header = orjson.loads(file.read(length))
            for leaf_path, box in header.pop("__metadata__").items():
                begin = 8 + length + header[leaf_path]["data_offsets"][0]
                self._chunks[leaf_path].append(_Chunk(name, begin, orjson.loads(box)))

    def root(self, path: str) -> str:
        """Path under which the tensor at a path is stored."""
        return self.ties.get(path, path)

    def about(self, path: str) -> Mapping[str, Any] | None:
        """Dtype and shape of the tensor at a path, or None for a plain value."""
        return self.tensors.get(self.root(path))

    def read(self, leaves: Mapping[str, Any]) -> dict[str, Tensor]:
        """The tensors to restore into these leaves, by path: of a sharded leaf, what this process holds.

        Do not write to them: they may lie in memory of the files. Each file in which a part of one of them lies is read
        and verified as a whole.
        """
        boxes = {
            path: box_of(leaf) if isinstance(leaf, Tensor) else full_box(entry["shape"])
            for path, leaf in leaves.items()
            if (entry := self.about(path)) is not None
        }
        needed = {
            path: [chunk for chunk in self._chunks[self.root(path)] if size_of(common(box, chunk.box))]
            for path, box in boxes.items()
        }
        names = {chunk.file for chunks in needed.values() for chunk in chunks}
        with ThreadPoolExecutor(min(os.cpu_count() or 1, 32)) as pool:
            files = dict(zip(names, pool.map(self._verified, names), strict=True))
        tensors = {}
        for path, box in boxes.items():
            found_size = sum(size_of(common(box, chunk.box)) for chunk in needed[path])
            message = f"the files in {self.directory} do not have all of {path}"
            check(found_size == size_of(box), message, DamagedCheckpointError)
            dtype = getattr(torch, self.tensors[self.root(path)]["dtype"])
            found = [(chunk.box, _tensor(files[chunk.file], chunk, dtype)) for chunk in needed[path]]
            tensors[path] = _assembled(box, dtype, found)
        return tensors

    def _verified(self, name: str) -> memoryview:
        """A file in memory, after comparing its checksum."""
        path = self.directory / name
        with errors_as_damage(path):
            with open(path, "rb") as file:
                data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))
            check(zlib.crc32(data) == self._checksums[name], "its checksum is wrong")
        return data


def _tensor(file: memoryview, chunk: _Chunk, dtype: torch.dtype) -> Tensor:
    count = size_of(chunk.box) * dtype.itemsize
    data = torch.frombuffer(file, dtype=torch.uint8, count=count, offset=chunk.begin)
    return data.view(dtype).view([end - begin for begin, end in chunk.box])


def _assembled(box: Box, dtype: torch.dtype, chunks: list[tuple[Box, Tensor]]) -> Tensor:
    """A part of a tensor, from chunks of which each overlaps with it."""
    if len(chunks) == 1:
        chunk_box, chunk = chunks[0]
        return chunk[within(box, chunk_box)]
    tensor = torch.empty([end - begin for begin, end in box], dtype=dtype)
    for chunk_box, chunk in chunks:
        part = common(box, chunk_box)
        words(tensor)[within(part, box)] = words(chunk)[within(part, chunk_box)]
    return tensor
