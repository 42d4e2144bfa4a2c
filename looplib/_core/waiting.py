"""The watch over collective calls: name the call that waits, and the ranks that have not come to it.

All ranks make a collective call, so a rank that does not come keeps the others waiting. A thread looks now and then at
the call for which the main thread waits. If it takes long, the thread publishes where it was made, under a key of this
rank in torch's store. After `seconds` it reads the keys of the other ranks and warns: which looplib function, which line
of the user's file, which ranks are missing and where those wait. When torch's time-out ends the call, its error says the
same.

Calls of DDP and FSDP2 are not watched one by one. A step in which they wait for a rank has also requested looplib's count
of the samples, and that is watched until it is read. Calls of other threads, such as background saves, are not reported.
"""

from __future__ import annotations

import json
import math
import os
import sys
import threading
import time
import warnings
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import distributed

from looplib._core import torch_private
from looplib._core.checks import few


@dataclass
class _Watch:
    """The watch of this process.

    Attributes:
        seconds: time after which a call that waits is reported; infinity for never.
        current: the call for which the main thread waits, or has requested and is going to wait.
        thread: the thread that looks at it.
    """

    seconds: float = 30.0
    current: Wait | None = None
    thread: threading.Thread | None = None

    @property
    def pause(self) -> float:
        """Time after which a call that waits is published, and after which it is looked at again."""
        return min(self.seconds / 10, 3600)


watch = _Watch()


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
    """The call in which this thread is, or the one whose innermost frame is given."""
    frame = frame or sys._getframe(1)
    function: FrameType | None = None
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(_LOOPLIB):
            function = frame
        elif function is not None and not name.startswith(_BETWEEN):
            break
        frame = frame.f_back
    name = "a call" if function is None else _name(function)
    return Call(name, "" if frame is None else frame.f_code.co_filename, frame.f_lineno if frame else 0)


def _name(frame: FrameType) -> str:
    """Name of a function as the user knows it."""
    name, owner = frame.f_code.co_name, frame.f_locals.get("self")
    if owner is None:
        return name
    cls = type(owner).__name__
    if name in ("__call__", "fires"):
        return "a predicate" if cls.startswith("_") else cls  # such as several with `|` between them
    return f"{cls}.{name}"


class Wait:
    """A collective call that waits for the other ranks of a group: the body of a `with`, which raises if it fails."""

    def __init__(self, group: Any, work: Any = None) -> None:
        self.group, self.work = group, work
        self.began, self.failed = time.monotonic(), False
        self.call: Call | None = None  # once it takes long

    def request(self) -> Wait:
        """Watch it from now on."""
        if threading.current_thread() is threading.main_thread():
            watch.current = self
            if watch.thread is None:
                watch.thread = threading.Thread(target=_look, name="looplib-watch", daemon=True)
                watch.thread.start()
        return self

    __enter__ = request

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        self.failed = isinstance(error, RuntimeError)
        if watch.current is self:
            watch.current = None
        if isinstance(error, RuntimeError):
            raise self.explained(error) from error

    def is_open(self) -> bool:
        return watch.current is self and not (self.work is not None and self.work.is_completed())

    def waited(self) -> float:
        return time.monotonic() - self.began

    def explained(self, error: Exception) -> RuntimeError:
        """torch's error with the words of the report.

        A time-out on one rank closes the connections of all, and so does a rank that ends, so what torch says differs
        between the ranks that wait.
        """
        self.call = self.call or call()
        return RuntimeError(f"{self.report()} torch says: {error}")

    def report(self) -> str:
        text = f"rank {distributed.get_rank()} has waited {self.waited():.1f} s in {self.call}. "
        if self.waited() > watch.pause:  # before, nobody knows yet where the other ranks are
            text += few(self.missing() or ["All ranks have come to this call."], between=" ") + " "
        return text + _ADVICE

    def missing(self) -> list[str]:
        """Sentences about the ranks that have not come."""
        missing = []
        for rank in distributed.get_process_group_ranks(self.group):
            where, group = _published(rank)
            if rank != distributed.get_rank() and group != self.group.group_name:
                there = f"waits in {where}" if where else "is in no call that waits"
                missing.append(f"Rank {rank} has not come, and {there}.")
        return missing


# Words of torch's errors.
_OF_CONNECTIONS = ("imed out", "imeout", "onnection", "peer", "gloo", "NCCL", "XCCL")
_ADVICE = (
    "All ranks must make this call: take it out of `if ll.distributed.is_rank_zero():` and of loops that differ between "
    "ranks; a function that one rank runs alone goes into ll.distributed.rank_zero_only. If a rank has ended, its own "
    "output says why."
)


def wait(work: Any, group: Any, limit: float = math.inf) -> None:
    """Wait for a collective call of this group on CPU tensors.

    `limit` is the number of seconds after which to raise, if it is to be less than the group's own time-out.
    """
    with Wait(group, work):
        work.wait(*[timedelta(seconds=limit)] if limit < math.inf else [])


def better_error(error: Exception) -> Exception:
    """An error in a step, with the words of the report if it came while a rank was missing."""
    request = watch.current
    if request is not None:
        request.failed = isinstance(error, RuntimeError) and any(word in str(error) for word in _OF_CONNECTIONS)
    watch.current = None
    if request is None or not request.failed:
        return error
    with suppress(RuntimeError):
        request.work.wait(timedelta(milliseconds=1))
        return error  # all ranks have come
    return request.explained(error)


def _key(rank: int) -> str:
    return f"looplib/waits/{rank}"


def _publish(*where: str) -> None:
    with suppress(RuntimeError):  # the rank that has the store may have ended
        torch_private.default_store().set(_key(distributed.get_rank()), json.dumps(where))


def _published(rank: int) -> tuple[str, str]:
    """Call in which a rank waits and the name of its group; empty if it does not, or if it cannot be asked."""
    with suppress(RuntimeError):
        store = torch_private.default_store()
        if store.check([_key(rank)]) and (where := json.loads(store.get(_key(rank)))):
            return where[0], where[1]
    return "", ""


def _look() -> None:
    """Publish and report the calls that take long."""
    while True:
        time.sleep(watch.pause)
        current = watch.current
        if current is not None and current.waited() >= watch.pause and current.is_open():
            with suppress(Exception):  # torch.distributed may be shut down at any moment
                _attend(current)


def _attend(late: Wait) -> None:
    late.call = call(sys._current_frames()[threading.main_thread().ident or 0])
    _publish(str(late.call), late.group.group_name)
    reported = False
    while late.is_open():
        if not reported and late.waited() >= watch.seconds:
            reported = True
            text = late.report()
            try:
                warnings.warn_explicit(text, RuntimeWarning, late.call.file or __file__, late.call.line or 1)
            except RuntimeWarning:  # an error by the user's filter, which this thread cannot raise
                print(f"RuntimeWarning: {text}", file=sys.stderr, flush=True)
        time.sleep(watch.pause)
    # What is published stays after a failure, since other ranks then ask where this one waited.
    if not late.failed:
        _publish()
