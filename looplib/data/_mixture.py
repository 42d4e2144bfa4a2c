"""Mixtures of datasets: how many samples of each an epoch has, and which."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import ConcatDataset

from looplib._core.checks import check, check_count, check_type
from looplib._core.random import mix
from looplib.data._orders import Epoch, Order, _numbers, _shown
from looplib.data.random_streams import MIXTURE

_GOLDEN = (5**0.5 - 1) / 2


def mixture(weights: Sequence[float] | Tensor | Callable[[int], Any], num_samples: int) -> Order:
    """Mixture of datasets in given proportions, for a `torch.utils.data.ConcatDataset` of them.

    >>> import looplib as ll, torch
    >>> web, books = [f"web {i}" for i in range(100)], [f"book {i}" for i in range(8)]
    >>> order = ll.data.mixture([0.75, 0.25], num_samples=8)
    >>> loader = ll.make_loader(torch.utils.data.ConcatDataset([web, books]), batch_size=4, order=order)
    >>> texts = [text for batch in loader(ll.TrainState()) for text in batch]
    >>> sum("book" in text for text in texts), len(set(texts))
    (2, 8)

    An epoch has `num_samples` samples in random order. Each dataset contributes its share of them, rounded up or down
    so that the mean over epochs is right. Each dataset is read in passes: the next epoch continues where the last one
    stopped, and no sample occurs again before all others of its dataset have occurred.

    To change the proportions, give a function of the epoch. By samples: sample k of the run is in epoch
    `k // num_samples`, so `lambda epoch: [1, 0] if epoch * num_samples < 50_000 else [1, 1]` adds the second dataset
    after 50,000 samples. The smaller `num_samples` is, the more finely proportions can change.

    Which samples an epoch has is a function of (seed, epoch), and does not depend on the batch size or the ranks. What
    earlier epochs have read is computed from the weights and `num_samples`, not remembered, so change the weights of a
    run by a function that still returns the old ones for its earlier epochs. Samples that `drop_last` or `max_batches` leaves
    out of an epoch count as read. Planning an epoch takes about 10 ns and 8 bytes for each sample of the datasets that
    it reads, and 0.1 ms for each earlier epoch.

    Args:
        weights: relative frequency of each dataset, or a function from the epoch to them. It must return the same
            numbers each time.
        num_samples: number of samples in an epoch.

    Raises:
        TypeError: from `make_loader`, if the dataset is not a ConcatDataset.
        ValueError: weights are negative, not finite or all 0; `num_samples` is below 1; or, from the loader, the
            number of weights is not the number of datasets, or a dataset with a weight has no samples.
    """
    check_count("num_samples", num_samples)
    if callable(weights):
        weights_of, shown = weights, getattr(weights, "__qualname__", type(weights).__name__)
    else:
        numbers = _numbers("weights", weights)
        weights_of, shown = (lambda epoch: numbers), _shown(numbers)

    def draw(epoch: Epoch) -> Tensor:
        advice = "it needs a torch.utils.data.ConcatDataset: give make_loader(ConcatDataset([first, second]), ...)"
        check_type("the dataset of order=mixture(...) is", epoch.dataset, ConcatDataset, advice)
        sizes = [*map(len, epoch.dataset.datasets)]
        counts = [_counts(number, weights_of(number), num_samples, len(sizes)) for number in range(epoch.number + 1)]
        read = torch.stack(counts).sum(0) - counts[-1]
        firsts = [0, *epoch.dataset.cumulative_sizes]
        keys = [
            firsts[k] + _next_of(size, int(read[k]), int(counts[-1][k]), epoch.seed, k)
            for k, size in enumerate(sizes)
        ]
        return torch.cat(keys)[torch.randperm(num_samples, generator=epoch.generator, device="cpu")]

    return Order(f"mixture({shown}, num_samples={num_samples})", draw, shuffles=True, source=weights)


def _counts(epoch: int, weights: Any, num_samples: int, datasets: int) -> Tensor:
    """Samples of each dataset in an epoch."""
    bounds = _numbers("weights", weights).cumsum(0)
    check(
        len(bounds) == datasets,
        f"weights of epoch {epoch} are {len(bounds)} numbers, and there are {datasets} datasets; give one for each",
    )
    # Multiples of the golden ratio are spread evenly, so shares are rounded up as often as their fractions say.
    ends = bounds / bounds[-1] * num_samples + (epoch + 0.5) * _GOLDEN % 1
    return ends.long().diff(prepend=torch.zeros(1, dtype=torch.int64, device="cpu"))


def _next_of(size: int, read: int, count: int, *seeds: int) -> Tensor:
    """The next samples of a dataset of which some were read before. Each pass over it has a permutation of its own."""
    if not count:
        return torch.empty(0, dtype=torch.int64, device="cpu")
    check(size, "a dataset of the mixture has a weight, and no samples; give it the weight 0")
    passes = range(read // size, (read + count - 1) // size + 1)
    seeded = [torch.Generator().manual_seed(mix(MIXTURE, *seeds, number)) for number in passes]
    orders = [torch.randperm(size, generator=generator, device="cpu") for generator in seeded]
    return torch.cat(orders)[read % size :][:count]
