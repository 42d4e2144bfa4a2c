"""Block shuffling: positions without reading, counts of reads, ranks and workers."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_loader import as_rank, at
from shared import examples

import looplib as ll


class Counted:
    """Shards of consecutive numbers that count the samples read, and note where each read began."""

    def __init__(self, lengths):
        self.lengths, self.reads, self.starts = lengths, 0, []

    def __call__(self, shard, start):
        self.starts.append((shard, start))
        first = sum(self.lengths[:shard])
        for number in range(first + start, first + self.lengths[shard]):
            self.reads += 1
            yield number


def loader_of(source, buffer, **options):
    dataset = ll.data.shards(source, source.lengths, buffer=buffer)
    return ll.make_loader(dataset, order=ll.data.shuffled_blocks(buffer), seed=7, **options)


@given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=5),
    buffer=st.integers(1, 15),
    size=st.integers(1, 6),
    epoch=st.integers(0, 2),
)
@settings(max_examples=examples(60), deadline=None)
def test_each_block_is_permuted_by_itself_and_read_once(lengths, buffer, size, epoch):
    source, samples = Counted(lengths), sum(lengths)
    seen = torch.cat([*loader_of(source, buffer, batch_size=size)(at(epoch=epoch))]).tolist()
    for first in range(0, samples, buffer):
        assert sorted(seen[first : first + buffer]) == [*range(first, min(first + buffer, samples))]
    assert source.reads == samples
    indexed = ll.make_loader(range(samples), batch_size=size, order=ll.data.shuffled_blocks(buffer), seed=7)
    assert torch.cat([*indexed(at(epoch=epoch))]).tolist() == seen


def test_blocks_and_epochs_have_different_permutations():
    loader = ll.make_loader(range(400), batch_size=100, order=ll.data.shuffled_blocks(100))
    rows = [tuple((batch % 100).tolist()) for epoch in range(2) for batch in loader(at(epoch=epoch))]
    assert len({*rows, tuple(range(100))}) == 9


def test_a_run_that_stopped_at_sample_1_000_000_reads_at_most_two_blocks():
    buffer, lengths = 1000, [99_991] * 11
    source = Counted(lengths)
    loader = loader_of(source, buffer, batch_size=64)
    batch, offset = divmod(1_000_000, 64)
    assert not offset
    resumed = next(loader(at(batch=batch)))
    assert source.reads <= 2 * buffer
    assert source.starts[0] == divmod(1_000_000, 99_991)  # 1,000,000 is the start of a block
    batches = loader(at(batch=batch - 16))  # one that has been reading since 1,024 samples
    assert torch.equal([next(batches) for _ in range(17)][-1], resumed)
    assert {*resumed.tolist()} <= {*range(1_000_000, 1_001_000)}


@pytest.mark.parametrize("workers", [0, 2])
def test_any_ranks_and_workers_get_the_same_samples_none_twice(workers):
    lengths = [7, 30, 13]
    alone = [batch.tolist() for batch in loader_of(Counted(lengths), 12, batch_size=8)(at(batch=2))]
    assert len({sample for batch in alone for sample in batch}) == 50 - 16
    for count in (1, 2, 3):
        parts = []
        for rank in range(count):
            with as_rank(rank, count):
                loader = loader_of(Counted(lengths), 12, batch_size=8, num_workers=workers)
                parts.append([batch.tolist() for batch in loader(at(batch=2))])
        assert [[*itertools.chain(*batch)] for batch in zip(*parts, strict=True)] == alone


def test_a_run_with_a_batch_size_per_rank_continues_in_a_block(tmp_path):
    def make():
        return loader_of(Counted([20, 20]), 10, batch_size_per_rank=3)

    ckpt, model = ll.checkpoint_io(tmp_path), torch.nn.Linear(1, 1)
    with as_rank(0, 2):
        state = ll.init_state(model, loader=make())
    ckpt.save(state.replace(step=3, batch=3, samples=18, batch_samples=6))
    state = ckpt.restore(ll.init_state(model, loader=make()))
    alone = torch.cat([*loader_of(Counted([20, 20]), 10, batch_size=40)(at())])
    assert torch.equal(torch.cat([*make()(state)]), alone[18:])


@given(
    samples=st.integers(1, 40),
    buffer=st.integers(1, 15),
    size=st.integers(1, 6),
    epoch=st.integers(0, 2),
    drop_last=st.booleans(),
)
@settings(max_examples=examples(60), deadline=None)
def test_a_stream_has_the_order_of_a_dataset_with_indices_from_any_batch_on(samples, buffer, size, epoch, drop_last):
    source = Counted([samples])
    stream = ll.data.shuffled_stream(lambda start: source(0, start), buffer=buffer)
    loader = ll.make_loader(stream, batch_size=size, seed=7, drop_last=drop_last and samples >= size)
    options = {"order": ll.data.shuffled_blocks(buffer), "drop_last": loader.drop_last}
    indexed = [
        batch.tolist()
        for batch in ll.make_loader(range(samples), batch_size=size, seed=7, **options)(at(epoch=epoch))
    ]
    for batch in range(len(indexed) + 1):
        source.reads = 0
        reading = loader(at(epoch=epoch, batch=batch))
        if batch < len(indexed):
            assert next(reading).tolist() == indexed[batch]
            assert source.reads <= buffer * (2 + size // buffer)
        assert [part.tolist() for part in reading] == indexed[batch + 1 :]
    with pytest.raises(ValueError, match=r"has no sample .* at batch"):
        next(loader(at(epoch=epoch, batch=len(indexed) + 2)))


def test_a_stream_of_a_batch_size_per_rank_continues_in_a_block(tmp_path):
    def make(**options):
        source = Counted([40])
        stream = ll.data.shuffled_stream(lambda start: source(0, start), buffer=10)
        return ll.make_loader(stream, batch_size_per_rank=3, seed=7, **options)

    ckpt, model = ll.checkpoint_io(tmp_path), torch.nn.Linear(1, 1)
    with as_rank(0, 2):
        state = ll.init_state(model, loader=make(num_workers=2))
    ckpt.save(state.replace(step=3, batch=3, samples=18, batch_samples=6))
    state = ckpt.restore(ll.init_state(model, loader=make()), quiet=True)
    order = torch.cat([*make()(at())])
    assert torch.equal(torch.cat([*make()(state)]), order[18:])
    of_3, of_7 = (ll.make_loader(make().dataset, batch_size=size, seed=7) for size in (3, 7))
    state = ll.init_state(model, loader=of_3).replace(step=1, batch=1, samples=3, batch_samples=3)
    with pytest.raises(ValueError, match="read with batch_size=3"):
        of_7(state)


def test_a_hugging_face_stream_is_shuffled_so():
    import datasets

    stream = datasets.Dataset.from_dict({"x": [*range(30)]}).to_iterable_dataset(num_shards=3)
    loader = ll.make_loader(ll.data.shuffled_stream(stream.skip, buffer=8), batch_size=4, seed=7)
    indexed = ll.make_loader(range(30), batch_size=4, seed=7, order=ll.data.shuffled_blocks(8))
    expected = [batch.tolist() for batch in indexed(at())]
    for batch in (0, 3, 7):
        assert [part["x"].tolist() for part in loader(at(batch=batch))] == expected[batch:]


def test_a_source_that_cannot_be_read_so_is_refused_by_name():
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(range(8))

    with pytest.raises(ValueError, match=r"shuffled_blocks\(4\) is given for a stream .* ll.data.shards"):
        ll.make_loader(Stream(), batch_size=2, order=ll.data.shuffled_blocks(4))
    source = Counted([4, 4])
    dataset = ll.data.shards(source, [4, 4], buffer=4)
    with pytest.raises(ValueError, match=r"buffer=4, and the order is shuffled_blocks\(3\)"):
        ll.make_loader(dataset, batch_size=2, order=ll.data.shuffled_blocks(3))
    with pytest.raises(ValueError, match="shard 1 ended after 4 samples, and its length is 5"):
        ll.data.shards(source, [4, 5], buffer=9)[0]
    with pytest.raises(IndexError, match="index is 8, and there are 8 samples"):
        dataset[8]
    for lengths in ([], [4, 0], [4.0]):
        with pytest.raises(ValueError, match="lengths is"):
            ll.data.shards(source, lengths, buffer=4)
    with pytest.raises(TypeError, match="read is a list; give a function start"):
        ll.data.shuffled_stream([1], buffer=4)
    with pytest.raises(TypeError, match="read is a list"):
        ll.data.shards([[1]], [1], buffer=4)
    for make in (
        ll.data.shuffled_blocks,
        lambda buffer: ll.data.shards(source, [4], buffer=buffer),
        lambda buffer: ll.data.shuffled_stream(source, buffer=buffer),
    ):
        with pytest.raises(ValueError, match="buffer"):
            make(0)
