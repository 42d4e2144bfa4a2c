# ruff: noqa: NPY002 (numpy's global stream is what is tested here)
"""Draws of a dataset from the global streams, against a reference that seeds all three for each sample."""

import random
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from shared import mix
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
    """Samples with what a function draws for some of them."""

    def __init__(self, draw, drawing=range(COUNT)):
        self.draw, self.drawing = draw, drawing

    def __len__(self):
        return COUNT

    def __getitem__(self, index):
        return index, self.draw(index) if index in self.drawing else 0.0


def from_torch(index):
    return torch.rand(()).item()


def from_random(index):
    return random.random()


def from_numpy(index):
    return np.random.standard_normal()


def cached_normals(index):
    return [random.gauss(0, 1) + 100 * np.random.standard_normal() for _ in range(3)][index % 3]


def own_state(index):
    """Reads the seed without drawing."""
    return float(torch.initial_seed() % 2**50)


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
    *(from_random, from_numpy, from_torch, cached_normals, own_seed, own_seed_restored, now_and_then, own_state),
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


def test_the_streams_are_restored_after_an_error():
    def fails(index):
        from_torch(index), from_numpy(index)
        raise KeyboardInterrupt

    before = states_of_streams()
    with pytest.raises(KeyboardInterrupt):
        read(made(Drawing(fails, (11,))))
    assert states_of_streams() == before


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
