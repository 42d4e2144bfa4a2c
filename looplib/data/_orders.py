"""Sample orders: the values that `make_loader(order=...)` accepts.

An order knows nothing about the dataset until a loader asks it for a function that draws an epoch. If an order does
not support a dataset or a batch size, it raises then, when the loader is made.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar
from zlib import crc32

import torch
from torch import Tensor
from torch.utils.data import DistributedSampler

from looplib._core.checks import check, check_optional_count
from looplib.data._permutation import Computed, permutation
from looplib.data._plan import Draw, Plan, listed, same_plan

_LARGE = 1 << 24  # samples, whose order would take 128 MiB on each rank


Sampler = Callable[[int, torch.Generator], Any] | Iterable[Any]


class Order:
    """Sample order of a loader, for `make_loader(order=...)`.

    >>> import looplib as ll, torch
    >>> loader = ll.make_loader(torch.arange(5), batch_size=2, order=ll.data.in_order())
    >>> loader.order
    in_order()
    >>> [batch.tolist() for batch in loader(ll.TrainState())]
    [[0, 1], [2, 3], [4]]

    Every order is a function of (seed, epoch): the loader seeds everything that the order draws.

    Attributes:
        shuffles: the order differs from the dataset's and was not written down by the user.
        distinct: no sample occurs twice in an epoch.
        whole_batches: the order decides the batches, not only the samples.
        any_batch_size: the samples come in the same order with any batch size.
        any_length: samples appended to the dataset do not change the order of the earlier ones.
    """

    __slots__ = ()
    shuffles: ClassVar[bool] = False
    distinct: ClassVar[bool] = False
    whole_batches: ClassVar[bool] = False
    any_batch_size: ClassVar[bool] = True
    any_length: ClassVar[bool] = False

    @property
    def may_vary(self) -> bool:
        """True if epochs may have different numbers of batches."""
        return False

    def draw(self, dataset: Any, batch_size: int | None, drop_last: bool) -> Draw:
        """Return the function `(epoch, generator) -> keys` of this order for a dataset."""
        raise NotImplementedError

    def check_undivided(self) -> None:
        """Raise ValueError if the order already gives each rank its own samples."""

    def check_repeatable(self, first: Plan, plan: Callable[[int], Plan]) -> None:
        """Raise ValueError if asking for epoch 0 again does not give the plan `first`."""

    def checksum(self, plan: Callable[[int], Plan]) -> int | None:
        """Checksum of what the repr leaves out, such as all but the first weights; None if the repr is complete."""
        return None


@dataclass(frozen=True, slots=True)
class shuffled(Order):
    """Shuffling: a random permutation of the dataset in each epoch. The default for datasets with a length.

    >>> import looplib as ll
    >>> loader = ll.make_loader(range(4), batch_size=2, order=ll.data.shuffled())
    >>> loader.order
    shuffled()

    Up to 2**24 samples, it is `torch.randperm`, held in memory. For more samples, each index is computed when its
    batch is read: a billion samples take no memory, and a run resumes at any batch at once.
    """

    shuffles = True
    distinct = True

    def draw(self, dataset: Any, batch_size: int | None, drop_last: bool) -> Draw:
        count = _length_of(dataset)
        if count > _LARGE:
            return lambda epoch, generator: permutation(count, generator)
        return lambda epoch, generator: torch.randperm(count, generator=generator)


@dataclass(frozen=True, slots=True)
class in_order(Order):
    """Sequential order: the dataset's own, for evaluation.

    >>> import looplib as ll
    >>> loader = ll.make_loader(range(4), batch_size=3, order=ll.data.in_order())
    >>> [batch.tolist() for batch in loader(ll.TrainState())]
    [[0, 1, 2], [3]]

    It is the only order that a stream accepts.
    """

    distinct = True
    any_length = True

    def draw(self, dataset: Any, batch_size: int | None, drop_last: bool) -> Draw:
        count = _length_of(dataset)
        if count > _LARGE:
            return lambda epoch, generator: Computed(count, lambda positions: positions)
        return lambda epoch, generator: torch.arange(count)


@dataclass(frozen=True, slots=True, eq=False, repr=False, init=False)
class weighted(Order):
    """Weighted random sampling with replacement, as by torch's WeightedRandomSampler.

    >>> import looplib as ll
    >>> order = ll.data.weighted([0, 1, 3], num_samples=8)
    >>> order
    weighted([0, 1, 3], num_samples=8)
    >>> loader = ll.make_loader(["never", "rare", "frequent"], batch_size=4, order=order)
    >>> len(loader), "never" in [text for batch in loader(ll.TrainState()) for text in batch]
    (2, False)

    Args:
        weights: (len(dataset),) relative probability of each sample.
        num_samples: number of samples in an epoch. Defaults to the length of the dataset.

    Raises:
        ValueError: weights are negative, not finite or all 0; `num_samples` is below 1; or, from `make_loader`, the
            number of weights is not the number of samples.
    """

    weights: Tensor
    num_samples: int | None
    shuffles = True

    def __init__(self, weights: Sequence[float] | Tensor, num_samples: int | None = None) -> None:
        check_optional_count("num_samples", num_samples, advice="expected an int of at least 1")
        object.__setattr__(self, "weights", _numbers("weights", weights))
        object.__setattr__(self, "num_samples", num_samples)

    def draw(self, dataset: Any, batch_size: int | None, drop_last: bool) -> Draw:
        _check_one_each("weights", self.weights, dataset)
        count = self.num_samples or len(dataset)
        # Use cumulative weights, since torch.multinomial supports at most 2**24 of them.
        bounds = self.weights.cumsum(0)

        def draw(epoch: int, generator: torch.Generator) -> Tensor:
            # The largest value of rand, 1 - 2**-53, times the total still rounds to less than the total.
            points = torch.rand(count, dtype=torch.float64, generator=generator) * bounds[-1]
            return torch.searchsorted(bounds, points, right=True)

        return draw

    def checksum(self, plan: Callable[[int], Plan]) -> int | None:
        return _checksum(self.weights)

    def __repr__(self) -> str:
        count = "" if self.num_samples is None else f", num_samples={self.num_samples}"
        return f"weighted({_shown(self.weights)}{count})"


@dataclass(frozen=True, slots=True, eq=False, repr=False, init=False)
class by_length(Order):
    """Length grouping (bucketing): random batches of samples with similar lengths, to reduce padding.

    >>> import looplib as ll
    >>> texts = ["a", "bb", "cccc", "dddddd", "ee", "ffff", "g", "hhhhhh"]
    >>> lengths = [len(text) for text in texts]
    >>> loader = ll.make_loader(texts, batch_size=2, order=ll.data.by_length(lengths, pool=4))
    >>> [sorted(map(len, batch)) for batch in loader(ll.TrainState())][0]
    [6, 6]

    The samples are shuffled, then sorted by length within pools of several batches. Then the batches are shuffled,
    except for the first: it is a full batch with the longest sample of the epoch, so that a run that does not fit
    into memory fails at its first batch. (The batch with that sample is swapped with the first. If the sample is in
    an incomplete last batch, only the sample is swapped.) An incomplete last batch stays last. The batches are those
    of `group_by_length` in transformers.

    Args:
        lengths: (len(dataset),) length of each sample.
        pool: number of batches to sort together. Larger pools save more padding but vary less between epochs; with 1,
            the batches are those of a plain shuffle. Defaults to 50, or to a quarter of the batches of a small
            dataset.

    Raises:
        ValueError: lengths are negative, not finite or all 0; `pool` is below 1; or, from `make_loader`, the number
            of lengths is not the number of samples, or there is no `batch_size`.
    """

    lengths: Tensor
    pool: int | None
    shuffles = True
    distinct = True
    any_batch_size = False

    def __init__(self, lengths: Sequence[float] | Tensor, pool: int | None = None) -> None:
        check_optional_count("pool", pool, advice="expected a number of batches, an int of at least 1")
        object.__setattr__(self, "lengths", _numbers("lengths", lengths))
        object.__setattr__(self, "pool", pool)

    def draw(self, dataset: Any, batch_size: int | None, drop_last: bool) -> Draw:
        if batch_size is None:
            raise ValueError("order=by_length(...) needs a batch_size, to make batches of similar lengths")
        _check_one_each("lengths", self.lengths, dataset)
        lengths, count, size = self.lengths, len(self.lengths), batch_size
        pool_size = size * (self.pool or max(1, min(50, count // (4 * size))))

        def draw(epoch: int, generator: torch.Generator) -> Tensor:
            keys = torch.randperm(count, generator=generator)
            if drop_last:  # drop before the sort: afterwards the longest samples would be dropped
                keys = keys[: count - count % size]
            pools = torch.arange(len(keys)) // pool_size
            order = lengths[keys].argsort(stable=True)
            keys = keys[order][pools[order].argsort(stable=True)]
            full = len(keys) // size
            batches = keys[: full * size].view(full, size)[torch.randperm(full, generator=generator)]
            return _longest_first(batches, keys[full * size :], lengths)

        return draw

    def checksum(self, plan: Callable[[int], Plan]) -> int | None:
        return _checksum(self.lengths)

    def __repr__(self) -> str:
        pool = "" if self.pool is None else f", pool={self.pool}"
        return f"by_length({_shown(self.lengths)}{pool})"


def _longest_first(batches: Tensor, rest: Tensor, lengths: Tensor) -> Tensor:
    """Keys of the full batches and of the rest, with the longest sample in the first batch."""
    if len(batches):
        first = int(lengths[batches].amax(1).argmax())
        batches[[0, first]] = batches[[first, 0]]
        if len(rest) and lengths[rest].max() > lengths[batches[0]].max():
            ours, theirs = lengths[batches[0]].argmax(), lengths[rest].argmax()
            batches[0, ours], rest[theirs] = rest[theirs].clone(), batches[0, ours].clone()
    return torch.cat([batches.flatten(), rest])


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class sampler(Order):
    """Custom sample order: a function of the epoch and a generator, or a torch Sampler.

    >>> import looplib as ll, torch
    >>> def backwards(epoch, generator):
    ...     return range(3, -1, -1)
    >>> loader = ll.make_loader(range(4), batch_size=2, order=ll.data.sampler(backwards))
    >>> [batch.tolist() for batch in loader(ll.TrainState())]
    [[3, 2], [1, 0]]

    Args:
        source: `(epoch, generator) -> indices`, or an iterable with a length, such as a torch Sampler or a list. Its
            draws from the global streams, from the given generator, or from a torch `generator` that it holds are
            seeded by (seed, epoch). It must give the same indices each time it is asked for an epoch. Indices may be
            any keys that the dataset accepts.

    Raises:
        TypeError: `source` is an iterator or has no length, so it could be read only once or might never end.
        ValueError: from `make_loader`, if `source` gives two different orders for one epoch, or divides the samples
            among ranks itself (DistributedSampler).
    """

    source: Sampler

    def __post_init__(self) -> None:
        source, title = self.source, f"{type(self).__name__} got a {type(self.source).__name__}"
        advice = "give a torch Sampler, a sequence, or a function (epoch, generator) -> indices"
        endless = isinstance(source, Iterator) or (isinstance(source, Iterable) and not hasattr(source, "__len__"))
        no_length = f"{title}, which has no __len__ and so may never end or be read once only; {advice}"
        check(not endless, no_length, TypeError)
        check(isinstance(source, Iterable) or callable(source), f"{title}; {advice}", TypeError)

    @property
    def may_vary(self) -> bool:
        return not isinstance(self.source, Sequence if self.whole_batches else Iterable)  # these have one length

    def draw(self, dataset: Any, batch_size: int | None, drop_last: bool) -> Draw:
        return _seeded(self.source)

    def check_undivided(self) -> None:
        check_undivided(type(self).__name__, self.source)

    def check_repeatable(self, first: Plan, plan: Callable[[int], Plan]) -> None:
        check(
            same_plan(first, plan(0)),
            f"{type(self).__name__} gave two different orders when asked twice for epoch 0; it must be a function of "
            "the epoch: draw from the global streams, from its own torch `generator` attribute, or from the generator "
            "given to a function (epoch, generator), and keep no count",
        )

    def checksum(self, plan: Callable[[int], Plan]) -> int | None:
        first = plan(0)
        return crc32(repr((listed(first.keys), list(first.ends))).encode())

    def __repr__(self) -> str:
        source = self.source
        if not isinstance(source, Iterable):
            text = getattr(source, "__qualname__", type(source).__name__)
        elif isinstance(source, (list, tuple, range)):
            text = repr(source) if len(source) <= _SHOWN else f"[{', '.join(map(repr, source[:_SHOWN]))}, ...]"
        else:
            text = f"{type(source).__name__}(...)"
        return f"{type(self).__name__}({text})"


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class batch_sampler(sampler):
    """Custom batches: like `sampler`, but each element is the list of indices of one batch.

    >>> import looplib as ll
    >>> order = ll.data.batch_sampler([[0, 1, 2], [3]])
    >>> loader = ll.make_loader(range(4), order=order)
    >>> [batch.tolist() for batch in loader(ll.TrainState())]
    [[0, 1, 2], [3]]

    It replaces `batch_size` and `drop_last`.

    Args:
        source: as for `sampler`, but of lists of indices.
    """

    whole_batches = True
    any_batch_size = False


def check_undivided(title: str, source: Any) -> None:
    """Raise ValueError for torch's sampler that divides samples among ranks, or a shard of accelerate or transformers."""
    for part in _with_inner(source):
        check(
            not (isinstance(part, DistributedSampler) or hasattr(part, "process_index")),
            f"{title} is or holds a {type(part).__name__}, which gives each rank samples of its own, and repeats or "
            "drops some; a looplib loader divides each batch among the ranks by itself: give it the plain dataset and "
            "the batch_size of all ranks together, or divide=False to keep this division",
        )


def _with_inner(source: Any) -> Iterator[Any]:
    """A sampler or dataset, the sampler that it holds, and so on."""
    while source is not None:
        yield source
        source = getattr(source, "sampler", None)


def _seeded(source: Sampler) -> Draw:
    """Turn a user's order into a function of (epoch, generator).

    An iterable draws from the global streams, which are already seeded at this point, or from torch generators that
    it or its inner samplers hold, which are seeded here.
    """
    return partial(_drawn, source) if isinstance(source, Iterable) else source


def _drawn(source: Any, epoch: int, generator: torch.Generator) -> list[Any]:
    if hasattr(source, "set_epoch"):
        source.set_epoch(epoch)
    held = [getattr(part, "generator", None) for part in _with_inner(source)]
    states = [(own, own.get_state()) for own in held if isinstance(own, torch.Generator)]
    for own, _ in states:
        own.set_state(generator.get_state())
    try:
        return list(source)
    finally:
        for own, state in states:
            own.set_state(state)


def _length_of(dataset: Any) -> int:
    check(
        hasattr(dataset, "__len__"),
        f"dataset is a {type(dataset).__name__} without __len__; give it one, or give a sampler: "
        "order=ll.data.sampler(...)",
        TypeError,
    )
    return len(dataset)


def _numbers(name: str, values: Sequence[float] | Tensor) -> Tensor:
    numbers = torch.as_tensor(values, dtype=torch.float64, device="cpu")
    listed = numbers.dim() == 1 and len(numbers)
    check(listed, f"{name} has the shape {tuple(numbers.shape)}; expected one number for each sample")
    low, high = numbers.min().item(), numbers.max().item()  # NaN if one of them is
    check(
        low >= 0 and 0 < high < math.inf,
        f"{name} go from {low} to {high}; expected finite numbers, none of them negative and not all 0",
    )
    return numbers.clone()  # copied, so that a later change of the user's array does not change the order


def _check_one_each(name: str, numbers: Tensor, dataset: Any) -> None:
    count = _length_of(dataset)
    shape = tuple(numbers.shape)
    check(
        shape == (count,), f"{name} has the shape {shape}; expected ({count},), one for each of the {count} samples"
    )


def _checksum(numbers: Tensor) -> int:
    return crc32(numbers.contiguous().view(torch.uint8).numpy().tobytes())


_SHOWN = 6  # numbers shown in a repr


def _shown(numbers: Tensor) -> str:
    texts = [repr(int(number) if number.is_integer() else number) for number in numbers[:_SHOWN].tolist()]
    return f"[{', '.join(texts)}{', ...' if len(numbers) > _SHOWN else ''}]"
