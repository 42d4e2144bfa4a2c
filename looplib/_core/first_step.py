"""The first step on several ranks: a comparison of what must be the same on all of them."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from looplib._core import kinds, lease, trees
from looplib._core.collective import together_with_data
from looplib._core.descriptions import described, described_arguments

_COUNTS = ("seed", "step", "epoch", "batch", "epoch_length", "samples")

_FREE = {"retry_on_oom", "gradient_histograms"}  # may differ between ranks, since they do not change the gradient


def compare(state: Any, batches: Sequence[Any], program: Callable[[], Mapping[str, Any]] | None) -> None:
    """Raise on all ranks if they run different programs.

    Compared are versions, the optimizer, wrappers for whole gradients, names, dtypes, shapes, counts, seeds, loaders and
    kinds of batches. `program` returns `described_program` of the train step, and is None without one. Only a code of
    the function and a digest of 32 bytes are sent to each rank, and what differs only if something does.
    """
    together_with_data().meet()
    tensors = {"params": state.params, "buffers": state.buffers}
    known = lease.provenance(state)
    facts = {
        "torch": torch.__version__,
        "looplib, by the checksum of its files,": _checksum_of_looplib(),
        **(program() if program is not None else _of_optimizer((known and known.optimizer) or {})),
        **{f"state.{name}": getattr(state, name) for name in _COUNTS},
        **{f"{tree}/{name}": _kind(one, one.shape) for tree in tensors for name, one in tensors[tree].items()},
        **_of_loaders(known.loaders if known else ()),
        "the batch": _kind_of_batch(batches[0]),
        # Without shapes: those of shards differ.
        **{f"opt_state{trees.pointer(path)}": _kind_of_leaf(leaf) for path, leaf in trees.leaves(state.opt_state)},
    }
    together_with_data().check_alike(facts, "the ranks do not run the same program:\n  ")


def described_program(grad_fn: Any, optimizer: Mapping[str, Any]) -> dict[str, Any]:
    """Facts about the step of a gradient function and an optimizer, given by its description.

    Of the gradient function, these are the wrappers that change the gradient of the whole step, as far as they are
    marked. Those of a rank's own part, such as `accumulate`, may differ where devices have different memory.
    """
    wrappers = []
    while (made := kinds.made(grad_fn)) is not None:
        if made.whole_step and made.name not in _FREE:
            _, args, settings = getattr(grad_fn, "call", None) or (None, (), {})
            wrappers.append(f"{made.name}({described_arguments(['...', *args[1:]], settings)})")
        grad_fn = made.inner
    return {**_of_optimizer(described(optimizer)), "grad_fn": " around ".join(wrappers) or "not wrapped"}


def _of_optimizer(description: Mapping[str, Any]) -> dict[str, Any]:
    """Facts about an optimizer: its class, hyperparameters and wrappers."""
    return {f"the optimizer's {' '.join(map(str, path))}": value for path, value in trees.leaves(description)}


def _of_loaders(loaders: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Facts about the loaders whose batches the ranks divide, of these.

    With another seed or order on each rank, some samples would come to several ranks, and others to none.
    """
    divided = [loader for loader in loaders if loader.get("divide", True)]
    names = ["the loader"] if len(divided) == 1 else [f"loader {number}" for number in range(1, len(divided) + 1)]
    return {
        f"{name}'s {key}": value for name, loader in zip(names, divided, strict=True) for key, value in loader.items()
    }


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
