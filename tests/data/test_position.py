"""A run that continues with another batch size or dataset."""

import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_loader import AugmentedStream, samples_of
from shared import examples

import looplib as ll
from looplib.data import make_loader
from looplib.types import TrainState

# Another batch size or dataset


def continued(loader, other, batches, epoch=1):
    """Samples of an epoch: some batches from the one loader, and the rest from the other. And where the run ended."""
    state = TrainState(epoch_length=len(loader), run=run_of(loader))
    seen = []
    while state.epoch <= epoch:
        for batch in loader(state):
            if state.epoch == epoch:
                seen += batch.tolist()
            state = consume(state, len(batch))
            if (state.epoch, state.batch) == (epoch, batches):
                loader = other
                state = other.resume(state)
                break
    return seen, state


def run_of(loader):
    return ll.types.Run(loaders=(loader.description,))


def consume(state, samples):
    """Change the counts as a train step does."""
    ends = state.batch + 1 == state.epoch_length
    return state.replace(
        step=state.step + 1,
        epoch=state.epoch + ends,
        batch=0 if ends else state.batch + 1,
        samples=state.samples + samples,
        batch_samples=samples,
    )


@given(
    count=st.integers(1, 60),
    size=st.integers(1, 8),
    other=st.integers(1, 16),
    batches=st.integers(1, 40),
    kind=st.sampled_from(["shuffled", "sequential", "weighted", "sampler"]),
)
@settings(max_examples=examples(150), deadline=None)
def test_a_run_continues_within_an_epoch_with_another_batch_size(count, size, other, batches, kind):
    order = {
        "shuffled": ll.data.shuffled(),
        "sequential": ll.data.sequential(),
        "weighted": ll.data.weighted([1 + i % 3 for i in range(count)]),
        "sampler": ll.data.sampler(lambda epoch, generator: torch.randperm(count, generator=generator)),
    }[kind]
    one, two = (make_loader(range(count), batch_size=size, order=order, seed=2) for size in (size, other))
    if batches >= len(one):
        return
    seen, state = continued(one, two, batches)
    assert seen == samples_of(one, 1)  # each sample once, in the order of before
    assert (state.epoch, state.batch, state.samples, state.epoch_length) == (2, 0, 2 * count, len(two))


def test_at_the_end_of_an_epoch_any_loader_continues():
    state = TrainState(step=25, epoch=1, epoch_length=25, samples=100, batch_samples=4)
    for loader in (
        make_loader(range(300), batch_size=8),
        make_loader(range(50), batch_size=8, order=ll.data.by_length([*range(50)])),
        make_loader(range(9), order=ll.data.batch_sampler([[1, 2], [3]])),
    ):
        found = loader.resume(state)
        assert (found.step, found.epoch, found.batch, found.samples) == (25, 1, 0, 100)
        assert found.epoch_length == len(loader)
        assert len(list(loader(found))) == len(loader)


def test_samples_at_the_end_of_a_dataset_in_order_continue_within_an_epoch():
    one, two = (make_loader(range(count), batch_size=4, order=ll.data.sequential()) for count in (20, 30))
    seen, state = continued(one, two, 3)
    assert (seen, state.samples) == ([*range(30)], 50)


def test_a_run_that_cannot_continue_within_an_epoch_is_told_what_keeps_everything():
    state = TrainState(step=35, epoch=1, batch=10, epoch_length=25, samples=140, batch_samples=4)
    hundred, by_length = {"dataset": range(100), "batch_size": 8}, ll.data.by_length([*range(100)])
    for loader, reason in (
        (make_loader(range(120), batch_size=8), "25 batches of 4 samples are not an epoch of the 120 samples"),
        (make_loader(**hundred, order=by_length), r"by_length\(.*\) has other batches"),
        (make_loader(range(9), order=ll.data.batch_sampler([[1], [2]])), "batch_sampler.* has other batches"),
        (make_loader([torch.zeros(3)] * 9, batch_size=None), "another batch_size or dataset"),
    ):
        with pytest.raises(ValueError, match=reason) as error:
            loader.resume(state)
        way = re.search(r"state\.replace\(epoch=2, batch=0, epoch_length=\d+\)", str(error.value))
        assert len(list(loader(eval(way[0], {"state": state})))) == len(loader)


def test_counts_that_do_not_say_where_a_run_stands_are_not_guessed_from():
    loader = make_loader(range(100), batch_size=8)
    at_batch = {"batch": 10, "epoch_length": 25, "batch_samples": 4}
    with pytest.warns(UserWarning, match="does not know its loader, so its batches .* 4 samples each"):
        assert loader.resume(TrainState(samples=40, **at_batch)).batch == 5
    for wrong in (
        TrainState(samples=39, **at_batch),  # batches of several sizes
        TrainState(samples=40, **at_batch | {"batch_samples": 0}),
        TrainState(samples=40, **at_batch | {"epoch_length": None}),
    ):
        with pytest.raises(ValueError, match="do not say which samples of epoch 0 have been read"):
            loader.resume(wrong)
    with pytest.raises(TypeError, match="a loader over a stream"):
        make_loader(AugmentedStream(9), batch_size=2).resume(TrainState(batch=2))


def test_a_state_that_fits_is_resumed_as_it_is():
    ten = make_loader(range(10), batch_size=4)
    for loader, samples in (
        (ten, 4),
        (make_loader(range(9), batch_size=3, max_batches=2), 3),
        (ten, 3),  # as a collate_fn that drops a sample makes it
        (ten, 4096),  # of a step that counts tokens
        (ten, 0),
        (make_loader(range(10), batch_size=4, order=ll.data.by_length([*range(10)])), 3),
    ):
        state = consume(TrainState(epoch_length=len(loader), run=run_of(loader)), samples)
        assert loader.resume(state) is state


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize(
    ("count", "old", "new", "order"),
    [
        (9, {"batch_size": 4}, {"batch_size": 3}, "by_length"),
        (9, {"batch_size": 3}, {"batch_size": 4}, "by_length"),
        (12, {"batch_size": 2, "max_batches": 3}, {"batch_size": 4}, "shuffled"),
        (20, {"batch_size": 2, "max_batches": 5}, {"batch_size": 4}, "by_length"),
    ],
)
def test_another_batch_size_is_seen_whatever_the_order_and_the_limit(count, old, new, order, known, tmp_path):
    order = {"shuffled": ll.data.shuffled(), "by_length": ll.data.by_length([*range(1, count + 1)])}[order]
    one, two = (make_loader(range(count), order=order, **options) for options in (old, new))
    assert len(one) == len(two)
    for batches in (1, 2):
        state = TrainState(epoch_length=len(one), **({"run": run_of(one)} if known else {}))
        for _ in range(len(one) + batches):
            state = consume(state, old["batch_size"])
        with pytest.raises(ValueError, match=f"cannot continue within epoch 1 at batch {batches}"):
            two.resume(state)
        assert one.resume(state) is state
        if known:
            template = TrainState(epoch_length=len(two))
            knowing = template.replace(run=run_of(two))
            for name, saved, describe in (("known", state, one), ("described", state.replace(run=template.run), one)):
                ll.checkpoint_io(tmp_path / name, describe={"loader": describe} if name == "described" else {}).save(
                    saved
                )
            with pytest.raises(ValueError, match="cannot continue within epoch 1"):
                two.resume(ll.checkpoint_io(tmp_path / "known").restore(template))
            for name, new, describe in (("known", knowing, {}), ("described", template, {"loader": two})):
                with pytest.warns(UserWarning, match="batch_size was"):
                    restored = ll.checkpoint_io(tmp_path / name, describe=describe).restore(new)
                with pytest.raises(ValueError, match="cannot continue within epoch 1"):
                    two.resume(restored)
