"""Batches of each of several ranks."""

import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_loader import Augmented, AugmentedStream, as_rank, at, quiet
from shared import examples, mix
from torch.utils.data import (
    TensorDataset,
)

import looplib as ll
from looplib.data import make_loader

pytestmark = quiet


def read(loader, ranks, state=None, how="__call__"):
    """For each rank what it is given."""
    found = []
    for rank in range(ranks):
        with as_rank(rank, ranks):
            found.append(list(getattr(loader, how)(state or at())))
    return found


def draws():
    return torch.tensor([torch.rand(()).item(), random.random(), np.random.rand()], dtype=torch.float64)  # noqa: NPY002


def stack(items):
    """A collate_fn of the user's, of which nobody knows that it draws nothing."""
    return torch.stack(items)


def with_draws(items):
    return torch.stack([torch.cat([item, draws()]) for item in items])


@pytest.mark.slow
@given(
    count=st.integers(1, 40),
    ranks=st.integers(1, 6),
    size=st.integers(1, 12),
    drop_last=st.booleans(),
    start=st.integers(0, 40),
    kind=st.sampled_from([AugmentedStream, lambda count: TensorDataset(torch.arange(count))]),
)
def test_tensors_and_streams_are_divided_as_items_are(count, ranks, size, drop_last, start, kind):
    if drop_last and count < size:
        return
    loader = make_loader(kind(count), batch_size=size, drop_last=drop_last)
    whole = list(map(_tensor, loader(at())))
    start %= len(whole)
    pairs = list(zip(*read(loader, ranks, at(batch=start), "parts"), strict=True))
    batches = list(zip(*read(loader, ranks, at(batch=start)), strict=True))
    for batch, parts, trained_on in zip(whole[start:], pairs, batches, strict=True):
        expected = torch.tensor_split(batch, ranks)
        for own, (part, counts), rows in zip(expected, parts, trained_on, strict=True):
            assert counts == bool(len(own))
            assert torch.equal(_tensor(part), own if counts else batch[:1])  # each rank makes as many steps
            assert torch.equal(_tensor(rows), own)


@given(sizes=st.lists(st.integers(1, 9), min_size=1, max_size=6), ranks=st.integers(1, 5), stream=st.booleans())
@settings(max_examples=examples(40))
def test_items_that_are_batches_are_divided_by_rows(sizes, ranks, stream):
    items = [
        {"x": torch.arange(100 * k, 100 * k + size), "names": [f"{k} {i}" for i in range(size)], "scale": 0.5}
        for k, size in enumerate(sizes)
    ]
    loader = (
        make_loader(dict(enumerate(items)).values(), batch_size=None)
        if stream
        else make_loader(items, batch_size=None, order=ll.data.sequential())
    )
    pairs = read(loader, ranks, how="parts")
    for k, item in enumerate(items):
        own = [pairs[rank][k][0] for rank in range(ranks) if pairs[rank][k][1]]
        assert torch.equal(torch.cat([part["x"] for part in own]), item["x"])
        assert [name for part in own for name in part["names"]] == item["names"]
        assert all(part["scale"] == 0.5 for part in own)
        stand_ins = [pairs[rank][k][0] for rank in range(ranks) if not pairs[rank][k][1]]
        assert len(own) == min(ranks, len(item["x"]))
        assert all(part["x"].tolist() == [100 * k] and part["names"] == [f"{k} 0"] for part in stand_ins)
    for batches, found in zip(read(loader, ranks), pairs, strict=True):
        expected = [part["x"].tolist() if counts else [] for part, counts in found]
        assert [batch["x"].tolist() for batch in batches] == expected


@pytest.mark.parametrize("data", [Augmented(7), AugmentedStream(7), TensorDataset(torch.arange(7))])
def test_undivided_batches_are_whole_on_each_rank(data):
    loader = make_loader(data, batch_size=3, divide=False, collate_fn=None)
    whole = list(loader(at()))
    for found in read(loader, 2):
        assert all(map(torch.equal, map(_tensor, found), map(_tensor, whole)))
    for found in read(loader, 5, how="parts"):
        assert all(counts for _, counts in found)
        assert all(map(torch.equal, (_tensor(part) for part, _ in found), map(_tensor, whole)))
    assert not loader.divide


def _tensor(batch):
    return batch[0] if isinstance(batch, list) else batch


# What is drawn


@pytest.mark.parametrize("make", [Augmented, AugmentedStream])
def test_ranks_draw_their_own_numbers_in_collate_fn_and_the_same_ones_in_the_items(make):
    plain = make_loader(make(12), batch_size=6, order=ll.data.sequential())
    loader = make_loader(make(12), batch_size=6, order=ll.data.sequential(), collate_fn=with_draws)
    random.seed(0), torch.manual_seed(0), np.random.seed(0)  # noqa: NPY002
    parts = read(loader, 3)
    again = read(loader, 3)
    for k, batch in enumerate(plain(at())):
        rows = torch.cat([found[k] for found in parts])
        assert torch.equal(rows[:, :-3], batch)
        assert torch.equal(rows, torch.cat([found[k] for found in again]))
    drawn = torch.cat([found[k][:, -3:] for found in parts for k in range(2)])
    assert drawn.unique().numel() == drawn.numel()
    assert not torch.isin(torch.cat(list(plain(at(1))))[:, 1:], drawn).any()


def test_the_first_ranks_collate_fn_draws_what_one_process_does():
    loader = make_loader(Augmented(12), batch_size=6, collate_fn=with_draws)
    first, _ = read(loader, 2)
    for k, (part, batch) in enumerate(zip(first, loader(at()), strict=True)):
        assert torch.equal(part, batch[:3])
        # The rank is no part of its seed: runs of one process keep the bits that they had.
        drawn = torch.rand(
            (), generator=torch.Generator().manual_seed(mix(int.from_bytes(b"collate", "big"), 0, 0, k))
        )
        assert part[0, -3].item() == drawn.item()


# Workers


@pytest.mark.parametrize("make", [Augmented, AugmentedStream])
def test_workers_that_live_on_learn_of_another_rank(make):
    loader = make_loader(
        make(24), batch_size=6, order=ll.data.sequential(), collate_fn=stack, num_workers=2, persistent_workers=True
    )
    whole = list(loader(at(1)))
    for ranks in (2, 3):
        for k, parts in enumerate(zip(*read(loader, ranks, at(1, 1)), strict=True)):
            assert torch.equal(torch.cat(parts), whole[k + 1])
    del loader
