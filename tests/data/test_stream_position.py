"""Streams that know their position: a resumed run continues there, and reads nothing before it."""

import pytest
import torch
from datasets import Dataset
from datasets.distributed import split_dataset_by_node
from plain_loader import as_rank

import looplib as ll


class Counted(torch.utils.data.IterableDataset):
    """Numbers from 0, of which it notes what it has read."""

    def __init__(self, count):
        self.count, self.at, self.epoch, self.read = count, 0, 0, []

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        while self.at < self.count:
            self.at += 1
            self.read.append(self.at - 1)
            yield 100 * self.epoch + self.at - 1

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, saved):
        self.at = saved["at"]


def consumed(state, steps=1):
    return state.replace(step=state.step + steps, batch=state.batch + steps, samples=state.samples + 4 * steps)


def first_batches(loader, state, steps):
    batches, seen = loader(state), []
    for _ in range(steps):
        seen.append(next(batches))
        state = consumed(state)
    return seen, state


def test_a_resumed_run_reads_on_where_the_stream_stood(tmp_path):
    loader = ll.make_loader(Counted(22), batch_size=4)
    new = ll.init_state(torch.nn.Linear(1, 1), loader=loader, extra={"stream": "", "mine": 7})
    whole = [batch.tolist() for batch in ll.make_loader(Counted(22), batch_size=4)(new)]
    _, state = first_batches(loader, new, 3)
    ckpt = ll.checkpoint_io(tmp_path)
    ckpt.save(ll.data.with_position(loader, state))

    data = Counted(22)
    loader = ll.make_loader(data, batch_size=4)
    state = ckpt.restore(ll.init_state(torch.nn.Linear(1, 1), extra={"stream": "", "mine": 0}))
    assert state.extra["mine"] == 7
    assert [batch.tolist() for batch in loader(state)] == whole[3:]
    assert data.read == list(range(12, 22))

    # The same state again, the next epoch, an earlier one, and a state whose position is of another batch.
    assert next(loader(state)).tolist() == whole[3]
    after = ll.state.end_epoch(state)
    assert next(loader(after)).tolist() == [100, 101, 102, 103]
    assert next(loader(new)).tolist() == whole[0]
    assert next(loader(consumed(state))).tolist() == whole[4]
    assert ll.data.with_position(loader, after).extra["stream"] == ""


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_dataset_of_hugging_face(ranks):
    def make():
        return (
            Dataset.from_dict({"x": list(range(40))}).to_iterable_dataset(num_shards=4).shuffle(seed=1, buffer_size=1)
        )

    def loader_of(rank):
        data, divide = make(), ranks == 1
        data = data if divide else split_dataset_by_node(data, rank, ranks)
        return ll.make_loader(data, batch_size=4, divide=divide)

    new = ll.TrainState(extra={"stream": ""})
    for rank in range(ranks):
        whole = [batch["x"].tolist() for batch in loader_of(rank)(new)]
        loader = loader_of(rank)
        _, state = first_batches(loader, new, 2)
        state = ll.data.with_position(loader, state)
        assert [batch["x"].tolist() for batch in loader_of(rank)(state)] == whole[2:]
        assert [batch["x"].tolist() for batch in loader(new)] == whole
    if ranks > 1:
        with (
            as_rank(0, 3),
            pytest.raises(ValueError, match="was read on 1 ranks that each have samples of their own"),
        ):
            loader_of(0)(state)


def test_what_has_no_position_is_named():
    loader = ll.make_loader(Counted(9), batch_size=4)
    with pytest.raises(ValueError, match="at batch 2 of epoch 0, and the loader has yielded 0 of epoch 0"):
        ll.data.with_position(loader, ll.TrainState(batch=2))
    for options in ({"num_workers": 1}, {}):
        data = Counted(9) if options else range(9)
        with pytest.raises(TypeError, match="no stream with state_dict and load_state_dict, or is read by workers"):
            ll.data.with_position(ll.make_loader(data, batch_size=4, **options), ll.TrainState(batch=1))
    with pytest.raises(TypeError, match="extra is a Tensor; give a dict"):
        ll.data.with_position(loader, ll.TrainState(extra=torch.ones(1)))


class Shuffled(torch.utils.data.IterableDataset):
    """Numbers in an order of the epoch, which its state_dict holds; `counts` the epochs itself, without set_epoch."""

    def __init__(self, counts):
        self.epoch, self.at, self.counts = 0, 0, counts
        if not counts:
            self.set_epoch = lambda epoch: vars(self).update(epoch=epoch)

    def __iter__(self):
        order = torch.randperm(22, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        while self.at < len(order):
            self.at += 1
            yield order[self.at - 1]
        self.at, self.epoch = 0, self.epoch + self.counts

    def state_dict(self):
        return {"at": self.at, "epoch": self.epoch}

    def load_state_dict(self, saved):
        vars(self).update(saved)


@pytest.mark.parametrize("counts", [False, True])
def test_each_epoch_after_a_resume_has_its_own_order(counts):
    def epochs(loader, state, count):
        seen = []
        for _ in range(count):
            seen.append([batch.tolist() for batch in loader(state)])
            state = ll.state.end_epoch(state)
        return seen

    def make():
        return ll.make_loader(Shuffled(counts), batch_size=4)

    new = ll.TrainState(extra={"stream": ""})
    whole = epochs(make(), new, 4)
    assert len({str(epoch) for epoch in whole}) == 4
    loader = make()
    epochs(loader, new, 1)
    _, state = first_batches(loader, ll.state.end_epoch(new), 2)
    state = ll.data.with_position(loader, state)
    loader = make()
    assert epochs(loader, state, 3) == [whole[1][2:], *whole[2:]]
    if not counts:  # a pass that begins at the position and is left
        assert next(loader(state)).tolist() == whole[1][2]
        assert epochs(loader, ll.state.end_epoch(state), 1) == whole[2:3]
