"""Checkpoint reading: JSON is parsed and memory is mapped, and nothing in a file is executed.

A manifest is verified when it is read, and a data file when something in it is needed, each as a whole. Headers say in
which files that is, so they are read before.
"""

from __future__ import annotations

import math
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

from looplib._core.checks import check, few
from looplib._core.mappings import mapped, without
from looplib._core.random import members_of
from looplib.checkpoint._format import (
    FORMAT,
    MANIFEST,
    CheckpointVersionError,
    DamagedCheckpointError,
    checksum,
    counts_in,
    decoded,
    slices_of,
    words,
)
from looplib.checkpoint._shards import Box, box_of, common, first_of, full_box, shape_of, size_of, within
from looplib.types import COUNTS

# What Python, orjson and torch raise for paths and contents that no save writes.
_OF_DAMAGE = (
    FileNotFoundError, NotADirectoryError, IsADirectoryError, LookupError, TypeError, ValueError, AttributeError,
    ArithmeticError, RuntimeError, SyntaxError,
)  # fmt: skip


@contextmanager
def errors_as_damage(path: Path) -> Iterator[None]:
    """Turn errors for a missing file, or for a content that no save writes, into a DamagedCheckpointError."""
    try:
        yield
    except DamagedCheckpointError:
        raise
    except _OF_DAMAGE as error:
        raise DamagedCheckpointError(f"{path} is damaged ({error})") from error


def check_file(path: Path) -> None:
    """Raise ValueError unless there is a regular file: a pipe would wait for a writer, and a device may have no end."""
    check(path.is_file(), "there is no regular file")


def read_manifest(directory: Path) -> dict[str, Any]:
    """Read a manifest and compare its checksum."""
    path = directory / MANIFEST
    with errors_as_damage(path):
        check_file(path)
        manifest: dict[str, Any] = orjson.loads(_text_of(path))
        is_same = manifest["crc32"] == zlib.crc32(orjson.dumps(without(manifest, ("crc32",))))
        check(is_same, "its checksum is wrong")
    version = manifest["format"]
    check(
        version == FORMAT,
        f"{path} is of format {version}, and this looplib reads format {FORMAT}: use the looplib that wrote it",
        CheckpointVersionError,
    )
    with errors_as_damage(path):
        counts = counts_in(manifest)
        check(counts.keys() == {*COUNTS}, f"its counts are {few(counts)}")
        elsewhere = [name for name in manifest["files"] if Path(name).name != name]
        check(not elsewhere, f"it has files in other folders, {few(elsewhere)}")
    return manifest


def _text_of(path: Path) -> bytes:
    """Content of a JSON file. A large one of something else, such as a file with a hole, is not read to its end."""
    parts = []
    with path.open("rb") as file:
        check(file.read(1) == b"{", "it is no JSON object")
        file.seek(-1, os.SEEK_END)
        check(file.read(1) == b"}", "it is no JSON object")
        file.seek(0)
        while part := file.read(1 << 20):
            check(b"\0" not in part, "it is no JSON object")
            parts.append(part)
    return b"".join(parts)


class _Chunk(NamedTuple):
    """A part of a tensor in a file."""

    file: str
    box: Box
    data: Tensor


class Reader:
    """Lazy checkpoint reader, which reads tensors on demand.

    Attributes:
        values: the plain values, by path.
        tensors: dtype and shape of each tensor that is stored, by path.
        ties: path of a tensor -> path of the same tensor in `tensors`.
    """

    def __init__(self, directory: Path, manifest: Mapping[str, Any]) -> None:
        self.directory = directory
        with errors_as_damage(directory / MANIFEST):
            self.values = mapped(decoded, manifest["values"])
            self._shared = {*manifest["shared"]}  # by all members of a stack, so that the first is all of it
            self._members = members_of(counts_in(manifest)["seed"])
        self.tensors: dict[str, dict[str, Any]] = manifest["tensors"]
        self.ties: dict[str, str] = manifest["ties"]
        self._written = manifest["files"]
        self._files: dict[str, memoryview] = {}
        self._chunks: dict[str, list[_Chunk]] = defaultdict(list)
        for name in self._written:
            self._map(name)
        with errors_as_damage(directory / MANIFEST):
            self._check()

    def _map(self, name: str) -> None:
        """Map a file into memory and list its chunks. If its header is damaged, `read` will find out."""
        path = self.directory / name
        with errors_as_damage(path):
            check_file(path)
            with open(path, "rb") as file:
                data = self._files[name] = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))
            start = 8 + int.from_bytes(data[:8], "little")
            header = orjson.loads(data[8:start])
            boxes = header.pop("__metadata__")  # of tensors that are here in part
            for leaf_path, entry in header.items():
                box = full_box(self.tensors[leaf_path]["shape"])
                if leaf_path in boxes:
                    box = tuple((begin, end) for begin, end in orjson.loads(boxes[leaf_path]))
                dtype = getattr(torch, self.tensors[leaf_path]["dtype"])
                if count := size_of(box):
                    tensor = torch.frombuffer(data, dtype=dtype, count=count, offset=start + entry["data_offsets"][0])
                    self._chunks[leaf_path].append(_Chunk(name, box, tensor.view(shape_of(box))))

    def _check(self) -> None:
        """Raise for shapes that the files cannot hold, and for ties to nothing."""
        stored = sum(file["bytes"] for file in self._written.values())
        for leaf_path, tensor in self.tensors.items():
            shape, size = tensor["shape"], getattr(torch, tensor["dtype"]).itemsize
            sizes = all(n >= 0 for n in shape) and math.prod(max(n, 1) for n in shape) < 1 << 60  # as torch can count
            fits = sizes and size_of(self._stored_box(leaf_path)) * size <= stored
            check(fits, f"its files have {stored} bytes, and {leaf_path} the shape {shape[:8]}")
        for leaf_path in self._shared:
            shape = self.tensors[leaf_path]["shape"]
            check(shape[:1] == [self._members], f"{leaf_path} has the shape {shape[:8]}, for {self._members} members")
        unknown = [root for root in self.ties.values() if root not in self.tensors]
        check(not unknown, f"it ties leaves to {few(unknown)}, which it does not have")

    def _stored_box(self, root: str) -> Box:
        """The part of a tensor that the files have: the first member of what all members of a stack share."""
        shape = self.tensors[root]["shape"]
        return first_of(shape) if root in self._shared else full_box(shape)

    def root(self, path: str) -> str:
        """Path under which the tensor at a path is stored."""
        return self.ties.get(path, path)

    def read(self, leaves: Mapping[str, Any]) -> dict[str, Tensor]:
        """The tensors to restore into these leaves, by path: of a sharded leaf, what this process holds.

        Do not write to them: they may lie in memory of the files. Each file in which a part of one of them lies is read
        and verified as a whole.
        """
        wanted: dict[str, tuple[Box, list[_Chunk]]] = {}
        with errors_as_damage(self.directory):  # as what the headers say is not verified yet
            for path, leaf in leaves.items():
                if (root := self.root(path)) in self.tensors:
                    is_whole = root in self._shared or not isinstance(leaf, Tensor)
                    box = self._stored_box(root) if is_whole else box_of(leaf)
                    chunks = self._chunks[root]
                    same = [chunk for chunk in chunks if chunk.box == box]
                    wanted[path] = box, same[:1] or [chunk for chunk in chunks if size_of(common(box, chunk.box))]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            for name in {chunk.file for _, chunks in wanted.values() for chunk in chunks}:
                slices = slices_of([self._files[name]])
                actual = checksum(slices, pool.map if len(slices) > 1 else map)
                with errors_as_damage(self.directory / name):
                    check(actual == self._written[name]["crc32"], "its checksum is wrong")
        values = {path: self._assembled(path, box, chunks) for path, (box, chunks) in wanted.items()}
        shared = [path for path in values if self.root(path) in self._shared]
        return values | {path: values[path].expand(self.tensors[self.root(path)]["shape"]) for path in shared}

    def _assembled(self, path: str, box: Box, chunks: list[_Chunk]) -> Tensor:
        """A part of the tensor at a path, from the chunks that have elements in common with it."""
        if [chunk.box for chunk in chunks] == [box]:
            return chunks[0].data
        parts = [common(box, chunk.box) for chunk in chunks]
        missing = f"the files in {self.directory} do not have all of {path}"
        check(sum(map(size_of, parts)) == size_of(box), missing, DamagedCheckpointError)
        if parts == [box]:
            return chunks[0].data[within(box, chunks[0].box)]
        tensor = torch.empty(
            shape_of(box), dtype=getattr(torch, self.tensors[self.root(path)]["dtype"]), device="cpu"
        )
        for part, chunk in zip(parts, chunks, strict=True):
            words(tensor)[within(part, box)] = words(chunk.data)[within(part, chunk.box)]
        return tensor
