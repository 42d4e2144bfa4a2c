"""Out-of-memory errors: how to recognize them, and the next size to try."""

from __future__ import annotations

import gc
import warnings

import torch

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
    warnings.warn(f"out of memory on a batch of {count}: from now on in pieces of {smaller}", stacklevel=3)
    return smaller


def out_of_memory(error: BaseException) -> bool:
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _SIGNS)
