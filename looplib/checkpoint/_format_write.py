"""Checkpoint writing: the data file of a tree, then the manifest.

Tensors that overlap in memory are written as one run of bytes, so that they share memory again after reading.
"""

from __future__ import annotations

import ctypes
import os
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import orjson
import torch
from torch import Tensor

from looplib._core.checks import check
from looplib._core.mappings import mapped
from looplib._core.ranks import is_sharded
from looplib.checkpoint._format import (
    DATA,
    LARGEST,
    MANIFEST,
    QUANTIZED,
    WHOLE,
    bytes_of,
    encoded,
    envelope,
    leaves_of,
    local,
    occupied,
    sync_directory,
)

_ALIGNMENT = 64


_CHUNK = 8 << 20  # bytes in one call, in at most about as many buffers as a system allows
_MOST = 1000


# safetensors' names of dtypes. Tensors of other dtypes are stored as bytes, and only the manifest has their dtype.
_SAFETENSORS = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64", "int32": "I32",
    "int16": "I16", "int8": "I8", "uint8": "U8", "uint16": "U16", "uint32": "U32", "uint64": "U64", "bool": "BOOL",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
}  # fmt: skip


@dataclass
class _Run:
    """Run of bytes in one storage, used by one leaf or by several overlapping ones."""

    name: str
    owner: Tensor  # one of the leaves
    low: int  # first byte in its storage, and one past the last
    high: int
    dtype: str
    shape: list[int]
    copied: Tensor | None = None

    def source(self) -> Tensor:
        """The run's bytes, on the storage's device."""
        if self.copied is not None:
            return self.copied
        empty = torch.empty(0, dtype=torch.uint8, device=self.owner.device)
        return empty.set_(self.owner.untyped_storage(), self.low, (self.high - self.low,), (1,))


class _Span(NamedTuple):
    """A tensor of a state, and the bytes of its storage that it covers."""

    leaf_path: str
    tensor: Tensor
    dtype: str
    low: int  # first byte of the tensor in its storage, and one past the last
    high: int

    @property
    def layout(self) -> tuple[Any, ...]:
        return self.dtype, self.low, self.tensor.shape, self.tensor.stride()


class Parts:
    """A tree split into the runs of bytes of its tensors and a manifest entry for each leaf.

    Raises TypeError, with the path, for a leaf that a checkpoint cannot store.
    """

    def __init__(self, tree: Any) -> None:
        self.runs: list[_Run] = []
        self.tensors: dict[str, dict[str, Any]] = {}
        self.values: dict[str, dict[str, Any]] = {}
        self.sharded: dict[str, Any] = {}  # DTensors
        self.locals: dict[str, Tensor] = {}  # and this process's shards of them
        self.storages: set[int] = set()
        spans_by_storage: dict[Any, list[_Span]] = {}
        for leaf_path, leaf in leaves_of(tree).items():
            if not isinstance(leaf, Tensor):
                self.values[leaf_path] = encoded(leaf_path, leaf)
            elif is_sharded(leaf):
                self._add_sharded(leaf_path, leaf)
            else:
                span = _span(leaf_path, leaf)
                address = span.tensor.untyped_storage().data_ptr()
                self.storages.add(address)
                # An empty tensor has no bytes to share.
                key = (span.tensor.device, address) if leaf.numel() else leaf_path
                spans_by_storage.setdefault(key, []).append(span)
        for spans in spans_by_storage.values():
            self._add_runs(spans)
        devices = {tensor.device for tensor in (*self.locals.values(), *(run.owner for run in self.runs))}
        self.ready = {device: torch.Event(device) for device in devices - {torch.device("cpu")}}
        self._record()

    def _record(self) -> None:
        """Note the work that is queued on accelerators, which must finish before another thread reads the results."""
        for device, event in self.ready.items():
            event.record(torch.accelerator.current_stream(device))

    def _add_sharded(self, leaf_path: str, leaf: Any) -> None:
        check(
            not any(placement.is_partial() for placement in leaf.placements),
            f"{leaf_path} is a DTensor that is not summed up yet (placements {leaf.placements}), which a checkpoint "
            "cannot hold: redistribute it first",
            TypeError,
        )
        self.sharded[leaf_path], self.locals[leaf_path] = leaf, _span(leaf_path, local(leaf)).tensor
        self.storages.add(self.locals[leaf_path].untyped_storage().data_ptr())

    def _add_runs(self, spans: list[_Span]) -> None:
        """Add one run for each group of overlapping spans of a storage."""
        spans.sort(key=lambda span: (span.low, -span.high))
        overlapping, end = [spans[0]], spans[0].high
        for span in spans[1:]:
            if span.low >= end:
                self._add_run(overlapping, end)
                overlapping = []
            overlapping.append(span)
            end = max(end, span.high)
        self._add_run(overlapping, end)

    def _add_run(self, spans: list[_Span], high: int) -> None:
        first = spans[0]
        low, plain = first.low, first.tensor.is_contiguous() and len({span.layout for span in spans}) == 1
        if not plain:
            low -= low % _ALIGNMENT  # so that each stays aligned for its dtype
        name, size = first.leaf_path, high - low
        dtype, shape = _kind(first.dtype, first.tensor, size) if plain else ("U8", [size])
        self.runs.append(_Run(name, first.tensor, low, high, dtype, shape))
        for span in spans:
            entry = {"dtype": span.dtype, "shape": list(span.tensor.shape), "data": name}
            view = {} if plain else {"stride": list(span.tensor.stride()), "offset": span.low - low}
            self.tensors[span.leaf_path] = {**entry, **view}

    def copy(self) -> None:
        """Copy the bytes to the host, so that the tensors may be overwritten by what is queued from now on."""
        for run in self.runs:
            run.copied = _copied_to_host(run.source())
        self._record()
        self.locals = mapped(partial(torch.Tensor.to, device="cpu", copy=True), self.locals)

    def size(self) -> int:
        """Bytes of the tensors. Of sharded tensors, only this process's shards count."""
        return sum(run.high - run.low for run in self.runs) + sum(shard.nbytes for shard in self.locals.values())

    def shards(self) -> dict[str, dict[str, Any]]:
        """Dtype and shape of each sharded tensor."""
        return {
            leaf_path: {"dtype": str(leaf.dtype).removeprefix("torch."), "shape": list(leaf.shape)}
            for leaf_path, leaf in self.sharded.items()
        }

    def description(self) -> dict[str, Any]:
        """Facts that must be the same on all ranks: plain values, dtypes and shapes."""
        leaves = {leaf_path: [entry["dtype"], entry["shape"]] for leaf_path, entry in self.tensors.items()}
        for leaf_path, leaf in self.sharded.items():
            leaves[leaf_path] = [str(leaf.dtype).removeprefix("torch."), list(leaf.shape), "sharded"]
        return {**self.values, **leaves}


def runs_of(tensors: Mapping[str, Tensor]) -> list[_Run]:
    """One run of bytes for each of these tensors, even if they share memory."""
    spans = [_span(leaf_path, tensor.detach().contiguous()) for leaf_path, tensor in tensors.items()]
    return [
        _Run(span.leaf_path, span.tensor, span.low, span.high, *_kind(span.dtype, span.tensor, span.high - span.low))
        for span in spans
    ]


def _kind(dtype: str, tensor: Tensor, size: int) -> tuple[str, list[int]]:
    """A run's dtype and shape for safetensors; plain bytes if the format has no name for the dtype."""
    return (_SAFETENSORS[dtype], list(tensor.shape)) if dtype in _SAFETENSORS else ("U8", [size])


def _copied_to_host(source: Tensor) -> Tensor:
    """A copy in host memory, which an accelerator makes in the order of its queue, so that nobody waits for it here.

    This takes pinned memory, which torch keeps for the next save (`torch.accelerator.empty_host_cache`).
    """
    if source.device.type == "cpu":
        return source.clone()
    try:
        pinned = torch.empty_like(source, device="cpu", pin_memory=True)
    except RuntimeError:  # the system allows no more of it
        return source.to("cpu", copy=True)
    return pinned.copy_(source, non_blocking=True)


def _span(leaf_path: str, tensor: Tensor) -> _Span:
    if kind := _unfit(tensor):
        raise TypeError(
            f"{leaf_path} is a {kind}, which a checkpoint cannot hold: convert it to a dense plain tensor"
        )
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.detach().resolve_conj().resolve_neg()
    return _Span(leaf_path, tensor, str(tensor.dtype).removeprefix("torch."), *occupied(tensor))


def _unfit(tensor: Tensor) -> str:
    """The reason why a tensor cannot be stored, or an empty string."""
    if tensor.layout is not torch.strided:
        return f"tensor of layout {tensor.layout}"
    if tensor.dtype in QUANTIZED:
        return "quantized tensor"
    if type(tensor) not in (Tensor, torch.nn.Parameter):
        return type(tensor).__name__
    return "tensor on the meta device, without values" if tensor.is_meta else ""


def write(directory: Path, parts: Parts, about: Mapping[str, Any], in_thread: bool = True) -> None:
    """Write and sync both files into an empty directory. If `in_thread`, another thread computes checksums and syncs."""
    with written_data(directory / DATA, parts.runs, parts.ready, in_thread) as (data, size):
        write_manifest(directory, parts, {"format": WHOLE, **about, "bytes": size, "data": data})


def write_manifest(directory: Path, parts: Parts, about: Mapping[str, Any]) -> None:
    """Write the last file of a directory, and sync the file and the directory."""
    write_document(directory, {**about, "values": parts.values, "tensors": parts.tensors})


def write_document(directory: Path, manifest: Mapping[str, Any]) -> None:
    """Write a manifest with its checksum into a directory that has not been renamed yet, and sync both."""
    text = orjson.dumps(manifest)
    write_file(directory / MANIFEST, envelope(zlib.crc32(text)) + text + b"}\n")
    sync_directory(directory)


def write_file(path: Path, content: bytes) -> None:
    """Write and sync a manifest, or a description of chunks."""
    check(
        len(content) <= LARGEST,
        f"{path.name} would have {len(content)} bytes, and a restore reads {LARGEST}: the state has too many leaves. Keep "
        "many numbers, such as those of a list in state.extra, in one tensor",
    )
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def write_data(
    path: Path, runs: Sequence[_Run], ready: Mapping[torch.device, torch.Event], in_thread: bool
) -> tuple[dict[str, dict[str, int]], int]:
    """Write and sync the runs of bytes, and return each run's offset and checksum and the file's size."""
    with written_data(path, runs, ready, in_thread) as result:
        return result


@contextmanager
def written_data(
    path: Path, runs: Sequence[_Run], ready: Mapping[torch.device, torch.Event], in_thread: bool
) -> Iterator[tuple[dict[str, dict[str, int]], int]]:
    """The result of `write_data`, before the file has been synced. It has been when the context ends.

    If `in_thread`, it is synced meanwhile: the file system then writes its records of this file together with those
    of what is written in the context.
    """
    head, offsets = _header(runs)
    head = len(head).to_bytes(8, "little") + head
    start = end = len(head)
    data = {path.name: {"begin": 0, "bytes": start, "crc32": zlib.crc32(head)}}  # checked like the runs of leaves
    position, pieces = 0, [memoryview(head)]
    for event in ready.values():
        event.synchronize()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        with ThreadPoolExecutor(1) as pool:
            beside = partial(_beside, pool) if in_thread else partial
            with _streams_of_their_own(ready):
                for group in _groups(zip(runs, offsets, strict=True)):
                    sources = [run.source().cpu() for run, _ in group]
                    views = [*map(bytes_of, sources)]
                    checksums = beside(_checksums, views)
                    for (run, offset), view in zip(group, views, strict=True):
                        data[run.name] = {"begin": start + offset, "bytes": len(view)}
                        pieces += [memoryview(bytes(start + offset - end)), view]
                        end = start + offset + len(view)
                    _write_all(descriptor, position, pieces)
                    position, pieces = end, []
                    for (run, _), checksum in zip(group, checksums(), strict=True):
                        data[run.name]["crc32"] = checksum
            synced = beside(os.fsync, descriptor)
            yield data, end
            synced()
    finally:
        os.close(descriptor)


def _groups(runs: Iterable[tuple[_Run, int]]) -> Iterator[list[tuple[_Run, int]]]:
    """Runs, with their offsets, in groups of about `_CHUNK` bytes, or more if a run is larger. The last may be empty."""
    group: list[tuple[_Run, int]] = []
    size = 0
    for run, offset in runs:
        group.append((run, offset))
        size += run.high - run.low
        if size >= _CHUNK:
            yield group
            group, size = [], 0
    yield group


@contextmanager
def _streams_of_their_own(devices: Iterable[torch.device]) -> Iterator[None]:
    """Copy to the host beside the steps: in their stream a copy would wait for the steps before it, and delay the next."""
    with ExitStack() as streams:
        for device in devices:
            if device.type != "mps":  # which has one stream
                streams.enter_context(torch.Stream(device))
        yield


def _header(runs: Sequence[_Run]) -> tuple[bytes, list[int]]:
    """The safetensors header, and the offset of each run in the data that follows it."""
    entries: dict[str, Any] = {}
    offsets, end = [], 0
    for run in runs:
        begin = -(-end // _ALIGNMENT) * _ALIGNMENT
        # The format forbids gaps between tensors, so the padding that aligns the next one is itself a tensor.
        if begin > end:
            entries[f"padding/{end}"] = {"dtype": "U8", "shape": [begin - end], "data_offsets": [end, begin]}
        offsets.append(begin)
        end = begin + run.high - run.low
        entries[run.name] = {"dtype": run.dtype, "shape": run.shape, "data_offsets": [begin, end]}
    head = orjson.dumps(entries)
    return head + b" " * (-(8 + len(head)) % _ALIGNMENT), offsets


def _checksums(views: Sequence[memoryview]) -> list[int]:
    return [*map(zlib.crc32, views)]


def _beside(pool: ThreadPoolExecutor, function: Callable[[Any], Any], argument: Any) -> Callable[[], Any]:
    """Call a function in another thread, and return what waits for its result.

    Checksums, writes and syncs release the interpreter lock.
    """
    try:
        return pool.submit(function, argument).result
    except RuntimeError:  # the interpreter is exiting: it accepts no new work and finishes what was started
        return partial(function, argument)


def _write_all(descriptor: int, position: int, views: Iterable[memoryview]) -> None:
    """Write bytes at the end of a file, in few calls of many bytes each.

    The file system then keeps them in memory in large pages, which are faster to write and to map. After each call,
    writing to disk is started, so that the sync at the end has little left to wait for.
    """
    pieces = deque(view[low : low + _CHUNK] for view in views for low in range(0, len(view), _CHUNK))
    while pieces:
        batch: list[memoryview] = []
        size = 0
        while pieces and size < _CHUNK and len(batch) < _MOST:
            batch.append(pieces.popleft())
            size += len(batch[-1])
        # Windows has no writev.
        written = os.writev(descriptor, batch) if hasattr(os, "writev") else os.write(descriptor, b"".join(batch))
        if written < size:  # the disk is nearly full
            rest = memoryview(b"".join(batch))[written:]
            while rest:
                rest = rest[os.write(descriptor, rest) :]
        _start_writeback(descriptor, position, size)
        position += size


_sync_file_range = getattr(ctypes.CDLL(None), "sync_file_range", None) if os.name == "posix" else None


def _start_writeback(descriptor: int, offset: int, size: int) -> None:
    if _sync_file_range is not None:
        _sync_file_range(descriptor, ctypes.c_int64(offset), ctypes.c_int64(size), 2)  # SYNC_FILE_RANGE_WRITE
