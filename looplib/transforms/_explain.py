"""Errors of compiled steps, with the user's line that they refer to."""

from __future__ import annotations

import linecache
import traceback

from looplib._core.closures import is_library
from looplib._core.tracing import UntraceableError

_SIGNS = ("DataDependent", "DynamicOutputShape", "Unsupported", "value out of a tracing tensor", "numpy")


def explained(error: Exception) -> Exception:
    """An UntraceableError with the user's line if tracing failed; otherwise the error itself."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not is_library(frame.filename)]
    if not frames or not _is_untraceable(error):
        return error
    frame = frames[-1]
    line = linecache.getline(frame.filename, frame.lineno or 0).strip()
    return UntraceableError(
        f"{frame.filename}:{frame.lineno}, in {frame.name}: `{line}` cannot be part of a compiled step, which is a "
        "graph of tensor operations: it asks for the value of a tensor (by if, .item(), bool(), int(), float(), a "
        "shape that depends on values, or NumPy). Write it with torch.where or masks, take it out of the step, or "
        f"leave out ll.compile_step. torch says: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
    )


def _is_untraceable(error: Exception) -> bool:
    return any(sign in f"{type(error).__name__}: {error}" for sign in _SIGNS)
