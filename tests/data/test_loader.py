# ruff: noqa: NPY002 (numpy's global stream is what is tested here)
"""Loaders beside a plain loop, torch's DataLoader, and processes."""

import gc
import itertools
import multiprocessing
import os
import random
import signal
import subprocess
import time
import tracemalloc
import weakref

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from plain_loader import (
    ORDERS,
    Augmented,
    AugmentedStream,
    Counting,
    as_rank,
    at,
    batches_of,
    options_of,
    plain_batches,
    quiet,
    samples_of,
    seeded,
    states_of_streams,
)
from shared import examples
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
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
from torchdata.stateful_dataloader import StatefulDataLoader

import looplib as ll
from looplib.data import make_loader
from looplib.types import TrainState

pytestmark = quiet

orders = st.sampled_from(sorted(ORDERS))


@given(
    order=orders,
    count=st.integers(2, 40),
    size=st.integers(1, 12),
    drop_last=st.booleans(),
    max_batches=st.none() | st.integers(1, 5),
    seed=st.integers(),
    epoch=st.integers(0, 3),
    first=st.integers(0, 40),
    ranks=st.integers(1, 4),
)
@example(order="pools", count=900, size=4, drop_last=False, max_batches=7, seed=1, epoch=1, first=5, ranks=3)
@settings(max_examples=examples(150))
def test_a_loader_reads_what_a_plain_loop_reads_from_any_batch_on_any_rank(
    order, count, size, drop_last, max_batches, seed, epoch, first, ranks
):
    options = options_of(order, count, size, drop_last)
    expected = plain_batches(order, count, size, drop_last, seed, epoch)[:max_batches]
    data, reference = Augmented(count), Augmented(count)
    if not expected:
        with pytest.raises(ValueError, match=f"no batches: .*, batch_size={size}, drop_last=True"):
            make_loader(data, seed=seed, **options)
        return
    loader = make_loader(data, seed=seed, max_batches=max_batches, **options)
    assert len(loader) == len(expected)
    first %= len(expected)
    state = at(epoch, first, len(expected))
    for rank in range(ranks):
        own = [[batch[i] for i in torch.arange(len(batch)).tensor_split(ranks)[rank]] for batch in expected[first:]]
        with as_rank(rank, ranks):
            data.read.clear()
            rest, parts = loader(state), loader.parts(state)
            indices = [loader.indices(at(epoch, k)).tolist() for k in range(first, len(expected))]
            assert data.read == []
            rest, read, parts = list(rest), [*data.read], list(parts)
        # A rank without a sample of a batch reads the first one in its place.
        stood_in = [part or batch[:1] for part, batch in zip(own, expected[first:], strict=True)]
        samples = [torch.stack([seeded(reference, seed, epoch, *sample) for sample in part]) for part in stood_in]
        assert indices == [[index for index, _ in part] for part in stood_in]
        assert read == list(itertools.chain(*indices))
        assert all(torch.equal(*pair) for pair in zip([part for part, _ in parts], samples, strict=True))
        assert [counts for _, counts in parts] == [bool(part) for part in own]
        for batch, sample, part in zip(rest, samples, own, strict=True):
            assert torch.equal(batch, sample[: len(part)])
    with pytest.raises(ValueError, match="at the end of an epoch"):
        loader(at(epoch, len(expected), len(expected)))


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


# Orders of the user's


class NumpySampler(Sampler):
    def __len__(self):
        return 12

    def __iter__(self):
        return iter(np.random.permutation(12))


@pytest.mark.parametrize(
    "make_sampler",
    [
        lambda: SubsetRandomSampler([*range(12)]),
        lambda: NumpySampler(),
        lambda: lambda epoch, generator: torch.randperm(12, generator=generator),
        lambda: lambda epoch, generator: random.sample(range(12), 12),
        lambda: lambda epoch, generator: (int(i) for i in torch.randperm(12)),
    ],
)
def test_a_sampler_is_a_function_of_seed_and_epoch(make_sampler):
    before = states_of_streams()
    sampler = make_sampler()
    loader = make_loader(range(12), batch_size=5, order=ll.data.sampler(sampler))
    orders = [samples_of(loader, epoch) for epoch in range(4)]
    assert states_of_streams() == before
    assert all(sorted(order) == [*range(12)] for order in orders)
    assert len(set(map(tuple, orders))) == 4
    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    again = make_loader(range(12), batch_size=5, order=ll.data.sampler(make_sampler()))
    assert orders == [samples_of(again, epoch) for epoch in range(4)]
    assert orders[0] != samples_of(make_loader(range(12), batch_size=5, order=ll.data.sampler(sampler), seed=1))


def test_set_epoch_is_called_for_samplers_that_have_it():
    sampler = torch.utils.data.DistributedSampler(range(12), num_replicas=2, rank=1, seed=3)
    loader = make_loader(range(12), batch_size=6, order=ll.data.sampler(sampler), divide=False)
    for epoch in (0, 1, 5):
        samples = samples_of(loader, epoch)
        sampler.set_epoch(epoch)
        assert samples == [*sampler]


def test_batches_cut_from_one_permutation_keep_the_draws_of_their_samples():
    bad = torch.tensor([3, 17, 20])

    def batches(epoch, generator):
        return [batch[~torch.isin(batch, bad)] for batch in torch.randperm(23, generator=generator).split(6)]

    whole, part = (
        make_loader(Augmented(23), batch_size=6),
        make_loader(Augmented(23), order=ll.data.batch_sampler(batches)),
    )
    for one, other in zip(whole(at(1)), part(at(1)), strict=True):
        assert torch.equal(one[~torch.isin(one[:, 0].long(), bad)], other)


def test_a_batch_sampler_without_an_end_is_read_to_the_limit():
    def endless(epoch, generator):
        while True:
            yield torch.randint(0, 5, (3,), generator=generator)

    loader = make_loader(range(5), order=ll.data.batch_sampler(endless), max_batches=4)
    assert len(loader) == len(batches_of(loader)) == 4
    assert batches_of(loader, 0, 2) == batches_of(loader)[2:]


def test_indices_of_batches_and_of_streams():
    batches = [torch.arange(3), torch.arange(5)]
    assert make_loader(batches, batch_size=None, order=ll.data.sequential()).indices(at(0, 1)).tolist() == [1]
    assert make_loader(AugmentedStream(5), batch_size=2).indices(at()) is None


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
                make_loader(wrapped, batch_size=3, order=ll.data.sequential()),
                make_loader(wrapped, batch_size=10, order=ll.data.sequential()),
            )
        )
        assert torch.equal(one, other)


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


def test_tensors_come_as_the_dataloader_gives_them():
    for data in tensor_sets():
        indices = batches_of(make_loader(range(len(data)), batch_size=3), 1)
        batches = make_loader(data, batch_size=3)(at(1))
        for batch, expected in zip(batches, DataLoader(data, batch_sampler=indices), strict=True):
            assert type(batch) is type(expected) is list
            for ours, theirs in zip(batch, expected, strict=True):
                assert (ours.dtype, ours.stride()) == (theirs.dtype, theirs.stride())
                assert torch.equal(ours, theirs)


def test_tensors_are_copied_out_of_the_dataset():
    data = TensorDataset(torch.zeros(6))
    for (x,) in make_loader(data, batch_size=3, order=ll.data.sequential())(at()):
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


class Failing(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        raise LookupError("no such picture")


def test_a_workers_error_comes_with_its_traceback():
    loader = make_loader(Failing(), batch_size=2, num_workers=1)
    with pytest.raises(LookupError, match=r"(?s)worker process 0.*in __getitem__.*no such picture") as raised:
        next(loader(at()))
    assert raised.traceback
    assert not multiprocessing.active_children()  # though the traceback still holds the iterator
    with pytest.raises(LookupError, match=r"^'?no such picture'?$"):
        next(make_loader(Failing(), batch_size=2)(at()))


def test_an_interrupt_of_the_process_group_leaves_the_workers_alone():
    loader = make_loader(Offset(40), batch_size=2, order=ll.data.sequential(), num_workers=1, prefetch_factor=1)
    batches = loader(at())
    seen = next(batches).tolist()
    (worker,) = multiprocessing.active_children()
    os.kill(worker.pid, signal.SIGINT)
    subprocess.run(["kill", str(worker.pid)], check=True)  # by another process than the one that it works for
    assert seen + [i for batch in batches for i in batch.tolist()] == [*range(40)]
    next(batches := loader(at()))
    (worker,) = multiprocessing.active_children()
    worker.terminate()
    worker.join()
    assert worker.exitcode == 0  # torch takes another code for a crash


def give_worker_its_number(worker_id):
    get_worker_info().dataset.offset = 100 * (worker_id + 1)


class Offset(Augmented):
    offset = 0

    def __getitem__(self, index):
        return index + self.offset


def test_worker_init_fn_finds_the_dataset_itself():
    loader = make_loader(
        Offset(4), batch_size=2, order=ll.data.sequential(), num_workers=2, worker_init_fn=give_worker_its_number
    )
    assert batches_of(loader) == [[100, 101], [202, 203]]


# Streams


def test_a_stream_is_what_a_dataloader_gives():
    loader = make_loader(AugmentedStream(10), batch_size=4)
    expected = [batch[:, 0].tolist() for batch in DataLoader(AugmentedStream(10), batch_size=4)]
    assert [batch[:, 0].tolist() for batch in loader(at())] == expected
    dropping = DataLoader(AugmentedStream(10), batch_size=4, drop_last=True)
    assert len(list(make_loader(dropping)(at()))) == 2
    assert len(list(make_loader(AugmentedStream(10), batch_size=None)(at()))) == 10
    assert samples_of(make_loader({"a": 0, "b": 1}.keys(), batch_size=2)) == ["a", "b"]


@pytest.mark.parametrize("options", [{}, {"num_workers": 2}, {"num_workers": 1, "persistent_workers": True}])
def test_a_streams_draws_are_a_function_of_seed_and_epoch(options):
    torch.manual_seed(0), random.seed(0), np.random.seed(0)
    before = states_of_streams()
    loader = make_loader(AugmentedStream(13), batch_size=2, **options)
    zero, one = list(loader(at())), list(loader(at(1)))
    assert sorted(torch.cat(zero)[:, 0].tolist()) == [*range(13)]
    assert not any((a[:, 1:] == b[:, 1:]).any() for a, b in zip(zero, one, strict=True))
    assert torch.cat(one)[:, 1:].unique().numel() == 39
    again = loader(at(1, batch=4))
    assert all(map(torch.equal, again, one[4:]))
    assert states_of_streams() == before


def test_an_epoch_length_ends_the_epoch_of_an_endless_stream():
    loader = make_loader(stream := Counting(), batch_size=2)
    assert [b.tolist() for b in loader(at(3, 1, epoch_length=3))] == [[302, 303], [304, 305]]
    assert stream.epoch == 3
    with pytest.raises(ValueError, match=r"ended after 3 batches, but state.epoch_length is 4"):
        list(make_loader(AugmentedStream(6), batch_size=2)(at(epoch_length=4)))


# DataLoaders taken over


def test_a_loader_says_whether_it_shuffles():
    orders = (ll.data.shuffled(), ll.data.sequential(), ll.data.sampler([2, 1]))
    assert [make_loader(range(4), batch_size=2, order=order).shuffles for order in orders] == [True, False, False]


@pytest.mark.parametrize("kind", [DataLoader, StatefulDataLoader])
def test_a_dataloader_is_taken_over(kind):
    data = Augmented(12)
    samplers = (
        WeightedRandomSampler([1.0] * 12, 7),
        RandomSampler(data, replacement=True),
        RandomSampler(data, num_samples=4),
        SequentialSampler(range(3)),
        NumpySampler(),
    )
    for theirs, ours in (
        ({"batch_size": 5, "shuffle": True}, {"batch_size": 5}),
        ({"batch_size": 5}, {"batch_size": 5, "order": ll.data.sequential()}),
        ({"batch_size": None}, {"batch_size": None, "order": ll.data.sequential()}),
        (
            {"batch_sampler": BatchSampler(SequentialSampler(data), 5, True)},
            {"batch_size": 5, "order": ll.data.sequential(), "drop_last": True},
        ),
        ({"batch_sampler": [[3, 1], [4]]}, {"order": ll.data.batch_sampler([[3, 1], [4]])}),
        *(
            ({"batch_size": 2, "sampler": sampler}, {"batch_size": 2, "order": ll.data.sampler(sampler)})
            for sampler in samplers
        ),
    ):
        taken = make_loader(kind(data, **theirs), seed=5)
        plain = make_loader(data, seed=5, **ours)
        assert len(taken) == len(plain)
        assert all(map(torch.equal, taken(at(1)), plain(at(1))))


# Devices


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
        with as_rank(1, 2):
            ((part, counts), *_) = itertools.islice(loader.parts(at()), 1)
        assert counts
        assert part["x"].is_meta
        assert batch["x"].is_meta
        assert batch["pair"][0].is_meta
        assert batch["pair"][1] == "name"
        assert batch["text"].moved == (torch.device("meta"), pin_memory)


class Drawing:
    """A dataset that draws, so that torch's streams are put back after each read."""

    def __len__(self):
        return 4

    def __getitem__(self, number):
        return torch.rand(())


def test_a_signal_between_two_batches_is_handled_at_once():
    came = []
    before = signal.signal(signal.SIGINT, lambda *_: came.append(True))
    try:
        for number, _ in enumerate(make_loader(Drawing(), batch_size=2)(at()), 1):
            signal.raise_signal(signal.SIGINT)
            assert len(came) == number
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_state_with_a_step_alone_is_warned_of_since_epoch_0_would_come_again():
    loader = make_loader(range(8), batch_size=2)
    with pytest.warns(
        UserWarning, match=r"step=5, and the loader reads epoch=0 and batch=0.*divmod\(taken, len\(loader\)\)"
    ):
        next(loader(TrainState(step=5)))
    for state in (
        TrainState(),
        TrainState(step=5, epoch=1),
        TrainState(step=3, batch=3),
        TrainState(step=3, samples=6),
    ):
        next(loader(state))
    next(loader(ll.init_state(torch.nn.Linear(1, 1)).replace(step=5)))  # one with weights stands where its owner says
