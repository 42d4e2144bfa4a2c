"""Epoch plans: the batches of an epoch as indices, decided before anything is read.

A plan is a function of (seed, epoch). Batches are planned first and divided among ranks and workers later, so they
are the same for any number of either, and a run can start at any batch without reading the earlier ones.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, compress, islice
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from looplib._core.checks import check
from looplib._core.random import mix
from looplib.data._permutation import Computed
from looplib.data._random_streams import ORDER, kept_streams, seed_streams

Draw = Callable[[int, torch.Generator], Any]  # (epoch, generator) -> the epoch's keys, or its batches of keys


def own_rows(count: int, rank: int, ranks: int) -> tuple[int, int]:
    """Range of a rank's samples in a global batch (first, one past the last), as by `torch.tensor_split`.

    A rank without samples gets the first sample in their place.
    """
    if rank >= count:
        return 0, min(1, count)
    each, more = divmod(count, ranks)
    low = rank * each + min(rank, more)
    return low, low + each + (rank < more)


@dataclass(frozen=True, eq=False)
class Plan:
    """Global batches of one epoch, as keys of the dataset.

    Attributes:
        keys: every sample of the epoch in order: int64 of shape (samples,), a list if keys are not ints, or for very
            large datasets a function.
        ends: index in `keys` at which each batch ends; the last one may lie beyond the end.
        visits: (samples,) number of earlier occurrences of that key in the epoch; None if all are distinct.
        read: index of a batch, and the number of its first samples that a run with another batch size has read.
    """

    keys: Tensor | list[Any] | Computed
    ends: Sequence[int]
    visits: Tensor | None
    read: tuple[int, int] = (0, 0)

    def __len__(self) -> int:
        return len(self.ends)

    def part(self, k: int, rank: int = 0, ranks: int = 1) -> slice:
        """Positions of one rank's part of a batch."""
        first = self._start(k)
        low, high = own_rows(self.size(k), rank, ranks)
        return slice(first + low, first + high)

    def numbers(self, part: slice) -> tuple[Tensor, Tensor | None]:
        """Of the samples at these positions: a number for each key, and the number of its earlier occurrences."""
        keys = self.keys[part]
        numbers = keys if isinstance(keys, Tensor) else _numbers_of(keys)
        return numbers, None if self.visits is None else self.visits[part]

    def without(self, keys: Collection[Any]) -> Plan:
        """The same batches without these keys. A batch that would be empty takes a key from its neighbors."""
        if isinstance(self.keys, Computed):  # takes the memory of all keys
            return replace(self, keys=self.keys[:]).without(keys)
        if isinstance(self.keys, Tensor):
            kept = ~torch.isin(self.keys, torch.tensor([operator.index(key) for key in keys], dtype=torch.int64))
            left: Tensor | list[Any] = self.keys[kept]
        else:
            kept = torch.tensor([key not in keys for key in self.keys])
            left = [*compress(self.keys, kept)]
        before = torch.cat([torch.zeros(1, dtype=torch.int64), kept.cumsum(0)])
        ends = before[torch.tensor(self.ends).clamp_(max=len(self.keys))]
        batches = torch.arange(len(ends))
        most = ends[-1] - batches.flip(0)  # leaves at least one for each of the following batches
        ends = torch.minimum((ends - batches).clamp_(min=1).cummax(0).values + batches, most)
        return Plan(left, ends.tolist(), None if self.visits is None else self.visits[kept])

    def size(self, k: int) -> int:
        """Number of samples in a batch."""
        return min(self.ends[k], len(self.keys)) - self._start(k)

    def _start(self, k: int) -> int:
        batch, read = self.read
        return (self.ends[k - 1] if k else 0) + (read if k == batch else 0)


@dataclass(frozen=True, eq=False)
class Epochs:
    """Plans of all epochs: `epochs(epoch)` returns the plan of one, without reading the dataset.

    Attributes:
        draw: `(epoch, generator) -> keys`.
        seed: seed of the generator and the global streams, together with the epoch.
        batch_size: keys in a batch, or None if `draw` returns whole batches of keys.
        drop_last: drop an incomplete last batch.
        limit: number of batches after which an epoch ends, or None for all.
        distinct: `draw` gives no key twice in an epoch.
        per_rank: samples per batch and rank, if they are given. An epoch then has the same samples on any number of ranks:
            `drop_last` drops those that do not fill a rank's batch.
    """

    draw: Draw
    seed: int
    batch_size: int | None
    drop_last: bool
    limit: int | None
    distinct: bool
    per_rank: int | None = None

    def __call__(self, epoch: int) -> Plan:
        generator = torch.Generator().manual_seed(mix(ORDER, self.seed, epoch))
        with kept_streams():
            seed_streams(mix(ORDER, self.seed, epoch, 1))
            drawn = self.draw(epoch, generator)
            ends: Sequence[int]
            if self.batch_size is None:
                batches = [list(listed(batch)) for batch in islice(drawn, self.limit)]
                keys, ends = _as_keys(chain.from_iterable(batches)), list(accumulate(map(len, batches)))
            else:
                keys, ends = self._in_batches(_as_keys(drawn), self.batch_size)
        return Plan(keys, ends, None if self.distinct else _visits(keys))

    def _in_batches(
        self, keys: Tensor | list[Any] | Computed, size: int
    ) -> tuple[Tensor | list[Any] | Computed, Sequence[int]]:
        """The keys of an epoch, and the ends of its batches of this size."""
        if self.per_rank and self.drop_last:
            keys = keys[: len(keys) // self.per_rank * self.per_rank]
        whole_batches = self.drop_last and not self.per_rank
        ends = range(size, len(keys) + (1 if whole_batches else size), size)[: self.limit]
        if not isinstance(keys, Computed):
            keys = keys[: ends[-1]] if ends else keys
        return keys, ends

    def samples(self, epoch: int) -> int:
        """Number of samples that the order draws for an epoch, before `limit`, and `drop_last` unless it is per rank."""
        return len(replace(self, drop_last=self.drop_last and self.per_rank is not None, limit=None)(epoch).keys)


def same_plan(one: Plan, other: Plan) -> bool:
    """True if two plans have the same batches."""
    return listed(one.keys) == listed(other.keys) and list(one.ends) == list(other.ends)


def listed(values: Any) -> Any:
    """Convert a tensor to a list; return everything else unchanged."""
    return values.tolist() if isinstance(values, Tensor) else values


def _numbers_of(keys: list[Any]) -> Tensor:
    """Numbers to seed the draws of these samples with."""
    return torch.tensor([_number_of(key) for key in keys], dtype=torch.int64)


def _number_of(key: Any) -> int:
    try:
        return operator.index(key)
    except TypeError:
        return crc32(repr(key).encode())


def _as_keys(drawn: Iterable[Any] | Tensor | Computed) -> Tensor | list[Any] | Computed:
    if isinstance(drawn, Computed):
        return drawn
    if isinstance(drawn, Tensor):
        check(
            drawn.dim() == 1 and not drawn.is_floating_point() and drawn.dtype != torch.bool,
            f"the sampler gave a {drawn.dtype} tensor of shape {tuple(drawn.shape)}; expected indices of the dataset: a "
            "1-D tensor of an integer type",
            TypeError,
        )
        return drawn.cpu().long()
    keys = list(drawn)
    try:
        return torch.tensor([operator.index(key) for key in keys], dtype=torch.int64)
    except TypeError:
        return keys


def _visits(keys: Tensor | list[Any] | Computed) -> Tensor:
    assert not isinstance(keys, Computed), "its keys are distinct"
    numbers = keys if isinstance(keys, Tensor) else _numbers_of(keys)
    ranked, positions = numbers.sort(stable=True)
    visits = torch.empty_like(positions)
    visits[positions] = torch.arange(len(ranked)) - torch.searchsorted(ranked, ranked)
    return visits
