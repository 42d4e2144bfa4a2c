"""Refusals and warnings of loaders, with what to write instead."""

import inspect
import itertools
import re

import pytest
import torch
from plain_loader import Augmented, AugmentedStream, Counting, as_rank, at, batches_of, quiet, samples_of
from shared import SGD, assert_each_refused
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    SubsetRandomSampler,
)
from torch.utils.data.datapipes.iter import IterableWrapper

import looplib as ll
from looplib.data import make_loader
from looplib.state import end_epoch
from looplib.types import TrainState

pytestmark = quiet


class Squares:
    def __getitem__(self, index):
        return index**2


class Shard(IterableDataset):
    """As accelerate's and transformers' IterableDatasetShard."""

    process_index = 1

    def __iter__(self):
        return iter([4, 5, 6, 7])


X, COUNTER = torch.zeros(6, 2), itertools.count()
TWO = {"batch_size": 2}
ARGUMENTS = [
    ("text", TWO, TypeError, "dataset is .*'text'.*characters"),
    (range(4), TWO | {"sampler": [1, 2]}, TypeError, "sampler.*order="),
    (range(4), TWO | {"generator": torch.Generator()}, TypeError, "generator.*seed="),
    (range(4), TWO | {"num_worker": 2}, TypeError, "num_worker"),  # DataLoader's own error
    (DataLoader(range(9)), {"order": ll.data.sequential()}, ValueError, "order.* DataLoader"),
    *((range(4), {"batch_size": size}, ValueError, "batch_size is") for size in (0, True, 2.0)),
    *((make(4), {}, TypeError, f"batch_size=64.*{make.__name__}") for make in (Augmented, AugmentedStream)),
    ([], TWO, ValueError, "0 samples, batch_size=2"),
    (range(3), {"batch_size": None, "drop_last": True}, ValueError, "drop_last"),
    (range(3), {"batch_size": None, "order": ll.data.by_length([1, 2, 3])}, ValueError, "by_length.*batch_size"),
    (range(3), TWO | {"order": ll.data.batch_sampler([[1]])}, ValueError, "batch_size=2.*batch_sampler"),
    (range(3), TWO | {"order": ll.data.weighted([1, 2])}, ValueError, r"weighted.* 2 numbers.* 3"),
    (range(3), TWO | {"order": ll.data.sampler(lambda *_: torch.eye(2))}, TypeError, r"float32.*\(2, 2\)"),
    (range(3), TWO | {"order": ll.data.sampler(lambda *_: torch.ones(3) > 0)}, TypeError, "torch.bool"),
    (
        range(3),
        TWO | {"order": ll.data.sampler(["a", "b"])},
        TypeError,
        r"sampler\(\['a', 'b'\]\) gave str .*batch_sampler",
    ),
    (range(3), TWO | {"order": ll.data.sampler(lambda *_: None)}, TypeError, r"sampler\(<lambda>\) gave None"),
    (range(3), {"order": ll.data.batch_sampler([[1]]), "drop_last": True}, ValueError, "drop_last.*batch_sampler"),
    (range(3), TWO | {"order": ll.data.sampler([True, False, True])}, TypeError, "bool.*nonzero"),
    (range(9), TWO | {"order": ll.data.sampler(lambda *_: [next(COUNTER) % 9])}, ValueError, "epoch 0"),
    (
        range(9),
        TWO | {"order": ll.data.sampler(SubsetRandomSampler(range(9), generator=torch.Generator()))},
        ValueError,
        "SubsetRandomSampler.*generator",
    ),
    (range(3), TWO | {"order": ll.data.shuffled}, TypeError, "shuffled"),
    (range(3), TWO | {"order": [2, 1, 0]}, TypeError, r"list.*ll.data.sampler\("),
    (Augmented(3), TWO | {"num_workers": -1}, ValueError, "num_workers"),
    (3, {}, TypeError, "int.*__len__ and __getitem__"),
    (Squares(), TWO, TypeError, "Squares.*__len__"),
    (iter(range(3)), TWO, TypeError, "range_iterator"),
    (AugmentedStream(3), TWO | {"order": ll.data.shuffled()}, ValueError, "shuffled.*AugmentedStream"),
    (DataLoader(AugmentedStream(3)), {"max_batches": 2}, ValueError, "max_batches=2.*AugmentedStream"),
    (range(3), TWO | {"max_batches": 0}, ValueError, "max_batches is 0"),
    (IterableWrapper([1]), TWO | {"num_workers": 2}, TypeError, "DataPipe.*num_workers=0"),
    (Shard(), TWO, ValueError, "Shard"),
    (AugmentedStream(4), TWO | {"max_batches": 3}, ValueError, "max_batches=3.*epoch_length=3"),
    ((X, X), TWO, TypeError, "tuple.*TensorDataset"),
    ([X, X[:, 0]], TWO, TypeError, "list.*TensorDataset"),
    ({"train": [1, 2], "test": [3]}, TWO, TypeError, r"keys train, test.*dataset\['train'\]"),  # as a DatasetDict
    ([DataLoader(range(9)), DataLoader(range(9))], {}, TypeError, "list of DataLoaders.*ConcatDataset"),
    ({"x": X, "y": X}, TWO, TypeError, "keys x, y.*StackDataset"),
]
ORDERS = [
    (lambda: ll.data.weighted([1, 2, 3], num_samples=0), ValueError, "num_samples is 0"),
    (lambda: ll.data.with_replacement(0), ValueError, "num_samples is 0"),
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
    assert_each_refused(*ORDERS)
    for dataset, options, kind, names in ARGUMENTS:
        with pytest.raises(kind, match=names):
            make_loader(dataset, **options)


def test_what_looks_like_that_and_is_right_is_taken():
    assert len(make_loader((torch.zeros(2), torch.zeros(3)), batch_size=None)) == 2  # batches
    assert len(make_loader(X, batch_size=2)) == 3
    assert len(make_loader({0: X, 1: X}, batch_size=None)) == 2
    assert len(make_loader((1, 2, 3), batch_size=2)) == 2
    assert samples_of(make_loader(Squares(), batch_size=2, order=ll.data.sampler([3, 4]))) == [9, 16]


def test_every_option_of_torchs_dataloader_is_taken_or_refused_by_name():
    own = {"dataset", "batch_size", "drop_last", "collate_fn"}
    for name, parameter in inspect.signature(DataLoader).parameters.items():
        if name in own:
            assert name in inspect.signature(make_loader).parameters
            continue
        try:
            loader = make_loader(Augmented(4), batch_size=2, **{name: parameter.default})
        except TypeError as error:
            assert re.search(f"no argument {name}; write ", str(error))  # noqa: PT017
        else:
            assert len(batches_of(loader)) == 2


def test_what_divides_by_itself_is_refused():
    from accelerate.data_loader import BatchSamplerShard

    sampler = DistributedSampler(range(12), num_replicas=2, rank=1)
    batches = BatchSampler(sampler, 3, False)
    for dataset, given in (
        (range(12), {"batch_size": 3, "order": ll.data.sampler(sampler)}),
        (range(12), {"order": ll.data.batch_sampler(batches)}),
        (DataLoader(range(12), batch_size=3, sampler=sampler), {}),
    ):
        with pytest.raises(ValueError, match=r"is or holds a DistributedSampler.* plain dataset .*divide=False"):
            make_loader(dataset, **given)
        with as_rank(1, 2):
            assert [len(batch) for batch in make_loader(dataset, **given, divide=False)(at())] == [3, 3]
    shard = BatchSamplerShard(BatchSampler(range(12), 3, False), 2, 1)
    with pytest.raises(ValueError, match="is or holds a BatchSamplerShard"):
        make_loader(range(12), order=ll.data.batch_sampler(shard))
    with as_rank(1, 2):
        assert batches_of(make_loader(Shard(), batch_size=2, divide=False)) == [[4, 5], [6, 7]]


# States, and batches that cannot be read


def test_states_that_are_not_this_loaders():
    loader, stream = make_loader(range(10), batch_size=4), make_loader(AugmentedStream(6), batch_size=2)
    longer = make_loader(range(9), batch_size=1, order=ll.data.sampler(lambda epoch, generator: range(3 + epoch)))
    assert len(batches_of(longer, 2)) == 5
    assert len(list(stream(end_epoch(at(batch=3))))) == 3
    assert_each_refused(
        (
            lambda: loader(at(epoch_length=5)),
            ValueError,
            r"is 5, .* 3 batches .*loader=loader.*loader\(ll.TrainState",
        ),
        (lambda: loader(at(1, 4)), ValueError, "batch 4 of epoch 1.* 3 batches.*end_epoch"),
        (lambda: loader(at(1, 3, 3)), ValueError, "batch 3 of epoch 1.* 3 batches.*end_epoch"),
        (lambda: loader(at(1, -1)), ValueError, r"batch -1 of epoch 1.* divmod\(batches_taken, len\(loader\)\)"),
        (lambda: loader(at(0, 7)), ValueError, "batch 7 of epoch 0.* 3 batches"),
        (lambda: longer(at(2, 0, 3)), ValueError, "epoch 2 has 5 batches, but epoch 0 has 3; .*end_epoch"),
        (lambda: iter(loader), TypeError, "for batch in loader"),
        (
            lambda: list(stream(at(batch=4))),
            ValueError,
            "after 3 batches.*at batch 4 of epoch 0; call state = ll.state.end",
        ),
        (lambda: list(stream(at(batch=5))), ValueError, "after 3 batches.*at batch 5"),
        (lambda: list(stream(at(epoch_length=4))), ValueError, "after 3 batches, but state.epoch_length is 4"),
        (lambda: len(stream), TypeError, r"stream \(AugmentedStream\) has no length; .*end_epoch"),
        (lambda: batches_of(make_loader(AugmentedStream(0), batch_size=2)), ValueError, "no batch in epoch 0"),
    )


def test_a_batch_that_cannot_be_divided_is_refused():
    texts = make_loader(range(5), batch_size=2, collate_fn=lambda items: dict.fromkeys(items, "text"))
    with as_rank(1, 2), pytest.raises(ValueError, match=r"a batch has 1 samples for 2 ranks, .*drop_last"):
        batches_of(texts)
    for data in (range(4), {0: 1, 1: 2}.keys()):
        loader = make_loader(data, batch_size=None)
        assert len(batches_of(loader)) == len(data)
        with as_rank(1, 2), pytest.raises(TypeError, match=r"a int cannot be divided among 2 ranks: .*divide=False"):
            batches_of(loader)


class Ends(Dataset):
    def __len__(self):
        return 10

    def __getitem__(self, index):
        return torch.tensor([index]) if index != 5 else next(iter([]))


class EndsInLists(Ends):
    def __getitems__(self, indices):
        return [self[index] for index in indices]


def ends(items):
    return torch.stack(items) if 5 not in torch.stack(items)[:, 0] else next(iter([]))


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_stop_iteration_is_an_error_that_names_the_batch(num_workers):
    for data, collate_fn in (
        (Ends(), None),
        (EndsInLists(), None),
        (Augmented(10), ends),
        (AugmentedStream(10), ends),
    ):
        loader = make_loader(
            data, batch_size=2, order=ll.data.sequential(), collate_fn=collate_fn, num_workers=num_workers
        )
        with pytest.raises(RuntimeError, match=r"raised StopIteration.* in batch \d of epoch 0"):
            list(loader(at()))


# A forgotten epoch_length


def every_other(epoch, generator):
    return range(epoch % 2, 10 - epoch)


def test_a_forgotten_epoch_length_is_said_at_the_first_call():
    model = torch.nn.Linear(1, 1)
    forgotten, known = ll.init_state(model, SGD), ll.init_state(model, SGD, epoch_length=5)
    theirs = DataLoader(range(10), batch_size=2, sampler=torch.utils.data.SubsetRandomSampler(range(10)))
    for dataset, options in (
        (range(10), TWO),
        (range(20), TWO | {"order": ll.data.sampler(list(range(10)))}),
        (range(10), {"order": ll.data.batch_sampler([[0, 1], [2], [3], [4, 5], [6]])}),
        (theirs, {}),
    ):
        message = r"that an epoch has 5 batches; write ll.init_state\(..., loader=loader"
        with pytest.warns(UserWarning, match=message) as told:
            make_loader(dataset, **options)(forgotten)
        assert told[0].filename == __file__
    loader = make_loader(range(10), batch_size=2)
    for quiet_loader, state in (
        (loader, known),
        (loader, TrainState()),
        (loader, ll.init_state(model)),  # to evaluate
        (loader, end_epoch(forgotten.replace(step=5, batch=5))),
        (make_loader(AugmentedStream(10), batch_size=2), forgotten),
        (make_loader(range(10), batch_size=2, order=ll.data.sampler(every_other)), forgotten),  # lengths may differ
    ):
        quiet_loader(state)
    list(loader.parts(forgotten))
