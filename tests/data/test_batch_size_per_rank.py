"""A batch size per rank: a run continues at the same sample on any number of ranks."""

import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_loader_ranks import as_rank
from test_position import consume

import looplib as ll
from looplib.types import TrainState


def make(ranks, count, per_rank, **options):
    with as_rank(0, ranks):
        return ll.make_loader(torch.arange(count), batch_size_per_rank=per_rank, seed=3, **options)


def batches_of(loader, ranks, state):
    """The global batches of all ranks, from the state's position to the end of its epoch."""
    parts = []
    for rank in range(ranks):
        with as_rank(rank, ranks):
            parts.append(list(loader(state)))
    return [torch.cat(batch).tolist() for batch in zip(*parts, strict=True)]


def joined(batches):
    return [sample for batch in batches for sample in batch]


@given(
    count=st.integers(1, 80),
    per_rank=st.integers(1, 5),
    stops=st.lists(st.tuples(st.integers(1, 5), st.integers(0, 12)), min_size=1, max_size=5),
    drop_last=st.booleans(),
)
@settings(max_examples=150, deadline=None)
def test_each_sample_comes_once_an_epoch_however_often_the_number_of_ranks_changes(count, per_rank, stops, drop_last):
    samples = count // per_rank * per_rank if drop_last else count
    if not samples:
        return
    expected = ll.make_loader(torch.arange(count), batch_size=count, seed=3)
    epochs = [next(expected(TrainState(epoch=epoch))).tolist()[:samples] for epoch in range(2)]
    state, seen = TrainState(), []
    for ranks, steps in [*stops, (1, 1000)]:
        loader = make(ranks, count, per_rank, drop_last=drop_last)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the steps, which change
            state = loader.resume(state if state.step else state.replace(epoch_length=len(loader)))
        assert loader.resume(state) is state
        for _ in range(steps):
            if state.epoch == 2:
                break
            batch = batches_of(loader, ranks, state)[0]
            assert len(batch) <= ranks * per_rank
            seen += batch
            state = consume(state, len(batch))
    assert (state.epoch, state.batch, state.samples) == (2, 0, 2 * samples)
    assert seen == epochs[0] + epochs[1]


def test_from_two_ranks_to_four_and_one_within_an_epoch(tmp_path):
    optimizer = ll.optimizer(torch.optim.SGD, lr=0.1)
    two, four, one = (make(ranks, 20, 2) for ranks in (2, 4, 1))

    def first(loader):
        return ll.init_state(torch.nn.Linear(1, 1), optimizer, epoch_length=len(loader))

    state = consume(first(two), 4)
    ll.checkpoint_io(tmp_path, describe={"loader": two}).save(state)
    whole = batches_of(two, 2, state.replace(batch=0, samples=0, batch_samples=0))

    ckpt = ll.checkpoint_io(tmp_path, describe={"loader": four})
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = ckpt.restore(first(four))
    text = "".join(str(one.message) for one in said)
    assert "batches of 8 samples, 2 on each rank, and 3 steps an epoch instead of 5" in text
    assert "The data continue at the next sample" in text
    assert "Schedules, and predicates of steps, count steps" in text
    assert (found.batch, found.epoch_length, found.samples) == (0, 3, 4)
    batches = batches_of(four, 4, found)
    assert [len(batch) for batch in batches] == [4, 8, 4]
    assert joined(batches) == joined(whole)[4:]
    with as_rank(3, 4):
        assert len(four.indices(found)) == 1

    # Saved before a step, and continued on one rank.
    ckpt.save(found)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = ll.checkpoint_io(tmp_path, describe={"loader": one}).restore(first(one))
    assert joined(batches_of(one, 1, found)) == joined(whole)[4:]


def test_what_a_batch_size_per_rank_does_not_go_with_is_named():
    data = torch.arange(12)
    for options, message in (
        ({"batch_size": 4}, "batch_size=4 and batch_size_per_rank=2 are given"),
        ({"limit": 3}, "limit=3 counts batches"),
        ({"divide": False}, "batch_size is already that of one rank"),
        ({"order": ll.data.by_length([*range(12)])}, "may not have the same samples in batches of another size"),
    ):
        with pytest.raises(ValueError, match=message):
            ll.make_loader(data, batch_size_per_rank=2, **options)
    with pytest.raises(TypeError, match="batch_size_per_rank is 0"):
        ll.make_loader(data, batch_size_per_rank=0)
    loader = ll.make_loader(data, batch_size_per_rank=2)
    assert repr(loader) == "ll.make_loader(Tensor, batch_size_per_rank=2)  # 6 batches"
    with as_rank(0, 2), pytest.raises(ValueError, match=r"made for 1 ranks, and there are 2: make it within .*setup"):
        loader(TrainState(epoch_length=6))
    # Counts that do not say where the run stands.
    with pytest.raises(ValueError, match="9 samples of the run do not say which of the 12 samples of epoch 0"):
        loader.resume(TrainState(step=2, batch=2, epoch_length=12, samples=9, batch_samples=1))
    stream = ll.make_loader(dict.fromkeys(range(9)).keys(), batch_size_per_rank=2)
    with pytest.raises(
        ValueError, match="a stream that was read in batches of 4 samples, and this loader has batches of 2"
    ):
        stream(TrainState(step=1, batch=1, samples=4, batch_samples=4))
