"""Checkpoint format: file names, leaf paths, plain values and counts as JSON, and errors for damage.

A state is a tree of tensors and plain values. Its tensors are stored contiguously, one after another, in a safetensors
file, so that other programs can read them. Of tensors that are sharded over ranks, each rank writes its chunks into a
safetensors file of its own, whose metadata say which part of a tensor each chunk is.

The manifest, a JSON file, has the rest: dtype and shape of each tensor, ties and plain values, and for each data file its
size and its checksum. A checksum is compared before anything of a file is used, but for its header, which says which
files are needed.

`_write` writes these files and `_read` reads them.
"""

from __future__ import annotations

import base64
import ctypes
import math
import reprlib
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from looplib._core.checks import check, is_count
from looplib._core.mappings import fields_of, without
from looplib._core.ranks import is_sharded
from looplib._core.torch_private import pytree
from looplib.types import COUNTS, TREES, TrainState

FORMAT = 6

MANIFEST, DATA = "manifest.json", "tensors.safetensors"

LARGEST = 256 << 20  # bytes of a manifest: of a million leaves

QUANTIZED = {torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4}

_MOST_DIMENSIONS = 1000  # of a tensor in a file

WEIGHTS = ("/params/", "/buffers/")  # beginnings of the paths of a module's leaves


class DamagedCheckpointError(ValueError):
    """A checkpoint is damaged. The message names the file and the damage."""


class CheckpointVersionError(ValueError):
    """A checkpoint has a format that this version of looplib does not read."""


@contextmanager
def errors_as_damage(path: Path) -> Iterator[None]:
    """Turn any error caused by a missing file, or by malformed content of one, into a DamagedCheckpointError.

    Another process may have deleted a file since it was listed, or since it was last looked at.
    """
    try:
        yield
    except (DamagedCheckpointError, CheckpointVersionError):
        raise
    except (FileNotFoundError, NotADirectoryError) as error:
        raise DamagedCheckpointError(f"{path} is missing ({error.strerror})") from None
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


# Plain types by name: a function that makes JSON of a value, and its inverse.
_CODES: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "NoneType": (str, lambda _: None),
    "bool": (bool, bool),
    "str": (str, str),
    "int": (hex, lambda text: int(text, 16)),
    "float": (repr, float),
    "complex": (repr, complex),
    "bytes": (lambda value: base64.b64encode(value).decode(), lambda text: base64.b64decode(text, validate=True)),
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


def envelope(checksum: int) -> bytes:
    """First bytes of a manifest file, before the manifest itself."""
    return b'{"crc32":%d,"manifest":' % checksum


def bytes_of(tensor: Tensor) -> memoryview:
    """Memory of a CPU tensor as bytes, without numpy."""
    if not tensor.numel():
        return memoryview(b"")
    return memoryview((ctypes.c_char * tensor.numel()).from_address(tensor.data_ptr())).cast("B")


def counts_in(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Counts and seed stored in a manifest."""
    counts: dict[str, Any] = manifest["counts"]
    length = counts["epoch_length"]
    sound = are_counts(without(counts, ("seed", "epoch_length")).values()) and (length is None or is_count(length, 0))
    check(sound and counts.keys() == set(COUNTS), f"counts that are no counts of a state: {counts}")
    seed = counts["seed"]
    return {**counts, "seed": tuple(map(int, seed)) if isinstance(seed, list) else int(seed)}


def counts_of(state: TrainState) -> dict[str, Any]:
    """Counts and seed of a state, in the form stored in a manifest."""
    seed = state.seed
    # Stored as text, since JSON numbers have 64 bits. The seeds of a stack are a list.
    written = [*map(str, seed)] if isinstance(seed, tuple) else str(seed)
    return {**fields_of(state, COUNTS), "seed": written}


def trees_of(state: TrainState) -> dict[str, Any]:
    """Trees of a state that a checkpoint stores: those that are not None."""
    return {name: tree for name in TREES if (tree := getattr(state, name)) is not None}


def count_of(shape: Any, of: str) -> int:
    """Number of elements of a shape that was read from a file. Raises ValueError for anything that is no shape.

    >>> count_of([2, 3], "w"), count_of([0, 2**40, 2**40], "w")
    (6, 0)
    >>> count_of([2**24, 2**24], "w")
    Traceback (most recent call last):
    ValueError: w has shape [16777216, 16777216]
    """
    # The product of many large numbers, which a damaged file may hold, would take long.
    sound = type(shape) is list and len(shape) <= _MOST_DIMENSIONS and are_counts(shape)
    count = math.prod(shape) if sound else 0
    if not sound or count >= 2**48:
        raise ValueError(f"{of} has shape {reprlib.repr(shape)}")
    return count


def are_counts(numbers: Collection[Any]) -> bool:
    """True for ints from 0 on that are less than 2**48, so that the product of two stays within 128 bits."""
    return {*map(type, numbers)} <= {int} and min(numbers, default=0) >= 0 and max(numbers, default=0) < 2**48
