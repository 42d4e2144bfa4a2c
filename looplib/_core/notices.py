"""Warnings at the user's line."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import torch

# torch, looplib, and the methods that Python makes for a dataclass
LIBRARIES = str(Path(torch.__file__).parent), str(Path(__file__).parents[1]), "<string>"


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the line that called looplib, directly or through torch."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_code.co_filename.startswith(LIBRARIES):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)
