"""Data parallelism: division of batches among ranks."""

from __future__ import annotations

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


def empty_part(part: Any, size: int, ranks: int) -> Any:
    """A batch of no samples, for a rank that has none of a batch of `size` samples and holds its first one."""
    try:
        return empty_batch(part)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"a batch has {size} samples for {ranks} ranks, and a {type(part).__name__} cannot be made without samples "
            "for the others; give drop_last=True if it is a last batch that is not full, or another batch_size (the "
            "batches are divided among the ranks)"
        ) from error
