"""Logging: a state and its metrics go in and log files, tables, progress bars and plots come out."""

from typing import TYPE_CHECKING as _TYPE_CHECKING

from looplib._core.hints import in_room as _in_room
from looplib.log._clients import TrackerClient
from looplib.log._configuration import configuration
from looplib.log._flops import count_flops
from looplib.log._loggers import console, jsonl, read_columns, read_jsonl, record, tee
from looplib.log._peaks import peak_flops
from looplib.log._plots import live_plot, plot
from looplib.log._progress import progress
from looplib.log._step_timer import memory, slowest_rank, step_timer
from looplib.log._trackers import Tracker, tracker
from looplib.log._wrappers import every_rank, in_background, rename, safely, select, windowed

__all__ = [
    "Tracker",
    "TrackerClient",
    "configuration",
    "console",
    "count_flops",
    "every_rank",
    "in_background",
    "jsonl",
    "live_plot",
    "memory",
    "peak_flops",
    "plot",
    "progress",
    "read_columns",
    "read_jsonl",
    "record",
    "rename",
    "safely",
    "select",
    "slowest_rank",
    "step_timer",
    "tee",
    "tracker",
    "windowed",
]

if not _TYPE_CHECKING:  # type checkers would take any name for one that there is
    __getattr__ = _in_room(__name__)
