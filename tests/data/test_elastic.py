"""A run that continues on other numbers of ranks: each sample once in an epoch, in the same order."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_loader import as_rank

import looplib as ll


def on_ranks(count, make, state):
    """Batches of all ranks for a state, each put together again."""
    parts = []
    for rank in range(count):
        with as_rank(rank, count):
            parts.append([batch.tolist() for batch in make()(state)])
    return [[sample for part in batch for sample in part] for batch in zip(*parts, strict=True)]


def consume(state, batch):
    """Change the counts as a train step does."""
    ends = state.batch + 1 == state.epoch_length
    return state.replace(
        step=state.step + 1,
        epoch=state.epoch + ends,
        batch=0 if ends else state.batch + 1,
        samples=state.samples + len(batch),
        batch_samples=len(batch),
    )


def run_in_turns(make, turns, epochs, ckpt, model):
    """Samples by epoch of a run that makes these steps on these numbers of ranks, the last of which finishes it."""
    seen = [[] for _ in range(epochs)]
    sizes = []
    for count, steps in turns:
        with as_rank(0, count):
            state = ll.init_state(model, loader=make())
        state = ckpt.restore(state, quiet=True)
        while state.epoch < epochs and steps:
            for batch in on_ranks(count, make, state):
                seen[state.epoch] += batch
                sizes.append(len(batch))
                state = consume(state, batch)
                steps -= 1
                if not steps:
                    break
        ckpt.save(state)
    return seen, sizes, state


def order_of(samples, epoch):
    """The order of an epoch, read in one batch by a loader of its own."""
    loader = ll.make_loader(range(samples), batch_size=samples, seed=3)
    return next(loader(ll.TrainState(epoch=epoch))).tolist()


@given(
    samples=st.integers(1, 40),
    per_rank=st.integers(1, 5),
    turns=st.lists(st.tuples(st.integers(1, 4), st.integers(0, 7)), max_size=4),
    last=st.integers(1, 4),
)
@settings(max_examples=60, deadline=None)
def test_each_sample_comes_once_in_an_epoch_on_any_numbers_of_ranks(tmp_path_factory, samples, per_rank, turns, last):
    def make():
        return ll.make_loader(range(samples), batch_size_per_rank=per_rank, seed=3)

    ckpt = ll.checkpoint_io(tmp_path_factory.mktemp("run"))
    seen, sizes, state = run_in_turns(make, [*turns, (last, 10**6)], 2, ckpt, torch.nn.Linear(1, 1))
    assert seen == [order_of(samples, epoch) for epoch in range(2)]
    assert (state.samples, state.epoch, state.batch) == (2 * samples, 2, 0)
    assert max(sizes) <= per_rank * max(count for count, _ in [*turns, (last, 0)])
    # But for the last batch of an epoch, and the first one on other ranks, each rank has as many samples as were asked for.
    assert sum(size % per_rank > 0 for size in sizes) <= 2 + len(turns)


@given(
    samples=st.integers(1, 40),
    batch_size=st.integers(1, 9),
    turns=st.lists(st.tuples(st.integers(1, 4), st.integers(0, 7)), max_size=4),
)
@settings(max_examples=30, deadline=None)
def test_a_batch_size_of_all_ranks_has_the_batches_of_one_process(tmp_path_factory, samples, batch_size, turns):
    def make():
        return ll.make_loader(range(samples), batch_size=batch_size, seed=3)

    model = torch.nn.Linear(1, 1)
    finish = (1, 10**6)
    alone = run_in_turns(make, [finish], 2, ll.checkpoint_io(tmp_path_factory.mktemp("alone")), model)
    seen, sizes, state = run_in_turns(
        make, [*turns, finish], 2, ll.checkpoint_io(tmp_path_factory.mktemp("run")), model
    )
    assert (seen, sizes, state.step) == (alone[0], alone[1], alone[2].step)
