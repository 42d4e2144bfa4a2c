"""Checkpoint format: file names, leaf paths, plain values as JSON, and errors for damage.

A state is a tree of tensors and plain values. Its tensors are stored contiguously, one after another, in a safetensors
file, so that other programs can read them. Of tensors that are sharded over ranks, each rank writes its chunks into a
safetensors file of its own.

The manifest, a JSON file, has the rest: dtype and shape of each tensor, ties and plain values; and for each data file its
size, the size and checksum of its header, and the checksum of each chunk in the order in which they lie behind it. For
the file of a rank's chunks there is the checksum of a list beside it, in which each chunk has the part of the tensor that
it is as well. A restore reads no header.

`_write` writes these files and `_read` reads them.
"""

from __future__ import annotations

import base64
import ctypes
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from looplib._core.checks import check
from looplib._core.ranks import is_sharded
from looplib._core.torch_private import pytree

FORMAT = 5

MANIFEST, DATA = "manifest.json", "tensors.safetensors"

LARGEST = 256 << 20  # bytes of a manifest: of a million leaves

QUANTIZED = {torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4}

WEIGHTS = ("/params/", "/buffers/")  # beginnings of the paths of a module's leaves

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""A part of a tensor: its first index and its size in each dimension."""


class DamagedCheckpointError(ValueError):
    """A checkpoint is damaged. The message names the file and the damage."""


class CheckpointVersionError(ValueError):
    """A checkpoint has a format that this version of looplib does not read."""


@contextmanager
def errors_as_damage(path: Path) -> Iterator[None]:
    """Turn any error caused by malformed content of a file into a DamagedCheckpointError."""
    try:
        yield
    except (DamagedCheckpointError, CheckpointVersionError):
        raise
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError) as error:
        raise DamagedCheckpointError(f"{path} holds something that no save writes: {error!r}") from error


def pointer(path: Any) -> str:
    """Path of a leaf as a JSON pointer (RFC 6901), such as /params/0.weight."""
    return "".join(["/" + _name(key).replace("~", "~0").replace("/", "~1") for key in path])


def _name(key: Any) -> str:
    for attribute in ("key", "idx", "name"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return "None"


def leaves_of(tree: Any) -> dict[str, Any]:
    """Leaves of a tree, by path."""
    leaves: dict[str, Any] = {}
    for path, leaf in pytree.tree_flatten_with_path(tree)[0]:
        leaf_path = pointer(path)
        twice = f"two leaves of the state are both at {leaf_path}: give their keys different names"
        check(leaf_path not in leaves, twice)
        leaves[leaf_path] = leaf
    return leaves


def local(leaf: Any) -> Tensor:
    """This process's shard of a DTensor, or a plain tensor unchanged, sharing its memory."""
    if not is_sharded(leaf):
        return leaf.detach()  # type: ignore[no-any-return]
    with torch.no_grad():
        shard = leaf.to_local()
        return shard.wait() if hasattr(shard, "wait") else shard.detach()  # type: ignore[no-any-return]


def words(tensor: Tensor) -> Tensor:
    """View of a tensor as integers of the same size, which torch can copy and compare whatever their bits mean."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    return plain.view(_WORDS[plain.element_size()])


_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# Plain types, each with a test for the values that JSON can represent.
_JSON: dict[type, Callable[[Any], bool]] = {
    **dict.fromkeys((type(None), bool, str), lambda value: True),
    int: lambda value: -(2**63) <= value < 2**63,
    float: math.isfinite,
}

# For the other values, by the name of their type: a function that makes JSON of a value, and its inverse.
_CODES: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "float": (str, float),
    "int": (hex, lambda text: int(text, 16)),
    "bytes": (lambda value: base64.b64encode(value).decode(), lambda text: base64.b64decode(text, validate=True)),
    "complex": (lambda value: [str(value.real), str(value.imag)], lambda pair: complex(*map(float, pair))),
}


def encoded(leaf_path: str, value: Any) -> dict[str, Any]:
    """Encode a plain value as JSON without loss."""
    kind = type(value)
    if kind in _JSON and _JSON[kind](value):
        return {"value": value}
    check(
        kind in (float, int, bytes, complex),
        f"{leaf_path} is a {kind.__name__}, which a checkpoint cannot hold: keep tensors, Python's own numbers, strings, "
        "bytes, None, and dicts, lists, tuples or registered pytrees of these",
        TypeError,
    )
    return {kind.__name__: _CODES[kind.__name__][0](value)}


def decoded(entry: Mapping[str, Any]) -> Any:
    """Decode a plain value written by `encoded`."""
    ((kind, value),) = entry.items()
    if kind == "value" and type(value) in _JSON:
        return value
    return _CODES[kind][1](value)


def list_of(name: str) -> str:
    """Name of the list of the chunks in a rank's file."""
    return name.removesuffix(".safetensors") + ".json"


def envelope(checksum: int) -> bytes:
    """First bytes of a manifest file, before the manifest itself."""
    return b'{"crc32":%d,"manifest":' % checksum


def bytes_of(tensor: Tensor) -> memoryview:
    """Memory of a CPU tensor as bytes, without numpy."""
    if not tensor.numel():
        return memoryview(b"")
    return memoryview((ctypes.c_char * tensor.numel()).from_address(tensor.data_ptr())).cast("B")
