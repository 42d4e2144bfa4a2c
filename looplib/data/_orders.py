"""Sample orders: the values that `make_loader(order=...)` accepts.

An order knows nothing about the dataset until a loader asks it for an epoch. If an order does not support a dataset or
a batch size, it raises then. A loader asks for the first epoch when it is made.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DistributedSampler

from looplib._core.checks import check, check_count, check_optional_count

Sampler = Callable[[int, torch.Generator], Any] | Iterable[Any]


class Epoch(NamedTuple):
    """An epoch to draw.

    Attributes:
        dataset: the dataset.
        batch_size: samples in a batch, or None if items or the order's own batches are batches.
        drop_last: True if an incomplete last batch is dropped.
        number: index of the epoch.
        seed: the loader's seed, for what does not depend on the epoch.
        generator: seeded by (seed, epoch).
    """

    dataset: Any
    batch_size: int | None
    drop_last: bool
    number: int
    seed: int
    generator: torch.Generator

    @property
    def samples(self) -> int:
        """Number of samples in the dataset."""
        check(
            hasattr(self.dataset, "__len__"),
            f"dataset is a {type(self.dataset).__name__} without __len__; give it one, or give a sampler: "
            "order=ll.data.sampler(...)",
            TypeError,
        )
        return len(self.dataset)


@dataclass(frozen=True, eq=False, repr=False)
class Order:
    """Sample order of a loader, for `make_loader(order=...)`.

    >>> import looplib as ll, torch
    >>> loader = ll.make_loader(torch.arange(5), batch_size=2, order=ll.data.sequential())
    >>> loader.order
    sequential()
    >>> [batch.tolist() for batch in loader(ll.TrainState())]
    [[0, 1], [2, 3], [4]]

    Every order is a function of (seed, epoch): the loader seeds everything that the order draws. An order cannot be passed
    to torch's DataLoader as a sampler.

    Attributes:
        text: the code that made it.
        draw: function that draws the samples, or the batches, of an epoch.
        shuffles: the order differs from the dataset's and was not written down by the user.
        distinct: no sample occurs twice in an epoch.
        whole_batches: the order decides the batches, not only the samples.
        any_batch_size: the samples come in the same order with any batch size.
        any_length: samples appended to the dataset do not change the order of the earlier ones.
        by_list: the dataset is asked with the list of a batch's indices, as by a DataLoader with `batch_size=None`.
        may_vary: epochs may have different numbers of batches.
        numbers: weights or lengths, of which `text` shows only the first.
        source: what a user's order draws from.
    """

    text: str
    draw: Callable[[Epoch], Any]
    shuffles: bool = False
    distinct: bool = False
    whole_batches: bool = False
    any_batch_size: bool = True
    any_length: bool = False
    by_list: bool = False
    may_vary: bool = False
    numbers: Tensor | None = None
    source: Any = None

    def __repr__(self) -> str:
        return self.text


def shuffled() -> Order:
    """Shuffling: a random permutation of the dataset in each epoch. The default for datasets with a length.

    >>> import looplib as ll
    >>> loader = ll.make_loader(range(4), batch_size=2, order=ll.data.shuffled())
    >>> loader.order
    shuffled()

    It is `torch.randperm`, which each rank holds in memory: 8 bytes per sample.
    """

    def draw(epoch: Epoch) -> Tensor:
        return torch.randperm(epoch.samples, generator=epoch.generator, device="cpu")

    return Order("shuffled()", draw, shuffles=True, distinct=True)


def sequential() -> Order:
    """Sequential order: the dataset's own, for evaluation.

    >>> import looplib as ll
    >>> loader = ll.make_loader(range(4), batch_size=3, order=ll.data.sequential())
    >>> [batch.tolist() for batch in loader(ll.TrainState())]
    [[0, 1, 2], [3]]

    It is the only order that a stream accepts.
    """
    return Order(
        "sequential()", lambda epoch: torch.arange(epoch.samples, device="cpu"), distinct=True, any_length=True
    )


def with_replacement(num_samples: int) -> Order:
    """Random sampling with replacement, as by torch's `RandomSampler(replacement=True)`.

    >>> import looplib as ll
    >>> loader = ll.make_loader(range(10**12), batch_size=4, order=ll.data.with_replacement(num_samples=8))
    >>> loader.order, len(loader)
    (with_replacement(num_samples=8), 2)

    It holds the draws of one epoch in memory, however large the dataset is.

    Args:
        num_samples: number of samples in an epoch.
    """
    check_count("num_samples", num_samples)

    def draw(epoch: Epoch) -> Tensor:
        return torch.randint(epoch.samples, (num_samples,), generator=epoch.generator, device="cpu")

    return Order(f"with_replacement(num_samples={num_samples})", draw, shuffles=True)


def weighted(weights: Sequence[float] | Tensor, num_samples: int | None = None) -> Order:
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
    check_optional_count("num_samples", num_samples, advice="expected an int of at least 1")
    numbers = _numbers("weights", weights)
    bounds = numbers.cumsum(0)  # since torch.multinomial supports at most 2**24 weights

    def draw(epoch: Epoch) -> Tensor:
        count = num_samples or epoch.samples
        # The largest value of rand, 1 - 2**-53, times the total still rounds to less than the total.
        points = torch.rand(count, dtype=torch.float64, generator=epoch.generator, device="cpu") * bounds[-1]
        return torch.searchsorted(bounds, points, right=True)

    count = "" if num_samples is None else f", num_samples={num_samples}"
    return Order(f"weighted({_shown(numbers)}{count})", draw, shuffles=True, numbers=numbers)


def by_length(lengths: Sequence[float] | Tensor, pool: int | None = None) -> Order:
    """Length grouping (bucketing): random batches of samples with similar lengths, to reduce padding.

    >>> import looplib as ll
    >>> texts = ["a", "bb", "cccc", "dddddd", "ee", "ffff", "g", "hhhhhh"]
    >>> lengths = [len(text) for text in texts]
    >>> loader = ll.make_loader(texts, batch_size=2, order=ll.data.by_length(lengths, pool=4))
    >>> [sorted(map(len, batch)) for batch in loader(ll.TrainState())][0]
    [6, 6]

    The samples are shuffled, then sorted by length within pools of several batches. Then the batches are shuffled,
    except that the full batch with the longest sample is swapped with the first, so that a run that does not fit into
    memory fails at its first batch. An incomplete last batch stays last.

    Args:
        lengths: (len(dataset),) length of each sample.
        pool: number of batches to sort together. Larger pools save more padding but vary less between epochs; with 1,
            the batches are those of a plain shuffle. Defaults to 50, or to a quarter of the batches of a small
            dataset.

    Raises:
        ValueError: lengths are negative, not finite or all 0; `pool` is below 1; or, from `make_loader`, the number
            of lengths is not the number of samples, or there is no `batch_size`.
    """
    check_optional_count("pool", pool, advice="expected a number of batches, an int of at least 1")
    numbers = _numbers("lengths", lengths)

    def draw(epoch: Epoch) -> Tensor:
        if epoch.batch_size is None:
            raise ValueError("order=by_length(...) needs a batch_size, to make batches of similar lengths")
        count, size = len(numbers), epoch.batch_size
        keys = torch.randperm(count, generator=epoch.generator, device="cpu")
        if epoch.drop_last:  # drop before the sort: afterwards the longest samples would be dropped
            keys = keys[: count - count % size]
        pools = torch.arange(len(keys), device="cpu") // (size * (pool or max(1, min(50, count // (4 * size)))))
        order = numbers[keys].argsort(stable=True)
        keys = keys[order][pools[order].argsort(stable=True)]
        full = len(keys) // size
        batches = keys[: full * size].view(full, size)[torch.randperm(full, generator=epoch.generator, device="cpu")]
        if full:
            first = int(numbers[batches].amax(1).argmax())
            batches[[0, first]] = batches[[first, 0]]
        return torch.cat([batches.flatten(), keys[full * size :]])

    text = f"by_length({_shown(numbers)}{'' if pool is None else f', pool={pool}'})"
    return Order(text, draw, shuffles=True, distinct=True, any_batch_size=False, numbers=numbers)


def sampler(source: Sampler) -> Order:
    """Custom sample order: a function of the epoch and a generator, or a torch Sampler.

    >>> import looplib as ll, torch
    >>> def backwards(epoch, generator):
    ...     return range(3, -1, -1)
    >>> loader = ll.make_loader(range(4), batch_size=2, order=ll.data.sampler(backwards))
    >>> [batch.tolist() for batch in loader(ll.TrainState())]
    [[3, 2], [1, 0]]

    Args:
        source: `(epoch, generator) -> indices`, or an iterable with a length, such as a torch Sampler or a list. Its
            draws from the global streams or from the given generator are seeded by (seed, epoch). It must give the
            same indices each time it is asked for an epoch, so a torch Sampler has no `generator` of its own.

    Raises:
        TypeError: `source` is an iterator or has no length, so it could be read only once or might never end.
        ValueError: from `make_loader`, if `source` gives two different orders for one epoch, or divides the samples
            among ranks itself (DistributedSampler).
    """
    return _order_of("sampler", source, may_vary=not isinstance(source, Iterable))  # an iterable has one length


def batch_sampler(source: Sampler) -> Order:
    """Custom batches: like `sampler`, but each element is the list of indices of one batch.

    >>> import looplib as ll
    >>> order = ll.data.batch_sampler([[0, 1, 2], [3]])
    >>> loader = ll.make_loader(range(4), order=order)
    >>> [batch.tolist() for batch in loader(ll.TrainState())]
    [[0, 1, 2], [3]]

    It replaces `batch_size` and `drop_last`.

    To leave samples out, such as those of a loss spike, and keep the batches, their order and the draws of all other
    samples, cut the permutation that `shuffled()` draws. (No batch may lose all of its samples.)

        def batches(epoch, generator):
            order = torch.randperm(len(dataset), generator=generator)
            return [batch[~torch.isin(batch, bad)] for batch in order.split(64)]

    Args:
        source: as for `sampler`, but of lists of indices.
    """
    varies = not isinstance(source, Sequence)
    return _order_of("batch_sampler", source, may_vary=varies, whole_batches=True, any_batch_size=False)


def _order_of(name: str, source: Any, **kind: Any) -> Order:
    """A user's order. Raises TypeError for a source that does not have an order for each epoch."""
    cls, iterable = type(source).__name__, isinstance(source, Iterable)
    check(
        hasattr(source, "__len__") and not isinstance(source, Iterator) if iterable else callable(source),
        f"{name} got a {cls}, which is no function, or has no __len__ and so may never end or be read once only; give a "
        "torch Sampler, a sequence, or a function (epoch, generator) -> indices",
        TypeError,
    )
    if isinstance(source, (list, tuple, range)):
        shown = _shown(source)
    else:
        shown = f"{cls}(...)" if iterable else getattr(source, "__qualname__", cls)

    def draw(epoch: Epoch) -> Any:
        if not iterable:
            return source(epoch.number, epoch.generator)
        if hasattr(source, "set_epoch"):
            source.set_epoch(epoch.number)
        return list(source)  # read once; it draws from the global streams, seeded for the epoch

    return Order(f"{name}({shown})", draw, source=source, **kind)


def check_undivided(title: str, source: Any) -> None:
    """Raise ValueError for torch's sampler that divides samples among ranks, or a shard of accelerate or transformers."""
    while source is not None:  # a sampler or dataset, the sampler that it holds, and so on
        check(
            not (isinstance(source, DistributedSampler) or hasattr(source, "process_index")),
            f"{title} is or holds a {type(source).__name__}, which gives each rank samples of its own, and repeats or "
            "drops some; a looplib loader divides each batch among the ranks by itself: give it the plain dataset and "
            "the batch_size of all ranks together, or divide=False to keep this division",
        )
        source = getattr(source, "sampler", None)


def _numbers(name: str, values: Sequence[float] | Tensor) -> Tensor:
    numbers = torch.as_tensor(values, dtype=torch.float64, device="cpu")
    check(
        numbers.dim() == 1 and len(numbers),
        f"{name} has the shape {tuple(numbers.shape)}; expected one number for each sample",
    )
    low, high = numbers.min().item(), numbers.max().item()  # NaN if one of them is
    check(
        low >= 0 and 0 < high < math.inf,
        f"{name} go from {low} to {high}; expected finite numbers, none of them negative and not all 0",
    )
    return numbers.clone()  # copied, so that a later change of the user's array does not change the order


def _shown(values: Sequence[Any] | Tensor) -> str:
    """The first six values as code."""
    first = [
        repr(int(value) if isinstance(value, float) and value.is_integer() else value) for value in listed(values[:6])
    ]
    return f"[{', '.join(first)}{', ...' if len(values) > 6 else ''}]"


def listed(values: Any) -> Any:
    """Convert a tensor to a list; return everything else unchanged."""
    return values.tolist() if isinstance(values, Tensor) else values
