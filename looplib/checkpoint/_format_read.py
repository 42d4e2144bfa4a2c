"""Checkpoint reading: JSON is parsed and memory is mapped, and nothing in a file is executed.

A manifest's checksum shows that it has not changed since it was written. It may still have been written with bad
intent, so each entry is checked before it is used.
"""

from __future__ import annotations

import math
import mmap
import os
import re
import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from pathlib import Path
from typing import Any

import orjson
import torch
from torch import Tensor

from looplib._core.checks import check
from looplib._core.mappings import mapped
from looplib.checkpoint._format import (
    DATA,
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
    try:
        document = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
        raise DamagedCheckpointError(f"{path} is missing, or of another kind ({error.strerror})") from None
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


def _sized(path: Path, expected: int) -> int:
    try:
        size = path.stat().st_size
    except (FileNotFoundError, NotADirectoryError) as error:
        raise DamagedCheckpointError(f"{path} is missing ({error.strerror})") from None
    check(size == expected, f"{path} has {size} bytes; {expected} were written", DamagedCheckpointError)
    return size


def _dtype(leaf_path: str, name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name, None)  # type: ignore[assignment]
    known = isinstance(dtype, torch.dtype) and dtype not in QUANTIZED
    check(known, f"{leaf_path} has dtype {name!r}, unknown to this torch")
    return dtype


def _are_counts(numbers: Collection[Any]) -> bool:
    """True for ints from 0 on whose products and sums stay within 64 bits."""
    return {*map(type, numbers)} <= {int} and min(numbers, default=0) >= 0 and max(numbers, default=0) < 2**48


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
            for name in self.data:
                self._check_run(name)
            for leaf_path in self.tensors:
                self._check_entry(leaf_path)
            for leaf_path in self.shards:
                self._check_shards(leaf_path)
        self._map(DATA)

    def describe(self, name: str) -> list[tuple[str, Chunk]]:
        """Read a file that describes the chunks of a rank, and return these with the paths of their leaves."""
        path = self.directory / name
        _sized(path, self.files[name])
        text = path.read_bytes()
        unchanged = zlib.crc32(text) == self.described[name]
        check(unchanged, f"{path} has been changed since it was written: wrong checksum", DamagedCheckpointError)
        chunks = []
        with sound(path):
            description = orjson.loads(text)
            file, writer = _shard_name(description["file"]), int(name[len("chunks-") : -len(".json")])
            for leaf_path, chunk in description["chunks"].items():
                run = f"{writer}{leaf_path}"
                self.data[run] = {**description["data"][leaf_path], "file": file}
                self._check_run(run)
                entry, stored = self.shards[leaf_path], {**chunk, "data": run}
                self._check_chunk(leaf_path, stored, entry["shape"], _dtype(leaf_path, entry["dtype"]))
                entry.setdefault("chunks", []).append(stored)
                chunks.append((leaf_path, (tuple(chunk["offsets"]), tuple(chunk["sizes"]))))
        return chunks

    def _check_run(self, name: str) -> None:
        begin, length, size = self.data[name]["begin"], self.data[name]["bytes"], self.files[self._file(name)]
        if not (_are_counts([begin, length]) and begin + length <= size):
            raise ValueError(f"the bytes of {name} are {length!r} from {begin!r} on, of {size}")

    def _check_entry(self, leaf_path: str) -> None:
        entry = self.tensors[leaf_path]
        shape, stride, offset = entry["shape"], entry.get("stride"), entry.get("offset", 0)
        length, size = self.data[entry["data"]]["bytes"], _dtype(leaf_path, entry["dtype"]).itemsize
        numbers = math.prod(shape)
        are_counts = type(shape) is list and _are_counts([offset, *shape, *(stride or ()), numbers])
        # Thousands of leaves are checked, so the message is made for a wrong one alone.
        if not (are_counts and offset % size == 0):
            raise ValueError(f"{leaf_path} has shape {shape}, stride {stride} and offset {offset}")
        if offset + (numbers if stride is None else extent(shape, stride)) * size > length:
            raise ValueError(
                f"{leaf_path} reaches beyond its {length} bytes: shape {shape}, stride {stride} and offset {offset}"
            )

    def _check_shards(self, leaf_path: str) -> None:
        entry = self.shards[leaf_path]
        shape, chunks = entry["shape"], entry.get("chunks")
        dtype = _dtype(leaf_path, entry["dtype"])
        check(type(shape) is list and _are_counts(shape), f"{leaf_path} has shape {shape}")
        if chunks is None:  # described in files of their own
            return
        for chunk in chunks:
            self._check_chunk(leaf_path, chunk, shape, dtype)
        numbers = sum(math.prod(chunk["sizes"]) for chunk in chunks)
        check(numbers == math.prod(shape), f"{leaf_path} has shape {shape}, and chunks of {numbers} numbers")

    def _check_chunk(self, leaf_path: str, chunk: Mapping[str, Any], shape: list[int], dtype: torch.dtype) -> None:
        offsets, sizes, length = chunk["offsets"], chunk["sizes"], self.data[chunk["data"]]["bytes"]
        check(_are_counts([*offsets, *sizes]), f"{leaf_path} has a chunk of {sizes} at {offsets}")
        inside = all(low + n <= of for low, n, of in zip(offsets, sizes, shape, strict=True))
        check(inside, f"{leaf_path} has shape {shape}, and a chunk of {sizes} at {offsets} beyond it")
        full = math.prod(sizes) * dtype.itemsize == length
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
        """Compare the checksums of all bytes of these unsharded leaves and of these chunks, on all cores."""
        chunks = [*zip(leaf_paths, repeat(0)), *chunks]
        names = {self.chunks(leaf_path)[index]["data"] for leaf_path, index in chunks}
        for file in set(map(self._file, names)):
            self._map(file)
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
            _sized(path, self.files[file])
            try:
                with open(path, "rb") as opened:
                    self.maps[file] = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)
            except FileNotFoundError:
                raise DamagedCheckpointError(f"{path} is missing") from None
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
