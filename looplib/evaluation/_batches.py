"""Reading batches for evaluation: from a given place on, each rank its share, under a progress bar."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, NamedTuple, TypeVar

from torch.utils.data import IterableDataset

from looplib._core.checks import check_optional_count
from looplib._core.ranks import any_rank, is_first, rank, world_size
from looplib.types import TrainState

T = TypeVar("T")

NO_BATCH = object()
_END = object()


class Reading(NamedTuple):
    """Which batches are read, and how.

    Attributes:
        batches: any iterable, or a looplib loader.
        limit: the number of batches, or None for all.
        title: text before the bar, or None for no bar.
        divide: whether the ranks divide the batches; else each has its own.
        start: the number of the first batch.
        check: called with the number of each batch before `start` that is read anyway, which the last of them is, and
            the batch: on several ranks that divide each batch, this rank's share, or None for none; `NO_BATCH` where
            they end before.
    """

    batches: Any
    limit: int | None = None
    title: str | None = None
    divide: bool = True
    start: int = 0
    check: Callable[[int, Any], None] | None = None


def read(reading: Reading, state: TrainState) -> Iterator[tuple[Any, bool]]:
    """This rank's batches, and whether each counts: all ranks are given the same number of them."""
    batches, limit, title, divide, start, _ = reading
    check_optional_count("limit", limit, advice="give how many batches, at least 1, or None for all")
    length = length_of(batches)
    left = None if length is None else max(0, length - start)
    if left == 0 and reading.check is None and not is_estimate(batches):
        reading = reading._replace(batches=(), start=0)  # a loader takes it for a mistake to be read on from its end
    if limit is not None:
        left = limit if left is None else min(limit, left)
    if divide and not _by_rows(reading):
        left = None if left is None else -(-left // world_size())
    shares = _shares(reading, state)
    if title is None or not is_first():
        return shares
    from tqdm.auto import tqdm

    bar: Iterator[tuple[Any, bool]] = iter(tqdm(shares, desc=title, total=left, leave=False))
    return bar


def length_of(batches: Any) -> int | None:
    """The number of batches, or None where nothing says it: a generator, or a stream, whatever stands around it."""
    try:
        return len(batches)
    except (TypeError, NotImplementedError):  # which a DataLoader over a dataset without a length raises, too
        return None


def is_estimate(batches: Any) -> bool:
    """Several workers that share an IterableDataset may give more batches than a DataLoader's length says."""
    return isinstance(getattr(batches, "dataset", None), IterableDataset)


def _by_rows(reading: Reading) -> bool:
    """Does the loader divide each batch among the ranks?"""
    return reading.divide and getattr(reading.batches, "divide", False)


def _shares(reading: Reading, state: TrainState) -> Iterator[tuple[Any, bool]]:
    batches, first = reading.batches, _first_read(reading)
    place = state.replace(epoch=0, batch=first, epoch_length=None)
    if _by_rows(reading):
        return islice(_after(batches.parts(place), first, reading, _batch_of_share), reading.limit)
    every = iter(batches(place) if callable(batches) else batches)
    rest = islice(_after(every, first, reading), reading.limit)
    return _in_turn(rest, rank(), world_size()) if reading.divide else _together(rest)


def _batch_of_share(share: tuple[Any, bool]) -> Any:
    batch, counts = share
    return batch if counts else None


def _first_read(reading: Reading) -> int:
    """The batch that reading begins with. A looplib loader need not read what comes before, where that is all the
    same; a stream reads it as well, and would take its own end for a mistake."""
    batches, start = reading.batches, reading.start
    if not callable(batches) or getattr(batches, "order", "unknown") is None:
        return 0
    if reading.check is None or start == 0:
        return start
    return start - 1 if isinstance(getattr(batches, "batch_size", None), int) else 0


def _after(
    batches: Iterator[T], first: int, reading: Reading, batch_of: Callable[[T], Any] = lambda batch: batch
) -> Iterator[T]:
    """The batches from `start` on, of those that begin with `first`."""
    number = first
    for number, batch in enumerate(islice(batches, reading.start - first), first + 1):
        if reading.check is not None:
            reading.check(number - 1, batch_of(batch))
        del batch
    if reading.check is not None and number < reading.start:
        reading.check(number, NO_BATCH)
    yield from batches


def _in_turn(batches: Iterator[Any], rank: int, ranks: int) -> Iterator[tuple[Any, bool]]:
    """Each rank takes a batch of so many; where the last ones are fewer, the first of them stands in."""
    for first in batches:
        mine, counts = first, rank == 0
        for place in range(1, ranks):
            other = next(batches, _END)
            if other is _END:
                break
            if place == rank:
                mine, counts = other, True
        yield mine, counts
        del first, mine


def _together(batches: Iterator[Any]) -> Iterator[tuple[Any, bool]]:
    """Ranks with batches of their own: one that has no more takes its last one again while others go on."""
    last: Any = _END
    while any_rank((batch := next(batches, _END)) is not _END):
        if batch is _END and last is _END:
            raise ValueError(
                f"rank {rank()} has no batch at all, and others have: with divide=False give each rank at least one"
            )
        last = last if batch is _END else batch
        yield last, batch is not _END
