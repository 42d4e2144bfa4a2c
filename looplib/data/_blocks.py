"""Block shuffling: a shuffle buffer whose position is a number, for datasets with indices, shards and streams."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate, count, islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from looplib._core import torch_private
from looplib._core.checks import check, check_count, is_count
from looplib._core.random import mix
from looplib.data._orders import Epoch, Order
from looplib.data.random_streams import BLOCK

_HELD = 2  # blocks: a batch may begin in one and end in the next


class Shards(Dataset[Any]):
    """Dataset of samples in shards, of which each process holds the last two blocks that it has read."""

    def __init__(self, read: Callable[[int, int], Iterable[Any]], lengths: Sequence[int], buffer: int) -> None:
        self.buffer = buffer
        self._read, self._ends = read, [*accumulate(lengths)]
        self._blocks: dict[int, list[Any]] = {}

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> Any:
        check(0 <= index < len(self), f"index is {index}, and there are {len(self)} samples", IndexError)
        block, offset = divmod(index, self.buffer)
        if block not in self._blocks:
            first = block * self.buffer
            samples = [*self._samples(first, min(first + self.buffer, len(self)))]
            while len(self._blocks) >= _HELD:
                self._blocks.pop(next(iter(self._blocks)))
            self._blocks[block] = samples
        return self._blocks[block][offset]

    def _samples(self, first: int, end: int) -> Iterator[Any]:
        """Samples from `first` to before `end`, of as many shards as they lie in."""
        while first < end:
            shard = bisect_right(self._ends, first)
            begin = self._ends[shard - 1] if shard else 0
            length = min(end, self._ends[shard]) - first
            with torch_private.outside_of_workers():  # each worker reads the blocks in which it has samples
                samples = [*islice(self._read(shard, first - begin), length)]
            check(
                len(samples) == length,
                f"shard {shard} ended after {first - begin + len(samples)} samples, and its length is "
                f"{self._ends[shard] - begin}: give shards(lengths=...) the numbers of samples that the shards have",
            )
            yield from samples
            first += length

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_blocks": {}}  # workers read their own


def shards(read: Callable[[int, int], Iterable[Any]], lengths: Sequence[int], *, buffer: int) -> Shards:
    """Dataset of samples in shards that are read forward, such as files, from any sample on.

    >>> import looplib as ll
    >>> files = [["a", "b", "c"], ["d", "e"]]
    >>> def read(shard, start):  # the samples of a shard, from the one with this number on
    ...     return iter(files[shard][start:])
    >>> dataset = ll.data.shards(read, lengths=[3, 2], buffer=4)
    >>> len(dataset), dataset[3]
    (5, 'd')
    >>> loader = ll.make_loader(dataset, batch_size=2, order=ll.data.shuffled_blocks(4))
    >>> [len(batch) for batch in loader(ll.TrainState())]
    [2, 2, 1]

    Samples are numbered through all shards. To read one, the `buffer` consecutive samples of its block are read, and the last
    two blocks stay in memory in each process, so orders that stay within blocks (`ll.data.shuffled_blocks`, `sequential`)
    read each block once in an epoch, and a resumed run reads no more than the blocks of its next batch. With workers or
    several ranks, each process reads the blocks in which it has samples. Within `read`,
    `torch.utils.data.get_worker_info()` is None, so that a shard never divides itself among the workers.

    Draws in `read` from the global random streams are not reproducible. Draw in `collate_fn`, or in a dataset around this
    one, whose `__getitem__` is seeded for each sample.

    Args:
        read: `read(shard, start)`, an iterable over the samples of a shard from `start` on. It should seek to there, as a file
            with an index, a row group of Parquet, or a slice of an array can. A source that can only be read from its
            beginning gives `itertools.islice(samples, start, None)`, and is then read from the beginning of the shard for
            each of its blocks.
        lengths: number of samples in each shard.
        buffer: number of samples in a block.

    Raises:
        TypeError: `read` is not a function.
        ValueError: `lengths` are not ints of at least 1, or `buffer` is below 1; when samples are read, if a shard has fewer
            samples than its length.
    """
    check(callable(read), f"read is a {type(read).__name__}; give a function (shard, start) -> samples", TypeError)
    sizes = [*lengths]
    check(
        bool(sizes) and all(map(is_count, sizes)),
        f"lengths is {lengths!r:.60}; give the number of samples in each shard, ints of at least 1",
    )
    check_count("buffer", buffer)
    return Shards(read, sizes, buffer)


def shuffled_blocks(buffer: int) -> Order:
    """Block shuffling: like a shuffle buffer, but the position in it is a number.

    >>> import looplib as ll
    >>> loader = ll.make_loader(range(8), batch_size=4, order=ll.data.shuffled_blocks(4))
    >>> first, second = loader(ll.TrainState())
    >>> sorted(first.tolist()), sorted(second.tolist())
    ([0, 1, 2, 3], [4, 5, 6, 7])

    Each block of `buffer` consecutive samples is shuffled by itself, by a permutation that is a function of (seed, epoch,
    number of the block). So the sample at any position is known without reading those before it: a run that is resumed
    reads one block, or two if its next batch lies in two, with any number of ranks and workers.

    The shuffle buffer of a stream (Hugging Face `IterableDataset.shuffle`, WebDataset) emits a random sample of the last
    `buffer`, and what it holds depends on all samples before, so it is resumed by reading them again, or without those that
    it held. In such a buffer a sample may come much later than it is stored; here it moves by less than `buffer`. Neither
    mixes samples that are stored far apart, so store them in random order.

    The dataset needs a length and an index: an array, a memory map, a Hugging Face `Dataset`, or files of which
    `ll.data.shards` makes one. For a stream without an index, see `ll.data.shuffled_stream`. The order takes 8 bytes per sample
    on each rank, as any order does.

    Args:
        buffer: number of samples in a block. For `ll.data.shards`, its own `buffer`.

    Raises:
        ValueError: `buffer` is below 1; or, from `make_loader`, it is not that of the shards, or the dataset is a stream.
    """
    check_count("buffer", buffer)

    def draw(epoch: Epoch) -> Tensor:
        held = epoch.dataset.buffer if isinstance(epoch.dataset, Shards) else buffer
        check(
            held == buffer,
            f"the shards have buffer={held}, and the order is shuffled_blocks({buffer}); give both the same",
        )
        blocks = torch.split(torch.arange(epoch.samples, device="cpu"), buffer)
        return torch.cat(
            [block[_permutation(len(block), epoch.seed, epoch.number, number)] for number, block in enumerate(blocks)]
        )

    return Order(f"shuffled_blocks({buffer})", draw, shuffles=True, distinct=True)


class ShuffledStream(IterableDataset[Any]):
    """Stream of samples that is shuffled block by block, and can begin at any sample."""

    def __init__(self, read: Callable[[int], Iterable[Any]], buffer: int) -> None:
        self.buffer, self._read = buffer, read

    def __iter__(self) -> Iterator[Any]:
        info: Any = get_worker_info()
        check(
            info is None or info.num_workers == 1,
            "a DataLoader with several workers, or a dataset in one, reads a shuffled_stream, of which each worker would give all "
            "samples: give the stream itself to ll.make_loader(stream, num_workers=...), whose workers take turns, with what "
            "is done to each sample in its read; or num_workers=0",
        )
        return self.samples(0, 0, 0)

    def samples(self, start: int, seed: int, epoch: int) -> Iterator[Any]:
        """Samples of an epoch from that with this number on."""
        first, offset = divmod(start, self.buffer)
        with torch_private.outside_of_workers():  # each worker reads the whole source
            reading = iter(self._read(first * self.buffer))
        for block in count(first):
            with torch_private.outside_of_workers():
                held = [*islice(reading, self.buffer)]
            for place in _permutation(len(held), seed, epoch, block).tolist()[offset:]:
                yield held[place]
            if len(held) < self.buffer:
                return
            offset = 0

    def has(self, index: int) -> bool:
        """True if there is a sample with this number."""
        return any(True for _ in islice(self._read(index), 1))


def shuffled_stream(read: Callable[[int], Iterable[Any]], *, buffer: int) -> ShuffledStream:
    """Stream with a shuffle buffer whose position is a number, for a source that can be read from any sample on.

    >>> import looplib as ll
    >>> def read(start):  # the samples of the source, from the one with this number on
    ...     return iter(range(start, 10))
    >>> loader = ll.make_loader(ll.data.shuffled_stream(read, buffer=4), batch_size=4)
    >>> [sorted(batch.tolist()) for batch in loader(ll.TrainState())]
    [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    >>> first, second, third = loader(ll.TrainState())
    >>> next(loader(ll.TrainState(batch=1))).equal(second)  # reads the second block alone
    True

    The order is that of `ll.data.shuffled_blocks`, and the number of samples need not be known. A resumed run reads one
    buffer, or two if its next batch lies in two. The batches are the same with any number of ranks and workers, and
    `with_position` is not needed. Each rank and each worker reads the whole source, and keeps its own samples. Within
    `read`, `torch.utils.data.get_worker_info()` is None, so a source that divides itself among the workers gives all samples
    to each of them. A source that divides itself among the ranks, as after `split_dataset_by_node` of Hugging Face
    `datasets`, cannot be known: give the undivided one.

    For a Hugging Face `IterableDataset`, `read` is `lambda start: dataset.skip(start)`, which reads what it skips again, but
    neither decodes nor maps it if `map` comes after `skip`. With shards whose lengths are known, `ll.data.shards` reads
    only the shard that it needs.

    Draws in `read` from the global random streams are not reproducible. Draw in `collate_fn`, which is seeded for each batch.

    Args:
        read: `read(start)`, an iterable over the samples of the source from `start` on, in the same order each time.
        buffer: number of samples in a block.

    Raises:
        TypeError: `read` is not a function.
        ValueError: `buffer` is below 1; from the loop, the source ends before the sample at which the run stands; or several
            workers of a DataLoader of torch's iterate over the stream, which would give each sample once for each of them.
    """
    check(callable(read), f"read is a {type(read).__name__}; give a function start -> samples", TypeError)
    check_count("buffer", buffer)
    return ShuffledStream(read, buffer)


def _permutation(length: int, seed: int, epoch: int, block: int) -> Tensor:
    generator = torch.Generator().manual_seed(mix(BLOCK, seed, epoch, block))
    return torch.randperm(length, generator=generator, device="cpu")
