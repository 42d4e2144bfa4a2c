"""Checkpoint writing: a state split into tensors and plain values, the files of its tensors, and the manifest."""

from __future__ import annotations

import os
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import orjson
import torch
from torch import Tensor

from looplib._core.checks import check, is_plain
from looplib._core.checksums import bits_of
from looplib._core.mappings import mapped
from looplib._core.overlap import share_elements
from looplib._core.ranks import is_sharded
from looplib.checkpoint._format import (
    LARGEST,
    MANIFEST,
    QUANTIZED,
    bytes_of,
    decoded,
    encoded,
    envelope,
    leaves_of,
    local,
    name_of,
    words,
)
from looplib.checkpoint._shards import Box

# safetensors' names of dtypes. Tensors of other dtypes are stored as bytes, and only the manifest has their dtype.
_SAFETENSORS = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64", "int32": "I32",
    "int16": "I16", "int8": "I8", "uint8": "U8", "uint16": "U16", "uint32": "U32", "uint64": "U64", "bool": "BOOL",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
}  # fmt: skip


class Parts:
    """A tree split into what its files hold.

    Raises TypeError, with the path, for a leaf that a checkpoint cannot store, and ValueError for two that overlap.

    Attributes:
        tensors: what is written of each unsharded tensor, as integers of the same size. Ties are written once.
        ties: path of a tensor -> path of the same tensor in `tensors`.
        sharded: the DTensors.
        shards: this process's shards of them, as integers of the same size.
        about: dtype and shape of all these but for ties, as in the manifest.
        values: the plain values, as in the manifest.
    """

    def __init__(self, tree: Any) -> None:
        leaves = leaves_of(tree)
        self.values = {path: encoded(path, leaf) for path, leaf in leaves.items() if not isinstance(leaf, Tensor)}
        self.sharded = {path: leaf for path, leaf in leaves.items() if is_sharded(leaf)}
        whole = {path: leaf for path, leaf in leaves.items() if path not in self.values and path not in self.sharded}
        for path, leaf in self.sharded.items():
            check(
                not any(placement.is_partial() for placement in leaf.placements),
                f"{path} is a DTensor that is not summed up yet (placements {leaf.placements}), which a checkpoint "
                "cannot hold: redistribute it first",
                TypeError,
            )
        shards = mapped(local, self.sharded)
        for path, tensor in (*whole.items(), *shards.items()):
            _check_kind(path, tensor)
        roots = same_memory(whole)
        self.ties = {path: root for path, root in roots.items() if path != root}
        self.tensors = {path: words(leaf) for path, leaf in whole.items() if path not in self.ties}
        self.shards = mapped(words, shards)
        self.about = {
            path: {"dtype": name_of(leaf.dtype), "shape": list(leaf.shape)}
            for path, leaf in (*whole.items(), *self.sharded.items())
            if path not in self.ties
        }
        self._copies: list[torch.Event] = []

    def copy(self) -> None:
        """Copy the tensors to the host, so that they may be overwritten by what is queued from now on."""
        devices = {tensor.device for tensor in (*self.tensors.values(), *self.shards.values()) if not tensor.is_cpu}
        self.tensors, self.shards = mapped(_copied_to_host, self.tensors), mapped(_copied_to_host, self.shards)
        for device in devices:
            event = torch.Event(device)
            event.record(torch.accelerator.current_stream(device))
            self._copies.append(event)

    def wait(self) -> None:
        """Wait until the copies are there."""
        for event in self._copies:
            event.synchronize()

    def size(self) -> int:
        """Bytes of the tensors. Of sharded tensors, only this process's shards count."""
        return sum(tensor.nbytes for tensor in (*self.tensors.values(), *self.shards.values()))

    def description(self) -> dict[str, str]:
        """Facts that must be the same on all ranks, in words: plain values, dtypes and shapes."""
        tensors = {
            path: f"a tensor of {about['dtype']} and shape {tuple(about['shape'])}"
            + ", sharded" * (path in self.sharded)
            for path, about in self.about.items()
        }
        return {path: repr(decoded(entry)) for path, entry in self.values.items()} | tensors


def same_memory(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """For each tensor, by path, the path of the first one that is the same view of the same memory.

    Raises ValueError for tensors that share some elements and are not the same. Separate views of one memory, such as
    the halves of a flat buffer, are separate tensors.
    """
    roots: dict[str, str] = {}
    first: dict[Any, str] = {}
    by_storage: dict[Any, list[tuple[int, int, str]]] = defaultdict(list)
    for path, leaf in tensors.items():
        tensor = local(leaf)
        roots[path] = path
        if not tensor.numel():  # has no memory to share
            continue
        storage = tensor.device, tensor.untyped_storage().data_ptr()
        begin, shape, stride = int(tensor.storage_offset()), tensor.shape, tensor.stride()
        view = storage, begin, shape, stride, tensor.dtype, tensor.is_conj(), tensor.is_neg()
        roots[path] = first.setdefault(view, path)
        if roots[path] == path:
            end = begin + 1 + sum((n - 1) * step for n, step in zip(shape, stride, strict=True))
            size = tensor.element_size()
            by_storage[storage].append((begin * size, end * size, path))
    for spans in by_storage.values():
        before: list[tuple[int, int, str]] = []
        for span in sorted(spans):
            before = [other for other in before if other[1] > span[0]]
            for *_, path in before:
                check(
                    not share_elements(local(tensors[path]), local(tensors[span[2]])),
                    f"{path} and {span[2]} share memory without being the same tensor, which a checkpoint cannot hold: "
                    "keep a copy in one of them (tensor.clone())",
                )
            before.append(span)
    return roots


def _check_kind(path: str, tensor: Tensor) -> None:
    """Raise TypeError for a tensor that cannot be stored."""
    if not is_plain(tensor) or tensor.is_meta or tensor.dtype in QUANTIZED:
        kind = f"{type(tensor).__name__} of {tensor.dtype} and {tensor.layout} on the device {tensor.device}"
        raise TypeError(f"{path} is a {kind}, which a checkpoint cannot hold: convert it to a dense plain tensor")


def _copied_to_host(source: Tensor) -> Tensor:
    """A copy in host memory, which an accelerator makes in the order of its queue, so that nobody waits for it here.

    This takes pinned memory, which torch keeps for the next save (`torch.accelerator.empty_host_cache`).
    """
    if source.is_cpu:
        return source.clone()
    try:
        pinned = torch.empty_like(source, device="cpu", pin_memory=True)
    except RuntimeError:  # the system allows no more of it
        return source.to("cpu", copy=True)
    return pinned.copy_(source, non_blocking=True)


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], about: Mapping[str, Any], boxes: Mapping[str, Box] | None = None
) -> dict[str, int]:
    """Write a safetensors file, and return its entry in the manifest. It is not synced yet.

    Args:
        tensors: the data, as integers of the size of their dtypes.
        about: dtypes and shapes, as in the manifest.
        boxes: parts of the tensors of a manifest that these are; None for all of each.
    """
    # Larger dtypes come first, so that each begins at a multiple of its size without any padding.
    tensors = dict(sorted(tensors.items(), key=lambda item: -item[1].element_size()))
    data = [bits_of(tensor).cpu() for tensor in tensors.values()]
    blocks: list[Any] = [_header(tensors, about, boxes), *map(bytes_of, data)]
    with open(path, "xb", buffering=1 << 20) as file, ThreadPoolExecutor(1) as pool:
        checksum = beside(pool, _checksum, blocks)
        for block in blocks:
            file.write(block)
        return {"bytes": sum(map(len, blocks)), "crc32": checksum()}


def _checksum(blocks: Iterable[Any]) -> int:
    checksum = 0
    for block in blocks:
        checksum = zlib.crc32(block, checksum)
    return checksum


def _header(tensors: Mapping[str, Tensor], about: Mapping[str, Any], boxes: Mapping[str, Box] | None) -> bytes:
    entries: dict[str, Any] = {}
    if boxes is not None:  # as text, since safetensors allows no other metadata
        entries["__metadata__"] = {path: orjson.dumps(boxes[path]).decode() for path in tensors}
    end = 0
    for path, tensor in tensors.items():
        begin, end = end, end + tensor.nbytes
        dtype = _SAFETENSORS.get(about[path]["dtype"])
        shape = [tensor.nbytes] if dtype is None else list(tensor.shape)
        entries[path] = {"dtype": dtype or "U8", "shape": shape, "data_offsets": [begin, end]}
    text = orjson.dumps(entries)
    text += b" " * (-(8 + len(text)) % 64)
    return len(text).to_bytes(8, "little") + text


def beside(pool: ThreadPoolExecutor, function: Callable[[Any], Any], argument: Any) -> Callable[[], Any]:
    """Call a function in another thread, and return what waits for its result.

    Checksums and writes release the interpreter lock.
    """
    try:
        return pool.submit(function, argument).result
    except RuntimeError:  # the interpreter is exiting: it accepts no new work and finishes what was started
        return partial(function, argument)


def write_manifest(directory: Path, manifest: Mapping[str, Any]) -> None:
    """Write a manifest with its checksum. It is not synced yet."""
    text = orjson.dumps(manifest)
    check(
        len(text) < LARGEST - 100,
        f"{MANIFEST} would have {len(text)} bytes, and a restore reads {LARGEST}: the state has too many leaves. Keep "
        "many numbers, such as those of a list in state.extra, in one tensor",
    )
    (directory / MANIFEST).write_bytes(envelope(zlib.crc32(text)) + text + b"}\n")


def sync(*paths: Path) -> None:
    """Sync files and directories, one after another."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
