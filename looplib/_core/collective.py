"""What all processes of a run do as one, where what fails on one has failed on all.

A function whose effects are the run's and not a process's (a save, a choice among files) is done by the first rank,
which tells the others what came of it, or by each, and each then hears whether all could. Nobody waits for one who
has raised: the others raise the same error, with that one's rank in it.
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


_PATIENCE = timedelta(hours=1)  # of ranks that wait for the slowest disk


class Together:
    """The processes that do something as one; a single one has no group, and does it as if this were not here."""

    def __init__(self, group: Any = None) -> None:
        self.several = group is not None
        self.rank = distributed.get_rank(group) if self.several else 0
        self.first = self.rank == 0
        # torch's alone to keep: one that outlives destroy_process_group has threads that the interpreter's end meets.
        self._group = weakref.ref(group) if self.several else lambda: None

    @property
    def group(self) -> Any:
        """torch's group, None for a single process."""
        if (group := self._group()) is None and self.several:
            raise RuntimeError(
                "torch.distributed has been shut down, and a checkpoint was not finished: wait() first"
            )
        return group

    def on_first(self, work: Callable[[], T]) -> T:
        """What the first rank's work gave, on all; plain values, which are pickled on the way."""
        if not self.several:
            return work()
        found, failure, error = None, None, None
        if self.first:
            found, failure, error = _tried(0, work)
        told: list[Any] = [(found, failure)]
        distributed.broadcast_object_list(told, group=self.group, group_src=0)
        found, failure = told[0]
        raise_of({} if failure is None else {0: failure}, self.rank, error)
        return cast(T, found)

    def on_each(self, work: Callable[[], T]) -> T:
        """What this rank's own work gave, once it is known that all ranks' did."""
        if not self.several:
            return work()
        found, failure, error = _tried(self.rank, work)
        failures = {rank: one for rank, one in enumerate(self.gather(failure)) if one is not None}
        raise_of(failures, self.rank, error)
        return cast(T, found)

    def gather(self, value: T) -> list[T]:
        """Each rank's value, in the order of ranks, on each."""
        if not self.several:
            return [value]
        found: list[Any] = [None] * distributed.get_world_size(self.group)
        distributed.all_gather_object(found, value, self.group)
        return found

    def another(self) -> Together:
        """The same processes with a group of their own, for a thread of each; all make it together."""
        return Together(_new_group()) if self.several else self


_alone = Together()


_known: weakref.WeakKeyDictionary[Any, Together] = weakref.WeakKeyDictionary()  # by torch's group of all


def together() -> Together:
    """All processes of this moment: those that hold parts of a model too, not those alone that divide the data.

    Collective where there are several, at the first call.
    """
    if not _ranks.running() or distributed.get_world_size() == 1:
        return _alone
    world = distributed.group.WORLD
    if world not in _known:
        _known[world] = Together(_new_group())
    return _known[world]


_unfinished: set[Future[Any]] = set()


def finish_first(work: Future[Any]) -> None:
    """This is done together by threads, and torch's groups must not go before it is."""
    _unfinished.add(work)
    work.add_done_callback(_unfinished.discard)


def finish() -> None:
    """Wait for all that is done together by threads; whoever asks for its result hears of its errors."""
    wait(list(_unfinished))


def _new_group() -> Any:
    return distributed.new_group(timeout=_PATIENCE, backend="gloo")


def _tried(rank: int, work: Callable[[], T]) -> tuple[T | None, Exception | None, BaseException | None]:
    """What came of it, or what to tell the others and what really happened."""
    try:
        return work(), None, None
    except BaseException as error:
        return None, named(rank, error), error


def named(rank: int, error: BaseException) -> Exception:
    """The error with the rank in its message, of the same type if that can be made and sent."""
    if isinstance(error, OSError) and error.errno is not None:
        return OSError(error.errno, f"rank {rank}: {error.strerror}", error.filename)
    if isinstance(error, Exception):
        try:
            found = pickle.loads(pickle.dumps(type(error)(f"rank {rank}: {error}")))
            if type(found) is type(error):
                return found
        except Exception:  # a type that asks for more than a message
            pass
    return RuntimeError(f"rank {rank}: {type(error).__name__}: {error}")


def raise_of(failures: Mapping[int, Exception], rank: int, own: BaseException | None = None) -> None:
    """Raise what the first of the ranks that failed did, if any; an interrupt stays what it is where it struck."""
    if own is not None and not isinstance(own, Exception):
        raise own
    if failures:
        raise failures[min(failures)] from (own if rank == min(failures) else None)
