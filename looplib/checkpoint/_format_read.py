"""Checkpoint reading: JSON is parsed and memory is mapped, and nothing in a file is executed.

A manifest's checksum shows that it has not changed since it was written. It may still have been written with bad
intent, so each entry is checked before it is used.
"""

from __future__ import annotations

import math
import mmap
import os
import re
import reprlib
import stat
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import repeat
from pathlib import Path
from typing import Any

import orjson
import torch
from torch import Tensor

from looplib._core.checks import are_counts, check, count_of
from looplib._core.mappings import mapped
from looplib.checkpoint._format import (
    DATA,
    LARGEST,
    MANIFEST,
    QUANTIZED,
    SHARDED,
    CheckpointVersionError,
    DamagedCheckpointError,
    decoded,
    envelope,
    extent,
    sound,
)

_SHARD = r"(tensors-\d{5,}\.safetensors|chunks-\d{5,}\.json)"


Chunk = tuple[tuple[int, ...], tuple[int, ...]]  # offsets and sizes of a part of a tensor


def read_manifest(directory: Path) -> dict[str, Any]:
    """Read a manifest, and check its checksum and the size of the data file."""
    return read_document(directory)[0]


def read_document(directory: Path) -> tuple[dict[str, Any], int]:
    """Read a manifest and return it with its checksum."""
    path = directory / MANIFEST
    document = _content(path)
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
        check(
            version <= SHARDED,
            f"{path} is of format {version}, and this looplib reads up to {SHARDED}: install a newer looplib",
            CheckpointVersionError,
        )
        _sized(directory / DATA, manifest["bytes"])
    return manifest, checksum


def check_files(directory: Path, manifest: Mapping[str, Any]) -> int:
    """Check the sizes of the shard files, and return the total bytes of all tensor files."""
    total: int = manifest["bytes"]
    for name, expected in manifest.get("files", {}).items():
        size = _sized(directory / _shard_name(name), expected)
        total += size if name.endswith(".safetensors") else 0
    return total


def _shard_name(name: str) -> str:
    """Name of a shard file. Anything else, such as a path outside the directory, is refused."""
    check(re.fullmatch(_SHARD, name), f"{name!r} is no name of a file of tensors")
    return name


def _content(path: Path) -> bytes:
    """Content of a manifest, or of a description of chunks."""
    check(_size(path) <= LARGEST, f"{path} is larger than any save writes it", DamagedCheckpointError)
    with _found(path):
        return path.read_bytes()


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


def _sized(path: Path, expected: int) -> int:
    size = _size(path)
    check(size == expected, f"{path} has {size} bytes; {expected} were written", DamagedCheckpointError)
    return size


def _dtype(leaf_path: str, name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name, None)  # type: ignore[assignment]
    known = isinstance(dtype, torch.dtype) and dtype not in QUANTIZED
    check(known, f"{leaf_path} has dtype {name!r}, unknown to this torch")
    return dtype


def _end(leaf_path: str, entry: Mapping[str, Any]) -> int:
    """One past the last byte of a tensor in its run of bytes, after a check of its manifest entry."""
    shape, strided, offset = entry["shape"], "stride" in entry, entry.get("offset", 0)
    numbers, size = count_of(shape, leaf_path), _dtype(leaf_path, entry["dtype"]).itemsize
    stride = entry["stride"] if strided else []
    if not (isinstance(stride, list) and are_counts([offset, *stride]) and offset % size == 0):
        raise ValueError(f"{leaf_path} has stride {reprlib.repr(stride)} and offset {reprlib.repr(offset)}")
    end: int = offset + (extent(shape, stride) if strided else numbers) * size
    return end


class Reader:
    """Lazy checkpoint reader: checks the manifest at once, and reads a leaf's bytes on demand."""

    def __init__(self, directory: Path, manifest: Mapping[str, Any]) -> None:
        self.directory = directory
        self.maps: dict[str, mmap.mmap] = {}
        self.runs: dict[str, Tensor] = {}
        with sound(directory / MANIFEST):
            self.values = mapped(decoded, manifest["values"])
            self.tensors: dict[str, dict[str, Any]] = manifest["tensors"]
            self.shards: dict[str, dict[str, Any]] = manifest.get("shards", {})
            self.data: dict[str, dict[str, Any]] = manifest["data"]
            self.files = {DATA: manifest["bytes"]}
            self.files |= {_shard_name(name): size for name, size in manifest.get("files", {}).items()}
            # Checksums of the files that describe the chunks. (In format 2, the manifest describes them.)
            self.described = {
                _shard_name(name): sums["crc32"] for name, sums in manifest.get("described", {}).items()
            }
            if unsized := self.described.keys() - self.files.keys():
                raise ValueError(f"there is no size of {', '.join(sorted(unsized))}")
            self._check_runs(self.data)
            ends: dict[str, int] = {}
            for leaf_path, entry in self.tensors.items():
                ends[entry["data"]] = max(ends.get(entry["data"], 0), _end(leaf_path, entry))
            for name, end in ends.items():
                if end != (size := self.data[name]["bytes"]):
                    raise ValueError(f"the bytes of {name} are {size}, and its tensors take {end}")
            for leaf_path in self.shards:
                self._check_shards(leaf_path)

    def describe(self, name: str) -> list[tuple[str, Chunk]]:
        """Read a file that describes the chunks of a rank, and return these with the paths of their leaves."""
        path = self.directory / name
        _sized(path, self.files[name])
        text = _content(path)
        unchanged = zlib.crc32(text) == self.described[name]
        check(unchanged, f"{path} has been changed since it was written: wrong checksum", DamagedCheckpointError)
        chunks = []
        with sound(path):
            description = orjson.loads(text)
            file, writer = _shard_name(description["file"]), int(name[len("chunks-") : -len(".json")])
            runs = {}
            for leaf_path, about in description["data"].items():
                run = file if leaf_path == file else f"{writer}{leaf_path}"
                self.data[run] = runs[run] = {**about, "file": file}
            self._check_runs(runs)
            for leaf_path, chunk in description["chunks"].items():
                run = f"{writer}{leaf_path}"
                entry, stored = self.shards[leaf_path], {**chunk, "data": run}
                self._check_chunk(leaf_path, stored, entry["shape"], _dtype(leaf_path, entry["dtype"]))
                entry.setdefault("chunks", []).append(stored)
                chunks.append((leaf_path, (tuple(chunk["offsets"]), tuple(chunk["sizes"]))))
        return chunks

    def _check_runs(self, runs: Mapping[str, Mapping[str, Any]]) -> None:
        """Check that runs of bytes lie within their files, and that these end with the last of them."""
        ends: dict[str, int] = {}
        for name, run in runs.items():
            begin, length, file = run["begin"], run["bytes"], self._file(name)
            if not are_counts([begin, length]):
                raise ValueError(f"the bytes of {name} are {length!r} from {begin!r} on")
            ends[file] = max(ends.get(file, 0), begin + length)
        for file, end in ends.items():
            check(
                end == self.files[file], f"{file} has {self.files[file]} bytes, and those of the tensors end at {end}"
            )

    def _check_shards(self, leaf_path: str) -> None:
        entry = self.shards[leaf_path]
        shape, chunks = entry["shape"], entry.get("chunks")
        dtype = _dtype(leaf_path, entry["dtype"])
        count = count_of(shape, leaf_path)
        if chunks is None:  # described in files of their own
            return
        for chunk in chunks:
            self._check_chunk(leaf_path, chunk, shape, dtype)
        numbers = sum(math.prod(chunk["sizes"]) for chunk in chunks)
        check(numbers == count, f"{leaf_path} has shape {shape}, and chunks of {numbers} numbers")

    def _check_chunk(self, leaf_path: str, chunk: Mapping[str, Any], shape: list[int], dtype: torch.dtype) -> None:
        offsets, sizes, length = chunk["offsets"], chunk["sizes"], self.data[chunk["data"]]["bytes"]
        check(are_counts([*offsets, *sizes]), f"{leaf_path} has a chunk of {sizes} at {offsets}")
        inside = all(low + n <= of for low, n, of in zip(offsets, sizes, shape, strict=True))
        check(inside, f"{leaf_path} has shape {shape}, and a chunk of {sizes} at {offsets} beyond it")
        full = count_of(sizes, leaf_path) * dtype.itemsize == length
        check(full, f"{leaf_path} has a chunk of {sizes} in {length} bytes")

    def _file(self, name: str) -> str:
        """Name of the file that contains a run of bytes."""
        file: str = self.data[name].get("file", DATA)
        return file

    def about(self, leaf_path: str) -> Mapping[str, Any] | None:
        """Dtype and shape of the tensor at a path, or None for a plain value."""
        return self.tensors.get(leaf_path) or self.shards.get(leaf_path)

    def chunks(self, leaf_path: str) -> Sequence[Mapping[str, Any]]:
        """Chunks in which the tensor at a path is stored: an unsharded tensor is one without `offsets` and `sizes`."""
        if leaf_path in self.shards:
            chunks: Sequence[Mapping[str, Any]] = self.shards[leaf_path].get("chunks", [])
            return chunks
        return [self.about(leaf_path) or {}]

    def chunk(self, leaf_path: str, index: int) -> Tensor:
        """One of these chunks, mapped from the file."""
        if leaf_path not in self.shards:
            return self.tensor(leaf_path)
        entry = self.shards[leaf_path]
        chunk = entry["chunks"][index]
        return self._run(chunk["data"]).view(getattr(torch, entry["dtype"])).view(chunk["sizes"])

    def verify(self, leaf_paths: Iterable[str], chunks: Iterable[tuple[str, int]] = ()) -> None:
        """Compare the checksums of all bytes of these unsharded leaves and of these chunks, on all cores.

        Also those of the headers of their files, which are for other programs: looplib reads the manifest.
        """
        chunks = [*zip(leaf_paths, repeat(0)), *chunks]
        names = {self.chunks(leaf_path)[index]["data"] for leaf_path, index in chunks}
        files = {DATA, *map(self._file, names)}
        for file in files:
            self._map(file)
        names |= files & self.data.keys()
        # The threads share one iterator, so that each takes the next run, largest first, when it has time. A task for
        # each run would cost more than most checksums, and a thread more than those of a few megabytes.
        sizes = {name: self.data[name]["bytes"] for name in names}
        runs = iter(sorted(sizes, key=sizes.__getitem__, reverse=True))
        threads = min(os.cpu_count() or 1, 32, 1 + sum(sizes.values()) // (4 << 20))
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(lambda _: [*map(self._run, runs)], range(threads)))

    def _map(self, file: str) -> mmap.mmap:
        if file not in self.maps:
            path = self.directory / file
            with sound(path), _found(path):
                _sized(path, self.files[file])
                with open(path, "rb") as opened:
                    self.maps[file] = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)
        return self.maps[file]

    def _run(self, name: str) -> Tensor:
        if name not in self.runs:
            run, file = self.data[name], self._file(name)
            begin, size, memory = run["begin"], run["bytes"], self._map(file)
            if zlib.crc32(memoryview(memory)[begin : begin + size]) != run["crc32"]:
                raise DamagedCheckpointError(
                    f"{self.directory / file}: the bytes of {name} have been changed since they were written: wrong "
                    "checksum"
                )
            self.runs[name] = (
                torch.frombuffer(memory, dtype=torch.uint8, offset=begin, count=size)
                if size
                else torch.empty(0, dtype=torch.uint8)
            )
        return self.runs[name]

    def tensor(self, leaf_path: str, copies: dict[Any, Tensor] | None = None, device: Any = "cpu") -> Tensor:
        """The tensor at a path: mapped from the file, or in copies of runs of bytes, which `copies` caches."""
        entry = self.tensors[leaf_path]
        name, dtype, shape = entry["data"], getattr(torch, entry["dtype"]), entry["shape"]
        run = self._run(name)
        if copies is not None:
            key = name, device
            run = copies[key] = copies[key] if key in copies else run.to(device, copy=True)
        if "stride" not in entry:
            size = math.prod(shape) * dtype.itemsize
            return (run if run.numel() == size else run[:size]).view(dtype).view(shape)
        rest = run[entry["offset"] :]
        rest = rest[: len(rest) // dtype.itemsize * dtype.itemsize].view(dtype)
        return rest.as_strided(shape, entry["stride"])
