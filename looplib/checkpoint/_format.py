"""Checkpoint format: file names, paths of leaves, plain values and counts as JSON, and errors for damage.

A state is a tree of tensors and plain values. Its tensors are stored contiguously, one after another, in a safetensors
file, so that other programs can read them. Of a state that is sharded over ranks, each rank writes a file. Its metadata
say which part of a tensor it has.

The manifest, a JSON file with its own checksum, has the rest: dtype and shape of each tensor, ties and plain values, and
for each data file its size and checksum: the CRC-32 of the CRC-32s, four bytes each, of its slices of 4 MiB.

`_write` writes these files and `_read` reads them.
"""

from __future__ import annotations

import ast
import base64
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from looplib._core import trees
from looplib._core.checks import check
from looplib._core.mappings import fields_of, without
from looplib._core.ranks import is_sharded
from looplib._core.replicas import checksums_by_name
from looplib.types import COUNTS, TREES, TrainState

FORMAT = 10

MANIFEST, DATA = "manifest.json", "tensors.safetensors"

WEIGHTS = ("/params/", "/buffers/")  # beginnings of the paths of a module's leaves


class DamagedCheckpointError(ValueError):
    """A checkpoint is damaged. The message names the file and the damage."""

    __module__ = "looplib.checkpoint"  # as tracebacks name it


class CheckpointVersionError(ValueError):
    """A checkpoint has a format that this version of looplib does not read."""

    __module__ = "looplib.checkpoint"


def leaves_of(tree: Any) -> dict[str, Any]:
    """Leaves of a tree by path, a JSON pointer such as /params/0.weight."""
    leaves: dict[str, Any] = {}
    for path, leaf in trees.leaves(tree):
        leaf_path = trees.pointer(path)
        if leaf_path in leaves:
            raise ValueError(f"two leaves of the state are both at {leaf_path}: give their keys different names")
        leaves[leaf_path] = leaf
    return leaves


def words(tensor: Tensor) -> Tensor:
    """View of a tensor as integers of the same size, which torch can copy and compare whatever their bits mean."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    return plain.view(_WORDS[plain.element_size()])


_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


def about(tensor: Tensor) -> dict[str, Any]:
    """Dtype and shape of a tensor, in the form stored in a manifest."""
    return {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}


def in_words(kind: Any) -> str:
    """Dtype and shape, or a plain value, from a manifest, for messages. Anything else is itself."""
    if not isinstance(kind, Mapping):
        return str(kind)
    return f"a {kind['dtype']} tensor of shape {tuple(kind['shape'])}" if "shape" in kind else repr(decoded(kind))


def numbers_of(tree: Any) -> dict[str, str]:
    """Numbers of small tensors and checksums of larger ones, for comparison between ranks. Sharded ones are left out."""
    tensors = {
        path: leaf.detach()
        for path, leaf in leaves_of(tree).items()
        if isinstance(leaf, Tensor) and not is_sharded(leaf)
    }
    small = {path: str(leaf.tolist()) for path, leaf in tensors.items() if leaf.numel() <= 4}
    large, _ = checksums_by_name(without(tensors, small))
    return {**small, **{f"{path} has the checksum": number for path, number in large.items()}}


# Plain types by name: a function that makes JSON of a value, and its inverse.
_CODES: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "NoneType": (str, lambda _: None),
    "bool": (bool, bool),
    "str": (str, str),
    "int": (hex, lambda text: int(text, 16)),
    "float": (repr, float),
    "complex": (repr, complex),
    "bytes": (lambda value: base64.b64encode(value).decode(), base64.b64decode),
}


def encoded(leaf_path: str, value: Any) -> dict[str, Any]:
    """Encode a plain value as JSON without loss."""
    kind = type(value).__name__
    check(
        kind in _CODES and type(value).__module__ == "builtins",
        f"{leaf_path} is a {kind}, which a checkpoint cannot hold: keep tensors, Python's own numbers, strings, bytes, "
        "None, and dicts, lists, tuples or registered pytrees of these",
        TypeError,
    )
    return {kind: _CODES[kind][0](value)}


def decoded(entry: Mapping[str, Any]) -> Any:
    """Decode a plain value written by `encoded`."""
    ((kind, value),) = entry.items()
    return _CODES[kind][1](value)


_SLICE = 4 << 20  # bytes


def slices_of(blocks: Iterable[Any]) -> list[list[memoryview]]:
    """The bytes of a file, given in blocks, in slices of equal size: each a list of parts of blocks."""
    slices: dict[int, list[memoryview]] = defaultdict(list)
    position = 0
    for block in blocks:
        rest = memoryview(block)
        while rest:
            part = rest[: _SLICE - position % _SLICE]
            slices[position // _SLICE].append(part)
            rest, position = rest[len(part) :], position + len(part)
    return [*slices.values()]


def checksum(slices: Iterable[Iterable[Any]], mapping: Callable[..., Iterable[int]] = map) -> int:
    """Checksum of a file: that of the checksums of its slices, which several threads can compute."""
    return _crc32(crc.to_bytes(4, "little") for crc in mapping(_crc32, slices))


def _crc32(blocks: Iterable[Any]) -> int:
    return reduce(lambda total, block: zlib.crc32(block, total), blocks, 0)


def counts_of(state: TrainState) -> dict[str, Any]:
    """Counts and seed of a state, in the form stored in a manifest."""
    # As text, since JSON numbers have 64 bits, and the seeds of a stack are a tuple.
    return {**fields_of(state, COUNTS), "seed": str(state.seed)}


def counts_in(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Counts and seed stored in a manifest."""
    return {**manifest["counts"], "seed": ast.literal_eval(manifest["counts"]["seed"])}


def trees_of(state: TrainState) -> dict[str, Any]:
    """Trees of a state that a checkpoint stores: those that are not None."""
    return {name: tree for name in TREES if (tree := getattr(state, name)) is not None}
