"""Errors of the user's functions and of torch: short tracebacks, notes about the batch, and memory that runs out."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterable
from pathlib import Path
from traceback import walk_tb
from typing import Any

import torch
from torch import Tensor, nn

from looplib._core.checks import named, warn

_SIGNS = (
    "out of memory",
    "can't allocate memory",  # torch's CPU allocator
    "not enough memory",
    "CUDNN_STATUS_NOT_SUPPORTED",
    "CUBLAS_STATUS_ALLOC_FAILED",
)


def half(pieces: int, count: int) -> int:
    """The next size to try after a failed attempt."""
    # Only here, outside the handler, has the traceback released the attempt's memory.
    gc.collect()
    if torch.accelerator.is_available():
        torch.accelerator.memory.empty_cache()
    smaller = -(-pieces // 2)
    warn(f"out of memory on a batch of {count}: from now on in microbatches of {smaller}")
    return smaller


def out_of_memory(error: BaseException) -> bool:
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _SIGNS)


# looplib, and how torch calls a module's forward
_FOLDED = f"{Path(__file__).parents[1]}{os.sep}", nn.modules.module.__file__


def fold(error: BaseException) -> None:
    """Take the frames between the user's code and where an error was raised out of its traceback.

    They stay if LOOPLIB_FULL_TRACEBACKS is set in the environment.
    """
    if "LOOPLIB_FULL_TRACEBACKS" in os.environ:
        return
    entries, entry, folded = [], error.__traceback__, None
    while entry is not None:
        entries.append(entry)
        entry = entry.tb_next
    for entry in reversed(entries):
        if folded is None or not entry.tb_frame.f_code.co_filename.startswith(_FOLDED):
            entry.tb_next, folded = folded, entry
    error.__traceback__ = folded


def note_batch(error: Exception, batch: Any, layers: Iterable[tuple[str, nn.Module]]) -> None:
    """Add a description of the batch to an error from the user's function or torch, and of the layer that raised it."""
    frames = [frame for frame, _ in walk_tb(error.__traceback__)]
    if str(frames[-1].f_globals.get("__name__")).startswith("looplib.") or out_of_memory(error):
        return
    note = f"The batch was {described_batch(batch)}."
    names = {id(layer): name for name, layer in layers}
    running = [frame.f_locals["self"] for frame in frames if id(frame.f_locals.get("self")) in names]
    if running:
        layer = running[-1]
        name = names[id(layer)] or "the model itself"
        note += f" The layer was {name}: {type(layer).__name__}({layer.extra_repr()})."
    if note not in getattr(error, "__notes__", ()):
        error.add_note(note)
    if "unexpected keyword argument" in str(error):
        error.add_note("To pass only the columns that forward takes: model(**ll.losses.model_inputs(model, batch)).")


def described_batch(batch: Any) -> str:
    """Description of a batch in words.

    >>> import torch
    >>> described_batch((torch.zeros(6, 4), {"label": torch.zeros(6, dtype=torch.int64)}))
    'a tuple (float32 (6, 4), a dict {label: int64 (6,)})'
    """
    if isinstance(batch, Tensor):
        return f"{str(batch.dtype).removeprefix('torch.')} {tuple(batch.shape)}"
    if isinstance(batch, dict):
        members = [f"{key}: {described_batch(value)}" for key, value in batch.items()]
        return f"a dict {{{', '.join(members[:20])}}}"
    if isinstance(batch, (tuple, list)):
        return f"{named(batch)} ({', '.join(map(described_batch, batch[:20]))})"
    return named(batch)
