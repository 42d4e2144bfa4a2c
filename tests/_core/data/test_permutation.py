"""The permutation of a large dataset, and loaders that use it."""

import pytest
import torch

import looplib as ll
from looplib.data import _orders
from looplib.data._permutation import permutation


def drawn(count, seed=0):
    return permutation(count, torch.Generator().manual_seed(seed))


def test_it_is_a_permutation_of_any_count_and_each_part_is_that_of_the_whole():
    for count in [*range(1, 300), 9_999, 10_000, 10_001]:
        whole = drawn(count)[:]
        assert torch.equal(whole.sort().values, torch.arange(count)), count
    assert len(drawn(count)) == count
    for low, high in ((0, 5), (4_000, 4_100), (9_990, 10_001), (9_990, 20_000), (7, 7)):
        assert torch.equal(drawn(count)[low:high], whole[low:high])
    assert not torch.equal(drawn(count, seed=1)[:], whole)


def test_it_looks_random():
    count, parts = 100_000, 20
    for seed in range(3):
        order = drawn(count, seed)[:]
        # How many samples of each twentieth of the dataset are in each twentieth of the epoch: chi squared has
        # 19 * 19 degrees of freedom, so a mean of 361 and a standard deviation of 27. (And of neighbors.)
        for left, right in (
            (torch.arange(count), order),
            (order[:-1], order[1:]),
            (order[:-7] * 3 % count, order[7:]),
        ):
            cells = torch.bincount(
                left * parts // count * parts + right * parts // count, minlength=parts**2
            ).double()
            chi_squared = ((cells - cells.mean()).square() / cells.mean()).sum().item()
            assert 361 - 5 * 27 < chi_squared < 361 + 5 * 27
        # The expected number of samples that stay where they are is 1, and of pairs that stay neighbors 1.
        assert (order == torch.arange(count)).sum() < 8
        assert (order.diff() == 1).sum() < 8
        # The parity of an index says nothing about that of its position.
        assert abs((order % 2 == torch.arange(count) % 2).double().mean().item() - 0.5) < 0.01


@pytest.mark.parametrize("order", [ll.data.shuffled(), ll.data.in_order()], ids=repr)
def test_a_loader_reads_each_sample_once_and_resumes_at_any_batch(monkeypatch, order):
    monkeypatch.setattr(_orders, "_LARGE", 10)
    data, state = torch.arange(100, 203), ll.TrainState()
    for options in ({}, {"drop_last": True}, {"limit": 7}):
        loader = ll.make_loader(data, batch_size=8, order=order, **options)
        batches = list(loader(state))
        assert len(batches) == len(loader) == {"": 13, "drop_last": 12, "limit": 7}["".join(options)]
        assert torch.cat(batches).unique().numel() == torch.cat(batches).numel() == min(8 * len(loader), 103)
        assert all(map(torch.equal, loader(state.replace(batch=5)), batches[5:]))
        assert torch.equal(loader.indices(state.replace(batch=3)), batches[3] - 100)
    whole = ll.make_loader(data, batch_size=8, order=order)
    again = list(whole(state.replace(epoch=1)))
    assert torch.equal(torch.cat(again).sort().values, data)
    assert torch.equal(again[0], next(whole(state))) == (not order.shuffles)
    left = torch.cat(list(ll.data.without_samples(whole, [3, 50])(state)))
    assert torch.equal(left.sort().values, torch.cat([data[:3], data[4:50], data[51:]]))
    larger = ll.make_loader(data, batch_size=16, order=order)
    resumed = larger.resume(state.replace(step=2, batch=2, epoch_length=13, samples=16, batch_samples=8))
    assert torch.equal(torch.cat(list(larger(resumed))), torch.cat(list(whole(state.replace(batch=2)))))
