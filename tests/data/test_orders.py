"""Orders as values, and what a loader says of itself."""

import json

import numpy as np
import pytest
import torch
from plain_loader import AugmentedStream, Counting, samples_of
from torch.utils.data import SequentialSampler

import looplib as ll
from looplib.data import make_loader

# Orders as values


def test_an_order_and_a_loader_read_as_the_code_that_made_them():
    for text in (
        "shuffled()",
        "sequential()",
        "weighted([0, 0.5, 2])",
        "weighted([0, 1, 2], num_samples=7)",
        "by_length([3, 1])",
        "by_length([3, 1], pool=4)",
        "sampler([2, 0])",
        "sampler(len)",
        "batch_sampler([[2], [0]])",
    ):
        made = eval(text, vars(ll.data))
        assert repr(made) == text
        assert made.shuffles == text.startswith(("shuffled", "weighted", "by_length"))
        assert isinstance(made, ll.data.Order)
    assert repr(ll.data.weighted(range(100))) == "weighted([0, 1, 2, 3, 4, 5, ...])"
    assert repr(ll.data.sampler(SequentialSampler(range(3)))) == "sampler(SequentialSampler(...))"
    assert repr(make_loader([1, 2, 3], batch_size=2)) == "ll.make_loader(list, batch_size=2)  # 2 batches"
    stream = make_loader(Counting(), batch_size=None, seed=4)
    assert repr(stream) == "ll.make_loader(Counting, batch_size=None, seed=4)  # a stream"
    assert isinstance(stream, ll.data.Loader)


def test_an_order_has_numbers_of_its_own():
    weights = np.array([0.0, 1.0])
    order = ll.data.weighted(weights)
    weights[:] = [1.0, 0.0]
    assert samples_of(make_loader(range(2), batch_size=2, order=order)) == [1, 1]


# Descriptions


def test_a_loader_describes_itself_in_plain_values():
    def described(data=range(40), **options):
        return make_loader(data, **{"batch_size": 4, "seed": 3} | options).description

    weights = [1.0] * 40
    orders = [
        ll.data.sequential(),
        ll.data.weighted(weights),
        ll.data.weighted([*weights[:-1], 2.0]),
        ll.data.by_length(weights),
        ll.data.sampler([*range(40)]),
        ll.data.sampler([*range(39), 38]),
        ll.data.sampler(lambda epoch, generator: [1]),
        ll.data.sampler(lambda epoch, generator: [2]),
    ]
    options = [{"batch_size": 5}, {"seed": 4}, {"drop_last": True}, {"max_batches": 3}, {"divide": False}]
    found = [described(data) for data in (range(40), range(41), [*range(40)], AugmentedStream(40))]
    found += [described(**given) for given in (*options, *({"order": order} for order in orders))]
    assert all(json.loads(json.dumps(description)) == description for description in found)
    assert len({json.dumps(description) for description in found}) == len(found)
    assert described(order=ll.data.weighted(weights)) in found
    assert found[0] == {
        "dataset": "range",
        "samples": 40,
        "order": "shuffled()",
        "seed": 3,
        "batch_size": 4,
        "drop_last": False,
        "max_batches": None,
    }


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("order", [ll.data.sampler([-1, 2, -6]), ll.data.batch_sampler([[-1, 2], [-6]])])
def test_negative_indices_count_from_the_end_as_in_torchs_loader(order, workers):
    data = torch.utils.data.TensorDataset(torch.arange(6), torch.arange(6) + 10)
    size = None if order.whole_batches else 2
    loader = make_loader(data, batch_size=size, order=order, num_workers=workers)
    theirs = torch.utils.data.DataLoader(data, 2, sampler=[-1, 2, -6])
    seen = list(loader(ll.TrainState()))
    assert all(
        torch.equal(x, y) for one, two in zip(seen, theirs, strict=True) for x, y in zip(one, two, strict=True)
    )
    too_low = ll.data.sampler([-7])
    with pytest.raises(IndexError):
        next(make_loader(data, batch_size=2, order=too_low)(ll.TrainState()))
