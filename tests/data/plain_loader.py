"""A loader as a plain loop over published formulas, and the datasets and helpers that the tests of this folder share."""

import bisect
import itertools
import random
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from shared import mix
from torch import distributed
from torch.utils.data import Dataset, IterableDataset, get_worker_info

import looplib as ll
from looplib.types import TrainState

ORDER, ITEM = (int.from_bytes(word, "big") for word in (b"order", b"item"))

# What torch and torchdata warn of in loaders with workers.
quiet = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded"),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),  # torchdata calls it
    pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true but no accelerator"),
]


class Augmented(Dataset):
    """Draws from all three global streams, as data augmentation does, and notes what is read."""

    def __init__(self, count):
        self.count, self.read = count, []

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        self.read.append(index)
        drawn = [torch.rand(()).item(), torch.randn(3)[1].item(), random.gauss(0, 1), random.random()]
        return torch.tensor([index, *drawn, np.random.standard_normal(), np.random.rand()], dtype=torch.float64)  # noqa: NPY002


class AugmentedStream(IterableDataset):
    """Numbers with a draw each, shared out among the workers, of which the last one may have more."""

    def __init__(self, count):
        self.count = count

    def __iter__(self):
        info = get_worker_info()
        first, step = (info.num_workers - 1 - info.id, info.num_workers) if info else (0, 1)
        for number in range(first, self.count, step):
            drawn = [torch.rand(()).item(), random.random(), np.random.rand()]  # noqa: NPY002
            yield torch.tensor([number, *drawn], dtype=torch.float64)


class Counting:
    """Endless, no IterableDataset, and told of the epoch."""

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        return itertools.count(100 * self.epoch)


def at(epoch=0, batch=0, epoch_length=None):
    return TrainState(epoch=epoch, batch=batch, epoch_length=epoch_length)


def batches_of(loader, epoch=0, batch=0):
    return [b.tolist() if isinstance(b, torch.Tensor) else b for b in loader(at(epoch, batch))]


def samples_of(loader, epoch=0):
    return list(itertools.chain.from_iterable(batches_of(loader, epoch)))


def states_of_streams():
    """Those of torch, `random` and numpy, for ==."""
    _, words, *others = np.random.get_state()  # noqa: NPY002
    return torch.default_generator.get_state().numpy().tobytes(), random.getstate(), words.tobytes(), others


@contextmanager
def as_rank(rank, ranks):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distributed, "is_initialized", lambda: True)
        patch.setattr(distributed, "get_rank", lambda group=None: rank)
        patch.setattr(distributed, "get_world_size", lambda group=None: ranks)
        yield


# The plain loader. An order draws the indices of an epoch, or its batches, from a generator.


def seeded(dataset, seed, epoch, index, visit=0):
    """A sample read with all three streams seeded for it."""
    seed = mix(mix(ITEM, seed, epoch), index, visit)
    torch.manual_seed(seed), random.seed(seed), np.random.seed(seed >> 31)  # noqa: NPY002
    return dataset[index]


def weights_of(count):
    return [i % 3 for i in range(count + 1)][1:]


def drawn_by_weight(generator, count, size, drop_last):
    bounds = list(itertools.accumulate(map(float, weights_of(count))))
    points = torch.rand(count, dtype=torch.float64, generator=generator) * bounds[-1]
    return [bisect.bisect_right(bounds, point) for point in points.tolist()]


def lengths_of(count):
    return [(i * 37) % 10_007 + 1 for i in range(count)]  # all different


def grouped(pool):
    """Shuffled, sorted within pools of batches, and the full batches shuffled; the longest sample in the first one."""

    def draw(generator, count, size, drop_last):
        lengths = lengths_of(count)
        keys = torch.randperm(count, generator=generator).tolist()[: count - count % size if drop_last else None]
        width = size * (pool or max(1, min(50, count // (4 * size))))
        pools = [sorted(keys[i : i + width], key=lengths.__getitem__) for i in range(0, count, width)]
        keys = list(itertools.chain(*pools))
        full = len(keys) // size
        batches = [keys[size * k : size * (k + 1)] for k in torch.randperm(full, generator=generator).tolist()]
        rest = keys[full * size :]
        if batches:
            longest = max(batches, key=lambda batch: lengths[batch[-1]])
            place = batches.index(longest)
            batches[0], batches[place] = longest, batches[0]
        return list(itertools.chain(*batches, rest))

    return draw


def cut(generator, count, size, drop_last):
    return torch.randperm(count, generator=generator).split([1, count - 1])


ORDERS = {
    "shuffled": (lambda count: None, lambda generator, count, *_: torch.randperm(count, generator=generator)),
    "in order": (lambda count: ll.data.sequential(), lambda generator, count, *_: range(count)),
    "weights": (lambda count: ll.data.weighted(weights_of(count)), drawn_by_weight),
    "with replacement": (
        lambda count: ll.data.with_replacement(count + 1),
        lambda generator, count, *_: torch.randint(count, (count + 1,), generator=generator),
    ),
    "pools of 2": (lambda count: ll.data.by_length(lengths_of(count), pool=2), grouped(2)),
    "pools": (lambda count: ll.data.by_length(lengths_of(count)), grouped(None)),
    "list": (lambda count: ll.data.sampler([0, *range(count)]), lambda generator, count, *_: [0, *range(count)]),
    "function": (
        lambda count: ll.data.sampler(lambda epoch, generator: torch.randperm(count, generator=generator).tolist()),
        lambda generator, count, *_: torch.randperm(count, generator=generator),
    ),
    "batches": (
        lambda count: ll.data.batch_sampler(lambda epoch, generator: map(list, cut(generator, count, None, None))),
        cut,
    ),
}


def options_of(order, count, size, drop_last=False):
    """The arguments of `make_loader` for an order."""
    options = {} if order == "batches" else {"batch_size": size, "drop_last": drop_last}
    return options | {"order": ORDERS[order][0](count)}


def plain_batches(order, count, size, drop_last, seed, epoch):
    """The batches of an epoch: for each sample its index, and how often it has come in the epoch before."""
    generator = torch.Generator().manual_seed(mix(ORDER, seed, epoch))
    drawn = ORDERS[order][1](generator, count, size, drop_last)
    if order != "batches":
        drawn = [drawn[i : i + size] for i in range(0, len(drawn), size)]
        drawn = [batch for batch in drawn if len(batch) == size or not drop_last]
    seen = [0] * count
    batches = []
    for batch in drawn:
        batches.append([])
        for index in map(int, batch):
            batches[-1].append((index, seen[index]))
            seen[index] += 1
    return batches
