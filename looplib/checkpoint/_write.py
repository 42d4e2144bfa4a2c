"""Checkpoint writing: a state split into tensors and plain values, and the files of both."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import orjson
from torch import Tensor

from looplib._core.checks import is_plain
from looplib._core.checksums import bits_of, bytes_of
from looplib._core.copies import is_shared
from looplib._core.mappings import mapped, pick, without
from looplib._core.memory import overlaps
from looplib._core.ranks import is_sharded, local
from looplib._core.torch_storage import memory_of
from looplib.checkpoint._format import (
    about,
    checksum,
    encoded,
    leaves_of,
    slices_of,
    words,
)
from looplib.checkpoint._shards import box_of, first_of, is_written_here

# safetensors' names of dtypes. Tensors of other dtypes are stored as bytes, and only the manifest has their dtype.
_SAFETENSORS = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64", "int32": "I32",
    "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip


class Parts:
    """A tree split into what its files hold.

    Raises TypeError, with the path, for a leaf that a checkpoint cannot store, and ValueError for two that overlap. The tree is
    that of a stack if there are several members.

    Attributes:
        values: the plain values, as in the manifest.
        ties: path of a tensor -> path of the same tensor, under which it is written once.
        shared: paths of the frozen parameters that all members of a stack share, of which only the first is written.
        sharded: paths of the DTensors.
        about: dtype and shape of all tensors but for ties, as in the manifest.
        data: the tensors and parts of DTensors that this process writes, as integers of the same size.
        boxes: which parts those of DTensors are.
    """

    def __init__(self, tree: Any, first: bool, members: int = 1) -> None:
        leaves = leaves_of(tree)
        self.values = {path: encoded(path, leaf) for path, leaf in leaves.items() if not isinstance(leaf, Tensor)}
        tensors = without(leaves, self.values)
        for path, leaf in tensors.items():
            _check_kind(path, leaf)
        self.sharded = {path for path, leaf in tensors.items() if is_sharded(leaf)}
        roots = same_memory(without(tensors, self.sharded))
        self.ties = {path: root for path, root in roots.items() if path != root}
        stored = without(tensors, self.ties)
        self.shared = [path for path, leaf in stored.items() if members > 1 and _is_shared(path, leaf)]
        self.about = mapped(about, stored)
        self.data = {path: words(local(leaf)) for path, leaf in stored.items() if is_written_here(leaf, first)}
        self.boxes = {
            path: box_of(leaf) for path, leaf in stored.items() if path in self.data and path in self.sharded
        }
        for path in self.data.keys() & {*self.shared}:
            self.data[path] = self.data[path][:1]
            self.boxes[path] = first_of(stored[path].shape)

    def copy(self) -> None:
        """Copy the tensors to the host, so that they may be overwritten from now on."""
        self.data = mapped(lambda tensor: tensor.to("cpu", copy=True), self.data)


def _is_shared(path: str, leaf: Tensor) -> bool:
    return path.startswith("/params/") and not leaf.requires_grad and not is_sharded(leaf) and is_shared(leaf)


_LEAVE_OUT = (
    ", or save only what is trained, such as the adapters of a quantized model: "
    "ll.checkpoint_io(..., select=lambda name, tensor: tensor.requires_grad)"
)


def _check_kind(path: str, leaf: Any) -> None:
    """Raise TypeError for a tensor that cannot be stored."""
    tensor = local(leaf) if is_sharded(leaf) else leaf
    partial_sums = is_sharded(leaf) and any(placement.is_partial() for placement in leaf.placements)
    if not is_plain(tensor) or tensor.is_meta or tensor.is_quantized or partial_sums:
        raise TypeError(
            f"{path} is a {type(leaf).__name__} of {leaf.dtype} and {leaf.layout} on the device {leaf.device}"
            f"{', not summed up yet' * partial_sums}, which a checkpoint cannot hold: convert it to a dense plain tensor"
            f"{_LEAVE_OUT * path.startswith('/params/')}"
        )


def same_memory(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """For each tensor, by path, the path of the first one that is the same view of the same memory.

    Raises ValueError for tensors whose ranges in memory overlap and that are not the same. Separate ranges of one
    memory, such as the halves of a flat buffer, are separate tensors.
    """
    roots: dict[str, str] = {}
    first: dict[Any, str] = {}
    for path, tensor in tensors.items():
        kind = tensor.device, tensor.dtype, tensor.is_conj(), tensor.is_neg()
        view = memory_of(tensor), tensor.storage_offset(), tensor.shape, tensor.stride(), *kind
        roots[path] = first.setdefault(view, path) if tensor.numel() else path
    for path, other in overlaps(pick(tensors, first.values())):
        raise ValueError(
            f"{path} and {other} share memory without being the same tensor, which a checkpoint cannot hold: "
            "keep a copy in one of them (tensor.clone())"
        )
    return roots


def write_tensors(path: Path, parts: Parts) -> tuple[dict[str, int], Callable[[], None]]:
    """Write a safetensors file of what this process writes.

    Returns its entry in the manifest, and a function that waits until the file is synced, which begins at once.
    """
    # Larger dtypes come first, so that each begins at a multiple of its size without any padding.
    data = dict(sorted(parts.data.items(), key=lambda item: -item[1].element_size()))
    # As text, since safetensors allows no other metadata.
    entries: dict[str, Any] = {"__metadata__": mapped(lambda box: orjson.dumps(box).decode(), parts.boxes)}
    end = 0
    for leaf_path, tensor in data.items():
        begin, end = end, end + tensor.nbytes
        dtype = _SAFETENSORS.get(parts.about[leaf_path]["dtype"])
        shape = [tensor.nbytes] if dtype is None else list(tensor.shape)
        entries[leaf_path] = {"dtype": dtype or "U8", "shape": shape, "data_offsets": [begin, end]}
    header = orjson.dumps(entries)
    header += b" " * (-(8 + len(header)) % 64)
    bits = [bits_of(tensor).cpu() for tensor in data.values()]
    slices = slices_of([len(header).to_bytes(8, "little") + header, *map(bytes_of, bits)])
    with open(path, "xb", buffering=1 << 20) as file:
        for part in slices:
            file.writelines(part)
    try:  # beside what follows, so that the file system writes its records of several files together
        synced = ThreadPoolExecutor(1).submit(sync, path).result
    except RuntimeError:  # the interpreter is exiting, and starts no more threads
        synced = partial(sync, path)
    return {"bytes": 8 + len(header) + end, "crc32": checksum(slices)}, synced


def sync(*paths: Path) -> None:
    """Sync files and directories, one after another."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
