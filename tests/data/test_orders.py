"""Orders as values, and what a loader says of itself."""

import json

import numpy as np
import pytest
import torch
from test_loader import AugmentedStream, samples_of
from torch.utils.data import SequentialSampler

import looplib as ll
from looplib.data import make_loader, without_samples

# Orders as values


@pytest.mark.parametrize(
    ("order", "text"),
    [
        (lambda: ll.data.shuffled(), "shuffled()"),
        (lambda: ll.data.in_order(), "in_order()"),
        (lambda: ll.data.weighted([0, 0.5, 2]), "weighted([0, 0.5, 2])"),
        (lambda: ll.data.weighted(torch.arange(3), num_samples=7), "weighted([0, 1, 2], num_samples=7)"),
        (lambda: ll.data.weighted(range(100)), "weighted([0, 1, 2, 3, 4, 5, ...])"),
        (lambda: ll.data.by_length([3, 1]), "by_length([3, 1])"),
        (lambda: ll.data.by_length([3, 1], pool=4), "by_length([3, 1], pool=4)"),
        (lambda: ll.data.sampler([2, 0]), "sampler([2, 0])"),
        (lambda: ll.data.sampler(len), "sampler(len)"),
        (lambda: ll.data.sampler(SequentialSampler(range(3))), "sampler(SequentialSampler(...))"),
        (lambda: ll.data.batch_sampler([[2], [0]]), "batch_sampler([[2], [0]])"),
    ],
)
def test_an_order_reads_as_the_code_that_made_it(order, text):
    made = order()
    assert repr(made) == text
    if "..." not in text:
        assert repr(eval(text, vars(ll.data))) == text
    assert isinstance(made, ll.data.Order)


def test_one_order_serves_loaders_of_any_dataset():
    order = ll.data.shuffled()
    assert sorted(samples_of(make_loader(range(3), batch_size=2, order=order))) == [0, 1, 2]
    assert sorted(samples_of(make_loader(range(5), batch_size=2, order=order))) == [0, 1, 2, 3, 4]


def test_an_order_has_numbers_of_its_own():
    weights = np.array([0.0, 1.0])
    order = ll.data.weighted(weights)
    weights[:] = [1.0, 0.0]
    assert samples_of(make_loader(range(2), batch_size=2, order=order)) == [1, 1]


# Descriptions


def test_a_loader_describes_itself_in_plain_values():
    weights = [1.0] * 40
    plain = {"batch_size": 4, "seed": 3}
    loaders = [
        make_loader(range(40), **plain),
        make_loader(range(41), **plain),
        make_loader(range(40), batch_size=5, seed=3),
        make_loader(range(40), batch_size=4, seed=4),
        make_loader(range(40), drop_last=True, **plain),
        make_loader(range(40), limit=3, **plain),
        make_loader([*range(40)], **plain),
        make_loader(range(40), order=ll.data.in_order(), **plain),
        make_loader(range(40), order=ll.data.weighted(weights), **plain),
        make_loader(range(40), order=ll.data.weighted([*weights[:-1], 2.0]), **plain),
        make_loader(range(40), order=ll.data.by_length(weights), **plain),
        make_loader(range(40), order=ll.data.sampler([*range(40)]), **plain),
        make_loader(range(40), order=ll.data.sampler([*range(39), 38]), **plain),
        make_loader(range(40), order=ll.data.sampler(lambda epoch, generator: [1]), **plain),
        make_loader(range(40), order=ll.data.sampler(lambda epoch, generator: [2]), **plain),
        make_loader(AugmentedStream(40), **plain),
        without_samples(make_loader(range(40), **plain), [3]),
    ]
    found = [loader.description for loader in loaders]
    assert all(json.loads(json.dumps(description)) == description for description in found)
    assert len({json.dumps(description) for description in found}) == len(found)
    again = make_loader(range(40), order=ll.data.weighted(weights), **plain)
    assert again.description == found[8]
    assert found[0] == {
        "dataset": "range",
        "samples": 40,
        "order": "shuffled()",
        "seed": 3,
        "batch_size": 4,
        "drop_last": False,
        "limit": None,
        "left_out": 0,
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
    assert [batch[0].tolist() for batch in without_samples(loader, [5])(ll.TrainState())] == [[2], [0]]
    too_low = ll.data.sampler([-7])
    with pytest.raises(IndexError):
        next(make_loader(data, batch_size=2, order=too_low)(ll.TrainState()))
