"""A tree of tensors and plain values as two files: a JSON manifest, and the tensors' bytes.

The bytes lie in a safetensors file (eight bytes of length, a JSON header, the data), so that other programs can read
them; what that format cannot say (strides, shared storage, rarer dtypes, plain values, checksums) stands in the
manifest. Tensors that several ranks hold shards of are written by `_shards` into a file for each rank, and read here.
Reading interprets JSON and maps memory: nothing in a file is ever run.
"""

from __future__ import annotations

import base64
import ctypes
import math
import mmap
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import orjson
import torch
from torch import Tensor

from looplib._core.ranks import is_sharded
from looplib._core.torch_private import pytree

WHOLE, SHARDED = 1, 2  # formats


MANIFEST, DATA = "manifest.json", "tensors.safetensors"


_SHARD = re.compile(r"tensors-\d{5,}\.safetensors")


_ALIGNMENT = 64


_CHUNK = 8 << 20


# What safetensors calls a dtype. Others are stored as bytes, and the manifest alone knows what they are.
_SAFETENSORS = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64", "int32": "I32",
    "int16": "I16", "int8": "I8", "uint8": "U8", "uint16": "U16", "uint32": "U32", "uint64": "U64", "bool": "BOOL",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
}  # fmt: skip


_QUANTIZED = {torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4}


class DamagedCheckpointError(ValueError):
    """A checkpoint that is not what was written: the message names the file and what is wrong."""


class CheckpointVersionError(ValueError):
    """A checkpoint of a format that is newer than this looplib."""


@contextmanager
def sound(path: Path) -> Iterator[None]:
    """Content of a file that is not of the form it should have, whatever that leads to, is damage."""
    try:
        yield
    except (DamagedCheckpointError, CheckpointVersionError):
        raise
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError) as error:
        raise DamagedCheckpointError(f"{path} holds something that no save writes: {error!r}") from error


def pointer(path: Any) -> str:
    """A leaf's place as a JSON pointer (RFC 6901), such as /params/0.weight."""
    keys = [getattr(key, "key", getattr(key, "idx", getattr(key, "name", None))) for key in path]
    return "".join("/" + str(key).replace("~", "~0").replace("/", "~1") for key in keys)


def leaves_of(tree: Any) -> dict[str, Any]:
    """The leaves by their places."""
    found: dict[str, Any] = {}
    for path, leaf in pytree.tree_flatten_with_path(tree)[0]:
        if (place := pointer(path)) in found:
            raise ValueError(f"two leaves of the state are both at {place}: give their keys different names")
        found[place] = leaf
    return found


@dataclass
class _Run:
    """A run of bytes of one storage, which one leaf or several are made of."""

    name: str
    owner: Tensor  # one of the leaves
    low: int  # where in its storage the bytes begin and end
    high: int
    dtype: str
    shape: list[int]
    copied: Tensor | None = None

    def source(self) -> Tensor:
        """Its bytes, on whatever device."""
        if self.copied is not None:
            return self.copied
        empty = torch.empty(0, dtype=torch.uint8, device=self.owner.device)
        return empty.set_(self.owner.untyped_storage(), self.low, (self.high - self.low,), (1,))


@dataclass(frozen=True)
class _Span:
    place: str
    tensor: Tensor
    dtype: str
    low: int  # where in its storage the tensor's bytes begin and end
    high: int


def local(leaf: Any) -> Tensor:
    """This process's part of a DTensor, which shares its memory."""
    with torch.no_grad():
        part = leaf.to_local()
        return part.wait() if hasattr(part, "wait") else part.detach()  # type: ignore[no-any-return]


class Parts:
    """A tree taken apart: the runs of bytes that its tensors lie in, and what the manifest says of each leaf.

    Raises TypeError for a leaf that a checkpoint cannot hold, with its place.
    """

    def __init__(self, tree: Any) -> None:
        self.runs: list[_Run] = []
        self.tensors: dict[str, dict[str, Any]] = {}
        self.values: dict[str, dict[str, Any]] = {}
        self.sharded: dict[str, Any] = {}  # DTensors
        self.locals: dict[str, Tensor] = {}  # and what this process holds of them
        self.storages: set[int] = set()
        by_storage: dict[Any, list[_Span]] = {}
        for place, leaf in leaves_of(tree).items():
            if not isinstance(leaf, Tensor):
                self.values[place] = _encoded(place, leaf)
            elif is_sharded(leaf):
                if any(placement.is_partial() for placement in leaf.placements):
                    raise TypeError(
                        f"{place} is a DTensor that is not summed up yet (placements {leaf.placements}), which a "
                        "checkpoint cannot hold: redistribute it first"
                    )
                self.sharded[place], self.locals[place] = leaf, _span(place, local(leaf)).tensor
                self.storages.add(self.locals[place].untyped_storage().data_ptr())
            else:
                span = _span(place, leaf)
                address = span.tensor.untyped_storage().data_ptr()
                self.storages.add(address)
                key = (span.tensor.device, address) if leaf.numel() else place  # nothing to share where nothing is
                by_storage.setdefault(key, []).append(span)
        for spans in by_storage.values():
            spans.sort(key=lambda span: (span.low, -span.high))
            together, end = [spans[0]], spans[0].high
            for span in spans[1:]:
                if span.low >= end:
                    self._add(together, end)
                    together = []
                together.append(span)
                end = max(end, span.high)
            self._add(together, end)
        # What was asked of an accelerator before must be done before another thread reads the results.
        self.ready = []
        used = {tensor.device for tensor in (*self.locals.values(), *(run.owner for run in self.runs))}
        for device in used - {torch.device("cpu")}:
            self.ready.append(torch.Event(device))
            self.ready[-1].record(torch.accelerator.current_stream(device))

    def _add(self, spans: list[_Span], high: int) -> None:
        """One run of bytes up to `high`, for spans that overlap."""
        first = spans[0]
        low, plain = first.low, first.tensor.is_contiguous()
        for span in spans[1:]:
            same = (span.dtype, span.low, span.tensor.shape, span.tensor.stride())
            plain = plain and same == (first.dtype, low, first.tensor.shape, first.tensor.stride())
        if not plain:
            low -= low % _ALIGNMENT  # so that each is still aligned for its own dtype
        name, size = first.place, high - low
        dtype, shape = _kind(first.dtype, first.tensor, size) if plain else ("U8", [size])
        self.runs.append(_Run(name, first.tensor, low, high, dtype, shape))
        for span in spans:
            entry = {"dtype": span.dtype, "shape": list(span.tensor.shape), "data": name}
            view = {} if plain else {"stride": list(span.tensor.stride()), "offset": span.low - low}
            self.tensors[span.place] = {**entry, **view}

    def copy(self) -> None:
        """Take the bytes over into memory of our own, so that the tensors may be written."""
        for run in self.runs:
            run.copied = run.source().to("cpu", copy=True)
        self.locals = {place: tensor.to("cpu", copy=True) for place, tensor in self.locals.items()}

    def size(self) -> int:
        """Bytes of the tensors, of the sharded ones this process's part."""
        return sum(run.high - run.low for run in self.runs) + sum(part.nbytes for part in self.locals.values())

    def description(self) -> dict[str, Any]:
        """What must be the same on all ranks: the values, and what the tensors are."""
        leaves = {place: [entry["dtype"], entry["shape"]] for place, entry in self.tensors.items()}
        for place, leaf in self.sharded.items():
            leaves[place] = [str(leaf.dtype).removeprefix("torch."), list(leaf.shape), "sharded"]
        return {**self.values, **leaves}


def runs_of(tensors: Mapping[str, Tensor]) -> list[_Run]:
    """A run of bytes for each of these tensors, whatever they share."""
    spans = [_span(place, tensor.detach().contiguous()) for place, tensor in tensors.items()]
    return [
        _Run(span.place, span.tensor, span.low, span.high, *_kind(span.dtype, span.tensor, span.high - span.low))
        for span in spans
    ]


def _kind(dtype: str, tensor: Tensor, size: int) -> tuple[str, list[int]]:
    """What safetensors says of a run of bytes: what it is, or that it is bytes."""
    return (_SAFETENSORS[dtype], list(tensor.shape)) if dtype in _SAFETENSORS else ("U8", [size])


def _span(place: str, tensor: Tensor) -> _Span:
    kind = ""
    if tensor.layout is not torch.strided:
        kind = f"tensor of layout {tensor.layout}"
    elif type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.dtype in _QUANTIZED:
        kind = "quantized tensor" if tensor.dtype in _QUANTIZED else type(tensor).__name__
    elif tensor.is_meta:
        kind = "tensor on the meta device, without values"
    if kind:
        raise TypeError(f"{place} is a {kind}, which a checkpoint cannot hold: give it as a dense plain tensor")
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.detach().resolve_conj().resolve_neg()
    size = tensor.element_size()
    low = int(tensor.storage_offset()) * size
    high = low + _reach(tensor.shape, tensor.stride()) * size
    return _Span(place, tensor, str(tensor.dtype).removeprefix("torch."), low, high)


def _reach(shape: Iterable[int], stride: Iterable[int]) -> int:
    """How many elements lie from the first to the last, both counted."""
    pairs = list(zip(shape, stride, strict=True))
    return sum((n - 1) * step for n, step in pairs) + 1 if all(n for n, _ in pairs) else 0


def _encoded(place: str, value: Any) -> dict[str, Any]:
    """A plain value in JSON, exactly."""
    kind = type(value)
    if kind is float and not math.isfinite(value):
        return {"float": str(value)}
    if kind is int and not -(2**63) <= value < 2**63:
        return {"int": hex(value)}
    if value is None or kind in (bool, int, float, str):
        return {"value": value}
    if kind is bytes:
        return {"bytes": base64.b64encode(value).decode()}
    if kind is complex:
        return {"complex": [str(value.real), str(value.imag)]}
    raise TypeError(
        f"{place} is a {kind.__name__}, which a checkpoint cannot hold: keep tensors, Python's own numbers, strings, "
        "bytes, None, and dicts, lists, tuples or registered pytrees of these"
    )


def _decoded(entry: Mapping[str, Any]) -> Any:
    ((kind, value),) = entry.items()
    if kind == "value" and (value is None or type(value) in (bool, int, float, str)):
        return value
    if kind == "complex":
        real, imaginary = value
        return complex(float(real), float(imaginary))
    if kind == "bytes":
        return base64.b64decode(value, validate=True)
    if kind == "float":
        return float(value)
    if kind == "int":
        return int(value, 16)
    raise ValueError(f"a value of kind {kind!r}")


def write(directory: Path, parts: Parts, about: Mapping[str, Any], helped: bool = True) -> None:
    """Write both files into an empty directory, and sync them and it; `helped` by a thread for the checksums."""
    data, size = write_data(directory / DATA, parts.runs, parts.ready, helped)
    write_manifest(directory, parts, {"format": WHOLE, **about, "bytes": size, "data": data})


def write_manifest(directory: Path, parts: Parts, about: Mapping[str, Any]) -> None:
    """The last file of a directory, and its sync."""
    text = orjson.dumps({**about, "values": parts.values, "tensors": parts.tensors})
    document = _envelope(zlib.crc32(text)) + text + b"}\n"
    with open(directory / MANIFEST, "xb") as file:
        file.write(document)
        file.flush()
        os.fsync(file.fileno())
    sync_directory(directory)


def _envelope(checksum: int) -> bytes:
    return b'{"crc32":%d,"manifest":' % checksum


def write_data(
    path: Path, runs: Sequence[_Run], ready: Sequence[torch.Event], helped: bool
) -> tuple[dict[str, dict[str, int]], int]:
    """Where in the file each run of bytes lies, with its checksum; and the file's size."""
    header: dict[str, Any] = {}
    begins, end = [], 0
    for run in runs:
        begin = -(-end // _ALIGNMENT) * _ALIGNMENT
        # The format forbids gaps between tensors, so what aligns the next one is a tensor of its own.
        if begin > end:
            header[f"padding/{end}"] = {"dtype": "U8", "shape": [begin - end], "data_offsets": [end, begin]}
        begins.append(begin)
        end = begin + run.high - run.low
        header[run.name] = {"dtype": run.dtype, "shape": run.shape, "data_offsets": [begin, end]}
    head = orjson.dumps(header)
    head += b" " * (-(8 + len(head)) % _ALIGNMENT)
    at = start = 8 + len(head)
    data = {}
    for event in ready:
        event.synchronize()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        _write_all(descriptor, memoryview(len(head).to_bytes(8, "little") + head))
        with ThreadPoolExecutor(1) as pool:
            for run, begin in zip(runs, begins, strict=True):
                _write_all(descriptor, memoryview(bytes(start + begin - at)))
                at = start + begin
                source = run.source().cpu()
                view = bytes_of(source)
                checksum = _beside(pool, view) if helped else partial(zlib.crc32, view)
                for low in range(0, len(view), _CHUNK):
                    _write_all(descriptor, view[low : low + _CHUNK])
                    _start_writeback(descriptor, at + low, _CHUNK)
                data[run.name] = {"begin": at, "bytes": len(view), "crc32": checksum()}
                at += len(view)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return data, at


def _beside(pool: ThreadPoolExecutor, view: memoryview) -> Callable[[], int]:
    """The checksum, made while the bytes are written: neither holds the interpreter."""
    try:
        return pool.submit(zlib.crc32, view).result
    except RuntimeError:  # the interpreter is ending: no new work is taken, and what was begun is finished
        return lambda: zlib.crc32(view)


def bytes_of(tensor: Tensor) -> memoryview:
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
    envelope = _envelope(checksum)
    if not document.startswith(envelope) or zlib.crc32(document[len(envelope) : -2]) != checksum:
        raise DamagedCheckpointError(f"{path} has been changed since it was written: its checksum is wrong")
    with sound(path):
        version, expected = manifest["format"], manifest["bytes"]
        if version > SHARDED:
            raise CheckpointVersionError(
                f"{path} is of format {version}, and this looplib reads up to {SHARDED}: install a newer looplib"
            )
    if size != expected:
        raise DamagedCheckpointError(f"{data} has {size} bytes; {expected} were written")
    found: dict[str, Any] = manifest
    return found


def check_files(directory: Path, manifest: Mapping[str, Any]) -> int:
    """The bytes of all files of tensors, once those of the shards have been found to be what was written."""
    total: int = manifest["bytes"]
    for name, expected in manifest.get("files", {}).items():
        total += _sized(directory / _shard_name(name), expected)
    return total


def _shard_name(name: str) -> str:
    """The name of a file of shards, and of nothing else: a manifest may be made to do harm."""
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


class Reader:
    """The leaves of a checkpoint: what they are is checked at once, their bytes when they are asked for."""

    def __init__(self, directory: Path, manifest: Mapping[str, Any]) -> None:
        self.directory = directory
        self.maps: dict[str, mmap.mmap] = {}
        self.runs: dict[str, Tensor] = {}
        with sound(directory / MANIFEST):
            self.values = {place: _decoded(entry) for place, entry in manifest["values"].items()}
            self.tensors: dict[str, dict[str, Any]] = manifest["tensors"]
            self.shards: dict[str, dict[str, Any]] = manifest.get("shards", {})
            self.data: dict[str, dict[str, Any]] = manifest["data"]
            self.files = {DATA: manifest["bytes"]}
            self.files |= {_shard_name(name): size for name, size in manifest.get("files", {}).items()}
            for name in self.data:
                self._check_run(name)
            for place in self.tensors:
                self._check_entry(place)
            for place in self.shards:
                self._check_shards(place)
        self._map(DATA)

    # A checksum says that nobody changed the manifest since it was made. It may have been made to do harm.

    def _check_run(self, name: str) -> None:
        begin, length, size = self.data[name]["begin"], self.data[name]["bytes"], self.files[self._file(name)]
        whole = type(begin) is int and type(length) is int and begin >= 0 and length >= 0
        if not whole or begin + length > size:
            raise ValueError(f"the bytes of {name} are {length!r} from {begin!r} on, of {size}")

    def _check_entry(self, place: str) -> None:
        entry = self.tensors[place]
        dtype, shape, length = getattr(torch, entry["dtype"], None), entry["shape"], self.data[entry["data"]]["bytes"]
        if not isinstance(dtype, torch.dtype) or dtype in _QUANTIZED:
            raise ValueError(f"{place} has dtype {entry['dtype']!r}, unknown to this torch")
        offset = entry.get("offset", 0)
        stride = entry.get("stride", [math.prod(shape[axis + 1 :]) for axis in range(len(shape))])
        numbers = [offset, *shape, *stride]
        whole = type(shape) is list and all(type(number) is int and number >= 0 for number in numbers)
        if not whole or max(math.prod(shape), *numbers) >= 2**48 or offset % dtype.itemsize:
            raise ValueError(f"{place} has shape {shape}, stride {stride} and offset {offset}")
        if offset + _reach(shape, stride) * dtype.itemsize > length:
            raise ValueError(f"{place} reaches beyond its {length} bytes: shape {shape}, stride {stride}")

    def _check_shards(self, place: str) -> None:
        entry, numbers = self.shards[place], 0
        dtype, shape, chunks = getattr(torch, entry["dtype"], None), entry["shape"], entry["chunks"]
        if not isinstance(dtype, torch.dtype) or dtype in _QUANTIZED:
            raise ValueError(f"{place} has dtype {entry['dtype']!r}, unknown to this torch")
        if type(shape) is not list or not all(type(number) is int and 0 <= number < 2**48 for number in shape):
            raise ValueError(f"{place} has shape {shape}")
        for chunk in chunks:
            offsets, sizes, length = chunk["offsets"], chunk["sizes"], self.data[chunk["data"]]["bytes"]
            if any(type(number) is not int or number < 0 for number in (*offsets, *sizes)):
                raise ValueError(f"{place} has shape {shape}, and a chunk of {sizes} at {offsets}")
            if any(low + n > of for low, n, of in zip(offsets, sizes, shape, strict=True)):
                raise ValueError(f"{place} has shape {shape}, and a chunk of {sizes} at {offsets} beyond it")
            if math.prod(sizes) * dtype.itemsize != length:
                raise ValueError(f"{place} has a chunk of {sizes} in {length} bytes")
            numbers += math.prod(sizes)
        if numbers != math.prod(shape):
            raise ValueError(f"{place} has shape {shape}, and chunks of {numbers} numbers")

    def _file(self, name: str) -> str:
        """Where a run of bytes lies."""
        file: str = self.data[name].get("file", DATA)
        return file

    def about(self, place: str) -> Mapping[str, Any] | None:
        """dtype and shape of the tensor at a place, None for a plain value."""
        return self.tensors.get(place) or self.shards.get(place)

    def chunks(self, place: str) -> list[tuple[list[int], list[int]]]:
        """Offsets and sizes of the parts in which the tensor at a place is stored; a whole one is one part."""
        if place in self.shards:
            return [(chunk["offsets"], chunk["sizes"]) for chunk in self.shards[place]["chunks"]]
        shape = self.tensors[place]["shape"]
        return [([0] * len(shape), shape)]

    def chunk(self, place: str, index: int) -> Tensor:
        """One of these, in the file's memory."""
        if place not in self.shards:
            return self.tensor(place)
        entry = self.shards[place]
        chunk = entry["chunks"][index]
        return self._run(chunk["data"]).view(getattr(torch, entry["dtype"])).view(chunk["sizes"])

    def verify(self, places: Iterable[str], chunks: Iterable[tuple[str, int]] = ()) -> None:
        """Compare the checksums of all bytes that these leaves, and chunks of leaves, need, on all cores."""
        names = {self.tensors[place]["data"] for place in places if place in self.tensors}
        for place, index in chunks:
            entry = self.tensors.get(place) or self.shards[place]["chunks"][index]
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

    def tensor(self, place: str, copies: dict[Any, Tensor] | None = None, device: Any = "cpu") -> Tensor:
        """The tensor at a place: in the file's memory, or in copies of runs of bytes, which `copies` keeps."""
        entry = self.tensors[place]
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
