"""A run that continues on other numbers of ranks: each sample once in an epoch, in the same order."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_loader import as_rank
from shared import examples

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
@settings(max_examples=examples(60), deadline=None)
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
@settings(max_examples=examples(30), deadline=None)
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


class Numbers(torch.utils.data.IterableDataset):
    def __init__(self, count):
        self.count = count

    def __iter__(self):
        return iter(range(self.count))


@given(
    samples=st.integers(1, 30),
    per_rank=st.integers(1, 4),
    stop=st.integers(1, 9),
    before=st.integers(1, 4),
    after=st.integers(1, 4),
)
@settings(max_examples=examples(60), deadline=None)
def test_a_stream_continues_at_the_next_sample(tmp_path_factory, samples, per_rank, stop, before, after):
    def make():
        return ll.make_loader(Numbers(samples), batch_size_per_rank=per_rank)

    ckpt, seen, batch_is_last = ll.checkpoint_io(tmp_path_factory.mktemp("run")), [], False
    for count, steps in ((before, stop), (after, 1), (before, 10**6)):
        with as_rank(0, count):
            state = ll.init_state(torch.nn.Linear(1, 1), loader=make())
        if batch_is_last and before != after:  # one that was not full does not say where another size continues
            with pytest.raises(ValueError, match=r"Finish this epoch with make_loader\(..., batch_size="):
                ckpt.restore(state)
            return
        state = ckpt.restore(state, quiet=True)
        for batch in on_ranks(count, make, state)[:steps]:
            batch_is_last = len(seen) % (count * per_rank) + len(batch) < count * per_rank
            seen += batch
            state = consume(state, batch)
        ckpt.save(state)
    assert seen == [*range(samples)]


def made(**options):
    return ll.make_loader(range(24), **{"batch_size": 4, "seed": 3, **options})


def new_state(loader):
    return ll.init_state(torch.nn.Linear(1, 1), loader=loader)


def saved_after(batches, ckpt, loader):
    state = new_state(loader)
    for batch in list(loader(state))[:batches]:
        state = consume(state, batch.tolist())
    ckpt.save(state)
    return state


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({}, {"batch_size": 9, "order": ll.data.sequential()}),
        ({}, {"batch_size": 9, "seed": 4}),
        ({"max_batches": 5}, {"max_batches": 3, "batch_size": 5}),
        ({"order": ll.data.by_length(range(1, 25))}, {"order": ll.data.by_length(range(1, 25)), "batch_size": 9}),
        ({}, {"batch_size": None, "order": ll.data.batch_sampler([[1, 2], [3]])}),
    ],
)
def test_loaders_that_differ_in_more_than_the_batch_size_are_refused_within_an_epoch(tmp_path, old, new):
    ckpt = ll.checkpoint_io(tmp_path)
    saved_after(2, ckpt, made(**old))
    with pytest.raises(ValueError, match="stands within an epoch, after batch 2"):
        ckpt.restore(new_state(made(**new)))


@pytest.mark.filterwarnings("ignore:.*batch_size was")
@pytest.mark.parametrize("order", ["shuffled", "sequential", "sampler", "weighted", "mixture"])
@pytest.mark.parametrize("size", [1, 3, 5, 8, 23, 30])
def test_a_batch_size_changed_by_hand_continues_at_the_next_sample_too(tmp_path, order, size):
    keys = torch.randperm(24, generator=torch.Generator().manual_seed(0)).tolist()
    order = {
        "shuffled": ll.data.shuffled(),
        "sequential": ll.data.sequential(),
        "sampler": ll.data.sampler(keys),
        "weighted": ll.data.weighted([1 + key % 3 for key in keys]),
        "mixture": ll.data.mixture([1.0], 24),
    }[order]
    data = torch.utils.data.ConcatDataset([range(24)])
    old, new = (ll.make_loader(data, batch_size=batch_size, order=order, seed=3) for batch_size in (4, size))
    ckpt = ll.checkpoint_io(tmp_path)
    saved_after(3, ckpt, old)
    state = ckpt.restore(new_state(new))
    whole = torch.cat([*old(new_state(old))])
    assert torch.equal(torch.cat([*new(state)]), whole[12:])
    assert new.resume(state) is state
    assert torch.equal(new.indices(state), next(new(state)))
    # A state that is saved as it was restored, and continued with the old size, has read as much.
    ckpt.save(state)
    state = ckpt.restore(new_state(old))
    assert (state.epoch, state.batch) == (0, 3)
    assert torch.equal(torch.cat([*old(state)]), whole[12:])


def test_only_the_loader_that_counts_the_batches_leaves_samples_out(tmp_path):
    ckpt = ll.checkpoint_io(tmp_path)
    saved_after(1, ckpt, made())
    with pytest.warns(UserWarning, match="batch_size was 4, is 9"):
        state = ckpt.restore(new_state(loader := made(batch_size=9)))
    assert [len(batch) for batch in loader(state)] == [5, 9, 6]
    other = ll.make_loader(range(24), batch_size=9)
    assert [len(batch) for batch in other(state)] == [9, 9, 6]
    assert [len(batch) for batch, _ in loader.parts(state)] == [9, 9, 6]  # as an evaluation reads it


def test_drop_last_ends_an_epoch_whose_rest_fills_no_batch(tmp_path):
    ckpt = ll.checkpoint_io(tmp_path)
    saved_after(5, ckpt, made(drop_last=True))
    with pytest.warns(UserWarning, match="batch_size was 4, is 16"):
        state = ckpt.restore(new_state(made(batch_size=16, drop_last=True)))
    assert (state.epoch, state.batch, state.samples, state.epoch_length) == (1, 0, 20, 1)


def test_a_line_says_what_a_batch_size_per_rank_means_on_other_ranks(tmp_path, capsys):
    def make():
        return ll.make_loader(range(24), batch_size_per_rank=2)

    ckpt = ll.checkpoint_io(tmp_path)
    with as_rank(0, 2):
        state = new_state(make())
        assert repr(make()).startswith("ll.make_loader(range, batch_size_per_rank=2)")
    ckpt.save(state.replace(step=2, batch=2, samples=8, batch_samples=4))
    with as_rank(0, 3):
        state = new_state(make())
    restored = ckpt.restore(state)  # without a warning
    assert (restored.batch, restored.epoch_length) == (1, 4)
    line = "A batch has 6 samples instead of 4, an epoch 4 batches: epoch 0 continues after its first 8 samples\n"
    assert capsys.readouterr().out.endswith(line)


def test_wrong_batch_sizes_per_rank_are_refused_by_name():
    for options, message in (
        ({"batch_size": 4, "batch_size_per_rank": 2}, "batch_size=4 and batch_size_per_rank=2 are given"),
        ({"batch_size_per_rank": 0}, "batch_size_per_rank"),
        ({"batch_size_per_rank": 2, "divide": False}, "write batch_size=2"),
        ({"batch_size_per_rank": 2, "order": ll.data.growing({0: 2})}, "the order makes the batches"),
    ):
        with pytest.raises(ValueError, match=message):
            ll.make_loader(range(8), **options)
    with pytest.raises(ValueError, match="batch_size_per_rank given together with a DataLoader"):
        ll.make_loader(torch.utils.data.DataLoader(range(8), batch_size=2), batch_size_per_rank=2)
    loader = ll.make_loader(range(8), batch_size_per_rank=2)
    with (
        as_rank(0, 2),
        pytest.raises(ValueError, match=r"was made for batches of 2 samples, and there are 2 ranks now"),
    ):
        loader(ll.TrainState())


def order_of_pair(count, seed):
    return next(ll.make_loader(range(count), batch_size=count, seed=seed)(ll.TrainState())).tolist()


@given(
    per_rank=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    batches=st.integers(1, 9),
    turns=st.lists(st.tuples(st.integers(1, 4), st.integers(0, 5)), max_size=4),
    last=st.integers(1, 4),
)
@settings(max_examples=examples(40), deadline=None)
def test_loaders_that_a_run_reads_side_by_side_stay_together(tmp_path_factory, per_rank, batches, turns, last):
    """Each of them has as many batches in an epoch on any number of ranks: 12 samples are a whole number of batches."""
    counts = [12 * size * batches for size in per_rank]

    def make():
        pairs = enumerate(zip(counts, per_rank, strict=True))
        return [ll.make_loader(range(count), batch_size_per_rank=size, seed=seed) for seed, (count, size) in pairs]

    ckpt, seen = ll.checkpoint_io(tmp_path_factory.mktemp("run")), ([], [])
    for ranks, steps in [*turns, (last, 10**6)]:
        with as_rank(0, ranks):
            state = ll.init_state(torch.nn.Linear(1, 1), loader=make())
        state = ckpt.restore(state, quiet=True)
        if state.epoch:
            break
        read = [on_ranks(ranks, lambda of=of: make()[of], state) for of in range(2)]
        for first, second in list(zip(*read, strict=True))[:steps]:
            assert len(first) * per_rank[1] == len(second) * per_rank[0]
            seen[0].extend(first)
            seen[1].extend(second)
            state = consume(state, first)
        ckpt.save(state)
    assert [*seen] == [order_of_pair(count, seed) for seed, count in enumerate(counts)]


def two_on(ranks, second=None, **options):
    with as_rank(0, ranks):
        first = ll.make_loader(range(24), batch_size_per_rank=2, **options)
        second = ll.make_loader(range(24), **(second or {"batch_size_per_rank": 2}), seed=1, **options)
        return ll.init_state(torch.nn.Linear(1, 1), loader=[first, second])


def test_loaders_whose_batches_change_by_other_factors_are_refused_within_an_epoch(tmp_path):
    ckpt, of_all = ll.checkpoint_io(tmp_path), {"batch_size": 4}
    ckpt.save(two_on(2, of_all).replace(step=1, batch=1, samples=4, batch_samples=4))
    with pytest.raises(
        ValueError, match=r"after batch 1 of 4 samples.*a batch has 6 here.* by one factor.*batch_size=4\)"
    ):
        ckpt.restore(two_on(3, of_all))
    assert ckpt.restore(two_on(2, of_all)).batch == 1
    with as_rank(0, 3):
        pair = [ll.make_loader(range(24), batch_size=4, seed=seed) for seed in range(2)]
        state = ll.init_state(torch.nn.Linear(1, 1), loader=pair)
    with pytest.warns(UserWarning, match="batch_size_per_rank"):
        assert ckpt.restore(state).batch == 1


def test_a_line_names_the_batches_of_all_loaders(tmp_path, capsys):
    ckpt = ll.checkpoint_io(tmp_path)
    ckpt.save(two_on(2).replace(step=2, batch=2, samples=8, batch_samples=4))
    assert ckpt.restore(two_on(3)).batch == 1
    assert "Batches have 6 and 6 samples instead of 4 and 4, an epoch 4 batches: epoch 0" in capsys.readouterr().out


def test_a_position_converted_for_one_loader_alone_is_refused_by_the_loader_beside_it():
    first, second = (ll.make_loader(range(24), batch_size=4, seed=seed) for seed in range(2))
    state = ll.init_state(torch.nn.Linear(1, 1), loader=[first, second])
    state = state.replace(step=1, batch=1, samples=4, batch_samples=4)
    changed = ll.make_loader(range(24), batch_size=7)
    with pytest.raises(ValueError, match=r"read 4 samples of the batch of 7 .* no part of a batch of 4"):
        second(changed.resume(state).replace(epoch_length=6))


@pytest.mark.slow
@given(
    per_rank=st.integers(1, 3),
    limit=st.integers(1, 8),
    turns=st.lists(st.tuples(st.integers(1, 4), st.integers(0, 7)), min_size=1, max_size=5),
)
@settings(max_examples=examples(60), deadline=None)
def test_epochs_of_a_number_of_batches_continue_on_other_ranks_without_a_sample_twice(
    tmp_path_factory, per_rank, limit, turns
):
    def make():
        return ll.make_loader(range(40), batch_size_per_rank=per_rank, seed=3, max_batches=limit)

    ckpt, seen, model = ll.checkpoint_io(tmp_path_factory.mktemp("run")), {}, torch.nn.Linear(1, 1)
    for ranks, steps in turns:
        with as_rank(0, ranks):
            state = ll.init_state(model, loader=make())
        state = ckpt.restore(state, quiet=True)
        for batch in on_ranks(ranks, make, state)[:steps]:
            seen.setdefault(state.epoch, []).extend(batch)
            state = consume(state, batch)
        ckpt.save(state)
        # An epoch has the first samples of its order, and ends where it has as many batches of the size of now.
        for epoch, samples in seen.items():
            assert samples == order_of(40, epoch)[: len(samples)]
        if state.batch and len(seen[state.epoch]) >= limit * per_rank * ranks:
            raise AssertionError("an epoch went on after its last batch")


def test_an_epoch_of_a_number_of_batches_ends_where_the_run_has_read_more(tmp_path):
    def state_on(ranks):
        with as_rank(0, ranks):
            return ll.init_state(
                torch.nn.Linear(1, 1), loader=ll.make_loader(range(40), batch_size_per_rank=2, max_batches=4)
            )

    ckpt = ll.checkpoint_io(tmp_path)
    ckpt.save(state_on(4).replace(step=3, batch=3, samples=24, batch_samples=8))
    state = ckpt.restore(state_on(2), quiet=True)  # 24 samples, where an epoch of 4 batches has 16
    assert (state.epoch, state.batch, state.samples, state.epoch_length) == (1, 0, 24, 4)
    state = ckpt.restore(state_on(5), quiet=True)
    assert (state.epoch, state.batch, state.run.partly_read) == (0, 2, (0, 2, 4))


def test_a_stream_with_epochs_of_a_number_of_batches_continues_at_the_next_sample(tmp_path):
    def make():
        return ll.make_loader(Numbers(100), batch_size_per_rank=2)

    def state_on(ranks):
        with as_rank(0, ranks):
            return ll.init_state(torch.nn.Linear(1, 1), loader=make(), epoch_length=5)

    ckpt = ll.checkpoint_io(tmp_path)
    ckpt.save(state_on(2).replace(step=2, batch=2, samples=8, batch_samples=4))
    state = ckpt.restore(state_on(3), quiet=True)
    assert sum(on_ranks(3, make, state), []) == [*range(8, 30)]  # noqa: RUF017


def test_an_endless_loader_continues_at_the_next_sample(tmp_path):
    def endless(size):
        return ll.data.endless(ll.make_loader(range(24), batch_size=size, seed=3))

    ckpt = ll.checkpoint_io(tmp_path)
    saved_after(2, ckpt, ll.make_loader(range(24), batch_size=4, seed=3))
    loader = endless(9)
    with pytest.warns(UserWarning, match="batch_size was 4, is 9"):
        state = ckpt.restore(new_state(loader), quiet=True)
    read = torch.cat([*itertools.islice(loader(state), 5)]).tolist()
    order = [*order_of(24, 0)[8:], *order_of(24, 1)]
    assert (state.epoch, state.batch, read) == (0, 0, order[: len(read)])
    assert torch.equal(loader.indices(state), next(loader(state)))


def test_a_count_of_the_batches_of_several_epochs_is_refused(tmp_path):
    """Without `epoch_length`, an endless loader counts on: 20 of 12 samples were read, and the next is the eighth one."""
    saved, new = (
        new_state(ll.data.endless(ll.make_loader(range(12), batch_size=size))).replace(epoch_length=None)
        for size in (4, 5)
    )
    ckpt = ll.checkpoint_io(tmp_path)
    ckpt.save(saved.replace(step=5, batch=5, samples=20, batch_samples=4))
    with pytest.raises(ValueError, match=r"after batch 5 of 4 samples, and a batch has 5 here.*batch_size=4\)"):
        ckpt.restore(new)


@given(
    samples=st.integers(1, 30),
    before=st.integers(1, 9),
    after=st.integers(1, 9),
    stop=st.integers(1, 30),
    epoch=st.integers(0, 1),
)
@settings(max_examples=examples(60), deadline=None)
@pytest.mark.filterwarnings("ignore:.*batch_size was")
def test_without_epoch_length_another_batch_size_continues_at_the_next_sample_or_is_refused(
    tmp_path_factory, samples, before, after, stop, epoch
):
    def state_of(size):
        return new_state(ll.make_loader(range(samples), batch_size=size, seed=3)).replace(epoch_length=None)

    def read(size, state):
        return ll.make_loader(range(samples), batch_size=size, seed=3)(state)

    ckpt, seen = ll.checkpoint_io(tmp_path_factory.mktemp("run")), []
    state = state_of(before).replace(epoch=epoch, samples=epoch * samples)
    for batch in list(read(before, state))[:stop]:
        seen += batch.tolist()
        state = consume(state, batch)
    ckpt.save(state)
    if before != after and state.batch_samples < before:
        with pytest.raises(ValueError, match=rf"has {after} here.*Finish this epoch with .*batch_size={before}\)"):
            ckpt.restore(state_of(after))
        after = before
    rest = read(after, ckpt.restore(state_of(after), quiet=True))
    assert [*seen, *(sample for batch in rest for sample in batch.tolist())] == order_of(samples, epoch)


def test_zipped_loaders_leave_out_what_the_run_has_read_of_the_first(tmp_path):
    def pair(size):
        first, other = (ll.make_loader(range(count), batch_size=of, seed=3) for count, of in ((24, size), (9, 3)))
        return first, ll.data.zipped(first, other, count_samples=lambda batch: len(batch[0]))

    state = saved_after(1, ll.checkpoint_io(tmp_path), pair(4)[0])
    first, together = pair(9)
    state = first.resume(state)
    batches = [*together(state)]
    assert torch.cat([batch for batch, _ in batches]).tolist() == order_of(24, 0)[4:]
    assert together.indices(state)[0].equal(batches[0][0])


def test_a_described_loader_is_elastic_too(tmp_path):
    def restored(ranks, save):
        with as_rank(0, ranks):
            loader = ll.make_loader(range(24), batch_size_per_rank=2)
            state = ll.init_state(torch.nn.Linear(1, 1), epoch_length=len(loader))
        ckpt = ll.checkpoint_io(tmp_path, describe={"train": loader})
        if save:
            ckpt.save(state.replace(step=2, batch=2, samples=8, batch_samples=4))
        return ckpt.restore(state, quiet=True)

    restored(2, True)
    assert restored(3, False).batch == 1  # without a warning


def test_a_setting_that_can_be_resumed_is_not_taken_for_a_loader(tmp_path):
    class Tracker:
        resume = "must"
        description = "a tracker"

    ckpt = ll.checkpoint_io(tmp_path, describe={"tracker": Tracker()})
    state = ll.init_state(torch.nn.Linear(1, 1), epoch_length=6)
    ckpt.save(state.replace(step=1, batch=1, samples=4, batch_samples=4))
    assert ckpt.restore(state, quiet=True).batch == 1


def test_a_stream_that_workers_read_is_refused_within_an_epoch_on_other_ranks(tmp_path):
    def state_on(ranks):
        with as_rank(0, ranks):
            loader = ll.make_loader(Numbers(40), batch_size_per_rank=2, num_workers=2)
            return ll.init_state(torch.nn.Linear(1, 1), loader=loader)

    ckpt = ll.checkpoint_io(tmp_path)
    ckpt.save(state_on(2).replace(step=1, batch=1, samples=4, batch_samples=4))
    with pytest.raises(ValueError, match="streams that one process reads"):
        ckpt.restore(state_on(3))


class Stateful(Numbers):
    at = 0

    def __iter__(self):
        while self.at < self.count:
            self.at += 1
            yield self.at - 1
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, saved):
        self.at = saved["at"]


@pytest.mark.parametrize(("old", "new", "batches"), [(4, 3, 2), (4, 3, 3), (3, 4, 3), (2, 4, 2)])
def test_a_kept_position_is_not_taken_for_that_of_a_batch_of_another_size(tmp_path, old, new, batches):
    with as_rank(0, old):
        loader = ll.make_loader(Stateful(20), batch_size_per_rank=1)
        state = new_state(loader).replace(extra={"stream": ""})
    loader = ll.make_loader(Stateful(20), batch_size=old)
    reading = loader(state)
    for _ in range(batches):
        state = consume(state, next(reading))
    ckpt = ll.checkpoint_io(tmp_path)
    ckpt.save(ll.data.with_position(loader, state))

    def make():
        return ll.make_loader(Stateful(20), batch_size_per_rank=1)

    with as_rank(0, new):
        state = new_state(make()).replace(extra={"stream": ""})
    state = ckpt.restore(state, quiet=True)
    assert sum(on_ranks(new, make, state), []) == [*range(old * batches, 20)]  # noqa: RUF017
