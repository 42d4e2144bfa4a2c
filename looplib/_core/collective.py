"""Collective work: all processes of a run act together, and an error on one is raised on all.

A function that acts for the whole run (a save, a choice among files) is executed by the first rank, which sends the
result to the others, or by each rank, after which each learns if all succeeded. No rank waits for one that has
raised: the others raise the same error, with that rank in the message.
"""

from __future__ import annotations

import hashlib
import pickle
import weakref
import zlib
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
from torch import distributed

from looplib._core import ranks as _ranks
from looplib._core import torch_private
from looplib._core.checks import few
from looplib._core.trees import paired

T = TypeVar("T")

_PATIENCE = timedelta(hours=1)  # for ranks that wait for the slowest disk


class RankGroup:
    """Processes that act together. A single one has no group and acts as if this did not exist."""

    def __init__(self, group: Any = None) -> None:
        self.is_distributed = group is not None
        self.rank = distributed.get_rank(group) if self.is_distributed else 0
        self.first = self.rank == 0
        # Only torch keeps the group: if it outlived destroy_process_group, its threads would still run at exit.
        self._group = weakref.ref(group) if self.is_distributed else lambda: None

    @property
    def group(self) -> Any:
        """torch's group, or None for a single process."""
        if (group := self._group()) is None and self.is_distributed:
            raise RuntimeError(
                "torch.distributed has been shut down, and a checkpoint was not finished: wait() first"
            )
        return group

    def barrier(self, function: str, flag: bool = False) -> bool:
        """Wait until all ranks have come here from the same function. Raise on all of them if they are in different ones.

        The functions that a user calls on all ranks begin with it, so a rank that does not call them is missed here, by
        name and within the time-out of the process group, and no later message is taken for one of another call. This
        includes those of a step, which has no barrier: its messages go through another group.

        Args:
            function: the name that the ranks compare. Lines of the user's files are looked up for the message alone.
            flag: this rank's part of the result.

        Returns:
            True if the flag is set on at least one rank.
        """
        if not self.is_distributed:
            return flag
        limit = torch_private.timeout_of(distributed.group.WORLD)
        code = torch.tensor([zlib.crc32(function.encode()), flag], device="cpu")
        gathered = code.new_empty(distributed.get_world_size(self.group), 2)
        work = distributed.all_gather(list(gathered), code, self.group, async_op=True)
        _ranks.wait(work, limit)
        codes, flags = gathered.T.tolist()
        if len({*codes}) > 1:
            calls = "".join(f"\n  rank {rank}: {text}" for rank, text in enumerate(self.gather(str(_ranks.call()))))
            raise RuntimeError(
                f"the ranks have met in different functions, and each of these needs all of them:{calls}"
            )
        return any(flags)

    def on_rank0(self, work: Callable[[], T]) -> T:
        """Result of the first rank's work, on all ranks. It must be plain values, since it is pickled."""
        return self.gather(self.all_or_raise(lambda: work() if self.first else cast(T, None)))[0]

    def all_or_raise(self, work: Callable[[], T]) -> T:
        """Result of this rank's work, after all ranks have succeeded.

        Otherwise the error of the first rank that failed is raised on all. An interrupt stays one on its own rank.
        """
        if not self.is_distributed:
            return work()
        failed: BaseException | None = None
        try:
            result = work()
        except BaseException as error:
            failed = error
        failures = self.gather(None if failed is None else with_rank(self.rank, failed))
        if failed is not None and not isinstance(failed, Exception):
            raise failed
        for rank, failure in enumerate(failures):
            if failure is not None:
                raise failure from (failed if rank == self.rank else None)
        return result

    def gather(self, value: T) -> list[T]:
        """Values of all ranks in order, on each rank."""
        if not self.is_distributed:
            return [value]
        return _ranks.exchange(value, self.group)

    def check_alike(
        self,
        facts: Mapping[str, Any],
        title: str,
        brief: Callable[[Any], str] = str,
        advice: str = "",
        most: int = 10,
    ) -> None:
        """Raise ValueError on all ranks if a fact differs on one of them. Facts are sent only if their digests differ.

        The message has a title, up to `most` lines and an advice. A name that has no verb gets one.
        """
        text = repr(sorted(facts.items())).encode()
        if len(set(self.gather(hashlib.sha256(text).digest()))) == 1:
            return
        everyone = self.gather(facts)
        different = [
            f"{name if ' has ' in name else f'{name} is'} {brief(first)} on rank 0, {brief(value)} on rank {rank}"
            for rank, others in enumerate(everyone)
            for name, first, value in paired(everyone[0].items(), others.items())
            if first != value
        ]
        raise ValueError(title + few(different, most, "\n  ") + advice)

    def another(self) -> RankGroup:
        """The same processes with a second group, for one thread on each. All ranks must call this."""
        return _like(self.group) if self.is_distributed else self


_alone = RankGroup()

_known: weakref.WeakKeyDictionary[Any, RankGroup] = weakref.WeakKeyDictionary()  # by torch's group of the same ranks


def together_with_data() -> RankGroup:
    """The processes that divide the data."""
    return together(_ranks.group()) if _ranks.running() else _alone


def together(group: Any = None) -> RankGroup:
    """All processes that currently exist, including those that hold parts of one model; or those of a group.

    The first call is collective if there are several.
    """
    if not _ranks.running() or distributed.get_world_size(group) == 1:
        return _alone
    group = group or distributed.group.WORLD
    if group not in _known:
        _known[group] = _like(group)
    return _known[group]


def _like(group: Any) -> RankGroup:
    """The ranks of a group, with a new group of torch's."""
    return RankGroup(_ranks.new_group(distributed.get_process_group_ranks(group), _PATIENCE))


def with_rank(rank: int, error: BaseException) -> Exception:
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


_unfinished: set[Future[Any]] = set()


def finish_first(work: Future[Any]) -> None:
    """Register work that threads do together, and that must finish before torch's groups are destroyed."""
    _unfinished.add(work)
    work.add_done_callback(_unfinished.discard)


def finish_all() -> None:
    """Wait for all work that threads do together. Errors are raised by the call that asks for the result."""
    wait([*_unfinished])
