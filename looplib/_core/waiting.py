"""The watch over collective calls: name the call that waits, and the ranks that have not come to it.

All ranks make a collective call, so a rank that does not come keeps the others waiting. A call that takes long publishes
where it was made, under a key of its rank in torch's store. After `seconds` it reads the keys of the other ranks and
warns: which looplib function, which line of the user's file, which ranks are missing and where those wait. When torch's
time-out ends the call, its error says the same.

A call that is not late costs nothing more than before: torch's own wait takes a time limit, and the stack is walked, and
the store asked, only when that limit has passed. Calls of DDP and FSDP2 are not watched one by one. A step in which they
wait for a rank has also requested looplib's count of the samples, so a thread looks now and then if that has arrived.
Background saves are not reported.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import distributed

from looplib._core import torch_private
from looplib._core.checks import few


@dataclass
class Request:
    """A collective call that a step has requested and not waited for yet; `broken` if the step has failed for it."""

    work: Any
    group: Any
    began: float
    broken: bool = False


@dataclass
class _Watch:
    """The watch of this process.

    Attributes:
        seconds: time after which a call that waits is reported; infinity for never.
        requested: what the current step has requested.
        thread: the thread that looks at it.
    """

    seconds: float = 30.0
    requested: Request | None = None
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
_NAMES = {"fires": "__call__"}


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
    name = _NAMES.get(frame.f_code.co_name, frame.f_code.co_name)
    owner = frame.f_locals.get("self")
    if owner is None:
        return name
    cls = type(owner).__name__
    if name == "__call__":
        return "a predicate" if cls.startswith("_") else cls  # such as several with `|` between them
    return f"{cls}.{name}"


def wait(work: Any, group: Any, limit: float = math.inf) -> None:
    """Wait for a collective call of this group on CPU tensors, and report it if it takes long.

    `limit` is the number of seconds after which to raise, if it is to be less than the group's own time-out.
    """

    def done() -> bool:
        try:
            work.wait(timedelta(seconds=watch.pause))
        except RuntimeError:
            if not work.is_completed():
                return False
            work.wait()  # raises if the call has failed
        return True

    wait_for(done, group, limit)


def wait_for(done: Callable[[], bool], group: Any, limit: float) -> None:
    """Ask until something is done that other ranks of this group do, and report if it takes long.

    Args:
        done: a function that waits for a moment at most, returns True if it is done, and raises if it has failed.
        group: the ranks.
        limit: seconds after which to raise.
    """
    late, began = None, time.monotonic()
    try:
        if not done():
            late = _Late(group, began, call())
            late.until(done, limit, threading.current_thread() is threading.main_thread())
    except RuntimeError as error:
        raise (late or _Late(group, began, call())).explained(error) from error


class _Late:
    """A call of this rank that waits for others, or has failed."""

    def __init__(self, group: Any, began: float, where: Call) -> None:
        self.group, self.began, self.call = group, began, where
        self.rank = distributed.get_rank()
        self.about = [str(where), group.group_name, torch_private.calls_of(group)]

    def waited(self) -> float:
        return time.monotonic() - self.began

    def until(self, done: Callable[[], bool], limit: float = math.inf, reports: bool = True) -> None:
        """Wait, publish where, and report once.

        What is published stays after a failure, since other ranks then ask where this one waited.
        """
        published = reported = not reports
        while not done():
            if self.waited() > limit:
                raise RuntimeError(f"Timed out after {limit:g} s")
            if not published and self.waited() >= watch.pause:
                published = True
                self.publish(json.dumps(self.about))
            if not reported and self.waited() >= watch.seconds:
                reported = True
                text = self.text(_ADVICE)
                warnings.warn_explicit(text, RuntimeWarning, self.call.file or __file__, self.call.line or 1)
        if published and reports:
            self.publish("")

    def publish(self, text: str) -> None:
        with contextlib.suppress(RuntimeError):  # the rank that has the store may have ended
            torch_private.default_store().set(_key(self.rank), text)

    def explained(self, error: Exception) -> RuntimeError:
        """torch's error with the words of the report.

        A time-out on one rank closes the connections of all, so what torch says differs between those that wait. A
        rank that ends closes them too, and then no call was left out. If the call has failed before it was late,
        nobody knows yet where the other ranks are.
        """
        if any(word in str(error) for word in _TIMED_OUT):
            text = self.text(_ADVICE)
        elif self.waited() > watch.pause:
            text = self.text(_ENDED)
        else:
            text = f"rank {self.rank}, in {self.call}. {_ENDED}"
        return RuntimeError(f"{text} torch says: {error}")

    def text(self, advice: str) -> str:
        missing = " ".join(self.missing())
        return (
            f"rank {self.rank} has waited {self.waited():.1f} s in {self.call}. "
            f"{f'{missing} {advice}' if missing else 'All ranks have come to this call.'}"
        )

    def missing(self) -> list[str]:
        """Sentences about the ranks that have not come."""
        absent, elsewhere = [], []
        for rank in distributed.get_process_group_ranks(self.group):
            other = _published(rank)
            if rank == self.rank or (other and other[1:] == self.about[1:]):
                continue
            if other is None:
                absent.append(rank)
                continue
            count = f" (call {other[2]} of the group, and this is call {self.about[2]})"
            same = other[:2] == self.about[:2]  # the same line, and not the same call of it
            elsewhere.append(f"Rank {rank} has not come, and waits in {other[0]}{count if same else ''}.")
        if len(absent) > 1:
            return [f"Ranks {few(absent)} have not come, and are in no call that waits.", *elsewhere]
        return [f"Rank {rank} has not come, and is in no call that waits." for rank in absent] + elsewhere


_TIMED_OUT = ("imed out", "imeout")  # words of torch's errors
_OF_CONNECTIONS = (*_TIMED_OUT, "onnection", "peer", "gloo", "NCCL", "XCCL")
_ADVICE = (
    "All ranks must make this call: take it out of `if ll.distributed.is_rank_zero():` and of loops that differ between "
    "ranks; a function that one rank runs alone goes into ll.distributed.rank_zero_only."
)
_ENDED = "If a rank has ended, its own output says why."


def _key(rank: int) -> str:
    return f"looplib/waits/{rank}"


def _published(rank: int) -> list[Any] | None:
    """Call in which a rank waits, or None if it does not, or if it cannot be asked."""
    with contextlib.suppress(RuntimeError):
        store = torch_private.default_store()
        if store.check([_key(rank)]) and (text := store.get(_key(rank))):
            return json.loads(text)  # type: ignore[no-any-return]
    return None


def request(work: Any, group: Any) -> None:
    """Watch a request that a step makes before its forward pass, and waits for later."""
    watch.requested = Request(work, group, time.monotonic())
    if watch.thread is None:
        watch.thread = threading.Thread(target=_look_at_requests, name="looplib-watch", daemon=True)
        watch.thread.start()


def better_error(error: Exception) -> Exception:
    """An error in a step, with the words of the report if it came while a rank was missing."""
    request = watch.requested
    if request is None:
        return error
    request.broken = isinstance(error, RuntimeError) and any(word in str(error) for word in _OF_CONNECTIONS)
    watch.requested = None
    if not request.broken:
        return error
    with contextlib.suppress(RuntimeError):
        request.work.wait(timedelta(milliseconds=1))
        return error  # all ranks have come
    return _Late(request.group, request.began, call()).explained(error)


def _look_at_requests() -> None:
    while True:
        time.sleep(watch.pause)
        with contextlib.suppress(Exception):  # a failed call, and a warning that is an error by the user's filter
            _look_at(watch.requested)


def _look_at(request: Request | None) -> None:
    """Report a request for which the main thread waits."""
    if request is None or request.work.is_completed() or time.monotonic() - request.began < watch.pause:
        return

    def done() -> bool:
        time.sleep(watch.pause)
        if request.broken or request.work.is_completed():
            request.work.wait(timedelta(milliseconds=1))  # raises if the call has failed
            return True
        return watch.requested is not request

    frame = sys._current_frames()[threading.main_thread().ident or 0]
    where = call(frame)
    del frame  # and with it what the step holds
    _Late(request.group, request.began, where).until(done)
