"""Data parallelism: division of batches among ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

from looplib._core import ranks as _ranks
from looplib._core.trees import batch_size, empty_batch, split
from looplib.data._plan import own_rows


def rank_and_ranks(divide: bool) -> tuple[int, int]:
    """Current rank and number of ranks; (0, 1) for a loader that is not divided."""
    return (_ranks.rank(), _ranks.world_size()) if divide else (0, 1)


def own_part(batch: Any, rank: int, ranks: int) -> tuple[Any, int]:
    """This rank's samples of a batch that was read completely, and the number of samples in the batch."""
    try:
        count = batch_size(batch)
    except TypeError:
        raise TypeError(
            f"the dataset's items are taken for batches, as batch_size is None, but a {type(batch).__name__} has no "
            f"samples to divide among {ranks} ranks; give a batch_size, or divide=False to give each rank the whole"
        ) from None
    low, high = own_rows(count, rank, ranks)
    return split(batch, count, [low, high - low, count - high])[1], count


def delivered(
    read: Iterator[Any], move: Callable[[Any], Any], epoch: int, first: int, rank: int, ranks: int, *, pairs: bool
) -> Iterator[Any]:
    """Batches that a loader yields, moved to their device.

    Args:
        read: batches, or on several ranks, pairs (this rank's part, samples in the global batch).
        move: moves a batch to the device.
        epoch, first: position of the first batch.
        rank, ranks: this rank and the number of ranks.
        pairs: yield (part, True if it counts).
    """
    if ranks > 1:
        return _parts(read, move, epoch, first, rank, ranks, pairs)
    if pairs:
        return ((move(batch), True) for batch in read)
    return read if move is unchanged else (move(batch) for batch in read)


def _parts(
    read: Iterator[Any], move: Callable[[Any], Any], epoch: int, first: int, rank: int, ranks: int, pairs: bool
) -> Iterator[Any]:
    with closing(read):  # type: ignore[type-var]
        for k, (part, count) in enumerate(read, first):
            part = move(part)
            yield (part, rank < count) if pairs else part if rank < count else _none_of(part, epoch, k, count, ranks)


def _none_of(part: Any, epoch: int, k: int, count: int, ranks: int) -> Any:
    """A batch of no samples, for a rank that has none of this batch."""
    try:
        return empty_batch(part)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"batch {k} of epoch {epoch} has {count} samples for {ranks} ranks, and a {type(part).__name__} cannot be "
            "made without samples for the others; give drop_last=True if it is a last batch that is not full, or "
            "another batch_size (the batches are divided among the ranks)"
        ) from error


def unchanged(batch: Any) -> Any:
    """Return the batch itself."""
    return batch
