"""Sources of a loader: indexed datasets, and streams, which are read from the start in every epoch."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils.data import get_worker_info

from looplib._core import torch_private, trees
from looplib._core.checks import check, is_plain, warn
from looplib._core.random import mix
from looplib._core.ranks import is_first
from looplib.data._blocks import ShuffledStream
from looplib.data._orders import Order
from looplib.data._plan import Plan, own_rows
from looplib.data._position import check_position, stored_position
from looplib.data._readers import Counts, Job, Reader
from looplib.data._workers import Engines
from looplib.data.random_streams import STREAM, restore_streams, save_streams, seed_streams
from looplib.types import TrainState


@dataclass(frozen=True, eq=False)
class Samples:
    """Source of a loader over a dataset with indices.

    Attributes:
        engines: read the jobs.
        order: order of the samples.
        plan: function that returns the plan of an epoch.
        length: batches in epoch 0.
        batched: True if a batch has several keys and a rank reads only its own. Otherwise an item is a batch.
    """

    engines: Engines
    order: Order
    plan: Callable[[int], Plan]
    length: int
    batched: bool

    def jobs(self, state: TrainState, rank: int, ranks: int, *, again: bool = False, read: int = 0) -> Iterator[Job]:
        """Jobs of the rest of the state's epoch, after checking that the state is at one of its batches or at its end.

        The first `read` samples of the state's batch are left out.
        """
        plan = self.plan(state.epoch)
        check_position(state, len(plan), self.length, again=again)
        # The iterator holds no state, which a loop would keep alive until the end of the epoch.
        return _jobs(plan, state.epoch, state.batch, rank, ranks, self.batched, read)

    def read(self, state: TrainState, rank: int, ranks: int, *, again: bool, read: int = 0) -> Iterator[Any]:
        """Remaining batches of the state's epoch, as pairs: this rank's part, and the samples in the batch.

        The first `read` samples of the state's batch are left out. There are no batches at the end of an epoch,
        except that this raises ValueError if it was asked for `again`.
        """
        return self.engines.read(state.epoch, self.jobs(state, rank, ranks, again=again, read=read))


def _jobs(plan: Plan, epoch: int, first: int, rank: int, ranks: int, batched: bool, read: int) -> Iterator[Job]:
    """The jobs refer to no loader, since an engine that is left early holds the rest."""
    for k in range(first, len(plan)):
        left_out = read if k == first else 0
        start, size = plan.start(k) + left_out, plan.size(k) - left_out
        if not size:  # the run has read this epoch to its end
            return
        low, high = own_rows(size, rank, ranks) if batched else (0, size)
        part = slice(start + low, start + high)
        visits = None if plan.visits is None else plan.visits[part]
        yield Job(epoch, k, rank, ranks, size, plan.keys[part], visits)


class Next(NamedTuple):
    """The next batch of a stream to read, or one rank's part of it.

    Attributes:
        epoch, batch: position of the batch.
        rank, ranks: this rank and the number of ranks.
        begins: True if a pass begins in the process that reads this batch.
        position: what the dataset's `load_state_dict` gets then, if anything.
        read: number of the batch's first samples to leave out, since the run has read them.
    """

    epoch: int
    batch: int
    rank: int
    ranks: int
    begins: bool
    position: Any
    read: int


class Stream(Reader):
    """Read the batches of a pass, with global random streams that persist from batch to batch.

    Each rank reads the whole stream and keeps its own samples of each batch.
    """

    iterator: Iterator[Any]
    streams: tuple[Any, ...]

    def __init__(
        self,
        dataset: Any,
        collate_fn: Callable[[Any], Any] | None,
        seed: int,
        counts: Counts,
        batch_size: int | None,
        drop_last: bool,
    ) -> None:
        super().__init__(dataset, collate_fn, seed, counts, batched=batch_size is not None)
        self.batch_size = batch_size or 1
        self.least = self.batch_size if drop_last else 1

    def read(self, job: Next) -> tuple[list[Any], int] | None:
        if job.begins:
            self.iterator = self._begun(job)
        else:
            restore_streams(self.streams)
        items = [*itertools.islice(self.iterator, self.batch_size)]
        self.streams, size = save_streams(), len(items)
        if size < self.batch_size:
            self.iterator = iter(())  # it has ended, and is not asked again
        if size < self.least:
            return None
        del items[: job.read]
        size = len(items)
        if not size:
            return None
        low, high = own_rows(size, job.rank, job.ranks) if self.batched else (0, 1)
        return items[low:high], size

    def _begun(self, job: Next) -> Iterator[Any]:
        info: Any = get_worker_info()
        if isinstance(self.dataset, ShuffledStream):
            return self._begun_at(job.batch, job.epoch, info.num_workers if info else 1)
        before = 0 if job.position is None else job.batch
        seed_streams(mix(STREAM, self.seed, job.epoch, info.id if info else 0, *([before] if before else [])))
        if job.position is not None and not before:
            self.dataset.load_state_dict(copy.deepcopy(job.position))  # of the start, which may hold the first epoch
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(job.epoch)
        if before:
            self.dataset.load_state_dict(copy.deepcopy(job.position))  # of this epoch, which set_epoch may start over
        return iter(self.dataset)

    def _begun_at(self, batch: int, epoch: int, workers: int) -> Iterator[Any]:
        """Samples of a batch and of each later one that is this worker's turn."""
        seed_streams(mix(STREAM, self.seed, epoch, batch))
        samples = self.dataset.samples(batch * self.batch_size, self.seed, epoch)
        return (sample for number, sample in enumerate(samples) if number // self.batch_size % workers == 0)


def warn_if_alike(name: str, begun: Sequence[Any]) -> None:
    """Warn if the first two workers begin with the same samples, and the first continues with different ones.

    Args:
        name: the stream's name.
        begun: the first batch of each worker, and the second batch of the first.
    """
    if _same(begun[0], begun[1]) and not _same(begun[0], begun[-1]) and is_first():
        warn(
            f"{name} is read by {len(begun) - 1} workers, and the first two begin with the same samples, so each sample comes "
            "once for each worker: let its __iter__ divide the samples by torch.utils.data.get_worker_info(), or give "
            "num_workers=0"
        )


def _same(one: Any, other: Any) -> bool:
    """True for batches of equal tensors, numbers and strings."""
    ones, others = (torch_private.pytree.tree_flatten(batch) for batch in (one, other))
    return bool(ones[0]) and ones[1] == others[1] and all(map(_equal, ones[0], others[0]))


def _equal(one: Any, other: Any) -> bool:
    comparable = is_plain(one) if isinstance(one, Tensor) else isinstance(one, (str, bytes, int, float))
    return comparable and trees.same(one, other)


class Streamed:
    """Source of a loader over a stream.

    Attributes:
        engines: read the batches.
        name: the stream's name in errors.
        seekable: the dataset, if a pass may begin at any batch.
        keeps_position: True if the dataset has `state_dict`, and is read in this process.
        fresh: the dataset's state before anything was read.
        divide: True if all ranks read the same samples.
        compared: True once the first batches of the workers have been compared, in the first pass.
        yielded: epoch, and number of its batches that were yielded, of the last pass.
        moved: True while the dataset is within a pass that began at a position, so that it must be put back for a pass
            from its start.
    """

    def __init__(self, engines: Engines, dataset: Any, divide: bool) -> None:
        self.engines, self.name, self.divide = engines, f"the stream ({type(dataset).__name__})", divide
        self.seekable = dataset if isinstance(dataset, ShuffledStream) else None
        # Workers and pin_memory read ahead of the loop.
        self.keeps_position = (
            engines.in_process and hasattr(dataset, "load_state_dict") and hasattr(dataset, "state_dict")
        )
        self.compared = engines.workers == 1
        self.fresh = copy.deepcopy(dataset.state_dict()) if self.keeps_position else None
        self.yielded = 0, 0
        self.moved = False

    def read(self, state: TrainState, rank: int, ranks: int, *, again: bool, read: int = 0) -> Iterator[Any]:
        """Remaining batches of the state's epoch, as pairs: this rank's part, and the samples in the batch.

        The first `read` samples of the state's batch are left out. A pass begins at the position that `with_position` has
        kept, if it is that of the state's batch, or at the stream's start. It ends with the stream or after `epoch_length`
        batches. It may have no batches left, but not if the epoch was asked for `again`, which would never end.
        """
        epoch, first, length = state.epoch, state.batch, state.epoch_length
        position = stored_position(state, self.name, self.divide, read) if self.keeps_position else None
        workers = self.engines.workers

        def batches() -> Iterator[Any]:
            count = before = first if self.seekable or position is not None else 0
            start = self.fresh if position is None and self.moved else position
            self.moved = self.moved or position is not None
            jobs = (
                Next(epoch, k, rank, ranks, k - before < workers, start, read if k == first else 0)
                for k in itertools.count(before)
            )
            ended = 0
            begun: list[Any] = []
            with closing(self.engines.read(epoch, jobs)) as parts:
                while ended < workers and (length is None or count < length):
                    part = next(parts)
                    if not self.compared:
                        begun.append(part)
                        if len(begun) > workers:
                            self.compared = True
                            warn_if_alike(self.name, begun)
                            begun.clear()
                    ended = 0 if part else ended + 1  # each worker ends by itself
                    if part:
                        count += 1
                        self.yielded = epoch, count
                        if count > first:
                            yield part
                self.moved = False  # the dataset stands where it would without the position
            if self.seekable and first and count == first:
                self._check_reached(first, read)
            check(count or read, f"{self.name} gave no batch in epoch {epoch}: is there data in it?")
            lost = (
                ""
                if position is None
                else " (It was read from a kept position: samples of a shuffle buffer are not seen again. To leave out the "
                f"rest of this epoch: state.replace(epoch={epoch + 1}, batch=0).)"
            )
            check(
                length is None or count >= length,
                f"{self.name} ended after {count} batches, but state.epoch_length is {length}; make the stream longer, "
                f"or leave epoch_length= out of init_state and call state = ll.state.end_epoch(state) after the for loop{lost}",
            )
            check(
                count > first or (count == first and not again),
                f"{self.name} ended after {count} batches, and the state stands at batch {first} of epoch {epoch}; call "
                "state = ll.state.end_epoch(state) after the for loop over a stream (now, if the loop was interrupted before "
                "that line)",
            )

        return batches()  # which holds no state: a loop would keep it alive until the end of the epoch

    def _check_reached(self, batch: int, read: int) -> None:
        """Raise ValueError if the stream has ended before the batch that the run has read last."""
        size = self.engines.reader.batch_size
        last = batch * size + read - 1 if read else (batch - 1) * size
        check(
            self.seekable is not None and self.seekable.has(last),
            f"{self.name} has no sample {last}, and the state stands after it, at batch {batch}: has the source fewer samples "
            "than before, or the loader another batch_size?",
        )
