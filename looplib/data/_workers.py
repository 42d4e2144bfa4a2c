"""Reading batches: what a DataLoader runs, in this process or in its workers.

A job is the place of a batch and its keys. Whoever reads it seeds the global streams for each item's own
place, so that nothing depends on which process that is, or on what it has read before.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import repeat
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    StackDataset,
    Subset,
    TensorDataset,
    default_collate,
    default_convert,
    get_worker_info,
)

from looplib._core.random import mix
from looplib._core.trees import batch_size, split
from looplib.data._orders import (
    COLLATE,
    ITEM,
    STREAM,
    kept_streams,
    listed,
    number_of,
    own_rows,
    restore_streams,
    save_streams,
    seed_streams,
)

Job = tuple[int, int, Any, Any, int, int]  # epoch, batch, the keys to read, how often each came before, rank, ranks


Start = Callable[[DataLoader[Any]], Iterator[Any]]


class Engines:
    """DataLoaders to be had one at a time: two iterations never share one, and persistent workers wait here."""

    def __init__(self, build: Callable[[], DataLoader[Any]], seed: int) -> None:
        self.build, self.seed = build, seed
        self.idle = [build()]  # at once, so that DataLoader checks its options now

    @contextmanager
    def run(self, epoch: int, start: Start) -> Iterator[Iterator[Any]]:
        engine = self.idle.pop() if self.idle else self.build()
        assert engine.generator is not None
        engine.generator.manual_seed(mix(STREAM, self.seed, epoch))
        source: Any = start(engine)
        sound = False
        try:
            yield source
            sound = True
        except GeneratorExit:  # left early: the workers are sound
            sound = True
            raise
        finally:
            if sound:
                self.idle.append(engine)
            if not (sound and engine.persistent_workers) and engine.num_workers:
                # Left to __del__, they would live as long as a traceback that holds them, and when the garbage
                # collector then stops them, its order of things makes that a wait of 5 seconds.
                source._shutdown_workers()


def start_worker(worker_init_fn: Callable[[int], None] | None, worker_id: int) -> None:
    # Signals go to the whole process group, or to all of a job. The main process alone decides what they mean.
    for name in ("SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    if hasattr(signal, "sigwaitinfo"):
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=_end_when_told, daemon=True).start()
    info: Any = get_worker_info()
    object.__setattr__(info, "dataset", info.dataset.dataset)  # the user's own, as with a plain DataLoader
    if worker_init_fn is not None:
        worker_init_fn(worker_id)


def _end_when_told() -> None:
    """Obey a SIGTERM of the main process alone, by which it ends workers that hang."""
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != os.getppid():
        pass
    os._exit(0)


class Jobs:
    """The sampler of an engine: what is set before each iteration."""

    jobs: Iterator[Job] = iter(())

    def __iter__(self) -> Iterator[Job]:
        return self.jobs


def read_jobs(engines: Engines, epoch: int, jobs: Iterator[Job]) -> Iterator[Any]:
    def start(engine: Any) -> Iterator[Any]:
        # As lists: a tensor would go to the worker as a file descriptor, and with all of its storage.
        engine.sampler.jobs = (
            (epoch, k, listed(keys), listed(visits), *place) for epoch, k, keys, visits, *place in jobs
        )
        return iter(engine)

    with engines.run(epoch, start) as source:
        yield from source


class Items(Dataset[Any]):
    """Reads the batch of a job item by item, each under streams seeded for it. Runs in the workers too."""

    def __init__(self, dataset: Any, collate: Callable[[Any], Any], seed: int, *, batched: bool) -> None:
        self.dataset, self.collate, self.seed, self.batched = dataset, collate, seed, batched
        self.in_lists = batched and _reads_lists(dataset)
        self.draws = not (_draws_nothing(dataset) and collate in (default_collate, default_convert))

    def __getitem__(self, job: Job) -> Any:
        epoch, k, _, _, rank, ranks = job
        with kept_streams() if self.draws else nullcontext():
            items = self._items(job)
            if self.draws:
                # The first rank draws what one process does. Of an item that is a batch, each has the whole.
                own = [rank] if rank and self.batched else []
                seed_streams(mix(COLLATE, self.seed, epoch, k, *own))
            batch = self.collate(items if self.batched else items[0])
        return batch if self.batched or ranks == 1 else own_part(batch, rank, ranks)

    def _items(self, job: Job) -> Any:
        epoch, _, keys, visits, *_ = job
        keys, visits = listed(keys), repeat(0) if visits is None else listed(visits)
        if not self.draws:
            return [self.dataset[key] for key in keys]
        place, items = mix(ITEM, self.seed, epoch), []
        for key, visit in zip(keys, visits, strict=False):
            seed_streams(mix(place, number_of(key), visit))
            if self.in_lists:
                return self.dataset.__getitems__(keys)
            items.append(self.dataset[key])
        return items


def own_part(batch: Any, rank: int, ranks: int) -> tuple[Any, int]:
    """This rank's rows of a batch that was read whole, and how many there are."""
    try:
        count = batch_size(batch)
    except TypeError:
        raise TypeError(
            f"the dataset's items are taken for batches, as batch_size is None, but a {type(batch).__name__} has no "
            f"rows to divide among {ranks} ranks; give a batch_size, or divide=False to give each rank the whole"
        ) from None
    low, high = own_rows(count, rank, ranks)
    return split(batch, count, [low, high - low, count - high])[1], count


class Rows(Dataset[Any]):
    """Reads the batch of a job from tensors, all samples at once: the bits of default_collate over the items."""

    def __init__(self, dataset: Any, tensors: Sequence[Tensor], rows: Tensor | None) -> None:
        self.dataset, self.tensors, self.rows = dataset, tensors, rows

    def __getitem__(self, job: Job) -> list[Tensor]:
        keys = torch.as_tensor(job[2])
        if self.rows is not None:
            keys = self.rows[keys]
        return [tensor.index_select(0, keys.to(tensor.device)) for tensor in self.tensors]


def rows_of(dataset: Any) -> tuple[Sequence[Tensor], Tensor | None] | None:
    """The tensors of a TensorDataset and the rows that its Subsets choose, if that is what it is."""
    if type(dataset) is TensorDataset:
        plain = all(type(t) is Tensor and t.layout is torch.strided and not t.is_nested for t in dataset.tensors)
        return (dataset.tensors, None) if plain else None
    if type(dataset) is Subset and (found := rows_of(dataset.dataset)):
        tensors, rows = found
        chosen = torch.as_tensor(dataset.indices)
        if chosen.dtype == torch.int64 and chosen.dim() == 1 and bool((chosen >= 0).all()):
            return tensors, chosen if rows is None else rows[chosen]
    return None


def _reads_lists(dataset: Any) -> bool:
    """Has it a `__getitems__` that does more than call its parts' item by item, as Subset's and StackDataset's?"""
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


class Stream(IterableDataset[Any]):
    """A stream that begins each pass with streams seeded for the epoch, in a worker that stays alive too.

    Each rank reads all of it, and keeps its own rows of each batch.
    """

    def __init__(self, dataset: Iterable[Any], collate: Callable[[Any], Any], seed: int, *, batched: bool) -> None:
        self.dataset, self.collate, self.seed, self.batched = dataset, collate, seed, batched
        self.draws = collate not in (default_collate, default_convert)
        self.place: Tensor = torch.tensor([0, 0, 1]).share_memory_()  # type: ignore[no-untyped-call]

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        epoch, self.rank, self.ranks = self.place.tolist()
        self.here, self.taken = (self.seed, epoch, info.id if info else 0), 0
        seed_streams(mix(STREAM, *self.here))
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)
        return iter(self.dataset)

    def batch(self, items: Any) -> Any:
        """The collate_fn of an engine: among several ranks, this one's part, and how many samples there are."""
        if self.ranks == 1:
            return self.collate(items)
        if not self.batched:
            return own_part(self.collate(items), self.rank, self.ranks)
        low, high = own_rows(len(items), self.rank, self.ranks)
        # What collate draws for its own rows must not move the stream, which is to be the same on all ranks.
        with kept_streams() if self.draws else nullcontext():
            if self.draws:
                seed_streams(mix(COLLATE, *self.here, self.taken, self.rank))
                self.taken += 1
            return self.collate(items[low:high]), len(items)


def read_stream(
    engines: Engines, name: str, epoch: int, first: int, length: int | None, rank: int, ranks: int
) -> Iterator[Any]:
    """The batches of a pass from number `first` on, to the stream's end or to `length`."""
    inside, end, count = save_streams(), object(), 0

    def start(engine: Any) -> Iterator[Any]:
        nonlocal inside
        engine.dataset.place.copy_(torch.tensor([epoch, rank, ranks]))
        with kept_streams():
            source: Iterator[Any] = iter(engine)
            inside = save_streams()
        return source

    with engines.run(epoch, start) as source:
        while length is None or count < length:
            with kept_streams():
                restore_streams(inside)
                batch = next(source, end)
                inside = save_streams()
            if batch is end:
                break
            count += 1
            if count > first:
                yield batch
    if count == 0:
        raise ValueError(f"{name} gave no batch in epoch {epoch}: is there data in it?")
    if length is not None and count < length:
        raise ValueError(
            f"{name} ended after {count} batches, but state.epoch_length is {length}; make the stream longer, or "
            "leave epoch_length out of init_state and call state = ll.end_epoch(state) after the for loop"
        )
    if count <= first:
        raise ValueError(
            f"{name} ended after {count} batches, and the state stands at batch {first} of epoch {epoch}; "
            "call state = ll.end_epoch(state) after the for loop over a stream"
        )
