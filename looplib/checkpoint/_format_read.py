"""Checkpoint reading: JSON is parsed and memory is mapped, and nothing in a file is executed.

A manifest's checksum shows that it has not changed since it was written. It may still have been written with bad
intent, so each entry is checked before it is used.
"""

from __future__ import annotations

import math
import mmap
import re
import zlib
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import orjson
import torch
from torch import Tensor

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

_SHARD = re.compile(r"tensors-\d{5,}\.safetensors")


def read_manifest(directory: Path) -> dict[str, Any]:
    """Read a manifest, and check its checksum and the size of the data file."""
    return read_document(directory)[0]


def read_document(directory: Path) -> tuple[dict[str, Any], int]:
    """Read a manifest and return it with its checksum."""
    path, data = directory / MANIFEST, directory / DATA
    try:
        document = path.read_bytes()
        size = data.stat().st_size
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
        raise DamagedCheckpointError(f"{error.filename} is missing, or of another kind ({error.strerror})") from None
    try:
        parsed = orjson.loads(document)
        checksum, manifest = int(parsed["crc32"]), parsed["manifest"]
    except (LookupError, TypeError, ValueError, ArithmeticError):
        raise DamagedCheckpointError(f"{path} is no manifest of a looplib checkpoint, or is cut short") from None
    head = envelope(checksum)
    if not document.startswith(head) or zlib.crc32(document[len(head) : -2]) != checksum:
        raise DamagedCheckpointError(f"{path} has been changed since it was written: its checksum is wrong")
    with sound(path):
        version, expected = manifest["format"], manifest["bytes"]
        if version > SHARDED:
            raise CheckpointVersionError(
                f"{path} is of format {version}, and this looplib reads up to {SHARDED}: install a newer looplib"
            )
    if size != expected:
        raise DamagedCheckpointError(f"{data} has {size} bytes; {expected} were written")
    return manifest, checksum


def check_files(directory: Path, manifest: Mapping[str, Any]) -> int:
    """Check the sizes of the shard files, and return the total bytes of all tensor files."""
    total: int = manifest["bytes"]
    for name, expected in manifest.get("files", {}).items():
        total += _sized(directory / _shard_name(name), expected)
    return total


def _shard_name(name: str) -> str:
    """Name of a shard file. Anything else, such as a path outside the directory, is refused."""
    if not _SHARD.fullmatch(name):
        raise ValueError(f"{name!r} is no name of a file of tensors")
    return name


def _sized(path: Path, expected: int) -> int:
    try:
        size = path.stat().st_size
    except (FileNotFoundError, NotADirectoryError) as error:
        raise DamagedCheckpointError(f"{path} is missing ({error.strerror})") from None
    if size != expected:
        raise DamagedCheckpointError(f"{path} has {size} bytes; {expected} were written")
    return size


def _dtype(leaf_path: str, name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype) or dtype in QUANTIZED:
        raise ValueError(f"{leaf_path} has dtype {name!r}, unknown to this torch")
    return dtype


class Reader:
    """Lazy checkpoint reader: checks the manifest at once, and reads a leaf's bytes on demand."""

    def __init__(self, directory: Path, manifest: Mapping[str, Any]) -> None:
        self.directory = directory
        self.maps: dict[str, mmap.mmap] = {}
        self.runs: dict[str, Tensor] = {}
        with sound(directory / MANIFEST):
            self.values = {leaf_path: decoded(entry) for leaf_path, entry in manifest["values"].items()}
            self.tensors: dict[str, dict[str, Any]] = manifest["tensors"]
            self.shards: dict[str, dict[str, Any]] = manifest.get("shards", {})
            self.data: dict[str, dict[str, Any]] = manifest["data"]
            self.files = {DATA: manifest["bytes"]}
            self.files |= {_shard_name(name): size for name, size in manifest.get("files", {}).items()}
            for name in self.data:
                self._check_run(name)
            for leaf_path in self.tensors:
                self._check_entry(leaf_path)
            for leaf_path in self.shards:
                self._check_shards(leaf_path)
        self._map(DATA)

    def _check_run(self, name: str) -> None:
        begin, length, size = self.data[name]["begin"], self.data[name]["bytes"], self.files[self._file(name)]
        are_counts = type(begin) is int and type(length) is int and begin >= 0 and length >= 0
        if not are_counts or begin + length > size:
            raise ValueError(f"the bytes of {name} are {length!r} from {begin!r} on, of {size}")

    def _check_entry(self, leaf_path: str) -> None:
        entry = self.tensors[leaf_path]
        shape, length = entry["shape"], self.data[entry["data"]]["bytes"]
        dtype = _dtype(leaf_path, entry["dtype"])
        offset = entry.get("offset", 0)
        stride = entry.get("stride", [math.prod(shape[axis + 1 :]) for axis in range(len(shape))])
        numbers = [offset, *shape, *stride]
        are_counts = type(shape) is list and all(type(number) is int and number >= 0 for number in numbers)
        if not are_counts or max(math.prod(shape), *numbers) >= 2**48 or offset % dtype.itemsize:
            raise ValueError(f"{leaf_path} has shape {shape}, stride {stride} and offset {offset}")
        if offset + extent(shape, stride) * dtype.itemsize > length:
            raise ValueError(f"{leaf_path} reaches beyond its {length} bytes: shape {shape}, stride {stride}")

    def _check_shards(self, leaf_path: str) -> None:
        entry = self.shards[leaf_path]
        shape, chunks = entry["shape"], entry["chunks"]
        dtype = _dtype(leaf_path, entry["dtype"])
        if type(shape) is not list or not all(type(number) is int and 0 <= number < 2**48 for number in shape):
            raise ValueError(f"{leaf_path} has shape {shape}")
        for chunk in chunks:
            self._check_chunk(leaf_path, chunk, shape, dtype)
        numbers = sum(math.prod(chunk["sizes"]) for chunk in chunks)
        if numbers != math.prod(shape):
            raise ValueError(f"{leaf_path} has shape {shape}, and chunks of {numbers} numbers")

    def _check_chunk(self, leaf_path: str, chunk: Mapping[str, Any], shape: list[int], dtype: torch.dtype) -> None:
        offsets, sizes, length = chunk["offsets"], chunk["sizes"], self.data[chunk["data"]]["bytes"]
        if any(type(number) is not int or number < 0 for number in (*offsets, *sizes)):
            raise ValueError(f"{leaf_path} has shape {shape}, and a chunk of {sizes} at {offsets}")
        if any(low + n > of for low, n, of in zip(offsets, sizes, shape, strict=True)):
            raise ValueError(f"{leaf_path} has shape {shape}, and a chunk of {sizes} at {offsets} beyond it")
        if math.prod(sizes) * dtype.itemsize != length:
            raise ValueError(f"{leaf_path} has a chunk of {sizes} in {length} bytes")

    def _file(self, name: str) -> str:
        """Name of the file that contains a run of bytes."""
        file: str = self.data[name].get("file", DATA)
        return file

    def about(self, leaf_path: str) -> Mapping[str, Any] | None:
        """Dtype and shape of the tensor at a path, or None for a plain value."""
        return self.tensors.get(leaf_path) or self.shards.get(leaf_path)

    def chunks(self, leaf_path: str) -> list[tuple[list[int], list[int]]]:
        """Offsets and sizes of the chunks in which the tensor at a path is stored: one for an unsharded tensor."""
        if leaf_path in self.shards:
            return [(chunk["offsets"], chunk["sizes"]) for chunk in self.shards[leaf_path]["chunks"]]
        shape = self.tensors[leaf_path]["shape"]
        return [([0] * len(shape), shape)]

    def chunk(self, leaf_path: str, index: int) -> Tensor:
        """One of these chunks, mapped from the file."""
        if leaf_path not in self.shards:
            return self.tensor(leaf_path)
        entry = self.shards[leaf_path]
        chunk = entry["chunks"][index]
        return self._run(chunk["data"]).view(getattr(torch, entry["dtype"])).view(chunk["sizes"])

    def verify(self, leaf_paths: Iterable[str], chunks: Iterable[tuple[str, int]] = ()) -> None:
        """Compare the checksums of all bytes of these leaves and chunks, on all cores."""
        names = {self.tensors[leaf_path]["data"] for leaf_path in leaf_paths if leaf_path in self.tensors}
        for leaf_path, index in chunks:
            entry = self.tensors.get(leaf_path) or self.shards[leaf_path]["chunks"][index]
            names.add(entry["data"])
        for file in {self._file(name) for name in names}:
            self._map(file)
        with ThreadPoolExecutor() as pool:
            list(pool.map(self._run, sorted(names)))

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
            begin, size, memory = self.data[name]["begin"], self.data[name]["bytes"], self._map(self._file(name))
            if zlib.crc32(memoryview(memory)[begin : begin + size]) != self.data[name]["crc32"]:
                raise DamagedCheckpointError(
                    f"{self.directory / self._file(name)}: the bytes of {name} have been changed since they were "
                    "written: wrong checksum"
                )
            empty = torch.empty(0, dtype=torch.uint8)
            self.runs[name] = torch.frombuffer(memory, dtype=torch.uint8, offset=begin, count=size) if size else empty
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
            return run[: math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
        rest = run[entry["offset"] :]
        rest = rest[: len(rest) // dtype.itemsize * dtype.itemsize].view(dtype)
        return rest.as_strided(shape, entry["stride"])
