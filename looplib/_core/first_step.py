"""The first step on several ranks: a comparison of what must be the same on all of them."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from looplib._core import ownership, trees
from looplib._core.collective import together_with_data

_COUNTS = ("seed", "step", "epoch", "batch", "epoch_length", "samples")


class State(Protocol):
    """The fields of a state that are compared."""

    @property
    def params(self) -> Mapping[str, Tensor]: ...
    @property
    def buffers(self) -> Mapping[str, Tensor]: ...
    @property
    def opt_state(self) -> Any: ...


def compare(state: State, batches: Sequence[Any], program: Callable[[], Mapping[str, Any]] | None) -> None:
    """Raise on all ranks if they run different programs.

    Compared are versions, the optimizer, wrappers for whole gradients, names, dtypes, shapes, counts, seeds and kinds of
    batches. `program` returns the description of the train step (`program_of`), and is None without one. Only a code of
    the function and a digest of 32 bytes are sent to each rank, and what differs only if something does.
    """
    together_with_data().meet()
    tensors = {"params": state.params, "buffers": state.buffers}
    facts = {
        "torch": torch.__version__,
        "looplib, by the checksum of its files,": _checksum_of_looplib(),
        **(_of_state(state) if program is None else program()),
        **{f"state.{name}": getattr(state, name) for name in _COUNTS},
        **{f"{tree}/{name}": _kind(one, one.shape) for tree in tensors for name, one in tensors[tree].items()},
        "the batch": _kind_of_batch(batches[0]),
        # Without shapes: those of shards differ.
        **{f"opt_state{trees.pointer(path)}": _kind_of_leaf(leaf) for path, leaf in trees.leaves(state.opt_state)},
    }
    together_with_data().check_alike(facts, "the ranks do not run the same program:\n  ")


def of_optimizer(description: Mapping[str, Any]) -> dict[str, Any]:
    """Facts about an optimizer: its class, hyperparameters and wrappers."""
    return {
        f"the optimizer's {' '.join(str(key.name) for key in path)}": value
        for path, value in trees.leaves(description)
    }


def _of_state(state: Any) -> dict[str, Any]:
    """Facts about the optimizer that created the state, if it is known."""
    made_with = ownership.made_with(state)
    return of_optimizer((made_with and made_with.optimizer) or {})


def _kind_of_leaf(leaf: Any) -> str:
    return str(leaf.dtype).removeprefix("torch.") if isinstance(leaf, Tensor) else type(leaf).__name__


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
