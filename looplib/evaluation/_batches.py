"""Batch reading for evaluation: from a given start, divided among ranks, with a progress bar."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import chain, islice
from typing import Any, NamedTuple, TypeVar

from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from looplib._core.checks import check, check_optional_count, named, warn
from looplib._core.collective import together, together_with_data
from looplib._core.ranks import alone, is_distributed, is_first, is_sharded, rank, world_size
from looplib._core.samples import are_columns
from looplib.data.remaining import Remaining
from looplib.types import TrainState

T = TypeVar("T")

NO_BATCH = ()  # stands for a batch that is not there: it has no samples
_END = object()


class Reading(NamedTuple):
    """Settings of one pass over the batches.

    Attributes:
        batches: any iterable, or a looplib loader.
        max_batches: number of batches, or None for all.
        title: text before the bar, or None for no bar.
        divide: True if the ranks divide the batches; otherwise each rank has its own.
        start: index of the first batch.
        skipped: called for each batch before `start` that is read anyway, with its index and the batch, or `NO_BATCH`
            if the batches end earlier. A looplib loader that is not a stream does not read them.
    """

    batches: Any
    max_batches: int | None = None
    title: str | None = None
    divide: bool = True
    start: int = 0
    skipped: Callable[[int, Any], None] | None = None


def ranks_of(reading: Reading, state: TrainState, function: str) -> Callable[[], AbstractContextManager[None]]:
    """Context in which to read and evaluate batches: all ranks have come here, or this one acts alone."""
    if reading.divide or _needs_all(state):
        together_with_data().barrier(function)
        return nullcontext
    return alone


def _needs_all(state: TrainState) -> bool:
    """True if FSDP2 has sharded the parameters, and gathers them on all ranks in each forward pass."""
    return is_distributed() and any(map(is_sharded, state.params.values()))


def read(reading: Reading, state: TrainState) -> Iterator[tuple[Any, bool]]:
    """This rank's batches, each with True if it counts. All ranks get the same number of batches."""
    _check_several(reading.batches)
    _check_remaining(reading)
    check_optional_count(
        "max_batches", reading.max_batches, advice="give how many batches, at least 1, or None for all"
    )
    length = _length_of(reading.batches)
    left = math.inf if length is None else max(0, length - reading.start)
    if left == 0 and is_loader(reading.batches):
        return iter(())  # a loader treats reading past its end as a mistake
    shares = _shares(reading, state)
    if reading.title is None or not is_first():
        return shares
    from tqdm.auto import tqdm

    count = left if reading.max_batches is None else min(left, reading.max_batches)
    if reading.divide and not divides_rows(reading) and count < math.inf:
        count = math.ceil(count / world_size())
    bar: Iterator[tuple[Any, bool]] = iter(tqdm(shares, desc=reading.title, total=count, leave=False))
    return bar


def _check_several(batches: Any) -> None:
    """Raise TypeError for a single batch, or for samples, in place of batches."""
    if isinstance(batches, Tensor):
        raise TypeError(
            f"batches is a tensor of shape {tuple(batches.shape)}, as one batch is: give [batch], or batch.split(64)"
        )
    if are_columns(batches):
        raise TypeError(
            f"batches is a {type(batches).__name__} of {len(batches)} tensors of {len(batches[0])} samples each, as one "
            "batch is: give a list of batches, [batch]"
        )
    if isinstance(batches, Dataset) and not isinstance(batches, IterableDataset):
        raise TypeError(
            f"batches is {named(batches)}, whose items are samples: give ll.make_loader(dataset, batch_size=256, "
            "order=ll.data.sequential()), or a DataLoader of it"
        )


def _check_remaining(reading: Reading) -> None:
    """Name the mistake of `loader(state)` in place of the loader: what is left of an epoch, or one rank's part of it."""
    batches = reading.batches
    if not isinstance(batches, Remaining):
        return
    check(
        not (reading.divide and batches.ranks > 1),
        "batches is what loader(state) returns, which is this rank's part of each batch, and the ranks would divide it "
        "again: give the loader itself, or divide=False",
    )
    if batches.first and reading.max_batches is None and is_first():
        warn(
            f"batches is what loader(state) returns, and the state is at batch {batches.first} of its epoch, so only the "
            "rest of the epoch is read: give the loader itself, which is read from the start, or if you mean the rest, "
            "itertools.chain(loader(state))"
        )


def _length_of(batches: Any) -> int | None:
    """Number of batches, or None if it is unknown, as for a generator or a stream, wrapped or not."""
    try:
        return len(batches)
    except (TypeError, NotImplementedError):  # also raised by a DataLoader over a dataset without a length
        return None


def is_loader(batches: Any) -> bool:
    """True for a looplib loader."""
    return hasattr(batches, "parts") and hasattr(batches, "divide")


def divides_rows(reading: Reading) -> bool:
    """True if the loader divides each batch among the ranks."""
    return reading.divide and getattr(reading.batches, "divide", False)


def _shares(reading: Reading, state: TrainState) -> Iterator[tuple[Any, bool]]:
    batches = reading.batches
    # Other iterables have to be read from their beginning, and so do streams.
    first = reading.start if is_loader(batches) and batches.order is not None else 0
    start = state.replace(epoch=0, batch=first, epoch_length=None)
    if divides_rows(reading):
        return islice(_after(batches.parts(start), first, reading), reading.max_batches)
    with nullcontext() if reading.divide else alone():  # a loader divides its batches among the ranks it finds here
        if is_loader(batches):
            every = (batch for batch, _ in batches.parts(start))
        else:
            every = iter(batches(start) if callable(batches) else batches)
    rest = islice(_after(every, first, reading), reading.max_batches)
    if reading.divide:
        return _in_turn(rest, rank(), world_size())
    return _together(rest) if _needs_all(state) else ((batch, True) for batch in rest)


def _after(batches: Iterator[T], first: int, reading: Reading) -> Iterator[T]:
    """Batches from `start` on, from an iterator that begins at batch `first`."""
    for number in range(first, reading.start):
        batch: Any = next(batches, NO_BATCH)
        if reading.skipped is not None:
            reading.skipped(number, batch)
        del batch
    yield from chain(batches)  # which leaves a generator of the caller's open, to read on


def _in_turn(batches: Iterator[Any], rank: int, ranks: int) -> Iterator[tuple[Any, bool]]:
    """Give each rank one of `ranks` consecutive batches. If too few are left, the first of them is used again."""
    for first in batches:
        mine, counts = first, rank == 0
        for other_rank, batch in enumerate(islice(batches, ranks - 1), 1):
            if other_rank == rank:
                mine, counts = batch, True
            del batch
        yield mine, counts
        del first, mine


def _together(batches: Iterator[Any]) -> Iterator[tuple[Any, bool]]:
    """For ranks with their own batches and a sharded model: one that runs out repeats its last batch until all end."""
    last: Any = _END
    while together().barrier("the next batch", (batch := next(batches, _END)) is not _END):
        if batch is _END and last is _END:
            raise ValueError(
                f"rank {rank()} has no batch at all, and others have: with divide=False give each rank at least one "
                "(FSDP2 gathers the shards of all ranks in each forward pass)"
            )
        last = last if batch is _END else batch
        yield last, batch is not _END
