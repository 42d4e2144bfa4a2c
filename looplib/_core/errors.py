"""Errors of the user's functions and of torch: notes about the batch, and memory that runs out."""

from __future__ import annotations

import gc
from traceback import walk_tb
from typing import Any

import torch
from torch import Tensor

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


def note_batch(error: Exception, batch: Any) -> None:
    """Add a description of the batch to an error from the user's function or torch."""
    if not _raised_here(error) and not out_of_memory(error):
        note = f"The batch was {described_batch(batch)}."
        if note not in getattr(error, "__notes__", ()):
            error.add_note(note)


def _raised_here(error: Exception) -> bool:
    """True if looplib itself raised the error."""
    modules = [str(frame.f_globals.get("__name__")) for frame, _ in walk_tb(error.__traceback__)]
    return "".join(modules[-1:]).startswith("looplib.")


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
