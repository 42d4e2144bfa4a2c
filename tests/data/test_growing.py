"""Batches that grow with the samples of a run, and runs that continue with another batch size at any sample."""

import itertools
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shared import examples

import looplib as ll
from looplib.data import growing, make_loader

ORDERS = {
    "shuffled": ll.data.shuffled(),
    "sequential": ll.data.sequential(),
    "with_replacement": ll.data.with_replacement(17),
    "sampler": ll.data.sampler([3, 1, 2, 0, 2]),
}


def batches_of(loader, epoch=0, batch=0):
    return [batch.tolist() for batch in loader(ll.TrainState(epoch=epoch, batch=batch))]


def batches_by_hand(epochs, sizes):
    """Cut the samples of each epoch by a count of those that were consumed."""
    consumed = 0
    for samples in epochs:
        left, batches = list(samples), []
        while left:
            size = [size for begin, size in sorted(sizes.items()) if begin <= consumed][-1]
            batches.append(left[:size])
            consumed += len(batches[-1])
            left = left[size:]
        yield batches


@pytest.mark.slow
@given(
    count=st.integers(1, 40),
    sizes=st.dictionaries(st.integers(1, 90), st.integers(1, 20), max_size=4),
    first=st.integers(1, 9),
    name=st.sampled_from([*ORDERS]),
)
@settings(max_examples=examples(40), deadline=None)
def test_batches_are_those_of_a_count_of_consumed_samples(count, sizes, first, name):
    order, sizes = ORDERS[name], {**sizes, 0: first}
    count = max(count, 4) if name == "sampler" else count
    plain = make_loader(range(count), batch_size=1, order=order, seed=3)
    grown = make_loader(range(count), order=growing(sizes, order), seed=3)
    epochs = [[*itertools.chain(*batches_of(plain, epoch))] for epoch in range(4)]
    for epoch, expected in enumerate(batches_by_hand(epochs, sizes)):
        assert batches_of(grown, epoch) == expected
        for batch in range(len(expected)):  # as a resumed run reads them
            assert batches_of(grown, epoch, batch) == expected[batch:]


@given(
    count=st.integers(2, 60),
    size=st.integers(1, 8),
    other=st.integers(1, 16),
    batch=st.integers(1, 40),
    epoch=st.integers(0, 2),
)
@settings(deadline=None)
def test_a_run_continues_with_another_batch_size_at_any_sample(count, size, other, batch, epoch):
    one = make_loader(range(count), batch_size=size, seed=4)
    if batch >= len(one):
        return
    read = batch * size
    counts = {"step": 9, "epoch": epoch, "batch": batch, "samples": epoch * count + read, "batch_samples": size}
    state = ll.TrainState(**counts, epoch_length=len(one), run=ll.types.Run(loaders=(one.description,)))
    loader = make_loader(range(count), order=growing({0: size, state.samples: other}), seed=4)
    moved = loader.resume(state).replace(epoch_length=None)
    assert (moved.step, moved.samples) == (9, state.samples)
    rest = [*itertools.chain(*batches_of(one, epoch))][read:]
    assert batches_of(loader, moved.epoch, moved.batch) == [rest[i : i + other] for i in range(0, len(rest), other)]


def test_a_refused_position_names_the_order_that_continues():
    state = ll.TrainState(epoch=1, batch=3, epoch_length=10, samples=52, batch_samples=4)
    elsewhere = make_loader(range(40), order=growing({0: 5}, order=ll.data.sequential()))
    with pytest.raises(
        ValueError, match="12 samples have been read, and no batch of this loader begins there"
    ) as error:
        elsewhere.resume(state)
    code = re.search(r"order=(ll\.data\.growing.*?\}\))", str(error.value))[1]
    assert code == "ll.data.growing({0: 4, 52: ...})"
    order = growing({0: 4, 52: 8}, order=ll.data.sequential())
    continued = make_loader(range(40), order=order)
    state = continued.resume(state)
    assert batches_of(continued, 1, state.batch)[0] == [*range(12, 20)]


def test_a_state_within_an_epoch_of_growing_batches_stands_where_it_says():
    loader = make_loader(range(40), order=growing({0: 4, 12: 8}))  # of 4, 4, 4, 8, 8, 8 and 4 samples
    for batch, samples, size in ((3, 12, 4), (4, 20, 8)):
        state = ll.TrainState(batch=batch, epoch_length=7, samples=samples, batch_samples=size)
        assert loader.resume(state).batch == batch


def test_epochs_of_different_lengths_need_a_state_without_a_length():
    loader = make_loader(range(40), order=growing({0: 4, 40: 8}))
    assert len(loader) == 10
    with pytest.raises(ValueError, match=r"loader=loader\).replace\(epoch_length=None\)"):
        loader(ll.TrainState(epoch=1, epoch_length=10))


def test_wrong_sizes_and_loaders_of_growing_batches_are_refused_by_name():
    for sizes, order, options, error, names in (
        ([8, 16], None, {}, TypeError, "sizes is a list"),
        ({}, None, {}, ValueError, "sizes"),
        ({100: 8}, None, {}, ValueError, "100: 8"),
        ({0: 8, 0.5: 16}, None, {}, ValueError, "0.5: 16"),
        ({0: 0}, None, {}, ValueError, "0: 0"),
        ({0: 8}, "shuffled", {}, TypeError, "'shuffled'"),
        ({0: 8}, ll.data.by_length([1, 2]), {}, ValueError, "by_length"),
        ({0: 8}, ll.data.batch_sampler([[1]]), {}, ValueError, "batch_sampler"),
        ({0: 8}, ll.data.sampler(lambda epoch, generator: [1]), {}, ValueError, "sampler"),
        ({0: 8}, ll.data.sequential(), {"batch_size": 4}, ValueError, "batch_size=4 and order=growing"),
        ({0: 8}, ll.data.sequential(), {"dataset": iter_again(), "batch_size": 4}, ValueError, "stream"),
    ):
        with pytest.raises(error, match=names):
            make_loader(**{"dataset": range(40), "order": growing(sizes, order)} | options)


class iter_again:
    def __iter__(self):
        yield 1
