"""Indexed datasets: read the batches of a plan, in this process or in workers.

A job is the position of a batch and its keys. The process that reads a sample seeds the global streams for that
sample, so nothing depends on which process reads it or on what it read before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    Dataset,
    StackDataset,
    Subset,
    TensorDataset,
    default_collate,
    default_convert,
)

from looplib._core.random import mix, mix_each
from looplib.data._divide import own_part, unchanged
from looplib.data._plan import Plan, listed
from looplib.data._position import check_position, read_of_next
from looplib.data._random_streams import COLLATE, ITEM, kept_streams, moves, seed_streams, seed_torch
from looplib.data._sending import Sent
from looplib.data._workers import Engines, ended_early
from looplib.types import TrainState

Job = tuple[int, int, Any, list[int] | None, int, int]  # epoch, batch, keys to read, a seed for each, rank, ranks

_AHEAD = 2048  # samples whose seeds are computed at a time


@dataclass(frozen=True, eq=False)
class Samples:
    """Source of a loader over a dataset with indices.

    Attributes:
        reader: reads the batch of a job.
        engines: DataLoaders over the reader.
        plan: function that returns the plan of an epoch.
        length: batches in epoch 0.
        batched: True if a batch has several keys and a rank reads only its own. Otherwise an item is a batch, which
            each rank reads whole to take its samples.
        in_process: True if no DataLoader is needed.
        batch_size: samples per global batch if they are given per rank, so that a run with another number of ranks may
            have read some of the next batch.
    """

    reader: Items | Rows
    engines: Engines
    plan: Callable[[int], Plan]
    length: int
    batched: bool
    in_process: bool
    batch_size: int | None = None

    def plan_at(self, state: TrainState) -> Plan:
        """The plan of the state's epoch, without the samples of the next batch that have been read."""
        plan = self.plan(state.epoch)
        check_position(state, len(plan), self.length)
        if self.batch_size and state.epoch_length == self.length:
            read = read_of_next(state, self.batch_size, len(plan.keys))
            return replace(plan, read=(state.batch, read)) if read else plan
        return plan

    def read(self, state: TrainState, rank: int, ranks: int, *, train: bool) -> Iterator[Any]:
        """Remaining batches of the state's epoch, or on several ranks, pairs (this rank's part, samples in the batch)."""
        epoch, first, plan = state.epoch, state.batch, self.plan_at(state)
        divided = ranks > 1 and self.batched
        # The iterator holds no state, which a loop would keep alive until the end of the epoch.
        jobs = _jobs(self.reader.seed_of(epoch), epoch, first, plan, (rank, ranks), divided=self.batched)
        read = (
            (self.reader[job] for job in jobs) if self.in_process else self._through_engine(epoch, first, plan, jobs)
        )
        return ((batch, plan.size(k)) for k, batch in enumerate(read, first)) if divided else read

    def _through_engine(self, epoch: int, first: int, plan: Plan, jobs: Iterator[Job]) -> Iterator[Any]:
        def start(engine: Any) -> Iterator[Any]:
            # Send lists: a tensor would go to the worker as a file descriptor, with its entire storage.
            engine.sampler.jobs = ((epoch, k, listed(keys), *others) for epoch, k, keys, *others in jobs)
            return iter(engine)

        end = object()
        with self.engines.run(epoch, start) as source:
            for k in range(first, len(plan)):
                if (batch := next(source, end)) is end:
                    raise RuntimeError(f"the DataLoader ended before batch {k} of epoch {epoch}, of {len(plan)}")
                yield batch


def _jobs(
    seed: int | None, epoch: int, first: int, plan: Plan, at: tuple[int, int], *, divided: bool
) -> Iterator[Job]:
    """Jobs of the rest of an epoch. They refer to no loader, since an engine that is left early holds the rest."""
    cut, begin, seeds = at if divided else (0, 1), 0, list[int]()
    for k in range(first, len(plan)):
        part = plan.part(k, *cut)
        if seed is not None and part.stop > begin + len(seeds):
            begin = part.start
            # For few samples it takes as long as for many. On several ranks, the next ones are read by others.
            end = part.stop if cut[1] > 1 else max(part.stop, begin + _AHEAD)
            seeds = mix_each(seed, *plan.numbers(slice(begin, end))).tolist()
        own = None if seed is None else seeds[part.start - begin : part.stop - begin]
        yield epoch, k, plan.keys[part], own, *at


def samples_engine(reader: Items | Rows, options: dict[str, Any]) -> DataLoader[Any]:
    """A DataLoader that runs jobs."""
    send = Sent if options.get("num_workers") else unchanged
    return DataLoader(
        reader, batch_size=None, sampler=Jobs(), collate_fn=send, generator=torch.Generator(), **options
    )


class Jobs:
    """Sampler of an engine: its jobs are set before each iteration."""

    jobs: Iterator[Job] = iter(())

    def __iter__(self) -> Iterator[Job]:
        return self.jobs


class Items(Dataset[Any]):
    """Read the batch of a job item by item, each with the draws of freshly seeded streams. Also runs in workers.

    Most datasets never draw from `random` or numpy, and to seed these two takes longer than to read a short item. So
    they are seeded for each item only once an item has drawn from them. Until then, each batch seeds them for its first
    item, and `moves` tells after this item and after the last one whether an item has drawn. torch's stream is seeded
    for each item, since a dataset may read `torch.initial_seed()` without drawing. Nothing is seeded for a dataset or
    a collate_fn of torch's or Python's own that cannot draw.
    """

    def __init__(self, dataset: Any, collate: Callable[[Any], Any], seed: int, *, batched: bool) -> None:
        self.dataset, self.collate, self.seed, self.batched = dataset, collate, seed, batched
        self.in_lists = batched and _reads_lists(dataset)
        self.in_worker = False  # set by the worker, whose streams nobody else reads
        self.has_drawn = False  # from `random` or numpy, in this process
        self.collate_draws = collate not in (default_collate, default_convert)

    def seed_of(self, epoch: int) -> int | None:
        """Seed to mix with each sample's number, or None if the dataset draws nothing."""
        return None if _draws_nothing(self.dataset) else mix(ITEM, self.seed, epoch)

    def __getitem__(self, job: Job) -> Any:
        epoch, k, keys, seeds, rank, ranks = job
        draws = self.collate_draws or seeds is not None
        with kept_streams() if draws and not self.in_worker else nullcontext():
            items = self._items(listed(keys), seeds)
            if self.collate_draws:
                # The first rank draws the same as a single process. If items are batches, each rank reads them whole.
                drawn_by = [rank] if rank and self.batched else []
                seed_streams(mix(COLLATE, self.seed, epoch, k, *drawn_by))
            try:
                batch = self.collate(items if self.batched else items[0])
            except StopIteration as error:
                raise ended_early(f"collate_fn, given batch {k} of epoch {epoch},") from error
            except Exception as error:
                note_text(error, items)
                raise
        return batch if self.batched or ranks == 1 else own_part(batch, rank, ranks)

    def _items(self, keys: list[Any], seeds: list[int] | None) -> Any:
        if seeds is None:
            return [self.dataset[key] for key in keys]
        if self.in_lists:
            return self._list(keys, seeds)
        # To watch the streams takes as long as to seed them for two samples.
        items = [] if self.has_drawn or len(keys) < 3 else self._unless_drawn(keys, seeds)
        return items + self._each(keys[len(items) :], seeds[len(items) :], seed_streams)

    def _list(self, keys: list[Any], seeds: list[int]) -> Any:
        if not seeds:
            return []  # of an empty batch
        seed_streams(seeds[0])
        try:
            return self.dataset.__getitems__(keys)
        except StopIteration as error:
            raise ended_early(f"dataset.__getitems__({keys})") from error

    def _each(self, keys: list[Any], seeds: list[int], seed_for: Callable[[int], object]) -> list[Any]:
        dataset, items = self.dataset, []
        for key, seed in zip(keys, seeds, strict=True):
            seed_for(seed)
            try:
                items.append(dataset[key])
            except StopIteration as error:
                raise ended_early(f"dataset[{key!r}]") from error
        return items

    def _unless_drawn(self, keys: list[Any], seeds: list[int]) -> list[Any]:
        """All items, or only the first if one has drawn from `random` or numpy, which are seeded for the first alone.

        The caller then reads the others again, each with its own seed: also if one of them has raised an error.
        """
        moved = moves(seeds[0])
        first = self._each(keys[:1], seeds[:1], seed_torch)
        if not next(moved):
            try:
                others = self._each(keys[1:], seeds[1:], seed_torch)
            except Exception:
                if not next(moved):
                    raise
            else:
                if not next(moved):
                    return first + others
        self.has_drawn = True
        return first


def note_text(error: Exception, items: Any) -> None:
    """Add to an error of `collate_fn` which columns of the samples are text, since few collators can take them."""
    first = items[0] if isinstance(items, list) and items else None
    if isinstance(first, Mapping) and (text := [str(name) for name in first if isinstance(first[name], str)]):
        error.add_note(
            f"The samples have columns of text: {', '.join(text)}. If collate_fn cannot take them, tokenize or remove "
            "them: dataset.remove_columns([...]) of a Hugging Face dataset."
        )


class Rows(Dataset[Any]):
    """Read the batch of a job from tensors, all samples at once, bitwise as default_collate over the items."""

    def __init__(self, dataset: Any, tensors: Sequence[Tensor], rows: Tensor | None) -> None:
        self.dataset, self.tensors, self.rows = dataset, tensors, rows

    def seed_of(self, epoch: int) -> None:
        """Nothing is drawn."""

    def __getitem__(self, job: Job) -> list[Tensor]:
        keys = torch.as_tensor(job[2])
        if self.rows is not None:
            keys = self.rows[keys]
        elif len(keys) and keys.min() < 0:  # as a sampler may count from the end; `index_select` does not
            keys = torch.where(keys < 0, keys + len(self.dataset), keys)
        return [tensor.index_select(0, keys.to(tensor.device)) for tensor in self.tensors]


def reader_of(
    dataset: Any, collate_fn: Callable[[Any], Any], seed: int, batch_size: int | None, *, batched: bool
) -> Items | Rows:
    """The fastest reader of a dataset whose batches are bitwise those of `collate_fn` over its items."""
    if batch_size and collate_fn is default_collate and (tensors_and_rows := _rows_of(dataset)):
        return Rows(dataset, *tensors_and_rows)
    return Items(dataset, collate_fn, seed, batched=batched)


def _rows_of(dataset: Any) -> tuple[Sequence[Tensor], Tensor | None] | None:
    """Tensors of a TensorDataset and the rows chosen by its Subsets, or None for a different dataset."""
    if type(dataset) is TensorDataset:
        kinds = {(type(tensor), tensor.layout, tensor.is_nested) for tensor in dataset.tensors}
        return (dataset.tensors, None) if kinds == {(Tensor, torch.strided, False)} else None
    if type(dataset) is Subset and (within := _rows_of(dataset.dataset)):
        tensors, rows = within
        chosen = torch.as_tensor(dataset.indices)
        if (chosen.dtype, chosen.dim()) == (torch.int64, 1) and bool((chosen >= 0).all()):
            return tensors, chosen if rows is None else rows[chosen]
    return None


def _reads_lists(dataset: Any) -> bool:
    """True if `__getitems__` does more than read item by item, as those of Subset and StackDataset do."""
    method = getattr(type(dataset), "__getitems__", None)
    if method is Subset.__getitems__:
        return _reads_lists(dataset.dataset)
    if method is StackDataset.__getitems__:
        parts = dataset.datasets
        return any(map(_reads_lists, parts.values() if isinstance(parts, dict) else parts))
    return callable(getattr(dataset, "__getitems__", None))


def _draws_nothing(dataset: Any) -> bool:
    if type(dataset) is Subset:
        return _draws_nothing(dataset.dataset)
    if type(dataset) is TensorDataset:
        return all(type(tensor) is Tensor for tensor in dataset.tensors)
    return type(dataset) in (list, tuple, range, Tensor)
