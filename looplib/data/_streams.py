"""Streams: datasets that can only be iterated over, read from the start in every epoch."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import closing, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, default_collate, default_convert, get_worker_info

from looplib._core.checks import check
from looplib._core.random import mix
from looplib._core.ranks import rank as own_rank
from looplib._core.ranks import world_size
from looplib.data._divide import own_part
from looplib.data._plan import own_rows
from looplib.data._random_streams import (
    COLLATE,
    STREAM,
    kept_streams,
    restore_streams,
    save_streams,
    seed_streams,
)
from looplib.data._sending import Sent
from looplib.data._workers import Engines, ended_early
from looplib.types import TrainState

KEY = "stream"  # of `state.extra`


@dataclass(frozen=True, eq=False)
class Streamed:
    """Source of a loader over a stream.

    Attributes:
        engines: DataLoaders over the stream.
        name: the stream's name in errors.
        keeps_position: True if the dataset has `state_dict`, and is read in this process.
        fresh: the dataset's state before anything was read.
        divide: True if all ranks read the same samples.
        yielded: epoch, and number of its batches that were yielded, of the last pass.
        moved: not empty while the dataset is within a pass that began at a position, so that it must be put back for a
            pass from its start.
    """

    engines: Engines
    name: str
    keeps_position: bool = False
    fresh: Any = None
    divide: bool = True
    yielded: list[int] = field(default_factory=lambda: [0, 0])
    moved: list[bool] = field(default_factory=list)

    def read(self, state: TrainState, rank: int, ranks: int, *, train: bool) -> Iterator[Any]:
        """Remaining batches of the state's epoch, or on several ranks, pairs (this rank's part, samples in the batch)."""
        # The iterator holds no state, which a loop would keep alive until the end of the epoch.
        return self._batches(state.epoch, state.batch, state.epoch_length, rank, ranks, self._position(state))

    def _position(self, state: TrainState) -> Any:
        """The dataset's position in `state.extra`, if it is that of the state's batch; else None."""
        text = state.extra.get(KEY) if isinstance(state.extra, Mapping) else None
        if not (self.keeps_position and text):
            return None
        saved = json.loads(text)
        if (saved["epoch"], saved["batch"]) != (state.epoch, state.batch):
            return None
        if self.divide:
            return saved["ranks"][0]
        check(
            len(saved["ranks"]) == world_size(),
            f"{self.name} was read on {len(saved['ranks'])} ranks that each have samples of their own, and there are "
            f"{world_size()}: continue with as many, or from the end of an epoch",
        )
        return saved["ranks"][own_rank()]

    def _batches(
        self, epoch: int, first: int, length: int | None, rank: int, ranks: int, position: Any
    ) -> Iterator[Any]:
        """Batches of a pass from index `first` on, up to the stream's end or `length`."""
        count = before = 0 if position is None else first
        with closing(self._pass(epoch, rank, ranks, length, before, position)) as batches:
            for count, batch in enumerate(batches, before + 1):
                self.yielded[:] = epoch, count
                if count > first:
                    yield batch
        self._check_end(epoch, first, length, count)

    def _pass(
        self, epoch: int, rank: int, ranks: int, length: int | None, count: int, position: Any
    ) -> Generator[Any, None, None]:
        """The first `length` batches of a pass, or all, with global random streams that persist between batches.

        With a `position` of the dataset, those after the first `count`.
        """
        streams_within, end = save_streams(), object()

        def start(engine: Any) -> Iterator[Any]:
            nonlocal streams_within
            engine.dataset.position.copy_(torch.tensor([epoch, rank, ranks]))
            if position is not None:
                self.moved[:] = [True]
            fresh = self.fresh if self.moved else None
            engine.dataset.starts_at = (fresh, 0) if position is None else (position, count)
            with kept_streams():
                source: Iterator[Any] = iter(engine)
                streams_within = save_streams()
            return source

        with self.engines.run(epoch, start) as source:
            while length is None or count < length:
                with kept_streams():
                    restore_streams(streams_within)
                    batch = next(source, end)
                    streams_within = save_streams()
                if batch is end:
                    break
                count += 1
                yield batch
            self.moved.clear()  # the dataset stands where it would without the position

    def _check_end(self, epoch: int, first: int, length: int | None, count: int) -> None:
        check(count, f"{self.name} gave no batch in epoch {epoch}: is there data in it?")
        check(
            length is None or count >= length,
            f"{self.name} ended after {count} batches, but state.epoch_length is {length}; make the stream longer, or "
            "leave epoch_length out of init_state and call state = ll.end_epoch(state) after the for loop",
        )
        check(
            count > first,
            f"{self.name} ended after {count} batches, and the state stands at batch {first} of epoch {epoch}; call "
            "state = ll.end_epoch(state) after the for loop over a stream",
        )


def stream_engine(
    source: Stream, batch_size: int | None, drop_last: bool, options: dict[str, Any]
) -> DataLoader[Any]:
    """A DataLoader over a stream."""
    return DataLoader(
        source,
        batch_size=batch_size,
        drop_last=drop_last,
        collate_fn=partial(_sent, source.batch) if options.get("num_workers") else source.batch,
        generator=torch.Generator(),
        **options,
    )


def _sent(collate: Callable[[Any], Any], items: Any) -> Sent:
    return Sent(collate(items))


class Stream(IterableDataset[Any]):
    """A stream that seeds the global random streams at the start of each pass, in persistent workers too.

    Each rank reads the whole stream and keeps its own samples of each batch.
    """

    def __init__(self, dataset: Iterable[Any], collate: Callable[[Any], Any], seed: int, *, batched: bool) -> None:
        self.dataset, self.collate, self.seed, self.batched = dataset, collate, seed, batched
        self.draws = collate not in (default_collate, default_convert)
        self.starts_at: tuple[Any, int] = None, 0  # the dataset's own position, and the batches before it
        self.position: Tensor = torch.tensor([0, 0, 1]).share_memory_()  # type: ignore[no-untyped-call]

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        epoch, self.rank, self.ranks = self.position.tolist()
        self.pass_seeds, self.collated_batches = (self.seed, epoch, info.id if info else 0), 0
        position, before = self.starts_at
        seed_streams(mix(STREAM, *self.pass_seeds, *([before] if before else [])))
        dataset: Any = self.dataset
        if position is not None and not before:
            dataset.load_state_dict(copy.deepcopy(position))  # of the start, which may hold the first epoch
        if hasattr(dataset, "set_epoch"):
            dataset.set_epoch(epoch)
        if before:
            dataset.load_state_dict(copy.deepcopy(position))  # of this epoch, which set_epoch may start over
        return iter(dataset)

    def batch(self, items: Any) -> Any:
        """collate_fn of an engine: on several ranks, this rank's part and the number of samples."""
        if self.ranks == 1:
            return self._collated(items)
        if not self.batched:
            return own_part(self._collated(items), self.rank, self.ranks)
        low, high = own_rows(len(items), self.rank, self.ranks)
        # Draws in collate depend on the rank, so they must not affect the stream, which is the same on all ranks.
        with kept_streams() if self.draws else nullcontext():
            if self.draws:
                seed_streams(mix(COLLATE, *self.pass_seeds, self.collated_batches, self.rank))
                self.collated_batches += 1
            return self._collated(items[low:high]), len(items)

    def _collated(self, items: Any) -> Any:
        try:
            return self.collate(items)
        except StopIteration as error:
            raise ended_early(f"collate_fn, in epoch {self.pass_seeds[1]} of the stream,") from error
