"""Readers: they turn a job into a batch, in this process or in a worker.

The process that reads a sample seeds the global streams for that sample, so nothing depends on which process reads it
or on what it read before. A reader returns pairs: the part of a batch that belongs to the rank, and the number of
samples in the batch.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import StackDataset, Subset, TensorDataset, default_collate, default_convert

from looplib._core.checks import check
from looplib._core.random import mix
from looplib._core.samples import CountSamples, counted
from looplib.data._orders import listed
from looplib.data._plan import own_part
from looplib.data.random_streams import COLLATE, ITEM, kept_streams, seed_streams


class Job(NamedTuple):
    """A batch of a plan to read, or one rank's part of it.

    Attributes:
        epoch, batch: position of the batch.
        rank, ranks: this rank and the number of ranks.
        size: number of samples in the batch, of all ranks together.
        keys: samples to read: an int64 tensor or a list.
        visits: number of earlier occurrences of each in the epoch; None if all are distinct.
    """

    epoch: int
    batch: int
    rank: int
    ranks: int
    size: int
    keys: Any
    visits: Any

    def __reduce__(self) -> Any:
        # Workers get lists: a tensor would go to them as a file descriptor, with its entire storage.
        return Job, tuple(map(listed, self))


@dataclass(frozen=True)
class Counts:
    """Counter of the samples in a loader's batches: `counts(batch)`.

    Attributes:
        counter: counts the samples of one batch.
        is_given: True if it was given to `make_loader`. The rule is held against the number that was drawn.
        in_microbatches: True if a batch is a list of microbatches.
    """

    counter: CountSamples
    is_given: bool
    in_microbatches: bool

    def __call__(self, batch: Any) -> int:
        return sum(map(self.counter, batch)) if self.in_microbatches else self.counter(batch)

    def check(self, batch: Any, drawn: int) -> None:
        """Raise ValueError for a batch that the rule counts wrongly. One that it cannot count is refused where that matters."""
        if self.is_given:
            return
        try:
            count = self(batch)
        except (TypeError, ValueError):
            return
        check(
            count == drawn,
            f"the loader drew {drawn} samples for a batch, and the batch that collate_fn made of them has {count} by "
            f"looplib's rule ({counted(batch)}), by which steps and evaluations would count it. Say how its samples are "
            "counted, by count_samples= given to make_loader, make_grad_fn and make_eval_step: count_samples=len for a "
            "list of images, a function that counts packed samples; or if collate_fn leaves samples out or repeats them on "
            "purpose, make_loader(..., count_samples=ll.data.count_samples). For a list of microbatches, see "
            "ll.data.collate_microbatches",
        )


class Reader:
    """Collate the samples of a job, with the draws of streams that are seeded for it and restored afterwards.

    Attributes:
        batched: True if a batch has several items, of which a rank reads only its own. Otherwise an item is a batch,
            which each rank reads whole to take its samples.
        counts: how samples are counted.
    """

    def __init__(
        self, dataset: Any, collate_fn: Callable[[Any], Any] | None, seed: int, counts: Counts, *, batched: bool
    ) -> None:
        self.dataset, self.seed, self.counts, self.batched = dataset, seed, counts, batched
        self.collate = collate_fn or (default_collate if batched else default_convert)
        self.collate_may_draw = self.collate not in (default_collate, default_convert)
        self.dataset_may_draw = type(dataset) not in (list, tuple, range, Tensor, TensorDataset)

    def read(self, job: Any) -> tuple[list[Any], int] | None:
        """This rank's items of a batch, and the number of samples in the batch; None at the end of a stream."""
        raise NotImplementedError

    def seeds(self, job: Job) -> Iterator[int]:
        """Seeds of the items of a batch."""
        visits = itertools.repeat(0) if job.visits is None else listed(job.visits)
        return map(mix, itertools.repeat(mix(ITEM, self.seed, job.epoch)), listed(job.keys), visits)

    def __getitem__(self, job: Any) -> tuple[Any, int] | None:
        with kept_streams() if self.collate_may_draw or self.dataset_may_draw else nullcontext():
            try:
                read = self.read(job)
                if read is None:
                    return None
                items, size = read
                if self.collate_may_draw:
                    # The first rank draws the same as a single process. If items are batches, each rank reads them whole.
                    drawn_by = [job.rank] if job.rank and self.batched else []
                    seed_streams(mix(COLLATE, self.seed, job.epoch, job.batch, *drawn_by))
                batch = self.collate(items if self.batched else items[0])
                if self.batched:
                    self.counts.check(batch, len(job.keys) if type(job) is Job else len(items))
                if self.batched or job.ranks == 1:
                    return batch, size
                return own_part(batch, job.rank, job.ranks, self.counts)
            except StopIteration as error:  # which a loop would mistake for the end of the data
                raise RuntimeError(
                    "the dataset or collate_fn raised StopIteration, which would end the epoch early and silently, in batch "
                    f"{job.batch} of epoch {job.epoch}. It usually comes from next() on an iterator that has ended: give "
                    "next() a default, or raise another error"
                ) from error


class Items(Reader):
    """Read a batch item by item, each with the draws of freshly seeded streams.

    Nothing is seeded for a dataset of torch's or Python's own that cannot draw.
    """

    def read(self, job: Job) -> tuple[list[Any], int]:
        keys, dataset = listed(job.keys), self.dataset
        if not self.dataset_may_draw or not keys:
            return [dataset[key] for key in keys], job.size
        seeds = self.seeds(job)
        if self.batched and _reads_lists(dataset):
            seed_streams(next(seeds))
            return dataset.__getitems__(keys), job.size
        items = []
        for seed, key in zip(seeds, keys, strict=False):
            seed_streams(seed)
            items.append(dataset[key])
        return items, job.size


class Lists(Reader):
    """Read a batch with one call, `dataset[keys]`, under the seed of its first sample."""

    def __init__(self, dataset: Any, collate_fn: Callable[[Any], Any] | None, seed: int, counts: Counts) -> None:
        super().__init__(dataset, collate_fn or default_convert, seed, counts, batched=True)
        self.collate = partial(_of_the_only_item, self.collate)

    def read(self, job: Job) -> tuple[list[Any], int]:
        keys = listed(job.keys)
        if self.dataset_may_draw and keys:
            seed_streams(next(self.seeds(job)))
        return [self.dataset[keys]], job.size


def _of_the_only_item(convert: Callable[[Any], Any], items: list[Any]) -> Any:
    return convert(items[0])


@dataclass(eq=False)
class Rows:
    """Read a batch from tensors, all samples at once, bitwise as default_collate over the items.

    Attributes:
        dataset: the dataset.
        tensors: those of a TensorDataset.
        rows: the rows that samples are in, or None if they are in all of them, in order.
    """

    dataset: Any
    tensors: Sequence[Tensor]
    rows: Tensor | None

    def __getitem__(self, job: Job) -> tuple[list[Tensor], int]:
        keys = torch.as_tensor(job.keys, device="cpu")
        if self.rows is not None:
            keys = self.rows[keys]
        elif len(keys) and keys.min() < 0:  # as a sampler may count from the end; `index_select` does not
            keys = torch.where(keys < 0, keys + len(self.dataset), keys)
        return [tensor.index_select(0, keys.to(tensor.device)) for tensor in self.tensors], job.size


def reader_of(
    dataset: Any,
    collate_fn: Callable[[Any], Any] | None,
    seed: int,
    counts: Counts,
    batch_size: int | None,
    *,
    batched: bool,
    by_list: bool = False,
) -> Items | Lists | Rows:
    """The fastest reader of a dataset whose batches are bitwise those of `collate_fn` over its items."""
    if by_list:
        return Lists(dataset, collate_fn, seed, counts)
    if batch_size and collate_fn in (None, default_collate) and (tensors_and_rows := _rows_of(dataset)):
        return Rows(dataset, *tensors_and_rows)
    return Items(dataset, collate_fn, seed, counts, batched=batched)


def _rows_of(dataset: Any) -> tuple[Sequence[Tensor], Tensor | None] | None:
    """Tensors of a TensorDataset and the rows chosen by its Subsets, or None for a different dataset."""
    if type(dataset) is TensorDataset:
        kinds = {(type(tensor), tensor.layout, tensor.is_nested) for tensor in dataset.tensors}
        return (dataset.tensors, None) if kinds == {(Tensor, torch.strided, False)} else None
    if type(dataset) is Subset and (within := _rows_of(dataset.dataset)):
        tensors, rows = within
        chosen = torch.as_tensor(dataset.indices, device="cpu")
        if (chosen.dtype, chosen.dim()) == (torch.int64, 1) and (chosen >= 0).all():
            return tensors, chosen if rows is None else rows[chosen]
    return None


def _reads_lists(dataset: Any) -> bool:
    """True if `__getitems__` does more than read item by item, as those of Subset and StackDataset do."""
    method = getattr(type(dataset), "__getitems__", None)
    if method is Subset.__getitems__:
        return _reads_lists(dataset.dataset)
    return method is not StackDataset.__getitems__ and callable(getattr(dataset, "__getitems__", None))
