"""Errors and warnings of compiled steps, with the user's line that they refer to."""

from __future__ import annotations

import linecache
import sys
import traceback
import types
import warnings

from looplib._core.closures import LIBRARIES, is_library
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
        f"leave out ll.compile_step. torch says: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    )


def _is_untraceable(error: Exception) -> bool:
    return any(sign in f"{type(error).__name__}: {error}" for sign in _SIGNS)


def warn(message: str) -> None:
    """Warn at the user's line that called a step."""
    frame: types.FrameType | None = sys._getframe(1)
    level = 2
    while frame is not None and frame.f_code.co_filename.startswith(LIBRARIES):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level if frame is not None else level - 1)
