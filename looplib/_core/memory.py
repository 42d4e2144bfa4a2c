"""Out-of-memory errors: how to recognize them, and the next size to try."""

from __future__ import annotations

import gc

import torch

from looplib._core.notices import warn

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
