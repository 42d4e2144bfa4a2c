"""Collective work: all processes of a run act together, and an error on one is raised on all.

A function that acts for the whole run (a save, a choice among files) is executed by the first rank, which sends the
result to the others, or by each rank, after which each learns if all succeeded. No rank waits for one that has
raised: the others raise the same error, with that rank in the message.
"""

from __future__ import annotations

import pickle
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from datetime import timedelta
from typing import Any, TypeVar, cast

from torch import distributed

from looplib._core import ranks as _ranks

T = TypeVar("T")

_PATIENCE = timedelta(hours=1)  # for ranks that wait for the slowest disk


class Together:
    """Processes that act together. A single one has no group and acts as if this did not exist."""

    def __init__(self, group: Any = None) -> None:
        self.several = group is not None
        self.rank = distributed.get_rank(group) if self.several else 0
        self.first = self.rank == 0
        # Only torch keeps the group: if it outlived destroy_process_group, its threads would still run at exit.
        self._group = weakref.ref(group) if self.several else lambda: None

    @property
    def group(self) -> Any:
        """torch's group, or None for a single process."""
        if (group := self._group()) is None and self.several:
            raise RuntimeError(
                "torch.distributed has been shut down, and a checkpoint was not finished: wait() first"
            )
        return group

    def on_first(self, work: Callable[[], T]) -> T:
        """Result of the first rank's work, on all ranks. It must be plain values, since it is pickled."""
        if not self.several:
            return work()
        result, failure, error = None, None, None
        if self.first:
            result, failure, error = _tried(0, work)
        answers: list[Any] = [(result, failure)]
        distributed.broadcast_object_list(answers, group=self.group, group_src=0)
        result, failure = answers[0]
        raise_of({} if failure is None else {0: failure}, self.rank, error)
        return cast(T, result)

    def on_each(self, work: Callable[[], T]) -> T:
        """Result of this rank's work, after all ranks have succeeded."""
        if not self.several:
            return work()
        result, failure, error = _tried(self.rank, work)
        failures = {rank: one for rank, one in enumerate(self.gather(failure)) if one is not None}
        raise_of(failures, self.rank, error)
        return cast(T, result)

    def gather(self, value: T) -> list[T]:
        """Values of all ranks in order, on each rank."""
        if not self.several:
            return [value]
        gathered: list[Any] = [None] * distributed.get_world_size(self.group)
        distributed.all_gather_object(gathered, value, self.group)
        return gathered

    def another(self) -> Together:
        """The same processes with a second group, for one thread on each. All ranks must call this."""
        return Together(_new_group()) if self.several else self


_alone = Together()

_known: weakref.WeakKeyDictionary[Any, Together] = weakref.WeakKeyDictionary()  # by torch's default group


def together() -> Together:
    """All processes that currently exist, including those that hold parts of one model.

    The first call is collective if there are several.
    """
    if not _ranks.running() or distributed.get_world_size() == 1:
        return _alone
    world = distributed.group.WORLD
    if world not in _known:
        _known[world] = Together(_new_group())
    return _known[world]


_unfinished: set[Future[Any]] = set()


def finish_first(work: Future[Any]) -> None:
    """Register work that threads do together, and that must finish before torch's groups are destroyed."""
    _unfinished.add(work)
    work.add_done_callback(_unfinished.discard)


def finish() -> None:
    """Wait for all work that threads do together. Errors are raised by the call that asks for the result."""
    wait(list(_unfinished))


def _new_group() -> Any:
    return distributed.new_group(timeout=_PATIENCE, backend="gloo")


def _tried(rank: int, work: Callable[[], T]) -> tuple[T | None, Exception | None, BaseException | None]:
    """Result of the work, or the error to send to the others and the original one."""
    try:
        return work(), None, None
    except BaseException as error:
        return None, named(rank, error), error


def named(rank: int, error: BaseException) -> Exception:
    """The error with the rank in its message, of the same type if it can be created and sent."""
    if isinstance(error, OSError) and error.errno is not None:
        return OSError(error.errno, f"rank {rank}: {error.strerror}", error.filename)
    if isinstance(error, Exception):
        try:
            copy = pickle.loads(pickle.dumps(type(error)(f"rank {rank}: {error}")))
            if type(copy) is type(error):
                return copy
        except Exception:  # a type that needs more than a message
            pass
    return RuntimeError(f"rank {rank}: {type(error).__name__}: {error}")


def raise_of(failures: Mapping[int, Exception], rank: int, own_error: BaseException | None = None) -> None:
    """Raise the error of the first rank that failed, if any. An interrupt stays an interrupt on its own rank."""
    if own_error is not None and not isinstance(own_error, Exception):
        raise own_error
    if failures:
        raise failures[min(failures)] from (own_error if rank == min(failures) else None)
