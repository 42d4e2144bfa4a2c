"""Block shuffling: positions without reading, counts of reads, ranks and workers."""

import itertools
import traceback

import pytest
import torch
from datasets import Dataset, IterableDataset
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_loader import as_rank, at, quiet
from shared import examples
from torch.utils.data import ChainDataset, DataLoader, get_worker_info

import looplib as ll

pytestmark = quiet


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
    stream = Dataset.from_dict({"x": [*range(30)]}).to_iterable_dataset(num_shards=3)
    loader = ll.make_loader(ll.data.shuffled_stream(stream.skip, buffer=8), batch_size=4, seed=7)
    indexed = ll.make_loader(range(30), batch_size=4, seed=7, order=ll.data.shuffled_blocks(8))
    expected = [batch.tolist() for batch in indexed(at())]
    for batch in (0, 3, 7):
        assert [part["x"].tolist() for part in loader(at(batch=batch))] == expected[batch:]


class Dividing:
    """Numbers that divide themselves among the workers that they see, when it is created and at each sample."""

    def __init__(self, start, count):
        self.numbers, self.seen = iter(range(start, count)), get_worker_info()

    def __iter__(self):
        for number in self.numbers:
            for info in (self.seen, get_worker_info()):
                if info and number % info.num_workers != info.id:
                    break
            else:
                yield {"x": number}


def generated(count):
    for number in range(count):
        yield {"x": number}


def sources_of(count, shards):
    """Functions that read the same samples from any on, of sources that divide themselves among workers."""
    hugging_face = Dataset.from_dict({"x": [*range(count)]}).to_iterable_dataset(num_shards=min(shards, count))
    generator = IterableDataset.from_generator(generated, gen_kwargs={"count": count})
    return {
        "datasets": hugging_face.skip,
        "formatted": hugging_face.with_format("torch").skip,
        "generator": generator.skip,
        "dividing": lambda start: Dividing(start, count),
    }


def in_parts(make, ranks, state):
    """The numbers in the batches of all ranks, each put together again."""
    parts = []
    for rank in range(ranks):
        with as_rank(rank, ranks):
            parts.append([batch["x"].tolist() for batch in make()(state)])
    return [[*itertools.chain(*batch)] for batch in zip(*parts, strict=True)]


@pytest.mark.parametrize("kind", ["datasets", "dividing"])
def test_a_source_that_divides_itself_among_the_workers_is_read_whole_by_each(kind):
    stream = ll.data.shuffled_stream(sources_of(24, 4)[kind], buffer=10)
    indexed = ll.make_loader(range(24), batch_size=4, seed=7, order=ll.data.shuffled_blocks(10))
    loader = ll.make_loader(stream, batch_size=4, seed=7, num_workers=2)
    assert in_parts(lambda: loader, 1, at(batch=1)) == [batch.tolist() for batch in indexed(at(batch=1))]


@pytest.mark.slow
@given(
    count=st.integers(1, 40),
    shards=st.integers(1, 5),
    kind=st.sampled_from(["datasets", "formatted", "generator", "dividing"]),
    buffer=st.integers(1, 15),
    size=st.integers(1, 6),
    workers=st.integers(0, 3),
    ranks=st.integers(1, 2),
    epoch=st.integers(0, 1),
    start=st.floats(0, 1),
)
@settings(max_examples=examples(25), deadline=None)
def test_any_source_has_the_batches_of_a_list_with_any_shards_workers_and_ranks(
    count, shards, kind, buffer, size, workers, ranks, epoch, start
):
    plain = ll.make_loader(range(count), batch_size=size, seed=7, order=ll.data.shuffled_blocks(buffer))
    state = at(epoch=epoch, batch=int(start * (len(plain) - 1)))
    stream = ll.data.shuffled_stream(sources_of(count, shards)[kind], buffer=buffer)

    def make():
        return ll.make_loader(stream, batch_size=size, seed=7, num_workers=workers, collate_fn=columns)

    assert in_parts(make, ranks, state) == [batch.tolist() for batch in plain(state)]


def columns(rows):
    return {"x": torch.tensor([int(row["x"]) for row in rows], dtype=torch.int64)}


def test_shards_that_divide_themselves_among_the_workers_are_read_whole():
    stream = Dataset.from_dict({"x": [*range(30)]}).to_iterable_dataset(num_shards=3)
    dataset = ll.data.shards(lambda shard, start: stream.shard(3, shard).skip(start), [10, 10, 10], buffer=8)
    options = {"batch_size": 4, "seed": 7, "order": ll.data.shuffled_blocks(8)}
    loader = ll.make_loader(dataset, num_workers=2, **options)
    assert in_parts(lambda: loader, 1, at()) == [
        batch.tolist() for batch in ll.make_loader(range(30), **options)(at())
    ]


def test_a_hugging_face_stream_alone_is_divided_by_itself():
    stream = Dataset.from_dict({"x": [*range(30)]}).to_iterable_dataset(num_shards=4)
    loader = ll.make_loader(stream, batch_size=4, num_workers=2)
    expected = [batch["x"].tolist() for batch in DataLoader(stream, batch_size=4, num_workers=2)]
    read = in_parts(lambda: loader, 1, at())
    assert read == expected
    assert sorted(itertools.chain(*read)) == [*range(30)]


def test_several_workers_of_a_plain_dataloader_are_refused():
    stream = ll.data.shuffled_stream(lambda start: iter(range(start, 8)), buffer=3)
    assert [*DataLoader(stream, batch_size=None)] == [*DataLoader(stream, batch_size=None, num_workers=1)]
    for dataset in (stream, ChainDataset([stream])):
        with pytest.raises(
            ValueError, match=r"each worker would give all samples: .*ll.make_loader\(stream"
        ) as refused:
            next(iter(DataLoader(dataset, num_workers=2)))
        traceback.clear_frames(refused.tb)  # the workers end now: torch waits 20 s for those that are left to gc


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
