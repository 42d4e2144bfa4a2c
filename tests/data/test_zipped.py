"""Endless loaders and loaders side by side, beside plain loops over the epochs of each loader."""

import copy
import itertools
import multiprocessing

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_loader import Augmented, as_rank, quiet
from shared import SGD, bits, examples
from torch.utils.data import TensorDataset

import looplib as ll
from looplib.data import endless, make_loader, zipped

pytestmark = quiet


def cycled(loader):
    """All batches of a run: the epochs of a loader, each in its own order, as `itertools.cycle` does not have them."""
    for epoch in itertools.count():
        for batch in loader(ll.TrainState(epoch=epoch)):
            yield batch.tolist()


def listed(batches, count):
    return [
        tuple(part.tolist() for part in batch) if isinstance(batch, tuple) else batch.tolist()
        for batch in itertools.islice(batches, count)
    ]


loaders = st.builds(
    lambda count, size, seed, drop_last: make_loader(
        range(100 * seed, 100 * seed + count), batch_size=size, seed=seed, drop_last=drop_last and count >= size
    ),
    count=st.integers(1, 12),
    size=st.integers(1, 5),
    seed=st.integers(0, 5),
    drop_last=st.booleans(),
)


@given(loader=loaders, start=st.integers(0, 30))
@settings(max_examples=examples(30), deadline=None)
def test_an_endless_loader_has_epoch_after_epoch_from_any_step_on(loader, start):
    expected = [*itertools.islice(cycled(loader), start, start + 12)]
    epoch, batch = divmod(start, len(loader))
    positions = (
        ll.TrainState(epoch=epoch, batch=batch, epoch_length=len(loader)),
        ll.TrainState(epoch=epoch, batch=batch),
        ll.TrainState(batch=start),  # a count of all batches, in a loop of one's own
    )
    for state in positions:
        assert listed(endless(loader)(state), 12) == expected
        assert endless(loader).indices(state).equal(loader.indices(ll.TrainState(epoch=epoch, batch=batch)))
    assert len(endless(loader)) == len(loader)


@pytest.mark.slow
@given(first=loaders, others=st.lists(loaders, min_size=1, max_size=2), start=st.integers(0, 40))
@settings(max_examples=examples(30), deadline=None)
def test_loaders_side_by_side_go_on_at_their_own_pace_from_any_step_on(first, others, start):
    together = zipped(first, *others, count_samples=lambda batch: len(batch[0]))
    run = [*itertools.islice(zip(*map(cycled, (first, *others)), strict=True), start + 2 * len(first))]
    epoch, batch = divmod(start, len(first))
    end = (epoch + 1) * len(first)
    for length in (None, len(first)):
        state = ll.TrainState(epoch=epoch, batch=batch, epoch_length=length)
        assert listed(together(state), None) == run[start:end]
        assert listed(together(state.replace(epoch=epoch + 1, batch=0)), None) == run[end : end + len(first)]
        assert listed(endless(together)(state), len(first)) == run[start : start + len(first)]
    indices = together.indices(ll.TrainState(epoch=epoch, batch=batch))
    assert [
        [*map(loader.dataset.__getitem__, keys)] for loader, keys in zip((first, *others), indices, strict=True)
    ] == [*run[start]]


@given(first=loaders, other=loaders, ranks=st.integers(1, 4), start=st.integers(0, 12))
@settings(max_examples=examples(20), deadline=None)
def test_each_rank_has_its_part_of_each_batch(first, other, ranks, start):
    together = zipped(first, other, count_samples=lambda batch: len(batch[0]))
    state = ll.TrainState(epoch=start // len(first), batch=start % len(first))
    whole = listed(together(state), None)
    of_ranks = []
    for rank in range(ranks):
        with as_rank(rank, ranks):
            of_ranks.append(listed(together(state), None))
    for k, batch in enumerate(whole):
        for place, samples in enumerate(batch):
            parts = [part.tolist() for part in torch.tensor_split(torch.tensor(samples), ranks)]
            assert [of_rank[k][place] for of_rank in of_ranks] == parts


def test_a_shorter_loader_is_shuffled_again_and_augmented_again_in_each_of_its_epochs():
    short = make_loader(Augmented(4), batch_size=2, seed=1)
    batches = [batch for _, batch in zipped(make_loader(range(32), batch_size=2), short)(ll.TrainState())]
    epochs = [torch.cat(batches[k : k + 2]) for k in range(0, 16, 2)]
    assert all(sorted(epoch[:, 0].tolist()) == [0, 1, 2, 3] for epoch in epochs)
    assert len({tuple(epoch[:, 0].tolist()) for epoch in epochs}) > 3
    drawn = torch.cat(epochs)[:, 1:]
    assert drawn.unique().numel() == drawn.numel()


def test_loaders_of_one_seed_and_length_are_paired_and_those_of_two_seeds_are_not():
    """As the docstring says: the same samples meet with the same draws, in each epoch."""
    for seed, are_paired in ((0, True), (1, False)):
        loader = zipped(make_loader(Augmented(8), batch_size=4), make_loader(Augmented(8), batch_size=4, seed=seed))
        pairs = [pair for epoch in range(3) for pair in loader(ll.TrainState(epoch=epoch))]
        assert [x.equal(u) for x, u in pairs] == 6 * [are_paired]


@pytest.mark.slow
@pytest.mark.parametrize("persistent_workers", [True, False])
def test_workers_read_the_same_batches_and_end_with_the_loop(persistent_workers):
    def together(**options):
        pair = [make_loader(Augmented(count), batch_size=2, seed=count, **options) for count in (6, 4)]
        return zipped(*pair)

    alone, with_workers = together(), together(num_workers=1, persistent_workers=persistent_workers)
    for state in (ll.TrainState(), ll.TrainState(epoch=1, batch=2)):
        expected = listed(alone(state), None)
        assert listed(with_workers(state), None) == expected
        assert listed(endless(with_workers)(state), 4)[: len(expected)] == expected
    assert persistent_workers or not multiprocessing.active_children()


# A run


def loss_fn(model, batch):
    (x, y), (u,) = batch
    return (model(x) - y).square().mean() + model(u).square().mean()


def count(batch):
    return len(batch[0][0])


def spec_of(kind):
    """A run that trains on an endless loader, or on two side by side."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 1))
    first = make_loader(TensorDataset(torch.randn(20, 3), torch.randn(20, 1)), batch_size=4)
    other = make_loader(TensorDataset(torch.randn(42, 3)), batch_size=6, seed=1)
    loader = {
        "zipped": lambda: zipped(first, other, count_samples=count),
        "endless": lambda: endless(zipped(first, other, count_samples=count)),
    }[kind]()
    step = ll.make_train_step(ll.make_grad_fn(model, loss_fn, count_samples=count), SGD, donate=True)
    return loader, step, ll.init_state(model, SGD, loader=loader)


def run(loader, step, state, until):
    while state.step < until:
        for batch in loader(state):
            state, _ = step(state, batch)
            if state.step == until:
                break
    return state


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["zipped", "endless"])
def test_a_run_that_is_saved_at_any_step_continues_with_the_bits_of_one_without_a_stop(kind, tmp_path):
    expected = bits(ll.copy_state(run(*spec_of(kind), 13)))
    for stop in range(1, 13):
        ckpt = ll.checkpoint_io(tmp_path / str(stop))
        ckpt.save(run(*spec_of(kind), stop))
        loader, step, state = spec_of(kind)
        assert bits(run(loader, step, ckpt.restore(state), 13)) == expected


def test_a_changed_loader_beside_the_first_is_warned_of(tmp_path):
    loader, step, state = spec_of("zipped")
    ll.checkpoint_io(tmp_path).save(run(loader, step, state, 3))
    first, other = loader._loaders
    changed = zipped(first, make_loader(other.dataset, batch_size=7, seed=1), count_samples=count)
    restored = ll.checkpoint_io(tmp_path).restore(spec_of("zipped")[2])
    with pytest.warns(UserWarning, match=r"loader beside 1 batch_size was 6, is 7"):
        changed(restored)


def test_samples_of_a_run_are_those_of_the_first_loader():
    state = run(*spec_of("zipped"), 13)
    assert (state.samples, state.epoch, state.batch) == (13 * 4, 2, 3)


@pytest.mark.parametrize("kind", ["zipped", "endless"])
def test_a_replayed_step_has_the_batches_of_the_run(kind):
    loader, step, state = spec_of(kind)
    found = ll.debug.replay(step, ll.copy_state(state), loader, 11)
    (x, _), (u,) = found.batch
    first, other = (loader if kind == "zipped" else loader._loader)._loaders
    assert x.equal(first.dataset.tensors[0][found.indices[0]])
    assert u.equal(other.dataset.tensors[0][found.indices[1]])


# Streams


class Stream:
    def __init__(self, count=None):
        self.count = count

    def __iter__(self):
        return itertools.islice(itertools.count(), self.count)


def test_a_stream_beside_a_loader_continues_over_its_epochs():
    loader = zipped(make_loader(range(6), batch_size=2), make_loader(Stream(), batch_size=3))
    for epoch, batch in itertools.product(range(3), range(3)):
        state = ll.TrainState(epoch=epoch, batch=batch, epoch_length=3)
        first = 3 * (3 * epoch + batch)
        assert next(loader(state))[1].tolist() == [first, first + 1, first + 2]


def test_a_stream_that_ends_beside_a_loader_is_refused():
    loader = zipped(make_loader(range(6), batch_size=2), make_loader(Stream(5), batch_size=3))
    with pytest.raises(ValueError, match=r"the stream of .* has ended.*must not end before the run"):
        [*loader(ll.TrainState())]


def test_a_stream_comes_first_if_the_state_knows_its_epochs():
    loader = zipped(make_loader(Stream(), batch_size=2), make_loader(range(3), batch_size=1))
    expected = [*itertools.islice(cycled(make_loader(range(3), batch_size=1)), 8)]
    state = ll.TrainState(epoch=1, batch=1, epoch_length=4)
    assert [u.tolist() for _, u in loader(state)] == expected[5:8]
    assert [u.tolist() for _, u in itertools.islice(loader(ll.TrainState(batch=5)), 3)] == expected[5:8]
    with pytest.raises(ValueError, match="epoch 1, and nothing says how many batches the epochs before it had"):
        loader(ll.TrainState(epoch=1))


# Refusals


def test_counts_by_the_rule_that_are_not_the_samples_are_refused():
    pair = [make_loader(TensorDataset(torch.zeros(12, 1), torch.zeros(12)), batch_size=size) for size in (3, 4)]
    with pytest.raises(ValueError, match=r"has 3 samples, and a step would count 2 .*count_samples=lambda"):
        next(zipped(*pair)(ll.TrainState()))  # two tensors in each batch, of 3 and of 4 samples
    next(zipped(*pair, count_samples=count)(ll.TrainState()))


def test_epochs_of_different_lengths_are_refused_where_a_position_needs_them():
    growing = make_loader(range(9), order=ll.data.growing({0: 1, 9: 3}))
    plain = make_loader(range(100), batch_size=10)
    for loader in (endless(growing), zipped(plain, growing)):
        with pytest.raises(ValueError, match=r"epoch 1 of .*growing.* has 3 batches, and epoch 0 has 9"):
            [*itertools.islice(loader(ll.TrainState()), 10)]
    assert len([*zipped(growing, plain)(ll.TrainState())]) == 9
    with pytest.raises(ValueError, match="epoch 1, and nothing says"):
        zipped(growing, plain)(ll.TrainState(epoch=1))


def test_what_is_no_loader_is_refused():
    loader = make_loader(range(4), batch_size=2)
    dataloader = torch.utils.data.DataLoader(range(4))
    for function, arguments in (
        (endless, [dataloader]),
        (zipped, [dataloader, loader]),
        (zipped, [loader, range(3)]),
    ):
        with pytest.raises(TypeError, match=f"{function.__name__} got .*ll.make_loader"):
            function(*arguments)
    with pytest.raises(TypeError, match="zipped got one loader"):
        zipped(loader)
    with pytest.raises(TypeError, match="reads a stream: it has no end if"):
        endless(make_loader(Stream(), batch_size=2))
    with pytest.raises(TypeError, match="count_samples is an int"):
        zipped(loader, loader, count_samples=3)


def test_what_has_no_meaning_for_several_loaders_is_refused():
    loader = make_loader(range(4), batch_size=2)
    for several, advice in (
        (endless(loader), "has no end: evaluate with the loader"),
        (zipped(loader, loader), "alone"),
    ):
        with pytest.raises(TypeError, match=advice):
            several.parts(ll.TrainState())
    with pytest.raises(TypeError, match=r"cannot convert a position.*consumed, 5"):
        zipped(loader, loader).resume(ll.TrainState(epoch=2, batch=1, epoch_length=2))


def test_an_epoch_without_epoch_length_ends_and_is_not_read_again():
    loader = make_loader(range(4), batch_size=2)
    end = ll.TrainState(batch=2)
    assert listed(zipped(loader, copy.copy(loader))(end), None) == []


def test_reprs_are_the_calls():
    loader = make_loader(range(4), batch_size=2)
    text = "ll.make_loader(range, batch_size=2)"
    assert repr(endless(loader)) == f"ll.data.endless({text})  # 2 batches"
    assert repr(zipped(loader, loader)) == f"ll.data.zipped({text}, {text})  # 2 batches"


def side_by_side(size, of_other=3, samples=12, **options):
    first, other = (
        ll.make_loader(torch.arange(float(count)).view(-1, 1), batch_size=batch_size, order=order)
        for count, batch_size, order in ((samples, size, None), (90, of_other, ll.data.sequential()))
    )
    loader = zipped(first, other, count_samples=lambda batch: len(batch[0]))
    state = ll.init_state(torch.nn.Linear(1, 1), loader=loader)
    return first, loader, state.replace(**options)


def test_a_restore_does_not_convert_the_position_of_loaders_side_by_side(tmp_path):
    ckpt = ll.checkpoint_io(tmp_path)
    ckpt.save(side_by_side(3, step=1, batch=1, samples=3, batch_samples=3)[2])
    with pytest.raises(ValueError, match="stands within an epoch"):
        ckpt.restore(side_by_side(2)[2], quiet=True)
    ckpt.save(side_by_side(4, samples=9, step=1, batch=1)[2].replace(samples=4, batch_samples=4))
    with pytest.raises(ValueError, match="stands within an epoch"):  # 3 batches as before, of other samples
        ckpt.restore(side_by_side(3, samples=9)[2], quiet=True)


@pytest.mark.parametrize("length", [3, None])
def test_after_an_epoch_that_has_another_number_of_batches_now_the_others_would_stand_elsewhere(tmp_path, length):
    ckpt = ll.checkpoint_io(tmp_path)
    ckpt.save(side_by_side(4, step=3, epoch=1, epoch_length=length)[2].replace(samples=12, batch_samples=4))
    first, loader, state = side_by_side(2)
    state = state.replace(epoch_length=length and 6)
    with pytest.raises(ValueError, match=r"batch_size was 4, is 2.*others .*elsewhere.*first.resume\(state\)"):
        ckpt.restore(state, quiet=True)
    assert next(loader(ll.TrainState(epoch=1)))[1].flatten().tolist() == [18, 19, 20]  # instead of 9, 10, 11
    # What the message advises.
    _, before, state = side_by_side(4)
    state = ckpt.restore(state.replace(epoch_length=length), quiet=True)
    assert next(before(state))[1].flatten().tolist() == [9, 10, 11]
    state = first.resume(state)
    assert [u.flatten().tolist()[0] for _, u in loader(state)] == [*range(18, 36, 3)]
    ckpt.save(state)
    with pytest.warns(
        UserWarning, match="beside 1 batch_size was not given, is 3"
    ):  # `first` alone was known until now
        assert ckpt.restore(side_by_side(2)[2], quiet=True).epoch == 1


def test_another_batch_size_beside_the_first_loader_is_warned_of_with_what_it_means(tmp_path):
    ckpt = ll.checkpoint_io(tmp_path)
    ckpt.save(side_by_side(4, step=3, epoch=1)[2].replace(samples=12, batch_samples=4))
    _, loader, state = side_by_side(4, of_other=6)
    with pytest.warns(UserWarning, match=r"beside 1 batch_size was 3, is 6.*samples may come again or never"):
        state = ckpt.restore(state, quiet=True)
    assert next(loader(state))[1].flatten().tolist() == [*range(18, 24)]


def test_the_description_of_loaders_side_by_side_has_all_of_them():
    first, second, third = (make_loader(range(6), batch_size=2, seed=seed) for seed in range(3))
    flat = zipped(first, second, third).description
    assert zipped(zipped(first, second), third).description == flat
    assert [loader["seed"] for loader in (flat, *flat["beside"].values())] == [0, 1, 2]
