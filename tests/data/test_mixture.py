"""Mixtures of datasets, whose proportions may change with the epoch."""

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from shared import examples
from torch.utils.data import ConcatDataset

import looplib as ll
from looplib.data import make_loader, mixture


def parts(*sizes):
    """Datasets of those sizes, with samples (dataset, index)."""
    return ConcatDataset([[(k, i) for i in range(size)] for k, size in enumerate(sizes)])


def epoch_of(loader, epoch, batch=0):
    return [
        tuple(pair)
        for batch in loader(ll.TrainState(epoch=epoch, batch=batch))
        for pair in zip(*map(torch.Tensor.tolist, batch), strict=True)
    ]


@given(
    sizes=st.lists(st.integers(1, 12), min_size=1, max_size=4),
    weights=st.lists(st.integers(0, 5) | st.floats(0.01, 3), min_size=4, max_size=4),
    num_samples=st.integers(1, 30),
    changes=st.booleans(),
)
@settings(max_examples=examples(40), deadline=None)
def test_each_dataset_has_its_share_and_is_read_in_whole_passes(sizes, weights, num_samples, changes):
    def shares(epoch):
        turned = weights[epoch % 4 :] + weights[: epoch % 4] if changes else weights
        turned = turned[: len(sizes)]
        return turned if any(turned) else [1.0] * len(sizes)

    loader = make_loader(
        parts(*sizes), batch_size=4, order=mixture(shares if changes else shares(0), num_samples), seed=1
    )
    seen, expected = Counter(), [0.0] * len(sizes)
    for epoch in range(8):
        samples = epoch_of(loader, epoch)
        assert len(samples) == num_samples
        counts, numbers = Counter(k for k, _ in samples), shares(epoch)
        for k, number in enumerate(numbers):
            share = num_samples * number / sum(numbers)
            assert abs(counts[k] - share) < 1 + 1e-9
            assert number or not counts[k]
            expected[k] += share
        seen.update(samples)
        for k, size in enumerate(sizes):
            times = [seen[k, i] for i in range(size)]
            assert max(times) - min(times) <= 1  # none again before all others of its dataset
            assert changes or abs(sum(times) - expected[k]) < 2.5  # what is rounded does not add up


def test_samples_of_an_epoch_are_shuffled_by_the_seed_and_the_epoch():
    def samples(seed, epoch):
        return epoch_of(make_loader(parts(40, 40), batch_size=8, order=mixture([1, 1], 80), seed=seed), epoch)

    orders = [samples(seed, epoch) for seed in (0, 1) for epoch in (0, 1)]
    assert all(sorted(order) == sorted(orders[0]) for order in orders)
    assert len({*map(tuple, orders)}) == 4
    assert len({tuple(i for k, i in order if k == 0) for order in orders}) == 4
    assert all(10 < sum(k for k, _ in order[:40]) < 30 for order in orders)


def test_each_pass_over_each_dataset_has_an_order_of_its_own():
    def halves(seed):
        """The first half of two passes over two datasets, as sets."""
        loader = make_loader(parts(40, 40), batch_size=8, order=mixture([1, 1], 40), seed=seed)
        epochs = [epoch_of(loader, epoch) for epoch in (0, 2)]
        return [frozenset(i for k, i in samples if k == part) for samples in epochs for part in (0, 1)]

    found = halves(0) + halves(1)
    assert len({*found}) == len(found) == 8
    assert {*map(len, found)} == {20}


def test_shares_that_are_whole_numbers_are_not_rounded():
    loader = make_loader(parts(9, 9, 9), batch_size=5, order=mixture([0.01, 0.06, 0.93], 100))
    for epoch in range(30):  # 0.01 + 0.06 is a little less than 0.07
        assert Counter(k for k, _ in epoch_of(loader, epoch)) == {0: 1, 1: 6, 2: 93}


def test_wrong_mixtures_are_refused_by_name():
    for dataset, weights, count, error, names in (
        (range(9), [1, 1], 4, TypeError, "range.*ConcatDataset"),
        (parts(2, 2), [1, 1, 1], 4, ValueError, "epoch 0.* 3 .* 2"),
        (parts(2, 2), lambda epoch: [1], 4, ValueError, "epoch 0.* 1 .* 2"),
        (parts(2, 2), lambda epoch: [1, -1], 4, ValueError, "weights.*-1.0"),
        (parts(2, 0), [1, 1], 4, ValueError, "no samples"),
        (parts(2, 2), [0, 0], 4, ValueError, "weights"),
        (parts(2, 2), [1, 2], None, ValueError, "num_samples"),
    ):
        with pytest.raises(error, match=names):
            make_loader(dataset, batch_size=2, order=mixture(weights, count))
    assert len(make_loader(parts(2, 0), batch_size=2, order=mixture([1, 0], 4))) == 2


def test_loaders_with_other_weights_have_other_descriptions():
    loaders = [
        make_loader(parts(30, 30), batch_size=4, order=mixture(weights, 20))
        for weights in ([1, 2], [2, 1], lambda epoch: [1, 1], lambda epoch: [3, 1])
    ]
    assert len({loader.description["order"] for loader in loaders}) == 4
    assert loaders[0].description["order"].startswith("mixture([1, 2], num_samples=20), checksum")
