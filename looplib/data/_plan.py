"""Epoch plans: the batches of an epoch as indices, decided before anything is read.

A plan is a function of (seed, epoch). Batches are planned first and divided among ranks and workers later, so they
are the same for any number of either, and a run can start at any batch without reading the earlier ones.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, islice
from typing import Any

import torch
from torch import Tensor

from looplib._core.checks import check, few
from looplib._core.random import mix
from looplib._core.samples import CountSamples, split
from looplib.data._orders import Epoch, Order, listed
from looplib.data.random_streams import ORDER, kept_streams, seed_streams


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
        keys: every sample of the epoch in order: int64 of shape (samples,).
        ends: index in `keys` at which each batch ends; the last one may lie beyond the end.
        visits: (samples,) number of earlier occurrences of that key in the epoch; None if all are distinct.
        drawn: number of samples that the order has drawn, of which `drop_last` and `max_batches` leave out the last.
    """

    keys: Tensor
    ends: Sequence[int]
    visits: Tensor | None
    drawn: int

    def __len__(self) -> int:
        return len(self.ends)

    def size(self, k: int) -> int:
        """Number of samples in a batch."""
        return min(self.ends[k], len(self.keys)) - self.start(k)

    @property
    def listed(self) -> tuple[list[Any], list[int]]:
        """Keys and ends as lists, to compare."""
        return listed(self.keys), [*self.ends]

    def start(self, k: int) -> int:
        """Position in `keys` of the first sample of a batch."""
        return self.ends[k - 1] if k else 0


def plan_of(
    order: Order,
    dataset: Any,
    batch_size: int | None,
    seed: int,
    drop_last: bool,
    max_batches: int | None,
    epoch: int,
) -> Plan:
    """The plan of an epoch, without reading the dataset.

    Args:
        order: draws the keys of an epoch, or its batches of keys.
        dataset: the dataset.
        batch_size: keys in a batch; None if each batch has one key, or if the order decides.
        seed: seed of the order's generator and the global streams, together with the epoch.
        drop_last: drop an incomplete last batch.
        max_batches: number of batches after which an epoch ends, or None for all.
        epoch: index of the epoch.
    """
    ends: Sequence[int]
    with kept_streams():
        seed_streams(mix(ORDER, seed, epoch, 1))
        generator = torch.Generator().manual_seed(mix(ORDER, seed, epoch))
        request = Epoch(dataset, batch_size, drop_last, epoch, seed, generator)
        if order.numbers is not None:
            count, samples = len(order.numbers), request.samples
            check(
                count == samples,
                f"{order} has {count} numbers; expected {samples}, one for each sample of the dataset",
            )
        drawn = order.draw(request)
        if order.whole_batches:
            batches = [list(listed(batch)) for batch in islice(_items(order, drawn), max_batches)]
            keys, ends = _as_keys(order, chain.from_iterable(batches)), list(accumulate(map(len, batches)))
        else:
            keys, size = _as_keys(order, drawn), batch_size or 1
            ends = range(size, len(keys) + (1 if drop_last else size), size)[:max_batches]
    count = len(keys)
    keys = keys[: ends[-1]] if ends else keys
    return Plan(keys, ends, None if order.distinct else _visits(keys), count)


def _items(order: Order, drawn: Any) -> Iterator[Any]:
    try:
        return iter(drawn)
    except TypeError as error:
        raise TypeError(f"{order} gave {drawn!r:.40}; expected indices of samples, or lists of them") from error


def _as_keys(order: Order, drawn: Iterable[Any] | Tensor) -> Tensor:
    if isinstance(drawn, Tensor):
        check(
            drawn.dim() == 1 and not drawn.is_floating_point() and drawn.dtype != torch.bool,
            f"{order} gave a {drawn.dtype} tensor of shape {tuple(drawn.shape)}; expected indices of the dataset: a "
            "1-D tensor of an integer type",
            TypeError,
        )
        return drawn.cpu().long()
    keys = [*_items(order, drawn)]
    kinds = {*map(type, keys)}
    check(
        bool not in kinds and all(hasattr(kind, "__index__") for kind in kinds),
        f"{order} gave {few(sorted(kind.__name__ for kind in kinds))} values; expected ints, the indices of samples. "
        "For a mask, give mask.nonzero().flatten(); for a sampler of lists, order=ll.data.batch_sampler(...)",
        TypeError,
    )
    return torch.tensor([*map(operator.index, keys)], dtype=torch.int64, device="cpu")


def _visits(keys: Tensor) -> Tensor:
    ranked, positions = keys.sort(stable=True)
    visits = torch.empty_like(positions)
    visits[positions] = torch.arange(len(ranked), device="cpu") - torch.searchsorted(ranked, ranked)
    return visits


def own_part(batch: Any, rank: int, ranks: int, count_samples: CountSamples) -> tuple[Any, int]:
    """This rank's samples of a batch that was read completely, and the number of samples in the batch."""
    try:
        count = count_samples(batch)
    except (TypeError, ValueError) as error:
        raise type(error)(
            f"the dataset's items are taken for batches, as batch_size is None, but a {type(batch).__name__} cannot be "
            f"divided among {ranks} ranks: give a batch_size, count_samples=, or divide=False to give each rank the whole. "
            f"({error})"
        ) from error
    low, high = own_rows(count, rank, ranks)
    return split(batch, count, [low, high - low, count - high], count_samples)[1], count


def empty_part(part: Any, size: int, ranks: int, count_samples: CountSamples) -> Any:
    """A batch of no samples, for a rank that has none of a batch of `size` samples and holds its first one."""
    try:
        return split(part, 1, [0, 1], count_samples)[0]
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"a batch has {size} samples for {ranks} ranks, and a {type(part).__name__} cannot be made without samples "
            "for the others; give drop_last=True if it is a last batch that is not full, or another batch_size (the "
            "batches are divided among the ranks)"
        ) from error
