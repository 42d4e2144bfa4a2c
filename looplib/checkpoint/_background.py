"""Background saves: one at a time, in a thread. The next call raises the thread's error."""

from __future__ import annotations

import atexit
import concurrent.futures
import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from looplib._core.collective import RankGroup, finish_first

_unheard: set[Future[None]] = set()  # saves whose errors no later call has raised yet


class BackgroundWriter:
    """Run one task at a time in a thread."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        # The ranks, and a second group of them for the threads that write.
        self._ranks: tuple[RankGroup, RankGroup] | None = None
        self._pending: Future[None] | None = None

    def start(self, work: Callable[[RankGroup], None], ranks: RankGroup) -> None:
        """Start `work(ranks)` in the thread, with a separate group of the ranks. All ranks call this."""
        if self._ranks is None or self._ranks[0] is not ranks:
            self._ranks = ranks, ranks.another()
        self._pending = self._pool.submit(work, self._ranks[1])
        _unheard.add(self._pending)
        finish_first(self._pending)

    def wait(self) -> None:
        """Wait for the current task and raise its error."""
        if self._pending is not None:
            concurrent.futures.wait([self._pending])  # an interrupt is raised here while the work continues
            done, self._pending = self._pending, None
            _unheard.discard(done)
            done.result()


@atexit.register  # runs after the background threads have finished
def _report_unheard() -> None:
    for save in _unheard:
        if error := save.exception():
            print(f"looplib: the last save failed: {error}", file=sys.stderr)
