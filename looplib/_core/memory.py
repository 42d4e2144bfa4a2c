"""Running out of memory: how it is told from other errors, and the next size to try."""

from __future__ import annotations

import gc
import warnings

import torch

_SIGNS = (
    "out of memory",
    "can't allocate memory",  # torch's allocator for the CPU
    "not enough memory",
    "CUDNN_STATUS_NOT_SUPPORTED",
    "CUBLAS_STATUS_ALLOC_FAILED",
)


def half(pieces: int, count: int) -> int:
    """The next size to try, when an attempt has failed."""
    # Only now, out of the handler, has the traceback let go of what the attempt had allocated.
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
