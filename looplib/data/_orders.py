"""Where everything random in the data comes from: the order of an epoch, and the draws made while reading it.

Both are functions of a place, not of a stream that goes on. The global batches of an epoch are planned from
(seed, epoch) before anything is read; and for the moment of reading, the three global random streams (torch,
`random`, numpy) are seeded for the place that is read, and put back after.
"""

from __future__ import annotations

import operator
import random
import sys
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, chain, islice
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from looplib._core import interrupts as _interrupts
from looplib._core.random import mix

Order = Callable[[int, torch.Generator], Any]


# Words, not 0 to 3, so that no seed here is one that a step draws its dropout from.
ORDER, ITEM, COLLATE, STREAM = (int.from_bytes(word, "big") for word in (b"order", b"item", b"collate", b"stream"))


def save_streams() -> tuple[Any, ...]:
    numpy = sys.modules.get("numpy")
    return (
        torch.default_generator.get_state(),
        random.getstate(),
        numpy and numpy.random.get_state(legacy=False),
    )


def restore_streams(saved: tuple[Any, ...]) -> None:
    torch.default_generator.set_state(saved[0])
    random.setstate(saved[1])
    if saved[2] is not None:
        sys.modules["numpy"].random.set_state(saved[2])


def seed_streams(seed: int) -> None:
    torch.default_generator.manual_seed(seed)  # torch.manual_seed looks through all devices, at 100 us
    random.seed(seed)
    if numpy := sys.modules.get("numpy"):
        # torch takes the low 32 bits: numpy, a Mersenne twister as well, would draw the same words from them.
        numpy.random.seed(seed >> 31)


@contextmanager
def kept_streams() -> Iterator[None]:
    """Whatever is drawn or seeded inside, the global streams go on after it as if it had not been."""
    _interrupts.install()
    saved, thread = save_streams(), threading.get_ident()
    try:
        yield
    finally:
        _interrupts.begin_hold(thread)
        try:
            restore_streams(saved)
        finally:
            _interrupts.end_hold(thread)
            _interrupts.deliver()


def own_rows(count: int, rank: int, ranks: int) -> tuple[int, int]:
    """Where a rank's rows of a global batch begin and end, as by torch.tensor_split.

    Where there is none for it, the first row stands in.
    """
    if rank >= count:
        return 0, min(1, count)
    each, more = divmod(count, ranks)
    low = rank * each + min(rank, more)
    return low, low + each + (rank < more)


@dataclass(frozen=True, eq=False)
class Plan:
    """The global batches of one epoch, as keys of the dataset: set first, divided and read later.

    Attributes:
        keys: every sample of the epoch in order: (samples,) int64, or a list where keys are not ints.
        ends: where in `keys` each batch ends; the last end may lie beyond.
        visits: (samples,) how often that key has come before in the epoch; None where none comes twice.
    """

    keys: Tensor | list[Any]
    ends: Sequence[int]
    visits: Tensor | None

    def __len__(self) -> int:
        return len(self.ends)

    def batch(self, k: int, rank: int = 0, ranks: int = 1) -> tuple[Tensor | list[Any], Tensor | None]:
        """This rank's part of a batch: keys, and how often each came before."""
        first = self.ends[k - 1] if k else 0
        part = slice(first, self.ends[k])
        if ranks > 1:
            low, high = own_rows(self.size(k), rank, ranks)
            part = slice(first + low, first + high)
        return self.keys[part], None if self.visits is None else self.visits[part]

    def without(self, keys: Collection[Any]) -> Plan:
        """The same batches with these keys taken out of them; one that would be empty has a key of its neighbours."""
        if isinstance(self.keys, Tensor):
            kept = ~torch.isin(self.keys, torch.tensor([operator.index(key) for key in keys], dtype=torch.int64))
            left: Tensor | list[Any] = self.keys[kept]
        else:
            kept = torch.tensor([key not in keys for key in self.keys])
            left = [key for key in self.keys if key not in keys]
        before = torch.cat([torch.zeros(1, dtype=torch.int64), kept.cumsum(0)])
        ends = before[torch.tensor(self.ends).clamp_(max=len(self.keys))]
        places = torch.arange(len(ends))
        most = ends[-1] - places.flip(0)  # so that one is left for each that follows
        ends = torch.minimum((ends - places).clamp_(min=1).cummax(0).values + places, most)
        return Plan(left, ends.tolist(), None if self.visits is None else self.visits[kept])

    def size(self, k: int) -> int:
        """Samples in a batch."""
        return min(self.ends[k], len(self.keys)) - (self.ends[k - 1] if k else 0)

    def smallest(self, first: int) -> int:
        """Which of the batches from `first` on has the fewest samples."""
        ends = torch.tensor([0, *self.ends]).clamp_(max=len(self.keys))
        return first + int(ends.diff()[first:].argmin())


@dataclass(frozen=True, eq=False)
class Sampling:
    """How epochs are planned.

    Attributes:
        order: `(epoch, generator) -> keys`.
        batch_size: keys in a batch, or None when `order` gives whole batches of keys.
        drop_last: leave out a last batch that is not full.
        distinct: known to give no key twice in an epoch.
        limit: batches after which an epoch ends, or None for all.
    """

    order: Order
    batch_size: int | None
    drop_last: bool
    distinct: bool
    limit: int | None = None


def plan_epoch(sampling: Sampling, seed: int, epoch: int) -> Plan:
    """The epoch's global batches: a pure function of its arguments, which reads nothing of the dataset."""
    generator = torch.Generator().manual_seed(mix(ORDER, seed, epoch))
    with kept_streams():
        seed_streams(mix(ORDER, seed, epoch, 1))
        found = sampling.order(epoch, generator)
        ends: Sequence[int]
        if sampling.batch_size is None:
            batches = [list(listed(batch)) for batch in islice(found, sampling.limit)]
            keys, ends = _as_keys(chain.from_iterable(batches)), list(accumulate(map(len, batches)))
        else:
            keys, size = _as_keys(found), sampling.batch_size
            ends = range(size, len(keys) + (1 if sampling.drop_last else size), size)[: sampling.limit]
            keys = keys[: ends[-1]] if ends else keys
    return Plan(keys, ends, None if sampling.distinct else _visits(keys))


def same_plan(one: Plan, other: Plan) -> bool:
    return listed(one.keys) == listed(other.keys) and list(one.ends) == list(other.ends)


def listed(values: Any) -> Any:
    return values.tolist() if isinstance(values, Tensor) else values


def _as_keys(found: Any) -> Tensor | list[Any]:
    if isinstance(found, Tensor):
        if found.dim() != 1 or found.is_floating_point() or found.dtype == torch.bool:
            raise TypeError(
                f"the sampler gave a {found.dtype} tensor of shape {tuple(found.shape)}; "
                "expected indices of the dataset: a 1-D tensor of an integer type"
            )
        return found.cpu().long()
    keys = list(found)
    try:
        return torch.tensor([operator.index(key) for key in keys], dtype=torch.int64)
    except TypeError:
        return keys


def number_of(key: Any) -> int:
    """An int that stands for a key of the dataset, so that its draws can be seeded by it."""
    try:
        return operator.index(key)
    except TypeError:
        return crc32(repr(key).encode())


def _visits(keys: Tensor | list[Any]) -> Tensor:
    numbers = keys if isinstance(keys, Tensor) else torch.tensor([number_of(key) for key in keys])
    ranked, places = numbers.sort(stable=True)
    visits = torch.empty_like(places)
    visits[places] = torch.arange(len(ranked)) - torch.searchsorted(ranked, ranked)
    return visits


def in_order(count: int) -> Order:
    return lambda epoch, generator: torch.arange(count)


def shuffled(count: int) -> Order:
    return lambda epoch, generator: torch.randperm(count, generator=generator)


def weighted(weights: Tensor, count: int) -> Order:
    """With replacement. By cumulated weights: torch.multinomial ends at 2**24 of them."""
    bounds = weights.cumsum(0)

    def order(epoch: int, generator: torch.Generator) -> Tensor:
        # The largest number that rand gives, 1 - 2**-53, times the total is still rounded below the total.
        points = torch.rand(count, dtype=torch.float64, generator=generator) * bounds[-1]
        return torch.searchsorted(bounds, points, right=True)

    return order


def similar_lengths(lengths: Tensor, batch_size: int, drop_last: bool, pool: int | None) -> Order:
    """Batches cut from pools of so many, each sorted by length, and then shuffled as batches.

    A pool is 50 batches, or a quarter of a small dataset, so that its batches differ from epoch to epoch. The
    batch that is not full stays last.
    """
    count = len(lengths)
    pool_size = batch_size * (pool or max(1, min(50, count // (4 * batch_size))))

    def order(epoch: int, generator: torch.Generator) -> Tensor:
        keys = torch.randperm(count, generator=generator)
        if drop_last:  # before the sort: after it, what is dropped would be the longest
            keys = keys[: count - count % batch_size]
        pools = torch.arange(len(keys)) // pool_size
        by_length = lengths[keys].argsort(stable=True)
        keys = keys[by_length][pools[by_length].argsort(stable=True)]
        full = len(keys) // batch_size
        batches = keys[: full * batch_size].view(full, batch_size)[torch.randperm(full, generator=generator)]
        return torch.cat([batches.flatten(), keys[full * batch_size :]])

    return order


def order_of(sampler: Callable[[int, torch.Generator], Any] | Iterable[Any]) -> Order:
    """A user's order: a function of (epoch, generator), or an object to iterate, such as a torch Sampler.

    An object's draws come from the global streams, which are seeded by then, or from torch generators that
    it or the samplers within it hold, which are seeded here.
    """
    if not isinstance(sampler, Iterable):
        return sampler

    def order(epoch: int, generator: torch.Generator) -> list[Any]:
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)
        owned = []
        part: Any = sampler
        while part is not None:
            if isinstance(getattr(part, "generator", None), torch.Generator):
                owned.append((part.generator, part.generator.get_state()))
                part.generator.set_state(generator.get_state())
            part = getattr(part, "sampler", None)
        try:
            return list(sampler)
        finally:
            for own, state in reversed(owned):  # the same one may be held twice
                own.set_state(state)

    return order
