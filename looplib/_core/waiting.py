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
import functools
import json
import math
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import FrameType
from typing import Any, NamedTuple, NoReturn

import torch
from torch import distributed

from looplib._core import torch_private


class _Watch:
    """The watch of this process.

    Attributes:
        seconds: time after which a call that waits is reported.
        step: time after which it publishes where it waits, and then looks again.
        requested: what a step has requested and not waited for yet, and its group.
        broken: True after the step of the last request has failed for a broken connection.
        thread: the thread that looks at it.
    """

    def __init__(self) -> None:
        self.broken = False
        self.requested: tuple[Any, Any] | None = None
        self.thread: threading.Thread | None = None
        self.report_after(30.0)

    def report_after(self, seconds: float) -> None:
        """Report a call that waits for this many seconds; infinity for never."""
        self.seconds = seconds
        self.step = timedelta(seconds=min(seconds / 10, 3600))


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
_NAMES = {"donated_step": "train_step", "pure_step": "train_step", "fires": "__call__"}


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
    return type(owner).__name__ if name == "__call__" else f"{type(owner).__name__}.{name}"


def wait(work: Any, group: Any, limit: float = math.inf) -> None:
    """Wait for a collective call of this group on CPU tensors, and report it if it takes long.

    `limit` is the number of seconds after which to raise, if it is to be less than the group's own time-out.
    """
    try:
        work.wait(watch.step)
    except RuntimeError:
        late = _Late(group, early=work.is_completed())
        late.until(lambda: _ended(work, late), limit)
        late.end()


def _ended(work: Any, late: _Late) -> bool:
    """True if the work is done after a moment. Raise if it has failed."""
    with contextlib.suppress(RuntimeError):
        work.wait(watch.step)
    if not work.is_completed():
        return False
    try:
        work.wait()
    except RuntimeError as error:
        late.fail(error)
    return True


def wait_for(done: Callable[[], bool], group: Any, limit: float) -> None:
    """Ask until something is done that other ranks of this group do, and report if it takes long.

    Args:
        done: a function that waits for a moment at most, and returns True if it is done.
        group: the ranks.
        limit: seconds after which to raise.
    """
    began = time.monotonic()
    while not done():
        if time.monotonic() - began > watch.step.total_seconds():
            late = _Late(group)
            late.until(done, limit)
            late.end()
            return


class _Late:
    """A call of this rank that has waited for a while, or that has failed early."""

    def __init__(self, group: Any, where: Call | None = None, early: bool = False) -> None:
        self.early = early
        self.group, self.began, self.call = group, time.monotonic() - watch.step.total_seconds(), where or call()
        self.rank = distributed.get_rank()
        self.about = [str(self.call), group.group_name, torch_private.calls_of(group)]
        self.reported = where is None and threading.current_thread() is not threading.main_thread()

    def until(self, done: Callable[[], bool], limit: float) -> None:
        """Wait, publish where, and report once."""
        if not self.reported:
            self._publish(json.dumps(self.about))
        while not done():
            waited = time.monotonic() - self.began
            if waited > limit:
                raise RuntimeError(f"{self._text()} The time-out of the process group, {limit:g} s, is over")
            if waited >= watch.seconds and not self.reported:
                self.reported = True
                file = self.call.file or __file__
                warnings.warn_explicit(self._text(), RuntimeWarning, file, self.call.line or 1)

    def end(self) -> None:
        """Publish that this rank waits no longer. Not after a failure, since other ranks then ask where it waited."""
        self._publish("")

    def fail(self, error: Exception) -> NoReturn:
        """Raise torch's error with the words of the report.

        A time-out on one rank closes the connections of all, so what torch says differs between those that wait. If
        the call has failed before it was late, nobody knows yet where the other ranks are.
        """
        broken = self.early and not any(word in str(error) for word in _TIMED_OUT)
        text = f"rank {self.rank}, in {self.call}:" if broken else self._text()
        raise RuntimeError(f"{text} torch says: {error}") from error

    def _publish(self, text: str) -> None:
        with contextlib.suppress(RuntimeError):  # the rank that has the store may have ended
            torch_private.default_store().set(_key(self.rank), text)

    def _text(self) -> str:
        waited = f"rank {self.rank} has waited {time.monotonic() - self.began:.1f} s in {self.call}."
        missing = self._missing()
        if not missing:
            return f"{waited} All ranks have come to this call."
        return f"{waited} {' '.join(missing)} All ranks must make this call: {_ADVICE}."

    def _missing(self) -> list[str]:
        """A sentence for each rank that has not come."""
        found, absent = [], []
        for rank in distributed.get_process_group_ranks(self.group):
            if rank == self.rank:
                continue
            other = _published(rank)
            if other is None:
                absent.append(rank)
            elif other[1:] != self.about[1:]:
                found.append(f"Rank {rank} has not come, and waits in {other[0]}{self._count(other)}.")
        if absent:
            found.insert(0, f"{_named(absent)} not come, and {_VERB[len(absent) > 1]} in no call that waits.")
        return found

    def _count(self, other: Sequence[Any]) -> str:
        """The numbers of calls, where two ranks wait in the same function but not in the same call of it."""
        same = other[0] == self.about[0] and other[1] == self.about[1]
        return f" (call {other[2]} of the group, and this is call {self.about[2]})" if same else ""


_ADVICE = (
    "take it out of `if ll.distributed.is_rank_zero():` and of loops that differ between ranks; a function that one "
    "rank runs alone goes into ll.distributed.rank_zero_only"
)
_VERB = {False: "is", True: "are"}


def _named(ranks: Sequence[int]) -> str:
    some = ", ".join(map(str, ranks[:10])) + (f" and {len(ranks) - 10} more" if len(ranks) > 10 else "")
    return f"Ranks {some} have" if len(ranks) > 1 else f"Rank {some} has"


def _key(rank: int) -> str:
    return f"looplib/waits/{rank}"


def _published(rank: int) -> list[Any] | None:
    """Call in which a rank waits, or None if it does not, or if it cannot be asked."""
    with contextlib.suppress(RuntimeError):
        store = torch_private.default_store()
        if store.check([_key(rank)]) and (text := store.get(_key(rank))):
            published: list[Any] = json.loads(text)
            return published
    return None


def request(work: Any, group: Any) -> None:
    """Watch a request that a step makes before its forward pass, and waits for later."""
    watch.requested, watch.broken = (work, group), False
    if watch.thread is None:
        watch.thread = threading.Thread(target=_look_at_requests, name="looplib-watch", daemon=True)
        watch.thread.start()


_TIMED_OUT = ("imed out", "imeout")  # words of torch's errors
_OF_CONNECTIONS = (*_TIMED_OUT, "onnection", "peer", "gloo", "NCCL", "XCCL")


def explained(error: Exception) -> Exception:
    """An error in a step, with the words of the report if it came while a rank was missing."""
    if watch.requested is None or not isinstance(error, RuntimeError):
        return error
    watch.broken = any(word in str(error) for word in _OF_CONNECTIONS)
    (work, group), where, watch.requested = watch.requested, call(), None
    if not watch.broken:
        return error
    try:
        work.wait(timedelta(milliseconds=1))
    except RuntimeError:
        try:
            _Late(group, where).fail(error)
        except RuntimeError as named:
            return named
    return error


def _look_at_requests() -> None:
    seen = 0  # by its id, since work that is kept would keep its group
    while True:
        time.sleep(watch.step.total_seconds())
        now = watch.requested
        if now is not None and id(now) == seen and not now[0].is_completed():
            frame = sys._current_frames().get(threading.main_thread().ident or 0)
            late = _Late(now[1], call(frame))
            del frame
            with contextlib.suppress(Exception):  # a warning that is an error by the user's filter
                late.until(functools.partial(_no_longer, now), math.inf)
                if not _failed(now[0]):
                    late.end()
        seen = id(now)
        del now


def _no_longer(request: tuple[Any, Any]) -> bool:
    time.sleep(watch.step.total_seconds())
    return bool(request[0].is_completed()) or watch.requested is not request


def _failed(work: Any) -> bool:
    """True if the request itself has failed, or its step. A step that gave up for a reason of its own has not."""
    if watch.broken or not work.is_completed():
        return watch.broken
    try:
        work.wait(timedelta(milliseconds=1))
    except RuntimeError:
        return True
    return False
