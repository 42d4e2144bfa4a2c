"""Waits for other ranks: say in which call a rank waits.

All ranks make a collective call, so a rank that does not come keeps the others waiting. Each rank that has waited for
`watch.seconds` warns: in which looplib function it is, at which line of the user's file. The ranks that say nothing, or
name another call, are those that are missing. When torch's time-out ends the call, its error says the same.

Calls of DDP and FSDP2 are not watched one by one. A step in which they wait for a rank has also requested looplib's count
of the samples, and that is watched until it is read. Calls of other threads, such as background saves, are not reported.
"""

from __future__ import annotations

import math
import os
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import distributed


@dataclass
class _Watch:
    """The watch of this process.

    Attributes:
        seconds: time after which a call that waits is reported; infinity for never.
        began: time at which the main thread made the last call; infinity if it waits for none.
        work: that call, if torch returned it.
        thread: the thread that looks at it now and then.
    """

    seconds: float = 30.0
    began: float = math.inf
    work: Any = None
    thread: threading.Thread | None = None

    def begin(self, work: Any = None) -> None:
        if threading.current_thread() is threading.main_thread():
            self.began, self.work = time.monotonic(), work
            if self.thread is None:
                self.thread = threading.Thread(target=_look, name="looplib-watch", daemon=True)
                self.thread.start()


watch = _Watch()


def _look() -> None:
    while True:
        time.sleep(min(watch.seconds / 10, 3600))
        is_late = time.monotonic() - watch.began > watch.seconds
        if is_late and not (watch.work is not None and watch.work.is_completed()):
            watch.began = math.inf
            here = call(sys._current_frames()[threading.main_thread().ident or 0])
            try:
                warnings.warn_explicit(_report(here), RuntimeWarning, here.file or __file__, here.line)
            except RuntimeWarning as error:  # by the user's filter, which this thread cannot raise
                print(f"RuntimeWarning: {error}", file=sys.stderr, flush=True)


class Call(NamedTuple):
    """A looplib function, and the line of the user's file that called it."""

    function: str
    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.function}, called at {self.file}:{self.line}" if self.file else self.function


_LOOPLIB = os.path.dirname(os.path.dirname(__file__)) + os.sep
_BETWEEN = tuple(os.path.dirname(path) + os.sep for path in (torch.__file__, os.__file__)) + ("<",)


def call(frame: FrameType | None = None) -> Call:
    """The call of looplib in which this thread is, or the one whose innermost frame is given."""
    frame = frame or sys._getframe(1)
    function: FrameType | None = None
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(_LOOPLIB):
            function = frame
        elif function is not None and not name.startswith(_BETWEEN):
            return Call(_name(function), name, frame.f_lineno)
        frame = frame.f_back
    return Call("a call" if function is None else _name(function), "", 1)


def _name(frame: FrameType) -> str:
    """Name of a function as the user knows it."""
    name, owner = frame.f_code.co_name, frame.f_locals.get("self")
    if owner is None:
        return name
    cls = type(owner).__name__
    if name in ("__call__", "fires"):
        return "a predicate" if cls.startswith("_") else cls  # such as several with `|` between them
    return f"{cls}.{name}"


_ADVICE = (
    "All ranks must make this call, and those that say nothing of it have not come: take it out of `if "
    "ll.distributed.is_rank_zero():` and of loops that differ between ranks; a function that one rank runs alone goes "
    "into ll.distributed.rank_zero_only. If a rank has ended, its own output says why."
)


def _report(here: Call) -> str:
    return f"rank {distributed.get_rank()} waits for other ranks in {here}. {_ADVICE}"


@contextmanager
def reported(work: Any = None) -> Iterator[None]:
    """Watch a call that is waited for in the block, and say the same if it fails."""
    watch.begin(work)
    try:
        yield
    except RuntimeError as error:
        raise RuntimeError(f"{_report(call())} torch says: {error}") from error
    finally:
        watch.began = math.inf


def wait(work: Any, limit: float = math.inf) -> None:
    """Wait for a call, and raise after `limit` seconds, if that is less than the time-out of its group."""
    with reported(work):
        work.wait(*[timedelta(seconds=limit)] if limit < math.inf else [])
