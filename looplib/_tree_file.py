"""A tree of tensors and plain values as two files: a JSON manifest, and the tensors' bytes.

The bytes lie in a safetensors file (eight bytes of length, a JSON header, the data), so that other programs can read
them; what that format cannot say (strides, shared storage, rarer dtypes, plain values, checksums) stands in the
manifest. Reading interprets JSON and maps memory: nothing in a file is ever run.
"""

from __future__ import annotations

import base64
import ctypes
import math
import mmap
import os
import zlib
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
import torch
from torch import Tensor

FORMAT = 1
MANIFEST, DATA = "manifest.json", "tensors.safetensors"
_ALIGNMENT = 64
_CHUNK = 8 << 20
# What safetensors calls a dtype. Others are stored as bytes, and the manifest alone knows what they are.
_SAFETENSORS = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64", "int32": "I32",
    "int16": "I16", "int8": "I8", "uint8": "U8", "uint16": "U16", "uint32": "U32", "uint64": "U64", "bool": "BOOL",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
}  # fmt: skip


class DamagedCheckpointError(ValueError):
    """A checkpoint that is not what was written: the message names the file and what is wrong."""


class CheckpointVersionError(ValueError):
    """A checkpoint of a format that is newer than this looplib."""


def pointer(path: Any) -> str:
    """A leaf's place as a JSON pointer (RFC 6901), such as /params/0.weight."""
    keys = [getattr(key, "key", getattr(key, "idx", getattr(key, "name", None))) for key in path]
    return "".join("/" + str(key).replace("~", "~0").replace("/", "~1") for key in keys)


def leaves_of(tree: Any) -> dict[str, Any]:
    """The leaves by their places."""
    found: dict[str, Any] = {}
    for path, leaf in torch.utils._pytree.tree_flatten_with_path(tree)[0]:
        if (place := pointer(path)) in found:
            raise ValueError(f"two leaves of the state are both at {place}: give their keys different names")
        found[place] = leaf
    return found


@dataclass
class _Blob:
    """A run of bytes of one storage, which one leaf or several are made of."""

    name: str
    source: Tensor  # its bytes, on whatever device
    dtype: str
    shape: list[int]
    begin: int = 0
    crc32: int = 0

    @property
    def size(self) -> int:
        return self.source.numel()


@dataclass
class _Span:
    place: str
    tensor: Tensor
    low: int = field(init=False)
    high: int = field(init=False)

    def __post_init__(self) -> None:
        tensor, size = self.tensor, self.tensor.element_size()
        reach = sum((int(n) - 1) * int(stride) for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
        self.low = int(tensor.storage_offset()) * size
        self.high = self.low + ((reach + 1) * size if tensor.numel() else 0)


def _blobs(leaves: Mapping[str, Tensor]) -> tuple[list[_Blob], dict[str, dict[str, Any]]]:
    """The runs of bytes that these tensors lie in, and each tensor as a place in one of them."""
    by_storage: dict[tuple[torch.device, int, int], list[_Span]] = {}
    for number, (place, tensor) in enumerate(leaves.items()):
        if type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided:
            kind = type(tensor).__name__ if tensor.layout is torch.strided else f"tensor of layout {tensor.layout}"
            raise TypeError(f"{place} is a {kind}, which a checkpoint cannot hold: give it as dense plain tensors")
        tensor = tensor.detach().resolve_conj().resolve_neg()
        storage = tensor.untyped_storage().data_ptr()
        key = (tensor.device, storage, -1 if storage else number)  # empty ones have no storage to share
        by_storage.setdefault(key, []).append(_Span(place, tensor))

    blobs, entries = [], {}
    for spans in by_storage.values():
        runs: list[list[_Span]] = []
        for span in sorted(spans, key=lambda span: (span.low, -span.high)):
            if runs and span.low < max(other.high for other in runs[-1]):
                runs[-1].append(span)
            else:
                runs.append([span])
        for run in runs:
            first, low, high = run[0], run[0].low, max(span.high for span in run)
            kind = str(first.tensor.dtype).removeprefix("torch.")
            plain = first.tensor.is_contiguous() and all(_alike(span.tensor, first.tensor) for span in run)
            source = torch.empty(0, dtype=torch.uint8, device=first.tensor.device)
            source = source.set_(first.tensor.untyped_storage(), low, (high - low,), (1,))
            if plain and kind in _SAFETENSORS:
                blob = _Blob(first.place, source, _SAFETENSORS[kind], list(first.tensor.shape))
            else:
                blob = _Blob(first.place, source, "U8", [high - low])
            blobs.append(blob)
            for span in run:
                entries[span.place] = {
                    "dtype": str(span.tensor.dtype).removeprefix("torch."),
                    "shape": list(span.tensor.shape),
                    "data": blob.name,
                    **({} if plain else {"stride": list(span.tensor.stride()), "offset": span.low - low}),
                }
    return blobs, entries


def _alike(one: Tensor, other: Tensor) -> bool:
    return (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride())


def _encoded(place: str, value: Any) -> dict[str, Any]:
    """A plain value in JSON, exactly."""
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    if isinstance(value, int) and not isinstance(value, bool) and not -(2**63) <= value < 2**63:
        return {"int": str(value)}
    if value is None or type(value) in (bool, int, float, str):
        return {"value": value}
    if isinstance(value, bytes):
        return {"bytes": base64.b64encode(value).decode()}
    if isinstance(value, complex):
        return {"complex": [repr(value.real), repr(value.imag)]}
    raise TypeError(
        f"{place} is a {type(value).__name__}, which a checkpoint cannot hold: keep tensors, numbers, strings, "
        "bytes, None, and dicts, lists, tuples or registered pytrees of these"
    )


def _decoded(entry: Mapping[str, Any]) -> Any:
    ((kind, value),) = entry.items()
    if kind == "value":
        return value
    if kind == "complex":
        return complex(*map(float, value))
    if kind == "bytes":
        return base64.b64decode(value)
    return float(value) if kind == "float" else int(value)


def write(directory: Path, tree: Any, about: Mapping[str, Any]) -> None:
    """Write both files into an empty directory, and sync them and it."""
    leaves = leaves_of(tree)
    blobs, tensors = _blobs({place: leaf for place, leaf in leaves.items() if isinstance(leaf, Tensor)})
    values = {place: _encoded(place, leaf) for place, leaf in leaves.items() if place not in tensors}
    size = _write_blobs(directory / DATA, blobs)
    manifest = {
        "format": FORMAT,
        **about,
        "bytes": size,
        "values": values,
        "tensors": tensors,
        "data": {blob.name: {"begin": blob.begin, "bytes": blob.size, "crc32": blob.crc32} for blob in blobs},
    }
    text = orjson.dumps(manifest, option=orjson.OPT_INDENT_2)
    document = b'{"crc32":' + str(zlib.crc32(text)).encode() + b',"manifest":' + text + b"}\n"
    with open(directory / MANIFEST, "xb") as file:
        file.write(document)
        file.flush()
        os.fsync(file.fileno())
    sync_directory(directory)


def _write_blobs(path: Path, blobs: list[_Blob]) -> int:
    header: dict[str, Any] = {}
    end = 0
    for blob in blobs:
        begin = -(-end // _ALIGNMENT) * _ALIGNMENT
        # The format forbids gaps between tensors, so what aligns the next one is a tensor of its own.
        if begin > end:
            header[f"padding/{end}"] = {"dtype": "U8", "shape": [begin - end], "data_offsets": [end, begin]}
        blob.begin, end = begin, begin + blob.size
        header[blob.name] = {"dtype": blob.dtype, "shape": blob.shape, "data_offsets": [begin, end]}
    head = orjson.dumps(header)
    head += b" " * (-(8 + len(head)) % _ALIGNMENT)
    start = 8 + len(head)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        _write_all(descriptor, memoryview(len(head).to_bytes(8, "little") + head))
        written = 0
        with ThreadPoolExecutor(1) as pool:
            for blob in blobs:
                if blob.begin > written:
                    _write_all(descriptor, memoryview(bytes(blob.begin - written)))
                source = blob.source.cpu()
                view = _bytes(source)
                checksum = pool.submit(zlib.crc32, view)  # beside the writing: neither holds the interpreter
                for at in range(0, len(view), _CHUNK):
                    _write_all(descriptor, view[at : at + _CHUNK])
                    _start_writeback(descriptor, start + blob.begin + at, _CHUNK)
                blob.crc32 = checksum.result()
                blob.begin += start
                written = end_of(blob) - start
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return start + end


def end_of(blob: _Blob) -> int:
    return blob.begin + blob.size


def _bytes(tensor: Tensor) -> memoryview:
    """A CPU tensor's own memory, without numpy."""
    if not tensor.numel():
        return memoryview(b"")
    return memoryview((ctypes.c_char * tensor.numel()).from_address(tensor.data_ptr())).cast("B")


def _write_all(descriptor: int, view: memoryview) -> None:
    while view:
        view = view[os.write(descriptor, view) :]


_sync_file_range = getattr(ctypes.CDLL(None), "sync_file_range", None) if os.name == "posix" else None


def _start_writeback(descriptor: int, offset: int, size: int) -> None:
    """Let the disk begin, so that the sync at the end finds little left to wait for."""
    if _sync_file_range is not None:
        _sync_file_range(descriptor, ctypes.c_int64(offset), ctypes.c_int64(size), 2)  # SYNC_FILE_RANGE_WRITE


def sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_manifest(directory: Path) -> dict[str, Any]:
    """The manifest, once its checksum and the size of the data have been found right."""
    path = directory / MANIFEST
    try:
        document = path.read_bytes()
        parsed = orjson.loads(document)
        manifest: dict[str, Any] = parsed["manifest"]
        version = manifest["format"]
        text = document[len(b'{"crc32":' + str(parsed["crc32"]).encode() + b',"manifest":') : -2]
    except FileNotFoundError:
        raise DamagedCheckpointError(f"{path} is missing") from None
    except (orjson.JSONDecodeError, KeyError, TypeError):
        raise DamagedCheckpointError(f"{path} is no manifest of a looplib checkpoint, or is cut short") from None
    if isinstance(version, int) and version > FORMAT:
        raise CheckpointVersionError(
            f"{path} is of format {version}, and this looplib reads up to {FORMAT}: install a newer looplib"
        )
    if zlib.crc32(text) != parsed["crc32"]:
        raise DamagedCheckpointError(f"{path} has been changed since it was written: its checksum is wrong")
    data = directory / DATA
    size = data.stat().st_size if data.exists() else None
    if size != manifest["bytes"]:
        found = "is missing" if size is None else f"has {size} bytes"
        raise DamagedCheckpointError(f"{data} {found}; {manifest['bytes']} were written")
    return manifest


class Reader:
    """The leaves of a checkpoint, checked when they are asked for."""

    def __init__(self, directory: Path, manifest: Mapping[str, Any]) -> None:
        self.path, self.manifest = directory / DATA, manifest
        with open(self.path, "rb") as file:
            self.memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        self.runs: dict[str, Tensor] = {}

    def __iter__(self) -> Iterator[str]:
        yield from self.manifest["tensors"]
        yield from self.manifest["values"]

    def __contains__(self, place: str) -> bool:
        return place in self.manifest["tensors"] or place in self.manifest["values"]

    def about(self, place: str) -> Mapping[str, Any] | None:
        """dtype and shape of the tensor at a place, None for a plain value."""
        entry: Mapping[str, Any] | None = self.manifest["tensors"].get(place)
        return entry

    def verify(self, places: Iterator[str] | list[str]) -> None:
        """Compare the checksums of all bytes that these leaves need, on all cores."""
        names = {self.manifest["tensors"][place]["data"] for place in places if place in self.manifest["tensors"]}
        with ThreadPoolExecutor() as pool:
            list(pool.map(self._run, sorted(names)))

    def _run(self, name: str) -> Tensor:
        if name not in self.runs:
            entry = self.manifest["data"][name]
            begin, size = entry["begin"], entry["bytes"]
            view = memoryview(self.memory)[begin : begin + size]
            if len(view) != size or zlib.crc32(view) != entry["crc32"]:
                raise DamagedCheckpointError(
                    f"{self.path}: the bytes of {name} have been changed since they were written: wrong checksum"
                )
            self.runs[name] = (
                torch.frombuffer(self.memory, dtype=torch.uint8, offset=begin, count=size)
                if size
                else torch.empty(0, dtype=torch.uint8)
            )
        return self.runs[name]

    def value(self, place: str) -> Any:
        """The plain value at a place."""
        return _decoded(self.manifest["values"][place])

    def tensor(self, place: str, runs: dict[str, Tensor] | None = None, device: torch.device | None = None) -> Tensor:
        """The tensor at a place. It lies in the file's memory, or in copies of runs of bytes, which `runs` keeps."""
        entry = self.manifest["tensors"][place]
        dtype = getattr(torch, entry["dtype"], None)
        if not isinstance(dtype, torch.dtype):
            raise DamagedCheckpointError(f"{self.path}: {place} has dtype {entry['dtype']!r}, unknown to this torch")
        name = entry["data"]
        run = self._run(name)
        if runs is not None:
            run = runs[name] = runs[name] if name in runs else run.to(device or "cpu", copy=True)
        shape, stride = entry["shape"], entry.get("stride")
        if stride is None or not math.prod(shape):
            return run[: math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
        rest = run[entry["offset"] :]
        return rest[: len(rest) // dtype.itemsize * dtype.itemsize].view(dtype).as_strided(shape, stride)
