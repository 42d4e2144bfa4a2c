"""Checkpoint reading: JSON is parsed and memory is mapped, and nothing in a file is executed.

A checksum shows that a file has not changed since it was written. It may still have been written with bad intent, so
each entry is checked before it is used.
"""

from __future__ import annotations

import math
import mmap
import os
import re
import reprlib
import stat
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import orjson
import torch
from torch import Tensor, distributed

from looplib._core.checks import are_counts, check, count_of, few
from looplib._core.checksums import bits_of
from looplib._core.mappings import mapped
from looplib._core.ranks import running
from looplib.checkpoint._format import (
    BLOCK,
    DATA,
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
    sound,
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
    with sound(path):
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
    """A part of a tensor in a file: which one, and its bytes among the file's data."""

    file: _DataFile
    box: Box
    begin: int
    end: int

    def tensor(self, dtype: torch.dtype) -> Tensor:
        size, offset = self.end - self.begin, self.file.start + self.begin
        data = torch.frombuffer(self.file.memory, dtype=torch.uint8, count=size, offset=offset)
        return data.view(dtype).view(self.box[1])


class _DataFile:
    """A data file, mapped into memory. Its header is compared with its checksum at once, and its data block by block."""

    def __init__(self, path: Path, about: Mapping[str, Any], tensors: Mapping[str, Mapping[str, Any]]) -> None:
        self.path = path
        self._checksums = about["crc32"]
        self._verified: set[int] = set()
        with sound(path), _found(path):
            _check_size(path, about["bytes"])
            blocks = len(self._checksums) - 1
            check(about["bytes"] <= LARGEST + blocks * BLOCK, f"{about['bytes']} bytes have {blocks} checksums")
            with open(path, "rb") as opened:
                self.memory = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)
            self.start = 8 + int.from_bytes(self.memory[:8], "little")
            self._verify(0, 0, self.start)
            self.chunks = dict(self._read_header(tensors))

    def _read_header(self, tensors: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, _Chunk]]:
        check(self.start % 8 == 0, f"the data begin at {self.start}, where not all dtypes can")
        entries = orjson.loads(self.memory[8 : self.start])
        boxes = orjson.loads(entries.pop("__metadata__", {}).get("boxes", "null"))
        for path, entry in entries.items():
            shape, (begin, end) = tensors[path]["shape"], entry["data_offsets"]
            offsets, sizes = ([0] * len(shape), shape) if boxes is None else boxes[path]
            check(are_counts([begin, end, *offsets, *sizes]), f"{path} has a chunk of {sizes} at {offsets}")
            inside = all(low + n <= of for low, n, of in zip(offsets, sizes, shape, strict=True))
            check(inside, f"{path} has shape {shape}, and a chunk of {sizes} at {offsets} beyond it")
            itemsize = _dtype(path, tensors[path]["dtype"]).itemsize
            fits = end - begin == count_of(sizes, path) * itemsize and begin % itemsize == 0
            check(
                fits and self.start + end <= len(self.memory),
                f"{path} has a chunk of {reprlib.repr(sizes)} in the bytes from {begin} to {end}",
            )
            yield path, _Chunk(self, (tuple(offsets), tuple(sizes)), begin, end)

    def blocks(self, chunk: _Chunk) -> Iterable[int]:
        """Indices of the blocks in which a chunk lies."""
        return range(chunk.begin // BLOCK, -(-chunk.end // BLOCK))

    def verify(self, block: int) -> None:
        """Compare the checksum of a block of the data."""
        if block not in self._verified:
            self._verify(block + 1, self.start + block * BLOCK, self.start + (block + 1) * BLOCK)
            self._verified.add(block)

    def _verify(self, index: int, begin: int, end: int) -> None:
        with sound(self.path):
            unchanged = zlib.crc32(memoryview(self.memory)[begin:end]) == self._checksums[index]
        check(
            unchanged,
            f"{self.path} has been changed since it was written: wrong checksum of the bytes from {begin} on",
            DamagedCheckpointError,
        )


def same_weights(one: Reader, other: Reader) -> bool:
    """True if two checkpoints hold the same parameters and buffers, to the bit."""
    paths = {path for path in (*one.tensors, *one.ties, *other.tensors, *other.ties) if path.startswith(WEIGHTS)}
    for path in paths:
        about = one.about(path)
        if about is None or about != other.about(path):
            return False
        tensors = [reader.read({path: whole(about["shape"])})[path] for reader in (one, other)]
        if not torch.equal(*[bits_of(words(tensor)) for tensor in tensors]):
            return False
    return True


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
        with sound(directory / MANIFEST):
            self.values = mapped(decoded, manifest["values"])
            self.tensors: dict[str, dict[str, Any]] = manifest["tensors"]
            for path, entry in self.tensors.items():
                bytes_in(path, entry)
            self.ties: dict[str, str] = manifest["ties"]
            for path, root in self.ties.items():
                check(root in self.tensors, f"{path} is tied to {root}, which is not there")
            self._about = {_file_name(name): about for name, about in manifest["files"].items()}
        self._files: dict[str, _DataFile] = {}

    def root(self, path: str) -> str:
        """Path under which the tensor at a path is stored."""
        return self.ties.get(path, path)

    def about(self, path: str) -> Mapping[str, Any] | None:
        """Dtype and shape of the tensor at a path, or None for a plain value."""
        return self.tensors.get(self.root(path))

    def read(self, boxes: Mapping[str, Box]) -> dict[str, Tensor]:
        """These parts of tensors, by path. Do not write to them: they may lie in memory of the files."""
        chunks = self._chunks(boxes)
        blocks = {
            (chunk.file, block) for each in chunks.values() for chunk in each for block in chunk.file.blocks(chunk)
        }
        with ThreadPoolExecutor(min(os.cpu_count() or 1, 32, len(blocks) or 1)) as pool:
            list(pool.map(lambda block: block[0].verify(block[1]), blocks))
        return {path: self._assembled(path, box, chunks[path]) for path, box in boxes.items()}

    def _chunks(self, boxes: Mapping[str, Box]) -> dict[str, list[_Chunk]]:
        """Chunks that make up these parts. Files are opened until they do: on the mesh of the save, only the own one."""
        found: dict[str, list[_Chunk]] = {path: [] for path in boxes}
        missing = {path: count for path, (_, sizes) in boxes.items() if (count := math.prod(sizes))}
        paths = defaultdict(list)
        for path in missing:
            paths[self.root(path)].append(path)
        for name in self._nearest():
            if not missing:
                break
            for root, chunk in self._file(name).chunks.items():
                for path in paths[root]:
                    if path in missing and (common := math.prod(_common(boxes[path], chunk.box)[1])):
                        found[path].append(chunk)
                        missing[path] -= common
                        if not missing[path]:
                            del missing[path]
        check(not missing, f"{self.directory} has not all chunks of {few(missing)}", DamagedCheckpointError)
        return found

    def _nearest(self) -> list[str]:
        """Names of the files: the one of unsharded tensors, then those that are most likely to hold what this rank holds."""
        names = sorted(self._about.keys() - {DATA})
        rank, ranks = (distributed.get_rank(), distributed.get_world_size()) if running() else (0, 1)
        indices = sorted(range(len(names)), key=lambda index: abs(index - rank * len(names) // ranks))
        return [DATA] * (DATA in self._about) + [names[index] for index in indices]

    def _file(self, name: str) -> _DataFile:
        if name not in self._files:
            self._files[name] = _DataFile(self.directory / name, self._about[name], self.tensors)
        return self._files[name]

    def _assembled(self, path: str, box: Box, chunks: list[_Chunk]) -> Tensor:
        """A part of a tensor, from chunks of which each overlaps with it."""
        dtype = getattr(torch, self.tensors[self.root(path)]["dtype"])
        if len(chunks) == 1:  # which has all of it
            return chunks[0].tensor(dtype)[_within(box, chunks[0].box)]
        into, filled = torch.empty(box[1], dtype=dtype), torch.zeros(box[1], dtype=torch.bool)
        for chunk in chunks:
            common = _common(box, chunk.box)
            place = _within(common, box)
            words(into)[place] = words(chunk.tensor(dtype))[_within(common, chunk.box)]
            filled[place] = True
        check(filled.all(), f"{self.directory} has not all chunks of {path}", DamagedCheckpointError)
        return into


def _common(one: Box, other: Box) -> Box:
    """The part that is in both of two parts of a tensor."""
    (lows, sizes), (other_lows, other_sizes) = one, other
    begins = [*map(max, lows, other_lows)]
    ends = [min(low + n, other + m) for low, n, other, m in zip(lows, sizes, other_lows, other_sizes, strict=True)]
    return tuple(begins), tuple(max(0, end - begin) for begin, end in zip(begins, ends, strict=True))


def _within(part: Box, whole: Box) -> tuple[slice, ...]:
    """Slices that take a part of a tensor from another part of it."""
    return tuple(slice(low - first, low - first + size) for low, size, first in zip(*part, whole[0], strict=True))
