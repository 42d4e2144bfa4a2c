"""Background saves: one at a time, in a thread. The next call raises the thread's error."""

from __future__ import annotations

import atexit
import concurrent.futures
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from looplib._core.collective import RankGroup, finish_first

_NICE = 10


unheard: dict[BaseException, str] = {}
"""Errors of background work that no later call has raised yet, and what failed."""


class BackgroundWriter:
    """Run one task at a time in a thread."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._ranks: tuple[RankGroup, RankGroup] | None = (
            None  # the ranks, and a second group of them for the threads that write
        )
        self._pending: Future[None] | None = None

    def start(self, work: Callable[[RankGroup], None], ranks: RankGroup) -> None:
        """Start `work(ranks)` in the thread, with a separate group of the ranks. All ranks call this."""
        if self._ranks is None or self._ranks[0] is not ranks:
            self._ranks = ranks, ranks.another()
        self._pool = self._pool or ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending = self._pool.submit(_run, work, self._ranks[1])
        finish_first(self._pending)

    def wait(self) -> None:
        """Wait for the current task and raise its error."""
        if self._pending is not None:
            concurrent.futures.wait([self._pending])  # an interrupt is raised here while the work continues
            done, self._pending = self._pending, None
            raised(done.exception())
            done.result()


def _run(work: Callable[[RankGroup], None], ranks: RankGroup) -> None:
    if sys.platform == "linux":  # if threads have their own priority, training steps take precedence
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
    try:
        work(ranks)
    except BaseException as error:
        unheard[error] = "save"
        raise


def raised(error: BaseException | None) -> None:
    """Note that a call has raised this error, or warned of it."""
    if error is not None:
        unheard.pop(error, None)


@atexit.register  # runs after the background threads have finished
def _report_unheard() -> None:
    for error, work in unheard.items():
        print(f"looplib: the last {work} failed: {error}", file=sys.stderr)
