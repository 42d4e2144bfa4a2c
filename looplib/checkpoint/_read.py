"""Checkpoint reading: JSON is parsed and memory is mapped, and nothing in a file is executed.

A checksum shows that a file has not changed since it was written. It may still have been written with bad intent, so
each entry is checked before it is used.
"""

from __future__ import annotations

import math
import mmap
import os
import re
import stat
import zlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import orjson
import torch
from torch import Tensor

from looplib._core.checks import are_counts, check, count_of
from looplib._core.mappings import mapped
from looplib.checkpoint._format import (
    FORMAT,
    LARGEST,
    MANIFEST,
    QUANTIZED,
    WEIGHTS,
    Box,
    CheckpointVersionError,
    DamagedCheckpointError,
    decoded,
    envelope,
    errors_as_damage,
    list_of,
    words,
)

_FILE = r"tensors(-\d{5,})?\.safetensors"


def read_manifest(directory: Path) -> tuple[dict[str, Any], int]:
    """Read a manifest, compare its checksum, and return both."""
    path = directory / MANIFEST
    check(_size(path) <= LARGEST, f"{path} is larger than any save writes it", DamagedCheckpointError)
    with _found(path):
        document = path.read_bytes()
    try:
        parsed = orjson.loads(document)
        checksum, manifest = int(parsed["crc32"]), parsed["manifest"]
    except (LookupError, TypeError, ValueError, ArithmeticError):
        raise DamagedCheckpointError(f"{path} is no manifest of a looplib checkpoint, or is cut short") from None
    head = envelope(checksum)
    unchanged = document.startswith(head) and zlib.crc32(document[len(head) : -2]) == checksum
    check(unchanged, f"{path} has been changed since it was written: its checksum is wrong", DamagedCheckpointError)
    with errors_as_damage(path):
        version = manifest["format"]
        advice = "install a newer looplib" if version > FORMAT else "restore it with the looplib that wrote it"
        check(
            version == FORMAT,
            f"{path} is of format {version}, and this looplib reads format {FORMAT}: {advice}",
            CheckpointVersionError,
        )
    return manifest, checksum


def check_files(directory: Path, manifest: Mapping[str, Any]) -> int:
    """Check the sizes of the data files, and return their sum."""
    for name, about in manifest["files"].items():
        _check_size(directory / _file_name(name), about["bytes"])
    total: int = sum(about["bytes"] for about in manifest["files"].values())
    return total


def bytes_in(leaf_path: str, entry: Mapping[str, Any]) -> int:
    """Bytes of a tensor, from its entry in a manifest."""
    return count_of(entry["shape"], leaf_path) * _dtype(leaf_path, entry["dtype"]).itemsize


def _file_name(name: str) -> str:
    """Name of a data file. Anything else, such as a path outside the directory, is refused."""
    check(re.fullmatch(_FILE, name), f"{name!r} is no name of a file of tensors")
    return name


@contextmanager
def _found(path: Path) -> Iterator[None]:
    """A missing file is damage. Another process may have deleted it since it was listed, or since it was last looked at."""
    try:
        yield
    except (FileNotFoundError, NotADirectoryError) as error:
        raise DamagedCheckpointError(f"{path} is missing ({error.strerror})") from None


def _size(path: Path) -> int:
    with _found(path):
        status = path.stat()
    # To read a pipe or a device could take forever.
    check(stat.S_ISREG(status.st_mode), f"{path} is no file of data", DamagedCheckpointError)
    return status.st_size


def _check_size(path: Path, expected: int) -> None:
    size = _size(path)
    check(size == expected, f"{path} has {size} bytes; {expected} were written", DamagedCheckpointError)


def _dtype(leaf_path: str, name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name, None)  # type: ignore[assignment]
    known = isinstance(dtype, torch.dtype) and dtype not in QUANTIZED
    check(known, f"{leaf_path} has dtype {name!r}, unknown to this torch")
    return dtype


class _Chunk(NamedTuple):
    """A part of a tensor in a file: which one, the bytes in which it lies, and their checksum."""

    file: str
    path: str
    box: Box
    begin: int
    end: int
    crc32: int


def chunks_in(directory: Path, name: str, about: Mapping[str, Any]) -> Mapping[str, Any]:
    """The chunks of a file: those in the manifest, or those in the list beside the file, whose checksum is there."""
    if not isinstance(about["chunks"], int):
        return about["chunks"]  # type: ignore[no-any-return]
    path = directory / list_of(name)
    check(_size(path) <= LARGEST, f"{path} is larger than any save writes it", DamagedCheckpointError)
    with _found(path):
        text = path.read_bytes()
    unchanged = zlib.crc32(text) == about["chunks"]
    check(unchanged, f"{path} has been changed since it was written: its checksum is wrong", DamagedCheckpointError)
    return orjson.loads(text)  # type: ignore[no-any-return]


def weights_in(directory: Path, manifest: Mapping[str, Any]) -> dict[str, bytes]:
    """Dtype, shape and checksums of the chunks of each parameter and buffer, by path."""
    tensors, ties = manifest["tensors"], manifest["ties"]
    chunks = defaultdict(list)
    for name, about in manifest["files"].items():
        for path, chunk in chunks_in(directory, name, about).items():
            chunks[path].append(chunk)
    roots = {path: ties.get(path, path) for path in (*tensors, *ties) if path.startswith(WEIGHTS)}
    return {path: orjson.dumps([tensors[root], sorted(chunks[root])]) for path, root in roots.items()}


def whole(shape: Sequence[int]) -> Box:
    """All of a tensor of this shape."""
    return (0,) * len(shape), tuple(shape)


class Reader:
    """Lazy checkpoint reader: checks the manifest at once, and reads tensors on demand.

    Attributes:
        values: the plain values, by path.
        tensors: dtype and shape of each tensor that is stored, by path.
        ties: path of a tensor -> path of the same tensor in `tensors`.
    """

    def __init__(self, directory: Path, manifest: Mapping[str, Any]) -> None:
        self.directory = directory
        self._opened: dict[str, memoryview] = {}
        self._chunks: dict[str, list[_Chunk]] = defaultdict(list)
        with errors_as_damage(directory / MANIFEST):
            self.values = mapped(decoded, manifest["values"])
            self.tensors: dict[str, dict[str, Any]] = manifest["tensors"]
            self.ties: dict[str, str] = manifest["ties"]
            for path, root in self.ties.items():
                check(root in self.tensors, f"{path} is tied to {root}, which is not there")
            self._files: dict[str, Mapping[str, Any]] = manifest["files"]
            for name, about in self._files.items():
                self._list_chunks(_file_name(name), about, chunks_in(directory, name, about))
            for path, entry in self.tensors.items():
                sizes = [math.prod(chunk.box[1]) for chunk in self._chunks[path]]
                check(sum(sizes) == count_of(entry["shape"], path), f"the files have not all chunks of {path}")

    def _list_chunks(self, name: str, about: Mapping[str, Any], chunks: Mapping[str, Any]) -> None:
        """The chunks of a file, which lie one after another behind its header."""
        end = about["start"]
        for path, (crc32, *box) in chunks.items():
            shape, dtype = self.tensors[path]["shape"], _dtype(path, self.tensors[path]["dtype"])
            offsets, sizes = box or whole(shape)
            count = count_of([*sizes], path)
            inside = all(low + size <= of for low, size, of in zip(offsets, sizes, shape, strict=True))
            check(are_counts(offsets) and inside, f"{path} has shape {shape}, and a chunk of {sizes} at {offsets}")
            begin, end = end, end + count * dtype.itemsize
            check(begin % dtype.itemsize == 0, f"{path} begins at {begin}, where no {dtype} can")
            self._chunks[path].append(_Chunk(name, path, (tuple(offsets), tuple(sizes)), begin, end, crc32))
        check(are_counts([about["start"]]) and end == about["bytes"], f"the chunks in {name} have not its size")

    def root(self, path: str) -> str:
        """Path under which the tensor at a path is stored."""
        return self.ties.get(path, path)

    def about(self, path: str) -> Mapping[str, Any] | None:
        """Dtype and shape of the tensor at a path, or None for a plain value."""
        return self.tensors.get(self.root(path))

    def read(self, boxes: Mapping[str, Box]) -> dict[str, Tensor]:
        """These parts of tensors, by path. Do not write to them: they may lie in memory of the files."""
        needed = {
            path: [chunk for chunk in self._chunks[self.root(path)] if math.prod(_common(box, chunk.box)[1])]
            for path, box in boxes.items()
        }
        chunks = [*{chunk for each in needed.values() for chunk in each}]
        for name in {chunk.file for chunk in chunks}:
            self._open(name)
        threads = min(os.cpu_count() or 1, 32)
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(self._verify, [chunks[first::threads] for first in range(threads)]))
        return {path: self._assembled(path, box, needed[path]) for path, box in boxes.items()}

    def _open(self, name: str) -> None:
        """Map a file into memory, and compare the checksum of its header."""
        path, about = self.directory / name, self._files[name]
        if name in self._opened:
            return
        with errors_as_damage(path), _found(path):
            _check_size(path, about["bytes"])
            with open(path, "rb") as opened:
                self._opened[name] = memoryview(mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY))
            self._compare(name, 0, about["start"], about["crc32"], "its header")

    def _verify(self, chunks: list[_Chunk]) -> None:
        for chunk in chunks:
            self._compare(chunk.file, chunk.begin, chunk.end, chunk.crc32, chunk.path)

    def _compare(self, name: str, begin: int, end: int, crc32: int, what: str) -> None:
        check(
            zlib.crc32(self._opened[name][begin:end]) == crc32,
            f"{self.directory / name} has been changed since it was written: wrong checksum of {what}",
            DamagedCheckpointError,
        )

    def _assembled(self, path: str, box: Box, chunks: list[_Chunk]) -> Tensor:
        """A part of a tensor, from chunks of which each overlaps with it."""
        dtype = getattr(torch, self.tensors[self.root(path)]["dtype"])
        parts = [self._tensor(chunk, dtype) for chunk in chunks]
        if len(parts) == 1:  # which has all of it
            return parts[0][_within(box, chunks[0].box)]
        tensor = torch.empty(box[1], dtype=dtype)
        words(tensor).zero_()  # chunks that overlap, as no save writes them, leave gaps
        for chunk, part in zip(chunks, parts, strict=True):
            common = _common(box, chunk.box)
            words(tensor)[_within(common, box)] = words(part)[_within(common, chunk.box)]
        return tensor

    def _tensor(self, chunk: _Chunk, dtype: torch.dtype) -> Tensor:
        data = torch.frombuffer(self._opened[chunk.file][chunk.begin : chunk.end], dtype=torch.uint8)
        return data.view(dtype).view(chunk.box[1])


def _common(one: Box, other: Box) -> Box:
    """The part that is in both of two parts of a tensor."""
    (lows, sizes), (other_lows, other_sizes) = one, other
    begins = [*map(max, lows, other_lows)]
    ends = [min(low + n, other + m) for low, n, other, m in zip(lows, sizes, other_lows, other_sizes, strict=True)]
    return tuple(begins), tuple(max(0, end - begin) for begin, end in zip(begins, ends, strict=True))


def _within(part: Box, whole: Box) -> tuple[slice, ...]:
    """Slices that take a part of a tensor from another part of it."""
    return tuple(slice(low - first, low - first + size) for low, size, first in zip(*part, whole[0], strict=True))
