# ruff: noqa: NPY002 (numpy's global stream is what is tested here)
import gc
import itertools
import multiprocessing
import os
import random
import signal
import time
import tracemalloc
import weakref
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    StackDataset,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
)
from torch.utils.data.datapipes.iter import IterableWrapper
from torchdata.stateful_dataloader import StatefulDataLoader

import looplib as ll
from looplib.data import Loader, make_loader, without_samples
from looplib.state import end_epoch
from looplib.types import TrainState

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded"),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),  # torchdata calls it
]


def at(epoch=0, batch=0, epoch_length=None):
    return TrainState(epoch=epoch, batch=batch, epoch_length=epoch_length)


def batches_of(loader, epoch=0, batch=0):
    return [b.tolist() if isinstance(b, torch.Tensor) else b for b in loader(at(epoch, batch))]


def samples_of(loader, epoch=0):
    return list(itertools.chain.from_iterable(batches_of(loader, epoch)))


def global_streams():
    return torch.default_generator.get_state(), random.getstate(), np.random.get_state()


def same_streams(one, other):
    return (
        torch.equal(one[0], other[0])
        and one[1] == other[1]
        and all(np.array_equal(a, b) for a, b in zip(one[2], other[2], strict=True))
    )


class Augmented(Dataset):
    """Draws from all three global streams, as data augmentation does."""

    def __init__(self, count):
        self.count, self.read = count, []

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        self.read.append(index)
        drawn = [torch.rand(()).item(), torch.randn(3)[1].item(), random.gauss(0, 1), random.random()]
        return torch.tensor([index, *drawn, np.random.standard_normal(), np.random.rand()], dtype=torch.float64)


class AugmentedStream(IterableDataset):
    """Numbers with a draw each, shared out among the workers."""

    def __init__(self, count):
        self.count = count

    def __iter__(self):
        info = get_worker_info()
        first, step = (info.id, info.num_workers) if info else (0, 1)
        for number in range(first, self.count, step):
            drawn = [torch.rand(()).item(), random.random(), np.random.rand()]
            yield torch.tensor([number, *drawn], dtype=torch.float64)


class Failing(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        raise LookupError("no such picture")


# The order


sizes = st.integers(1, 60)


@given(
    count=sizes, batch_size=st.integers(1, 20), drop_last=st.booleans(), epoch=st.integers(0, 9), seed=st.integers()
)
def test_a_shuffled_epoch_is_each_sample_once_in_the_batches_of_a_dataloader(
    count, batch_size, drop_last, epoch, seed
):
    reference = DataLoader(range(count), batch_size=batch_size, drop_last=drop_last)
    if not len(reference):
        with pytest.raises(ValueError, match=f"no batches: {count} samples, batch_size={batch_size}, drop_last=True"):
            make_loader(range(count), batch_size=batch_size, drop_last=drop_last, seed=seed)
        return
    loader = make_loader(range(count), batch_size=batch_size, drop_last=drop_last, seed=seed)
    batches = batches_of(loader, epoch)
    assert len(loader) == len(reference)
    assert [len(batch) for batch in batches] == [len(batch) for batch in reference]
    samples = list(itertools.chain.from_iterable(batches))
    assert len(set(samples)) == len(samples)
    assert set(samples) <= set(range(count))
    assert drop_last or len(samples) == count


def test_orders_differ_by_seed_and_epoch_and_by_nothing_else():
    loader, again = (make_loader(range(50), batch_size=7, seed=3) for _ in range(2))
    orders = [tuple(samples_of(loader, epoch)) for epoch in range(20)]
    assert len(set(orders)) == 20
    torch.manual_seed(5)
    assert orders == [tuple(samples_of(again, epoch)) for epoch in range(20)]
    others = [tuple(samples_of(make_loader(range(50), batch_size=7, seed=seed))) for seed in range(20)]
    assert len(set(others)) == 20
    assert orders[0] == tuple(samples_of(make_loader(range(50), batch_size=20, seed=3)))


def test_a_million_samples_make_no_million_python_objects():
    loader = make_loader(TensorDataset(torch.zeros(1_000_000)), batch_size=64)
    tracemalloc.start()
    try:
        batch = next(loader(at(batch=15_000, epoch_length=15_625)))
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()
    assert len(batch[0]) == 64


def test_what_is_returned_keeps_no_state_alive():
    for loader in (make_loader(range(4), batch_size=2), make_loader(AugmentedStream(4), batch_size=2)):
        state = at()
        seen = weakref.ref(state)
        batches = loader(state)
        next(batches)
        del state
        assert seen() is None


# Weights, lengths and orders of the user's


def test_weights_are_the_frequencies_and_zero_is_never():
    weights = [0, 1, 2, 0, 5, 0]
    loader = make_loader(range(6), batch_size=100, order=ll.data.weighted(weights, num_samples=20_000))
    assert len(loader) == 200
    counts = Counter(samples_of(loader))
    assert set(counts) == {1, 2, 4}
    for index in counts:
        p = weights[index] / 8
        assert abs(counts[index] - 20_000 * p) < 5 * (20_000 * p * (1 - p)) ** 0.5
    assert samples_of(loader, 1) != samples_of(loader)
    assert len(make_loader(range(6), batch_size=4, order=ll.data.weighted(torch.tensor(weights)))) == 2


@given(
    weights=st.lists(st.floats(0, 1e300, allow_subnormal=False), min_size=1).filter(any),
    drawn=st.sampled_from([0.0, 1 - 2**-53]),
)
def test_the_outermost_draws_still_fall_on_samples_with_weight(weights, drawn):
    weights = [0.0, *weights, 0.0]
    order = ll.data.weighted(torch.tensor(weights, dtype=torch.float64), num_samples=1)
    loader = make_loader(range(len(weights)), batch_size=1, order=order)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "rand", lambda *args, **options: torch.tensor([drawn], dtype=torch.float64))
        assert weights[loader.indices(at()).item()] > 0


@given(
    count=st.integers(1, 60),
    batch_size=st.integers(1, 7),
    pool=st.integers(1, 9),
    epoch=st.integers(0, 3),
    drop_last=st.booleans(),
)
@settings(max_examples=60)
def test_a_pool_is_so_many_batches_of_the_shuffle_sorted_together(count, batch_size, pool, epoch, drop_last):
    if drop_last and count < batch_size:
        return
    lengths = [(i * 37) % 101 + 1 for i in range(count)]  # all different
    options = {"batch_size": batch_size, "drop_last": drop_last, "seed": 5}
    found = batches_of(make_loader(range(count), order=ll.data.by_length(lengths, pool=pool), **options), epoch)
    plain = batches_of(make_loader(range(count), **options), epoch)
    expected = []
    for first in range(0, len(plain), pool):
        together = sorted(itertools.chain.from_iterable(plain[first : first + pool]), key=lengths.__getitem__)
        expected += [together[i : i + batch_size] for i in range(0, len(together), batch_size)]
    full = [batch for batch in expected if len(batch) == batch_size]
    rest = [batch for batch in expected if len(batch) < batch_size]
    if full:
        longest = max(full, key=lambda batch: lengths[batch[-1]])
        if rest and lengths[rest[0][-1]] > lengths[longest[-1]]:  # a full batch is to have the longest sample
            longest[-1], rest[0][-1] = rest[0][-1], longest[-1]
        assert found[0] == longest
    assert sorted(found) == sorted(full + rest)
    assert [len(batch) for batch in found] == [len(batch) for batch in plain]
    if count <= pool * batch_size and count % batch_size == 0:
        ranges = sorted((min(batch), max(batch)) for batch in [[lengths[i] for i in batch] for batch in found])
        assert all(one[1] < other[0] for one, other in itertools.pairwise(ranges))


def test_the_pool_is_fifty_batches_or_a_quarter_of_a_small_dataset():
    for count, pool in ((4000, 50), (800, 50), (400, 25), (16, 1), (3, 1)):
        lengths = torch.arange(count).flip(0) + 1
        one, other = (
            make_loader(range(count), batch_size=4, order=ll.data.by_length(lengths, **o))
            for o in ({}, {"pool": pool})
        )
        assert batches_of(one) == batches_of(other)
        if count > 16:
            smaller = make_loader(range(count), batch_size=4, order=ll.data.by_length(lengths, pool=pool - 1))
            assert batches_of(one) != batches_of(smaller)


class NumpySampler(Sampler):
    def __len__(self):
        return 12

    def __iter__(self):
        return iter(np.random.permutation(12))


@pytest.mark.parametrize(
    "make_sampler",
    [
        lambda: SubsetRandomSampler([*range(12)]),
        lambda: SubsetRandomSampler([*range(12)], generator=torch.Generator().manual_seed(4)),
        lambda: NumpySampler(),
        lambda: lambda epoch, generator: torch.randperm(12, generator=generator),
        lambda: lambda epoch, generator: random.sample(range(12), 12),
        lambda: lambda epoch, generator: (int(i) for i in torch.randperm(12)),
    ],
)
def test_a_sampler_is_a_function_of_seed_and_epoch(make_sampler):
    before = global_streams()
    sampler = make_sampler()
    loader = make_loader(range(12), batch_size=5, order=ll.data.sampler(sampler))
    orders = [samples_of(loader, epoch) for epoch in range(4)]
    assert same_streams(before, global_streams())
    assert all(sorted(order) == [*range(12)] for order in orders)
    assert len(set(map(tuple, orders))) == 4
    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    again = make_loader(range(12), batch_size=5, order=ll.data.sampler(make_sampler()))
    assert orders == [samples_of(again, epoch) for epoch in range(4)]
    assert orders[0] != samples_of(make_loader(range(12), batch_size=5, order=ll.data.sampler(sampler), seed=1))


def test_a_samplers_own_generator_is_left_as_it_was():
    generator = torch.Generator().manual_seed(4)
    before = generator.get_state()
    sampler = BatchSampler(RandomSampler(range(12), generator=generator), 5, False)
    sampler.generator = generator
    loader = make_loader(range(12), order=ll.data.batch_sampler(sampler))
    assert samples_of(loader) == samples_of(loader)
    assert torch.equal(generator.get_state(), before)


def test_set_epoch_is_called_for_samplers_that_have_it():
    sampler = torch.utils.data.DistributedSampler(range(12), num_replicas=2, rank=1, seed=3)
    loader = make_loader(range(12), batch_size=6, order=ll.data.sampler(sampler), divide=False)
    for epoch in (0, 1, 5):
        samples = samples_of(loader, epoch)
        sampler.set_epoch(epoch)
        assert samples == [*sampler]


def test_a_batch_sampler_decides_the_batches():
    parts = [[0, 1, 2], [3], [9, 9]]
    for sampler in (parts, lambda epoch, generator: parts, lambda epoch, generator: map(torch.tensor, parts)):
        loader = make_loader(range(10), order=ll.data.batch_sampler(sampler))
        assert len(loader) == 3
        assert batches_of(loader) == parts
        assert batches_of(loader, batch=1) == parts[1:]


def test_keys_need_not_be_numbers():
    class Faces(Dataset):
        def __getitem__(self, name):
            return name, random.random()

    names = ["anna", "bert", "carl", "anna"]
    loader = make_loader(Faces(), batch_size=3, order=ll.data.sampler(names))
    (first, drawn), (second, more) = loader(at())
    assert [*first, *second] == names
    assert len({*drawn.tolist(), *more.tolist()}) == 4
    in_twos = list(make_loader(Faces(), order=ll.data.batch_sampler([names[:2], names[2:]]))(at()))
    assert torch.equal(torch.cat([drawn, more]), torch.cat([draw for _, draw in in_twos]))


def test_an_order_that_varies_in_length_needs_a_state_without_a_length():
    loader = make_loader(range(9), batch_size=1, order=ll.data.sampler(lambda epoch, generator: range(3 + epoch)))
    assert len(loader) == 3
    assert len(batches_of(loader, 2)) == 5
    with pytest.raises(ValueError, match=r"epoch 2 has 5 batches, but epoch 0 has 3; .*end_epoch"):
        loader(at(2, 0, 3))


def test_items_that_are_batches_already():
    batches = [torch.arange(i, i + 3) for i in range(5)]
    loader = make_loader(batches, batch_size=None)
    assert len(loader) == 5
    assert {tuple(batch) for batch in batches_of(loader)} == {tuple(batch.tolist()) for batch in batches}
    from_numpy = make_loader([np.ones(3)], batch_size=None)
    assert isinstance(next(from_numpy(at())), torch.Tensor)


# What is drawn in the dataset


def test_torch_and_numpy_do_not_draw_the_same_words():
    class Words(Augmented):
        def __getitem__(self, index):
            ours = torch.randint(0, 2**24, (5,)).tolist()
            return ours + (np.random.randint(0, 2**32, 5, dtype=np.uint32) % 2**24).tolist()

    for batch in make_loader(Words(8), batch_size=1)(at()):
        assert len(set(map(int, batch))) == 10


class InLists(Augmented):
    def __getitems__(self, indices):
        self.lists = [*getattr(self, "lists", []), indices]
        return [self[index] for index in indices]


def test_a_dataset_that_reads_lists_gets_the_whole_batch():
    data = InLists(10)
    loader = make_loader(data, batch_size=4)
    batches = list(loader(at()))
    assert [len(indices) for indices in data.lists] == [4, 4, 2]
    assert data.lists == [batch[:, 0].long().tolist() for batch in batches]
    assert all(map(torch.equal, batches[1:], loader(at(batch=1))))


def test_subsets_and_stacks_are_augmented_item_by_item():
    class Whole(Subset):
        pass

    for wrapped in (
        Subset(Augmented(20), range(5, 15)),
        Whole(Augmented(10), range(10)),
        StackDataset(Augmented(10)),
    ):
        one, other = (
            torch.cat([torch.as_tensor(b[0] if isinstance(b, list) else b) for b in loader(at())])
            for loader in (
                make_loader(wrapped, batch_size=3, order=ll.data.in_order()),
                make_loader(wrapped, batch_size=10, order=ll.data.in_order()),
            )
        )
        assert torch.equal(one, other)
    stacked = StackDataset(x=InLists(10), y=range(10))
    next(make_loader(stacked, batch_size=3)(at()))
    assert len(stacked.datasets["x"].lists[0]) == 3


# Tensors, at once


def tensor_sets():
    numbers = torch.randn(20, 4, 3, generator=torch.Generator().manual_seed(0))
    odd = numbers.transpose(1, 2)
    whole = TensorDataset(numbers, odd, torch.arange(20), numbers.bfloat16(), numbers > 0, numbers[:, :0])
    return [
        whole,
        TensorDataset(numbers.transpose(0, 1).contiguous().transpose(0, 1)),
        TensorDataset(torch.randn(20, 3, 4, 4).to(memory_format=torch.channels_last)),
        Subset(whole, range(3, 17)),
        Subset(Subset(whole, torch.arange(19, 1, -1)), [4, 1, 1, 8, 0]),
        Subset(whole, [-1, -3, 0]),
        Subset(whole, np.array([2, 4, 6])),
    ]


@pytest.mark.parametrize("which", range(7))
def test_tensors_come_as_the_dataloader_gives_them(which):
    data = tensor_sets()[which]
    loader = make_loader(data, batch_size=3)
    indices = make_loader(range(len(data)), batch_size=3)
    reference = DataLoader(data, batch_sampler=batches_of(indices, 1))
    for batch, expected in zip(loader(at(1)), reference, strict=True):
        assert type(batch) is type(expected) is list
        for ours, theirs in zip(batch, expected, strict=True):
            assert ours.dtype == theirs.dtype
            assert ours.stride() == theirs.stride()
            assert torch.equal(ours, theirs)


def test_tensors_are_copied_out_of_the_dataset():
    data = TensorDataset(torch.zeros(6))
    for (x,) in make_loader(data, batch_size=3, order=ll.data.in_order())(at()):
        x += 1
    assert not data.tensors[0].any()


# Workers


@pytest.mark.parametrize("make", [lambda: Augmented(12), lambda: AugmentedStream(12)], ids=["samples", "stream"])
@pytest.mark.parametrize("within", [False, True], ids=["dropped", "in a cycle"])
def test_workers_that_persist_end_with_their_loader_at_once(make, within, monkeypatch):
    # If torch waits for a worker, it waits for a minute.
    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 60.0)
    gc.collect()
    gc.disable()
    try:
        before, began = set(multiprocessing.active_children()), time.monotonic()
        collate = Collate()
        loader = make_loader(make(), batch_size=2, num_workers=2, persistent_workers=True, collate_fn=collate)
        batches = loader(TrainState())
        next(batches)
        del batches  # left early
        assert len(set(multiprocessing.active_children()) - before) == 2
        if within:
            collate.loader = loader
        del loader, collate
        if within:
            gc.collect()
        assert set(multiprocessing.active_children()) <= before
        assert time.monotonic() - began < 50
    finally:
        gc.enable()


class Collate:
    def __call__(self, items):
        return len(items)


def test_persistent_workers_are_kept_and_never_shared():
    class Where(Augmented):
        def __getitem__(self, index):
            return index, get_worker_info().id, torch.multiprocessing.current_process().pid

    loader = make_loader(Where(12), batch_size=3, num_workers=1, persistent_workers=True)
    plain = make_loader(range(12), batch_size=3)
    first = list(loader(at()))
    one, two = loader(at(1)), loader(at(2))
    mixed = [(next(one), next(two)) for _ in range(3)]
    one.close()
    assert [a[0].tolist() for a, _ in mixed] == batches_of(plain, 1)[:3]
    assert [b[0].tolist() for _, b in mixed] == batches_of(plain, 2)[:3]
    after = list(loader(at(3)))  # in workers left amid an epoch
    assert [b[0].tolist() for b in after] == batches_of(plain, 3)
    assert {a[2][0].item() for a, _ in mixed} == {first[0][2][0].item()} == {b[2][0].item() for b in after}
    assert {b[2][0].item() for _, b in mixed} != {first[0][2][0].item()}
    del one, two, loader
    assert not multiprocessing.active_children()


@pytest.mark.parametrize("leave", ["close", "drop"])
def test_workers_go_when_the_iterator_does(leave):
    loader = make_loader(Augmented(100), batch_size=1, num_workers=1)
    batches = loader(at())
    next(batches)
    assert multiprocessing.active_children()
    if leave == "close":
        batches.close()
    else:
        del batches
    assert not multiprocessing.active_children()


def test_a_workers_error_comes_with_its_traceback():
    loader = make_loader(Failing(), batch_size=2, num_workers=1)
    with pytest.raises(LookupError, match=r"(?s)worker process 0.*in __getitem__.*no such picture") as raised:
        next(loader(at()))
    assert raised.traceback
    assert not multiprocessing.active_children()  # though the traceback still holds the iterator
    with pytest.raises(LookupError, match=r"^'?no such picture'?$"):
        next(make_loader(Failing(), batch_size=2)(at()))


def test_an_interrupt_of_the_process_group_leaves_the_workers_alone():
    loader = make_loader(Offset(40), batch_size=2, order=ll.data.in_order(), num_workers=1, prefetch_factor=1)
    batches = loader(at())
    seen = next(batches).tolist()
    (worker,) = multiprocessing.active_children()
    os.kill(worker.pid, signal.SIGINT)
    assert seen + [i for batch in batches for i in batch.tolist()] == [*range(40)]


def give_worker_its_number(worker_id):
    get_worker_info().dataset.offset = 100 * (worker_id + 1)


class Offset(Augmented):
    offset = 0

    def __getitem__(self, index):
        return index + self.offset


def test_worker_init_fn_finds_the_dataset_itself():
    loader = make_loader(
        Offset(4), batch_size=2, order=ll.data.in_order(), num_workers=2, worker_init_fn=give_worker_its_number
    )
    assert batches_of(loader) == [[100, 101], [202, 203]]


# Streams


def test_a_stream_is_what_a_dataloader_gives():
    loader = make_loader(AugmentedStream(10), batch_size=4)
    expected = [batch[:, 0].tolist() for batch in DataLoader(AugmentedStream(10), batch_size=4)]
    assert [batch[:, 0].tolist() for batch in loader(at())] == expected
    assert len(list(make_loader(AugmentedStream(10), batch_size=4, drop_last=True)(at()))) == 2
    assert len(list(make_loader(AugmentedStream(10), batch_size=None)(at()))) == 10
    assert samples_of(make_loader({"a": 0, "b": 1}.keys(), batch_size=2)) == ["a", "b"]


@pytest.mark.parametrize("options", [{}, {"num_workers": 2}, {"num_workers": 1, "persistent_workers": True}])
def test_a_streams_draws_are_a_function_of_seed_and_epoch(options):
    torch.manual_seed(0), random.seed(0), np.random.seed(0)
    before = global_streams()
    loader = make_loader(AugmentedStream(12), batch_size=2, **options)
    zero, one = list(loader(at())), list(loader(at(1)))
    assert sorted(torch.cat(zero)[:, 0].tolist()) == [*range(12)]
    assert not any((a[:, 1:] == b[:, 1:]).any() for a, b in zip(zero, one, strict=True))
    assert torch.cat(one)[:, 1:].unique().numel() == 36
    again = loader(at(1, batch=4))
    assert all(map(torch.equal, again, one[4:]))
    assert same_streams(before, global_streams())


def test_draws_between_two_batches_of_a_stream_do_not_touch_it():
    loader = make_loader(AugmentedStream(6), batch_size=1)
    quiet, noisy = list(loader(at())), []
    for batch in loader(at()):
        noisy.append(batch)
        torch.rand(5), random.random(), np.random.seed(0)
    assert all(map(torch.equal, quiet, noisy))


def test_the_end_of_a_stream():
    loader = make_loader(AugmentedStream(6), batch_size=2)
    state = at()
    for _ in loader(state):
        state = state.replace(batch=state.batch + 1)
    with pytest.raises(ValueError, match=r"ended after 3 batches.*at batch 3 of epoch 0; call state = ll.end_epoch"):
        list(loader(state))
    assert len(list(loader(end_epoch(state)))) == 3
    with pytest.raises(ValueError, match=r"ended after 3 batches.*at batch 5"):
        list(loader(at(batch=5)))
    with pytest.raises(ValueError, match=r"AugmentedStream.*gave no batch in epoch 0"):
        list(make_loader(AugmentedStream(0), batch_size=2)(at()))
    with pytest.raises(TypeError, match=r"stream \(AugmentedStream\) has no length; .*end_epoch"):
        len(loader)


def test_an_epoch_length_ends_the_epoch_of_an_endless_stream():
    loader = make_loader(stream := Counting(), batch_size=2)
    assert [b.tolist() for b in loader(at(3, 1, epoch_length=3))] == [[302, 303], [304, 305]]
    assert stream.epoch == 3
    with pytest.raises(ValueError, match=r"ended after 3 batches, but state.epoch_length is 4"):
        list(make_loader(AugmentedStream(6), batch_size=2)(at(epoch_length=4)))


class Counting:
    """Endless, no IterableDataset, and told of the epoch."""

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        return itertools.count(100 * self.epoch)


# DataLoaders taken over


@pytest.mark.parametrize("kind", [DataLoader, StatefulDataLoader])
def test_a_dataloader_is_taken_over(kind):
    data = Augmented(10)
    for theirs, ours in (
        ({"batch_size": 4, "shuffle": True}, {"batch_size": 4}),
        ({"batch_size": 3}, {"batch_size": 3, "order": ll.data.in_order()}),
        ({"batch_size": None}, {"batch_size": None, "order": ll.data.in_order()}),
        (
            {"batch_size": 4, "sampler": WeightedRandomSampler([1.0] * 10, 7)},
            {"batch_size": 4, "order": ll.data.sampler(WeightedRandomSampler([1.0] * 10, 7))},
        ),
        (
            {"batch_sampler": BatchSampler(SequentialSampler(data), 3, True)},
            {"batch_size": 3, "order": ll.data.in_order(), "drop_last": True},
        ),
        ({"batch_sampler": [[3, 1], [4]]}, {"order": ll.data.batch_sampler([[3, 1], [4]])}),
        (
            {"batch_size": 2, "sampler": NumpySampler(), "shuffle": None},
            {"batch_size": 2, "order": ll.data.sampler(NumpySampler())},
        ),
    ):
        samples = Augmented(12) if isinstance(theirs.get("sampler"), NumpySampler) else data
        taken = make_loader(kind(samples, **theirs), seed=5)
        plain = make_loader(samples, seed=5, **ours)
        assert len(taken) == len(plain)
        assert all(map(torch.equal, taken(at(1)), plain(at(1))))


@pytest.mark.parametrize("kind", [DataLoader, StatefulDataLoader])
def test_other_samplers_of_a_dataloader_keep_their_meaning(kind):
    data = range(10)
    again = make_loader(kind(data, sampler=RandomSampler(data, replacement=True), batch_size=2))
    part = make_loader(kind(data, sampler=RandomSampler(data, num_samples=4), batch_size=2))
    assert len({*samples_of(part)}) == 4
    assert any(len({*samples_of(again, epoch)}) < 10 for epoch in range(9))
    tail = make_loader(kind(data, sampler=SequentialSampler(range(3)), batch_size=2))
    assert samples_of(tail) == [0, 1, 2]
    stream = make_loader(kind(AugmentedStream(9), batch_size=2, drop_last=True))
    assert len(list(stream(at()))) == 4
    for loader in (again, part):
        assert samples_of(loader) == samples_of(loader) != samples_of(loader, 1)


def test_a_dataloaders_workers_are_taken_over():
    theirs = DataLoader(Offset(4), batch_size=2, num_workers=1, worker_init_fn=give_worker_its_number)
    assert batches_of(make_loader(theirs)) == [[100, 101], [102, 103]]
    assert theirs._iterator is None


# Devices


@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true but no accelerator")
@pytest.mark.parametrize("pin_memory", [False, True])
def test_batches_move_to_a_device_with_all_that_is_in_them(pin_memory):
    class Text:
        def to(self, device, non_blocking):
            self.moved = device, non_blocking
            return self

    def collate(items):
        return {"x": torch.tensor(items), "pair": (torch.tensor(1), "name"), "text": Text()}

    for data in ([1, 2], Counting()):
        loader = make_loader(data, batch_size=2, collate_fn=collate, device="meta", pin_memory=pin_memory)
        batch = next(loader(at()))
        assert batch["x"].is_meta
        assert batch["pair"][0].is_meta
        assert batch["pair"][1] == "name"
        assert batch["text"].moved == (torch.device("meta"), pin_memory)


# Errors


class Squares:
    def __getitem__(self, index):
        return index**2


COUNTER = itertools.count()
REFUSED = [
    *((range(4), {"batch_size": size}, ValueError, "batch_size is") for size in (0, True, 2.0)),
    ([], {"batch_size": 2}, ValueError, "0 samples, batch_size=2, drop_last=False"),
    (range(3), {"batch_size": None, "drop_last": True}, ValueError, "drop_last=True needs a batch_size"),
    (range(3), {"batch_size": None, "order": ll.data.by_length([1, 2, 3])}, ValueError, "by_length.*batch_size"),
    (range(3), {"batch_size": 2, "order": ll.data.batch_sampler([[1]])}, ValueError, "batch_size=2.*batch_sampler"),
    (range(3), {"batch_size": 2, "order": ll.data.weighted([1, 2])}, ValueError, r"weights.*\(2,\).*\(3,\)"),
    (range(3), {"batch_size": 1, "order": ll.data.sampler(lambda *_: torch.eye(2))}, TypeError, r"float32.*\(2, 2\)"),
    (range(3), {"batch_size": 1, "order": ll.data.sampler(lambda *_: torch.ones(3) > 0)}, TypeError, "torch.bool"),
    (range(9), {"batch_size": 2, "order": ll.data.sampler(lambda *_: [next(COUNTER) % 9])}, ValueError, "epoch 0"),
    (range(3), {"batch_size": 2, "order": ll.data.shuffled}, TypeError, r"shuffled.*call.*shuffled\("),
    (range(3), {"batch_size": 2, "order": [2, 1, 0]}, TypeError, r"list.*order=ll.data.sampler\("),
    (Failing(), {"num_workers": -1, "batch_size": 1}, ValueError, "num_workers"),
    (Failing(), {"prefetch_factor": 2, "batch_size": 1}, ValueError, "prefetch_factor"),
    (3, {}, TypeError, "int.*__len__ and __getitem__"),
    (Squares(), {"batch_size": 2}, TypeError, "Squares.*__len__.*sampler"),
    (iter(range(3)), {"batch_size": 1}, TypeError, "range_iterator.*once only"),
    (AugmentedStream(3), {"batch_size": 1, "order": ll.data.shuffled()}, ValueError, "shuffled.*AugmentedStream"),
    (AugmentedStream(3), {"limit": 2}, ValueError, r"limit=2.*stream .*epoch_length=2\)"),
    (DataLoader(AugmentedStream(3)), {"limit": 2}, ValueError, "limit=2.*stream"),
    (range(3), {"limit": 0}, ValueError, "limit is 0"),
    (IterableWrapper([1]), {"batch_size": 2, "num_workers": 2}, TypeError, "DataPipe.*num_workers=0"),
]
REFUSED_ORDERS = [
    (lambda: ll.data.weighted([1, 2, 3], num_samples=0), ValueError, "num_samples is 0"),
    (lambda: ll.data.weighted([1, 2, -1]), ValueError, "weights.*-1.0"),
    (lambda: ll.data.weighted([0, 0, 0]), ValueError, "not all 0"),
    (lambda: ll.data.weighted([0, 1, float("nan")]), ValueError, "finite"),
    (lambda: ll.data.weighted([[1, 2]]), ValueError, r"weights.*\(1, 2\)"),
    (lambda: ll.data.by_length([1] * 3, pool=0), ValueError, "pool is 0"),
    (lambda: ll.data.by_length([1, -1]), ValueError, "lengths.*-1.0"),
    (lambda: ll.data.sampler(iter([1])), TypeError, "list_iterator.*once"),
    (lambda: ll.data.batch_sampler(Counting()), TypeError, "Counting.*__len__"),
    (lambda: ll.data.sampler(3), TypeError, "sampler.*int"),
]


def test_what_no_loader_and_no_order_can_be_made_of_is_refused_by_name():
    for make, kind, names in REFUSED_ORDERS:
        with pytest.raises(kind, match=names):
            make()
    for dataset, options, kind, names in REFUSED:
        with pytest.raises(kind, match=names):
            make_loader(dataset, **options)
    assert samples_of(make_loader(Squares(), batch_size=2, order=ll.data.sampler([3, 4]))) == [9, 16]


def test_states_that_are_not_this_loaders():
    loader = make_loader(range(10), batch_size=4)
    with pytest.raises(
        ValueError, match=r"epoch_length is 5, but this loader has 3 batches .*len\(loader\)"
    ) as found:
        loader(at(epoch_length=5))
    assert str(found.value).endswith("to read another set from its beginning: loader(ll.TrainState())")
    assert len(list(loader(TrainState()))) == 3
    with pytest.raises(ValueError, match=r"stands at the end of epoch 1 \(batch 3 of 3\).*end_epoch"):
        loader(at(1, 3))
    with pytest.raises(ValueError, match=r"state.batch is 7, but epoch 0 has 3 batches"):
        loader(at(0, 7))
    with pytest.raises(TypeError, match=r"for batch in loader\(state\)"):
        iter(loader)


def test_repr():
    assert repr(make_loader([1, 2, 3], batch_size=2)) == "ll.make_loader(list, batch_size=2)  # 2 batches"
    stream = make_loader(Counting(), batch_size=None, seed=4)
    assert repr(stream) == "ll.make_loader(Counting, batch_size=None, seed=4)  # a stream"
    assert isinstance(make_loader([1], batch_size=None), Loader)


# The first batches of each epoch


ORDERS = {
    "shuffled": lambda count: {"batch_size": 4},
    "in order": lambda count: {"batch_size": 4, "order": ll.data.in_order()},
    "drop last": lambda count: {"batch_size": 4, "drop_last": True},
    "weights": lambda count: {"batch_size": 4, "order": ll.data.weighted([1.0 + i for i in range(count)])},
    "lengths": lambda count: {"batch_size": 4, "order": ll.data.by_length([1 + i % 5 for i in range(count)], pool=2)},
    "default pool": lambda count: {"batch_size": 4, "order": ll.data.by_length([1 + i % 5 for i in range(count)])},
    "sampler": lambda count: {"batch_size": 4, "order": ll.data.sampler(SubsetRandomSampler(range(count)))},
    "batch sampler": lambda count: {
        "order": ll.data.batch_sampler(lambda epoch, g: torch.randperm(count, generator=g).split([3, count - 3]))
    },
}


@given(st.sampled_from(sorted(ORDERS)), st.integers(1, 25), st.integers(0, 3), st.data())
@settings(deadline=None, max_examples=80)
def test_a_run_within_an_epoch_reads_the_rest_of_it_up_to_the_limit_and_nothing_else(order, limit, epoch, data):
    read = Augmented(17)
    whole = make_loader(Augmented(17), seed=3, **ORDERS[order](17))
    part = make_loader(read, seed=3, limit=limit, **ORDERS[order](17))
    assert len(part) == min(limit, len(whole))
    first = data.draw(st.integers(0, len(part) - 1))
    expected = list(whole(at(epoch)))[first:limit]
    read.read.clear()
    rest = part(at(epoch, first, len(part)))
    assert not read.read
    found = list(rest)
    assert len(found) == len(expected)
    assert all(map(torch.equal, found, expected))
    assert len(read.read) == sum(map(len, expected))
    for k in range(first, len(part)):
        assert torch.equal(part.indices(at(epoch, k)), whole.indices(at(epoch, k)))
    with pytest.raises(ValueError, match="at the end of epoch"):
        part(at(epoch, len(part), len(part)))


def test_a_batch_sampler_without_an_end_is_read_to_the_limit():
    def endless(epoch, generator):
        while True:
            yield torch.randint(0, 5, (3,), generator=generator)

    loader = make_loader(range(5), order=ll.data.batch_sampler(endless), limit=4)
    assert len(loader) == len(batches_of(loader)) == 4
    assert batches_of(loader, 0, 2) == batches_of(loader)[2:]


# The samples of a batch by their numbers, and loaders without some of them


@pytest.mark.parametrize("rank", range(3))
def test_indices_are_of_the_ranks_own_rows(rank, monkeypatch):
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_rank", lambda group=None: rank)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda group=None: 3)
    for divide in (True, False):
        loader = make_loader(Augmented(17), batch_size=7, seed=3, drop_last=True, divide=divide)
        for part in (loader, without_samples(loader, [4, 11])):
            found = [part.indices(at(0, k)).tolist() for k in range(2)]
            assert found == [batch[:, 0].tolist() for batch in part(at())]


def test_indices_of_keys_of_batches_and_of_streams():
    named = {"a": 1, "b": 2, "c": 3}
    loader = make_loader(named, batch_size=2, order=ll.data.sampler(["c", "a", "b"]), collate_fn=list)
    assert [loader.indices(at(0, k)) for k in (0, 1)] == [["c", "a"], ["b"]]
    assert batches_of(without_samples(loader, ["a"])) == [[3], [2]]
    batches = [torch.arange(3), torch.arange(5)]
    assert make_loader(batches, batch_size=None, order=ll.data.in_order()).indices(at(0, 1)).tolist() == [1]
    stream = make_loader(AugmentedStream(5), batch_size=2)
    assert stream.indices(at()) is None
    with pytest.raises(TypeError, match=r"a stream \(AugmentedStream\) has no numbered samples"):
        without_samples(stream, [1])


@given(st.sampled_from(sorted(ORDERS)), st.sets(st.integers(0, 22), max_size=8), st.integers(0, 5), st.data())
@settings(deadline=None, max_examples=60)
def test_without_some_rows_all_others_come_where_and_as_they_did(order, rows, epoch, data):
    whole = make_loader(Augmented(23), seed=7, **ORDERS[order](23))
    first = data.draw(st.integers(0, len(whole) - 1))
    state = at(epoch, first, len(whole))
    expected = [[row for row in batch if row[0].item() not in rows] for batch in whole(at(epoch, 0, len(whole)))]
    read = Augmented(23)
    part = without_samples(make_loader(read, seed=7, **ORDERS[order](23)), rows)
    assert len(part) == len(whole)
    if sum(map(len, expected)) < len(expected):
        with pytest.raises(ValueError, match=f"epoch {epoch} has 2 batches and only 1 samples without"):
            part(state)
        return
    if all(expected):
        for batch, left in zip(part(state), expected[first:], strict=True):
            assert torch.equal(batch, torch.stack(left))  # with the draws of each
    else:
        found = list(part(at(epoch, 0, len(whole))))
        assert torch.equal(torch.cat(found), torch.stack(list(itertools.chain(*expected))))
        assert sum(abs(len(batch) - len(left)) for batch, left in zip(found, expected, strict=True)) <= 2 * sum(
            not left for left in expected
        )
    assert rows.isdisjoint(read.read)
    some = set(list(rows)[::2])
    twice = without_samples(without_samples(whole, some), torch.tensor(sorted(rows - some), dtype=torch.int64))
    assert all(torch.equal(a, b) for a, b in zip(twice(state), part(state), strict=True))
    assert part.indices(state).tolist() == next(part(state))[:, 0].long().tolist()


def test_rows_that_are_not_there_are_refused():
    with pytest.raises(
        ValueError, match=r"samples \[-1, 14\] are not in the dataset, whose 14 samples are numbered from 0"
    ):
        without_samples(make_loader(Augmented(14), batch_size=4), [3, 14, -1])
