"""The metrics of the last train step taken in this process.

A step leaves them here, so that a progress bar can show the loss without the loop handing it over.
"""

from __future__ import annotations

from typing import Any

metrics: Any = None


compiling = 0.0  # seconds spent on compiling steps so far
