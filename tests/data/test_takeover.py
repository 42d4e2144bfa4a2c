"""DataLoaders that a loader takes over, `shuffle`, and streams that workers read."""

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    get_worker_info,
)

import looplib as ll
from looplib.data import sequential


class Table(Dataset):
    """Reads many rows at once, and nothing but lists."""

    def __len__(self):
        return 10

    def __getitem__(self, indices):
        assert isinstance(indices, list)
        return {"x": torch.tensor(indices) * 10, "count": len(indices)}


def test_a_dataset_that_reads_lists_is_asked_with_the_list_of_a_batch():
    theirs = DataLoader(
        Table(), batch_size=None, sampler=BatchSampler(SequentialSampler(range(10)), 4, drop_last=False)
    )
    loader = ll.make_loader(theirs)
    assert len(loader) == 3
    for ours, raw in zip(loader(ll.TrainState()), theirs, strict=True):
        assert torch.equal(ours["x"], raw["x"])
        assert ours["count"] == raw["count"]
    assert [batch["count"] for batch in loader(ll.TrainState(batch=1))] == [4, 2]
    assert "batch_sampler(BatchSampler" in repr(loader)


@pytest.mark.slow
def test_workers_read_it_and_each_epoch_has_draws_of_its_own():
    def loader(workers):
        sampler = BatchSampler(RandomSampler(range(10)), 4, drop_last=True)
        return ll.make_loader(DataLoader(Table(), batch_size=None, sampler=sampler, num_workers=workers))

    def rows(workers, epoch):
        return [batch["x"].tolist() for batch in loader(workers)(ll.TrainState(epoch=epoch))]

    assert rows(2, 0) == rows(0, 0) != rows(0, 1)


def test_shuffle_is_short_for_an_order():
    data = torch.arange(12)

    def read(**options):
        return [batch.tolist() for batch in ll.make_loader(data, batch_size=5, **options)(ll.TrainState(epoch=2))]

    assert read(shuffle=False) == [batch.tolist() for batch in DataLoader(data, batch_size=5, shuffle=False)]
    assert read(shuffle=True) == read() != read(shuffle=False)
    assert list(ll.make_loader(Numbers(), batch_size=4, shuffle=False)(ll.TrainState())).__len__() == 3
    for message, error, dataset, options in (
        ("shuffle=True and order=sequential.. are given", ValueError, data, {"shuffle": True, "order": sequential()}),
        ("order=shuffled.. is given for a stream", ValueError, Numbers(), {"shuffle": True}),
        ("shuffle is an int; give True, False", TypeError, data, {"shuffle": 1}),
        ("shuffle given together with a DataLoader", ValueError, DataLoader(data), {"shuffle": True}),
        ("no argument limit; write max_batches=", TypeError, data, {"limit": 3}),
    ):
        options = options if isinstance(dataset, DataLoader) else options | {"batch_size": 5}
        with pytest.raises(error, match=message):
            ll.make_loader(dataset, **options)


class Numbers(IterableDataset):
    """Twelve numbers; divided among the workers, or not."""

    def __init__(self, divided=False, constant=False):
        self.divided, self.constant = divided, constant

    def __iter__(self):
        worker = get_worker_info()
        first, step = (worker.id, worker.num_workers) if self.divided and worker else (0, 1)
        return iter([torch.tensor(0 if self.constant else k) for k in range(first, 12, step)])


@pytest.mark.parametrize("way", ["train", "evaluate"])
def test_a_stream_that_each_worker_reads_whole_is_named(way):
    def read(loader):
        if way == "train":
            return torch.cat(list(loader(ll.TrainState())))
        step = ll.make_predict_step(torch.nn.Linear(1, 1), lambda model, x: x.unsqueeze(1))
        return torch.cat(list(ll.evaluation.predict(step, ll.init_state(torch.nn.Linear(1, 1)), loader))).flatten()

    loader = ll.make_loader(Numbers(), batch_size=2, num_workers=2)
    with pytest.warns(
        UserWarning, match="2 workers, and the first two begin with the same samples.*get_worker_info"
    ) as told:
        counts = [len(read(loader)) for _ in range(2)]
    assert counts == [24, 24]  # as torch's DataLoader gives them
    assert len(told) == 1
    read(ll.make_loader(Numbers(divided=True), batch_size=2, num_workers=2))
    read(ll.make_loader(Numbers(constant=True), batch_size=2, num_workers=2))  # a stand-in for data
    read(ll.make_loader(Numbers(), batch_size=2, num_workers=1))


@pytest.mark.every_case
@pytest.mark.parametrize("workers", [(2, 0), (0, 2), (0, 1)])
def test_a_stream_is_not_continued_by_another_number_of_workers(workers, tmp_path):
    first, then = (ll.make_loader(Numbers(divided=True), batch_size=2, num_workers=count) for count in workers)
    ckpt, new = ll.checkpoint_io(tmp_path), ll.init_state(torch.nn.Linear(1, 1), loader=first)
    batches = first(new)
    seen, state = [next(batches)], new.replace(batch=1, step=1)
    ckpt.save(state)
    ckpt.save(ll.state.end_epoch(state).replace(step=2))
    restored = ckpt.restore(ll.init_state(torch.nn.Linear(1, 1)), which=1)
    if workers == (0, 1):  # one process reads, here or there
        assert torch.equal(torch.cat([*seen, *then(restored)]), torch.arange(12))
        return
    was, now = (max(1, count) for count in workers)
    for at in state, restored:
        message = rf"batch 1 .* read with workers={was}, which is different now.*some would come again.*as many"
        with pytest.raises(ValueError, match=message):
            then(at)
    between = ckpt.restore(ll.init_state(torch.nn.Linear(1, 1)))
    with pytest.warns(UserWarning, match=f"loader workers was {was}, is {now}"):  # the batches differ from here on
        assert len(torch.cat(list(then(between)))) == 12
