"""Arguments that a loader refuses or warns about, with what to write instead."""

import inspect
import re

import pytest
import torch
from test_loader import Augmented, AugmentedStream, at, batches_of
from torch.utils.data import DataLoader

import looplib as ll
from looplib.data import make_loader
from looplib.state import end_epoch
from looplib.types import TrainState

pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")


# Arguments, and what to write instead


@pytest.mark.parametrize(
    ("options", "instead"),
    [
        ({"weights": [1] * 4}, r"order=ll.data.weighted\(weights, num_samples=...\)"),
        ({"num_samples": 4}, r"order=ll.data.weighted\("),
        ({"lengths": [1] * 4}, r"order=ll.data.by_length\(lengths, pool=...\)"),
        ({"pool": 4}, r"order=ll.data.by_length\("),
        ({"sampler": [1, 2]}, r"order=ll.data.sampler\(...\)"),
        ({"batch_sampler": [[1, 2]]}, r"order=ll.data.batch_sampler\(...\)"),
        ({"generator": torch.Generator()}, "seed=..."),
        ({"in_order": False}, "batches always come in the order of the epoch"),
    ],
)
def test_an_argument_that_there_is_not_is_named_with_what_to_write(options, instead):
    with pytest.raises(TypeError, match=f"make_loader has no argument {next(iter(options))}.*{instead}"):
        make_loader(range(4), batch_size=2, **options)
    with pytest.raises(TypeError, match="num_worker"):  # DataLoader's own error
        make_loader(range(4), batch_size=2, num_worker=2)


def test_shuffle_is_the_order_that_everyone_types():
    orders = {True: ll.data.shuffled(), False: ll.data.in_order(), None: None}
    for shuffle, order in orders.items():
        loader, same = (
            make_loader(range(9), batch_size=2, **which) for which in ({"shuffle": shuffle}, {"order": order})
        )
        assert (repr(loader), loader.description) == (repr(same), same.description)
        assert batches_of(loader) == batches_of(same)
    assert len(batches_of(make_loader(AugmentedStream(4), batch_size=2, shuffle=False))) == 2
    for data, options, error, words in (
        (
            range(9),
            {"shuffle": True, "order": ll.data.in_order()},
            ValueError,
            "order=in_order.* and shuffle=True are",
        ),
        (range(9), {"shuffle": "yes"}, TypeError, "shuffle is the text 'yes'; give True or False"),
        (AugmentedStream(4), {"shuffle": True}, ValueError, "given for a stream"),
        (DataLoader(range(9)), {"shuffle": True}, ValueError, "shuffle given together with a DataLoader"),
    ):
        with pytest.raises(error, match=words):
            make_loader(data, **options, **({} if isinstance(data, DataLoader) else {"batch_size": 2}))


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


@pytest.mark.parametrize("make", [Augmented, AugmentedStream])
def test_a_loader_needs_a_batch_size(make):
    with pytest.raises(
        TypeError, match=rf"batch_size=64\), or batch_size=None if each item .*{make.__name__}\) is a"
    ):
        make_loader(make(4))


@pytest.mark.parametrize("options", [{}, {"batch_size": 2}])
def test_columns_are_no_dataset(options):
    x, y = torch.zeros(6, 2), torch.zeros(6)
    with pytest.raises(
        TypeError, match=r"tuple of 2 tensors or arrays of 6 samples.*TensorDataset\(x, y\), batch_size"
    ):
        make_loader((x, y), **options)
    with pytest.raises(TypeError, match=r"dict of 2 tensors .*StackDataset\(\*\*columns\), batch_size"):
        make_loader({"x": x.numpy(), "y": y}, **options)
    assert len(make_loader((torch.zeros(2), torch.zeros(3)), batch_size=None)) == 2  # batches
    assert len(make_loader({0: x, 1: x}, batch_size=None)) == 2
    assert len(make_loader((1, 2, 3), batch_size=2)) == 2


# Nothing ends early and silently


class Ends(Augmented):
    def __init__(self, count, at=5):
        super().__init__(count)
        self.at = at

    def __getitem__(self, index):
        if index == self.at:
            next(iter([]))
        return super().__getitem__(index)


class EndsInLists(Ends):
    def __getitems__(self, indices):
        return [self[index] for index in indices]


def ends(items):
    if 5 in torch.stack(items)[:, 0]:
        next(iter([]))
    return torch.stack(items)


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize(
    ("make", "collate_fn"), [(Ends, None), (EndsInLists, None), (Augmented, ends), (AugmentedStream, ends)]
)
def test_a_stop_iteration_is_an_error_that_names_the_batch(make, collate_fn, num_workers):
    loader = make_loader(
        make(10), batch_size=2, order=ll.data.in_order(), collate_fn=collate_fn, num_workers=num_workers
    )
    with pytest.raises(RuntimeError, match=r"raised StopIteration.* in batch \d of epoch 0"):
        list(loader(at()))


# A forgotten epoch_length


def every_other(epoch, generator):
    return range(epoch % 2, 10 - epoch)


def a_loader_of_torch():
    sampler = torch.utils.data.SubsetRandomSampler(range(10), generator=torch.Generator())
    return torch.utils.data.DataLoader(range(10), batch_size=2, sampler=sampler)


@pytest.mark.parametrize(
    ("dataset", "options"),
    [
        (range(10), {"batch_size": 2}),
        (range(20), {"batch_size": 2, "order": ll.data.sampler(list(range(10)))}),
        (range(10), {"order": ll.data.batch_sampler([[0, 1], [2], [3], [4, 5], [6]])}),
        (a_loader_of_torch(), {}),
    ],
    ids=["shuffled", "sampler", "batch_sampler", "DataLoader"],
)
def test_a_forgotten_epoch_length_is_said_at_the_first_call(dataset, options):
    state = ll.init_state(torch.nn.Linear(1, 1), ll.optimizer(torch.optim.SGD, lr=0.1))
    message = r"that an epoch has 5 batches; write ll.init_state\(..., epoch_length=len"
    with pytest.warns(UserWarning, match=message) as w:
        make_loader(dataset, **options)(state)
    assert w[0].filename == __file__


def test_an_epoch_length_that_is_known_or_left_out_is_not_asked_for():
    model, optimizer = torch.nn.Linear(1, 1), ll.optimizer(torch.optim.SGD, lr=0.1)
    forgotten, known = ll.init_state(model, optimizer), ll.init_state(model, optimizer, epoch_length=5)
    loader = make_loader(range(10), batch_size=2)
    for quiet, state in (
        (loader, known),
        (loader, TrainState()),
        (loader, ll.init_state(model)),  # to evaluate
        (loader, end_epoch(forgotten.replace(step=5, batch=5))),
        (make_loader(AugmentedStream(10), batch_size=2), forgotten),
        (make_loader(range(10), batch_size=2, order=ll.data.sampler(every_other)), forgotten),  # lengths may differ
    ):
        quiet(state)
    list(loader.parts(forgotten))
