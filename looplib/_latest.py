"""The metrics of the last train step taken in this process.

A step leaves them here, so that a progress bar can show the loss without the loop handing it over.
"""

from __future__ import annotations

from looplib.metrics import Metrics

metrics: Metrics | None = None
compiling = 0.0  # seconds spent on compiling steps so far
