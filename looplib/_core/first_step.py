"""The first step on several ranks: a comparison of what must be the same on all of them."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from looplib._core import trees
from looplib._core.collective import together_with_data

_COUNTS = ("seed", "step", "epoch", "batch", "epoch_length", "samples")


class State(Protocol):
    """The fields of a state that are compared."""

    @property
    def params(self) -> Mapping[str, Tensor]: ...
    @property
    def buffers(self) -> Mapping[str, Tensor]: ...


def compare(state: State, batches: Sequence[Any]) -> None:
    """Raise on all ranks if they run different programs: versions, names, dtypes, shapes, counts, seeds, kinds of batches.

    One message of 32 bytes to each rank. What differs is sent only if something does.
    """
    tensors = {"params": state.params, "buffers": state.buffers}
    facts = {
        "torch": torch.__version__,
        "looplib, by the checksum of its files,": _checksum_of_looplib(),
        **{f"state.{name}": getattr(state, name) for name in _COUNTS},
        **{f"{tree}/{name}": _kind(one, one.shape) for tree in tensors for name, one in tensors[tree].items()},
        "the batch": _kind_of_batch(batches[0]),
    }
    together_with_data().check_alike(facts, "the ranks do not run the same program:\n  ")


def _kind(tensor: Tensor, shape: Any) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(shape)}"


def _kind_of_batch(batch: Any) -> str:
    """Dtypes and dimensions of the tensors: sizes may differ from rank to rank."""
    kinds = {_kind(leaf, ["..."] * leaf.dim()) for _, leaf in trees.leaves(batch) if isinstance(leaf, Tensor)}
    return "; ".join(sorted(kinds)).replace("'", "") or "without tensors"


@functools.cache
def _checksum_of_looplib() -> str:
    checksum = 0
    for path in sorted(Path(__file__).parents[1].rglob("*.py")):
        checksum = zlib.crc32(path.read_bytes(), checksum)
    return f"{checksum:08x}"
