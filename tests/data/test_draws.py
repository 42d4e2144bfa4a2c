# ruff: noqa: NPY002 (numpy's global stream is what is tested here)
"""Draws of a dataset from the global streams, against a reference that seeds all three for each sample."""

import random
import sys
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from shared import mix
from torch import distributed
from torch.utils.data import Dataset, IterableDataset

import looplib as ll
from looplib.data import make_loader
from looplib.types import TrainState

COUNT, SEED = 24, 5
ITEM = int.from_bytes(b"item")

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded"),
]


class Drawing(Dataset):
    """Samples with what a function draws for them, which counts how often each is read."""

    def __init__(self, draw, drawing=range(COUNT)):
        self.draw, self.drawing, self.reads = draw, drawing, [0] * COUNT

    def __len__(self):
        return COUNT

    def __getitem__(self, index):
        self.reads[index] += 1
        return index, self.draw(index) if index in self.drawing else 0.0


class Seeds(Dataset):
    """Samples with the seed of torch's stream."""

    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return index, torch.initial_seed()


def batches(loader, state, rank, ranks):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distributed, "is_initialized", lambda: ranks > 1)
        patch.setattr(distributed, "get_rank", lambda group=None: rank)
        patch.setattr(distributed, "get_world_size", lambda group=None: ranks)
        return list(loader(state))


def from_torch(index):
    return torch.rand(()).item()


def from_random(index):
    return random.random()


def from_numpy(index):
    return np.random.standard_normal()


def cached_normals(index):
    return [random.gauss(0, 1) + 100 * np.random.standard_normal() for _ in range(3)][index % 3]


def a_coin(index):
    return float(random.getrandbits(1))


def held_generator(index):
    return np.random.Generator(np.random.get_bit_generator()).random()


def seed_of_torch(index):
    return float(torch.initial_seed() % 1000)


def own_seed(index):
    random.seed(7), np.random.seed(7)
    return random.random() + np.random.rand()


@contextmanager
def seeded_by_index(index):
    states = random.getstate(), np.random.get_state()
    random.seed(index), np.random.seed(index)
    yield
    random.setstate(states[0]), np.random.set_state(states[1])


def own_seed_restored(index):
    with seeded_by_index(index):
        return random.random() + np.random.rand()


def now_and_then(index):
    return np.random.rand() if torch.rand(()) < 0.2 else 0.5


DRAWS = [
    *(from_random, from_numpy, from_torch, cached_normals, a_coin, held_generator, seed_of_torch, own_seed),
    *(own_seed_restored, now_and_then),
]


def seeded(dataset, epoch, index, visit=0):
    """A sample read with all three streams seeded for it."""
    seed = mix(mix(ITEM, SEED, epoch), index, visit)
    torch.manual_seed(seed), random.seed(seed), np.random.seed(seed >> 31)
    return dataset[index]


def read(loader, epoch=0, batch=0):
    return [sample for items in loader(TrainState(epoch=epoch, batch=batch)) for sample in items]


def expected(loader, epoch=0, batch=0):
    dataset = Drawing(loader.dataset.draw, loader.dataset.drawing)
    states = [TrainState(epoch=epoch, batch=k) for k in range(batch, len(loader))]
    return [seeded(dataset, epoch, index) for state in states for index in loader.indices(state).tolist()]


def made(dataset, batch_size=7, **options):
    return make_loader(dataset, batch_size=batch_size, seed=SEED, collate_fn=list, **options)


def states_of_streams():
    _, words, *others = np.random.get_state()
    return torch.default_generator.get_state().numpy().tobytes(), random.getstate(), words.tobytes(), others


@pytest.mark.parametrize("drawing", [(11, 17), range(COUNT), ()])
def test_each_sample_has_the_draws_of_streams_seeded_for_it(drawing):
    for draw in DRAWS:
        loader = made(Drawing(draw, drawing))
        assert read(loader) == expected(loader), draw.__name__
        want = expected(loader, 1, 2)
        before = states_of_streams()
        assert read(loader, 1, 2) == want, draw.__name__
        assert read(made(Drawing(draw, drawing)), 1, 2) == want, draw.__name__  # in a process that has read nothing
        assert read(made(Drawing(draw, drawing), 2), 1, 7) == want, draw.__name__
        assert states_of_streams() == before


@pytest.mark.parametrize("draw", [now_and_then, cached_normals])
def test_draws_in_workers_are_the_same(draw):
    for options in ({"num_workers": 2, "persistent_workers": True}, {"num_workers": 1}):
        loader = made(Drawing(draw, (3, 11, 17)), **options)
        for epoch, batch in ((0, 0), (1, 0), (1, 2)):
            assert read(loader, epoch, batch) == expected(loader, epoch, batch)


def test_repeated_samples_have_draws_of_their_own():
    order = ll.data.sampler([*range(COUNT), 3, 3, 11])
    got = read(made(Drawing(from_numpy, (3, 11)), order=order))
    reference = Drawing(from_numpy, (3, 11))
    want = [seeded(reference, 0, i) for i in range(COUNT)]
    assert got == [*want, seeded(reference, 0, 3, 1), seeded(reference, 0, 3, 2), seeded(reference, 0, 11, 1)]


@pytest.mark.parametrize("ranks", [1, 3])
def test_seeds_of_a_long_epoch_are_those_of_its_samples(ranks):
    count, dataset = 2 * 2100, Seeds(2100)
    order = ll.data.sampler([*range(2100), *range(2099, -1, -1)])  # each sample twice
    for size in (500, 3000):  # an epoch has more seeds than are computed at a time; a batch has
        loader = make_loader(dataset, batch_size=size, order=order, seed=SEED, collate_fn=list)
        for state in (TrainState(epoch=3), TrainState(epoch=3, batch=1)):
            read = [
                sample for rank in range(ranks) for batch in batches(loader, state, rank, ranks) for sample in batch
            ]
            first = state.batch * size
            want = {(i, mix(mix(ITEM, SEED, 3), i, 0)) for i in range(first, 2100)}
            want |= {
                (count - 1 - k, mix(mix(ITEM, SEED, 3), count - 1 - k, 1)) for k in range(max(first, 2100), count)
            }
            assert len(read) == count - first
            assert set(read) == want


def test_one_batch_is_read_twice_at_most_and_not_its_first_sample():
    for draw, drawing, most in (
        (from_random, range(COUNT), 0),  # it is seen after the first sample, which has its own seed
        (from_torch, range(COUNT), 0),
        (seed_of_torch, range(COUNT), 0),
        (own_seed_restored, range(COUNT), 0),
        (from_random, (11, 17), 6),
        (from_numpy, (0, 3, 11, 17, 20), 6),
    ):
        dataset = Drawing(draw, drawing)
        loader = made(dataset)
        read(loader), read(loader, epoch=1)
        assert sum(dataset.reads) - 2 * COUNT in (0, most), draw.__name__


def test_streams_that_nobody_uses_are_seeded_for_each_batch_only(monkeypatch):
    calls = []
    seed = random.seed
    monkeypatch.setattr(random, "seed", lambda number: (calls.append(number), seed(number)))
    loader = made(Drawing(from_torch), batch_size=12)
    read(loader)
    assert len(calls) <= 3 * len(loader) + 2  # twice for the samples, once for collate_fn; twice for the order
    assert read(loader) == expected(loader)
    calls.clear()
    read(make_loader([0.0] * COUNT, batch_size=12, collate_fn=list))
    assert len(calls) == 2 + 2  # a list draws nothing: for collate_fn, and for the order


class Failing(Drawing):
    """Fails at one sample, with what it draws in the message."""

    def __init__(self, draw, error, at=11):
        super().__init__(draw, (at,))
        self.error = error

    def __getitem__(self, index):
        _, drawn = super().__getitem__(index)
        if index in self.drawing:
            raise self.error(f"sample {index} drew {drawn}")
        return index, drawn


@pytest.mark.parametrize(("draw", "reads"), [(from_numpy, 2), (from_torch, 1)])
def test_an_error_is_that_of_the_sample_with_its_own_seed(draw, reads):
    with pytest.raises(LookupError) as reference:
        seeded(Failing(draw, LookupError), 0, 11)
    dataset = Failing(draw, LookupError)
    with pytest.raises(LookupError) as raised:
        read(made(dataset, COUNT, order=ll.data.in_order()))
    assert str(raised.value) == str(reference.value)
    assert raised.value.__context__ is None
    assert dataset.reads[11] == reads  # an error without a draw, such as a timeout, is not lost by reading again


@pytest.mark.parametrize(("error", "kind"), [(StopIteration, RuntimeError), (KeyboardInterrupt, KeyboardInterrupt)])
def test_the_end_of_an_iterator_and_an_interrupt_are_not_read_again(error, kind):
    before = states_of_streams()
    dataset = Failing(from_torch, error)
    with pytest.raises(kind, match=r"dataset\[11\] raised StopIteration|sample 11 drew"):
        read(made(dataset, COUNT, order=ll.data.in_order()))
    assert dataset.reads == [1] * 12 + [0] * 12
    assert states_of_streams() == before
    with pytest.raises(kind, match=r"dataset\[11\] raised StopIteration|sample 11 drew"):
        read(made(Failing(from_random, error), COUNT, order=ll.data.in_order()))
    assert states_of_streams() == before


def test_numpy_may_be_imported_by_the_dataset(monkeypatch):
    def imports(index):
        monkeypatch.setitem(sys.modules, "numpy", np)
        return np.random.rand()

    monkeypatch.delitem(sys.modules, "numpy")
    loader = made(Drawing(imports, (11, 12, 17)), order=ll.data.in_order())
    got = read(loader)
    assert sys.modules["numpy"] is np
    assert got == expected(loader)


def test_numpys_global_stream_may_have_another_bit_generator():
    def replaces(index):
        np.random.set_bit_generator(np.random.PCG64(0))
        return np.random.rand()

    before = np.random.get_bit_generator()
    try:
        np.random.set_bit_generator(np.random.PCG64(0))
        loader = made(Drawing(lambda index: np.random.rand(), (11,)))
        assert read(loader) == expected(loader)
        np.random.set_bit_generator(before)
        with pytest.raises(ValueError, match="must be for a PCG64"):  # not while it is read
            read(made(Drawing(replaces, (11,))))
    finally:
        np.random.set_bit_generator(before)


class Stream(IterableDataset):
    def __iter__(self):
        yield from np.random.standard_normal(COUNT)


def odd_normals(index):
    return sum(np.random.standard_normal() for _ in range(index % 2 + 1))


@pytest.mark.parametrize("before", [0, 1, 2, 3])
def test_a_normal_number_that_numpy_keeps_for_the_next_call_is_still_kept(before):
    for dataset in (Drawing(odd_normals, ()), Drawing(odd_normals, (11,)), Drawing(odd_normals), Stream()):
        np.random.seed(3)
        want = np.random.standard_normal(9).tolist()
        np.random.seed(3)
        got = [np.random.standard_normal() for _ in range(before)]
        state = states_of_streams()
        for _ in make_loader(dataset, batch_size=7, seed=SEED)(TrainState()):
            assert states_of_streams() == state
            got.append(np.random.standard_normal())
            state = states_of_streams()
        assert got == want[: before + 4]


def test_numpys_stream_is_copied_as_bytes(monkeypatch):
    calls = []
    get_state = np.random.get_state
    monkeypatch.setattr(np.random, "get_state", lambda **options: (calls.append(1), get_state(**options))[1])
    np.random.seed(3)
    loader = made(Drawing(from_numpy))
    read(loader)
    assert not calls
    np.random.standard_normal()
    read(loader)
    assert len(calls) == 1 + len(loader)  # for the order and each batch, since a normal number is kept


def test_numpys_stream_is_kept_without_its_bytes_and_if_the_dataset_replaces_its_generator(monkeypatch):
    def replaces(index):
        np.random.set_bit_generator(np.random.MT19937(index))
        return np.random.rand()

    own = np.random.get_bit_generator()
    before = states_of_streams()
    try:
        read(made(Drawing(replaces, (11,))))
        assert states_of_streams() == before
    finally:
        np.random.set_bit_generator(own)
    with monkeypatch.context() as patch:
        patch.delattr(np.random, "get_bit_generator")
        loader = made(Drawing(from_numpy))
        before = states_of_streams()
        got = read(loader)
        assert states_of_streams() == before
        assert got == expected(loader)


def test_draws_that_are_undone_are_not_noticed_but_reproducible():
    def undone(index):
        states = random.getstate(), np.random.get_state()
        drawn = random.random() + np.random.rand()
        random.setstate(states[0]), np.random.set_state(states[1])
        return drawn

    loader = made(Drawing(undone))
    got = read(loader, 1)
    assert got[14:] == read(loader, 1, 2)
    assert got == read(made(Drawing(undone), num_workers=2), 1)
    assert len({drawn for _, drawn in got}) == 2 * len(loader)  # a batch seeds its first sample, and looks after it
    assert {drawn for _, drawn in got}.isdisjoint(drawn for _, drawn in read(loader, 2))
