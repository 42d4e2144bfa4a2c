"""Checkpoint reading: JSON is parsed and memory is mapped, and nothing in a file is executed.

A checksum shows that a file has not changed since it was written. It may still have been written with bad intent, so
each entry is checked before it is used.

A header says where a tensor lies in a file, and is read before the file is verified. A wrong one cannot lead to wrong
values: each file that a restore takes something from is verified, and what it takes has to be complete.
"""

from __future__ import annotations

import mmap
import os
import re
import stat
import zlib
from collections import defaultdict
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import orjson
import torch
from torch import Tensor

from looplib._core.checks import check
from looplib._core.mappings import mapped
from looplib.checkpoint._format import (
    FORMAT,
    LARGEST,
    MANIFEST,
    QUANTIZED,
    CheckpointVersionError,
    DamagedCheckpointError,
    are_counts,
    count_of,
    decoded,
    envelope,
    errors_as_damage,
    words,
)
from looplib.checkpoint._shards import Box, common, size_of, whole, within

_FILE = r"tensors(-\d{5,})?\.safetensors"


def read_manifest(directory: Path) -> tuple[dict[str, Any], int]:
    """Read a manifest, compare its checksum, and return both."""
    path = directory / MANIFEST
    check(_size(path) <= LARGEST, f"{path} is larger than any save writes it", DamagedCheckpointError)
    with errors_as_damage(path):
        document = path.read_bytes()
        parsed = orjson.loads(document)
        checksum, manifest = int(parsed["crc32"]), parsed["manifest"]
        head = envelope(checksum)
        unchanged = document.startswith(head) and zlib.crc32(document[len(head) : -2]) == checksum
        check(
            unchanged, f"{path} has been changed since it was written: its checksum is wrong", DamagedCheckpointError
        )
        version = manifest["format"]
        advice = "install a newer looplib" if version > FORMAT else "restore it with the looplib that wrote it"
        check(
            version == FORMAT,
            f"{path} is of format {version}, and this looplib reads format {FORMAT}: {advice}",
            CheckpointVersionError,
        )
    return manifest, checksum


def check_files(directory: Path, manifest: Mapping[str, Any]) -> int:
    """Check names and sizes of the data files, and return the sum of the sizes."""
    total = 0
    for name, about in manifest["files"].items():
        # Anything else, such as a path outside the directory, is refused.
        check(re.fullmatch(_FILE, name), f"{name!r} is no name of a file of tensors")
        path, expected = directory / name, about["bytes"]
        size = _size(path)
        check(size == expected, f"{path} has {size} bytes; {expected} were written", DamagedCheckpointError)
        total += size
    return total


def bytes_in(leaf_path: str, entry: Mapping[str, Any]) -> int:
    """Bytes of a tensor, from its entry in a manifest."""
    return count_of(entry["shape"], leaf_path) * dtype_of(leaf_path, entry["dtype"]).itemsize


def _size(path: Path) -> int:
    with errors_as_damage(path):
        status = path.stat()
    # To read a pipe or a device could take forever.
    check(stat.S_ISREG(status.st_mode), f"{path} is no file of data", DamagedCheckpointError)
    return status.st_size


def dtype_of(leaf_path: str, name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name, None)  # type: ignore[assignment]
    known = isinstance(dtype, torch.dtype) and dtype not in QUANTIZED
    check(known, f"{leaf_path} has dtype {name!r}, unknown to this torch")
    return dtype


class _Chunk(NamedTuple):
    """A part of a tensor in a file: which one, and the bytes in which it lies."""

    file: str
    box: Box
    begin: int
    end: int


class Reader:
    """Lazy checkpoint reader: checks the manifest and the headers at once, and reads tensors on demand.

    Attributes:
        values: the plain values, by path.
        tensors: dtype and shape of each tensor that is stored, by path.
        ties: path of a tensor -> path of the same tensor in `tensors`.
    """

    def __init__(self, directory: Path, manifest: Mapping[str, Any]) -> None:
        self.directory = directory
        self._mapped: dict[str, memoryview] = {}
        self._chunks: dict[str, list[_Chunk]] = defaultdict(list)
        with errors_as_damage(directory / MANIFEST):
            self.values = mapped(decoded, manifest["values"])
            self.tensors: dict[str, dict[str, Any]] = manifest["tensors"]
            for path, entry in self.tensors.items():
                bytes_in(path, entry)  # raises for anything that is no shape or no dtype
            self.ties: dict[str, str] = manifest["ties"]
            for path, root in self.ties.items():
                check(root in self.tensors, f"{path} is tied to {root}, which is not there")
            self._files: dict[str, Mapping[str, Any]] = manifest["files"]
            check_files(directory, manifest)
            for name, about in self._files.items():
                self._read_header(directory / name, about["bytes"])

    def _read_header(self, path: Path, size: int) -> None:
        """List the chunks of a file, which lie one after another behind its header."""
        with errors_as_damage(path):
            with open(path, "rb") as file:
                length = int.from_bytes(file.read(8), "little")
                check(length <= min(size, LARGEST), f"a header of {length} bytes")
                header = orjson.loads(file.read(length))
            boxes = header.pop("__metadata__", {})
            start = end = 8 + length
            for name, entry in header.items():
                shape, dtype = self.tensors[name]["shape"], dtype_of(name, self.tensors[name]["dtype"])
                box = orjson.loads(boxes[name]) if name in boxes else whole(shape)
                inside = all(are_counts(ends) and ends[0] <= ends[1] <= n for ends, n in zip(box, shape, strict=True))
                check(inside, f"{name} has shape {shape}, and a chunk at {box}")
                begin, end = end, end + size_of(box) * dtype.itemsize
                placed = entry["data_offsets"] == [begin - start, end - start] and begin % dtype.itemsize == 0
                check(placed, f"{name} begins at {begin}, where no save writes it")
                self._chunks[name].append(_Chunk(path.name, box, begin, end))
            check(end == size, f"the tensors in it end at {end}, and it has {size} bytes")

    def root(self, path: str) -> str:
        """Path under which the tensor at a path is stored."""
        return self.ties.get(path, path)

    def about(self, path: str) -> Mapping[str, Any] | None:
        """Dtype and shape of the tensor at a path, or None for a plain value."""
        return self.tensors.get(self.root(path))

    def read(self, boxes: Mapping[str, Box]) -> dict[str, Tensor]:
        """These parts of tensors, by path. Do not write to them: they may lie in memory of the files.

        Each file in which a part of one of them lies is read and verified as a whole.
        """
        needed = {
            path: [chunk for chunk in self._chunks[self.root(path)] if size_of(common(box, chunk.box))]
            for path, box in boxes.items()
        }
        names = {chunk.file for chunks in needed.values() for chunk in chunks} - self._mapped.keys()
        with ThreadPoolExecutor(min(os.cpu_count() or 1, 32)) as pool:
            self._mapped.update(zip(names, pool.map(self._verified, names), strict=True))
        return {path: self._assembled(self.root(path), box, needed[path]) for path, box in boxes.items()}

    def _verified(self, name: str) -> memoryview:
        """A file in memory, after comparing its checksum."""
        path = self.directory / name
        with errors_as_damage(path), open(path, "rb") as file:
            data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))
        changed = f"{path} has been changed since it was written: its checksum is wrong"
        check(zlib.crc32(data) == self._files[name]["crc32"], changed, DamagedCheckpointError)
        return data

    def _assembled(self, root: str, box: Box, chunks: list[_Chunk]) -> Tensor:
        """A part of a tensor, from chunks of which each overlaps with it."""
        parts = [common(box, chunk.box) for chunk in chunks]
        complete = sum(map(size_of, parts)) == size_of(box)
        check(complete, f"the files in {self.directory} do not have all of {root}", DamagedCheckpointError)
        dtype = dtype_of(root, self.tensors[root]["dtype"])
        if len(chunks) == 1:
            return self._tensor(chunks[0], dtype)[within(box, chunks[0].box)]
        data = torch.zeros(size_of(box) * dtype.itemsize, dtype=torch.uint8)
        tensor = data.view(dtype).view([end - begin for begin, end in box])
        for chunk, part in zip(chunks, parts, strict=True):
            words(tensor)[within(part, box)] = words(self._tensor(chunk, dtype))[within(part, chunk.box)]
        return tensor

    def _tensor(self, chunk: _Chunk, dtype: torch.dtype) -> Tensor:
        data = torch.frombuffer(self._mapped[chunk.file][chunk.begin : chunk.end], dtype=torch.uint8)
        return data.view(dtype).view([end - begin for begin, end in chunk.box])
