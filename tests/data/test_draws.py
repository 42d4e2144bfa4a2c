# ruff: noqa: NPY002 (numpy's global stream is what is tested here)
"""Draws of a dataset from the global streams, against a reference that seeds all three for each sample."""

import random
import sys

import numpy as np
import pytest
import torch
from plain_loader import at, quiet, seeded, states_of_streams
from torch.utils.data import Dataset, IterableDataset

from looplib.data import make_loader, weighted

COUNT, SEED = 24, 5
pytestmark = quiet


class Drawing(Dataset):
    """Samples with what a function draws for each."""

    def __init__(self, draw):
        self.draw = draw

    def __len__(self):
        return COUNT

    def __getitem__(self, index):
        return index, self.draw(index)


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


def own_seed_put_back(index):
    states = random.getstate(), np.random.get_state()
    drawn = own_seed(index)
    random.setstate(states[0]), np.random.set_state(states[1])
    return drawn


def put_back(index):
    """Draws, and leaves the streams as they were."""
    python, numpy = random.getstate(), np.random.get_state()
    drawn = random.random() + np.random.rand()
    random.setstate(python), np.random.set_state(numpy)
    with torch.random.fork_rng(devices=[]):
        return drawn + torch.rand(()).item()


def now_and_then(index):
    return np.random.rand() if torch.rand(()) < 0.2 else 0.5


def rarely(index):
    return random.random() if index == RARE else 0.5


RARE = 9  # in the third batch of epoch 0
DRAWS = [
    *(from_random, from_numpy, from_torch, cached_normals, own_seed, own_seed_put_back, put_back),
    *(now_and_then, own_state, rarely),
]


def read(loader, epoch=0, batch=0):
    return [sample for items in loader(at(epoch, batch)) for sample in items]


def expected(loader, epoch=0, batch=0):
    dataset = Drawing(loader.dataset.draw)
    indices = [index for k in range(batch, len(loader)) for index in loader.indices(at(epoch, k)).tolist()]
    return [seeded(dataset, SEED, epoch, index) for index in indices]


def made(draw, batch_size=7, **options):
    return make_loader(Drawing(draw), batch_size=batch_size, seed=SEED, collate_fn=list, count_samples=len, **options)


@pytest.mark.slow
def test_each_sample_has_the_draws_of_streams_seeded_for_it():
    for draw in DRAWS:
        loader = made(draw)
        assert read(loader) == expected(loader), draw.__name__
        want, before = expected(loader, 1, 2), states_of_streams()
        for batch_size, batch in ((7, 2), (2, 7)):
            assert read(made(draw, batch_size), 1, batch) == want, draw.__name__
        assert states_of_streams() == before


def test_each_item_is_read_and_seeded_once(monkeypatch):
    reads, seeds, seed = [], [], random.seed
    monkeypatch.setattr(random, "seed", lambda number: (seeds.append(number), seed(number)))
    loader = made(lambda index: reads.append(index))
    read(loader)
    assert sorted(reads) == list(range(COUNT))
    assert len(set(seeds)) >= COUNT


@pytest.mark.slow
@pytest.mark.parametrize("draw", [now_and_then, cached_normals])
def test_draws_in_workers_are_the_same(draw):
    for options in ({"num_workers": 2, "persistent_workers": True}, {"num_workers": 1}):
        loader = made(draw, **options)
        for epoch, batch in ((0, 0), (1, 0), (1, 2)):
            assert read(loader, epoch, batch) == expected(loader, epoch, batch)


def test_the_streams_are_restored_after_an_error():
    def fails(index):
        from_torch(index), from_numpy(index)
        raise KeyboardInterrupt

    before = states_of_streams()
    with pytest.raises(KeyboardInterrupt):
        read(made(fails))
    assert states_of_streams() == before


class Stream(IterableDataset):
    def __iter__(self):
        yield from np.random.standard_normal(COUNT)


def odd_normals(index):
    return sum(np.random.standard_normal() for _ in range(index % 2 + 1))


@pytest.mark.parametrize("before", [0, 1, 2, 3])
def test_a_normal_number_that_numpy_keeps_for_the_next_call_is_still_kept(before):
    for dataset in (Drawing(odd_normals), Stream()):
        np.random.seed(3)
        want = np.random.standard_normal(9).tolist()
        np.random.seed(3)
        got = [np.random.standard_normal() for _ in range(before)]
        state = states_of_streams()
        for _ in make_loader(dataset, batch_size=7, seed=SEED)(at()):
            assert states_of_streams() == state
            got.append(np.random.standard_normal())
            state = states_of_streams()
        assert got == want[: before + 4]


def test_numpys_stream_is_kept_also_if_only_its_kept_normal_number_differs():
    loader = made(from_torch)
    for count in (2, 1, 2, 0, 1):
        np.random.seed(3), np.random.standard_normal(count)
        state = states_of_streams()
        read(loader)
        assert states_of_streams() == state


def test_loaders_need_no_numpy(monkeypatch):
    def no_numpy(tensor):
        raise RuntimeError("Numpy is not available")

    monkeypatch.setattr(torch.Tensor, "numpy", no_numpy)
    monkeypatch.setitem(sys.modules, "numpy", None)
    for draw, order in ((from_torch, None), (rarely, weighted([1] * COUNT))):
        loader = made(draw, order=order)
        assert [index for index, _ in read(loader)] == [index for k in range(4) for index in loader.indices(at(0, k))]
