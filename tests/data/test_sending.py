"""Batches from workers are the same whether their tensors are copied or shared."""

import os
import threading
from collections import namedtuple

import numpy as np
import pytest
import torch
from shared import bits
from torch.utils.data import Dataset, IterableDataset, default_collate
from torch.utils.data._utils.collate import default_collate_fn_map

import looplib as ll
from looplib.data import make_loader
from looplib.types import TrainState

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded"),
    pytest.mark.filterwarnings("ignore:Sparse"),
]

LARGEST = 1 << 18  # bytes of a tensor that is copied
Pair = namedtuple("Pair", "x y")


class Items(Dataset):
    def __init__(self, make, count=4):
        self.make, self.count = make, count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        if index >= self.count:
            raise IndexError
        return self.make(index)


class Iterated(IterableDataset):
    def __iter__(self):
        return iter([torch.full((3,), float(k)) for k in range(6)])


def read(make, workers, batch_size=None, **options):
    loader = make_loader(Items(make), batch_size=batch_size, num_workers=workers, order=ll.data.in_order(), **options)
    return list(loader(TrainState()))


def dtypes(index):
    kinds = (
        torch.bool,
        torch.uint8,
        torch.int64,
        torch.bfloat16,
        torch.float16,
        torch.complex64,
        torch.float8_e4m3fn,
    )
    return {str(dtype): torch.arange(index + 5).to(dtype) for dtype in kinds}


def shapes(index):
    base = torch.arange(24.0).reshape(1, 2, 3, 4) + index
    return [
        *(torch.tensor(float(index)), torch.empty(0, 3), base[:, :, 1], base.to(memory_format=torch.channels_last)),
        *(base.mT, base[0, 0, 0, :1].expand(5), torch.zeros(LARGEST + 1, dtype=torch.uint8), base.numpy()),
    ]


def kinds(index):
    x = torch.arange(4.0) + index
    conjugate = torch.complex(x, x).conj()
    return Pair(
        [
            torch.nn.Parameter(x, requires_grad=False),
            x.clone().requires_grad_(),
            x.to_sparse(),
            conjugate,
            conjugate.imag,
        ],
        (x.clone().share_memory_(), {"text": "words"}, torch.Size([3]), torch.zeros(2, device="meta")),
    )


def _bytes(x):
    return x.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8).tolist()


def described(tree):
    leaves, spec = torch.utils._pytree.tree_flatten(tree)
    return [(x.dtype, x.shape, x.stride(), _bytes(x)) for x in leaves], spec


def test_items_from_workers_are_those_of_one_process():
    for make in (dtypes, shapes):
        assert [*map(described, read(make, 2))] == [*map(described, read(make, 0))]
    for here, there in zip(read(kinds, 0), read(kinds, 2), strict=True):
        assert list(map(type, there.x)) == list(map(type, here.x))
        assert [leaf.requires_grad for leaf in there.x[:4]] == [False, True, False, False]
        assert all(torch.equal(one, other) for one, other in zip(here.x[:2], there.x[:2], strict=True))
        assert there.x[2].to_dense().equal(here.x[2].to_dense())
        assert there.x[3].equal(here.x[3])
        assert there.x[4].equal(here.x[4])
        assert there.y[0].is_shared()
        assert there.y[0].equal(here.y[0])
        assert there.y[1:3] == here.y[1:3]


def test_tensors_that_share_memory_share_it_afterwards():
    def make(index):
        whole, array = torch.arange(6.0), np.arange(4.0)
        return whole, whole, whole[2:], whole.view(2, 3), torch.from_numpy(array[:2]), torch.from_numpy(array)

    for whole, same, tail, view, part, array in read(make, 1):
        assert same is whole
        whole[2] = 7
        assert tail[0] == view[0, 2] == 7
        assert part.tolist() == [0, 1]
        assert array.tolist() == [0, 1, 2, 3]


def test_empty_tensors_share_no_memory():
    for one, other in read(lambda index: (torch.empty(0), torch.empty(0)), 1):
        one.resize_(3).fill_(1)
        other.resize_(3).fill_(2)
        assert one.tolist() == [1, 1, 1]


def test_small_tensors_take_no_shared_memory():
    def files():
        return len(os.listdir("/proc/self/fd"))

    loader = make_loader(Items(lambda index: dtypes(0), 40), batch_size=2, num_workers=1)
    batches = loader(TrainState())
    held, before = [next(batches)], files()
    held += batches
    assert files() <= before
    assert not any(tensor.is_shared() for batch in held for tensor in batch.values())
    (large,) = read(lambda index: torch.zeros(LARGEST // 4), 1, batch_size=4)  # stacked in shared memory, as by torch
    assert large.is_shared()
    assert all(item.is_shared() for item in read(lambda index: torch.zeros(LARGEST + 1, dtype=torch.uint8), 1))


def test_batches_of_default_collate_are_the_same():
    def make(index):
        x = torch.arange(3) + index
        return {"x": x, "n": index, "f": 0.5 * index, "a": np.ones(2), "text": "t", "pair": Pair(x, [x.float()])}

    for here, there in zip(read(make, 0, 2), read(make, 1, 2), strict=True):
        assert here.keys() == there.keys()
        assert bits(here) == bits(there)
    for ragged in (lambda index: torch.ones(index + 1), lambda index: torch.ones(2).to_sparse()):
        errors = []
        for workers in (0, 1):
            with pytest.raises(RuntimeError) as raised:
                read(ragged, workers, 2)
            errors.append(str(raised.value).splitlines()[-1])
        assert errors[0] in errors[1] or errors[1] in errors[0]


@pytest.mark.parametrize("kinds", [(torch.float32, torch.float64), (torch.int64, torch.float32)])
@pytest.mark.parametrize("count", [LARGEST, 3])
def test_batches_of_mixed_dtypes_are_the_same_at_any_size(kinds, count):
    here, there = (
        read(lambda index: torch.full((count,), 1.1).to(kinds[index % 2]), workers, 4)[0] for workers in (0, 1)
    )
    assert there.dtype == here.dtype
    assert torch.equal(there, here)


def test_a_function_that_the_user_registered_collates_in_workers(monkeypatch):
    monkeypatch.setitem(default_collate_fn_map, torch.Tensor, lambda tensors, *, collate_fn_map: torch.cat(tensors))
    (one, two), (here, _) = (read(lambda index: torch.ones(1) * index, workers, 2) for workers in (1, 0))
    assert (one.tolist(), two.tolist(), here.tolist()) == ([0, 1], [2, 3], [0, 1])


def test_streams_and_rows_and_a_collate_fn():
    for loader in (
        make_loader(Iterated(), batch_size=4, num_workers=1),
        make_loader(Iterated(), batch_size=4, num_workers=1, collate_fn=torch.stack),
        make_loader(torch.utils.data.TensorDataset(torch.eye(8)), batch_size=4, num_workers=1),
    ):
        batches = [batch[0] if isinstance(batch, list) else batch for batch in loader(TrainState())]
        assert len(batches) == 2
        assert not any(batch.is_shared() for batch in batches)


@pytest.mark.slow
def test_spawned_workers():
    loader = make_loader(Items(shapes), batch_size=None, num_workers=1, multiprocessing_context="spawn")
    here = make_loader(Items(shapes), batch_size=None)
    assert [*map(described, loader(TrainState()))] == [*map(described, here(TrainState()))]


def test_a_batch_that_cannot_be_sent_is_an_error():
    with pytest.raises(TypeError, match=r"cannot pickle '_thread.lock' object"):
        read(lambda index: threading.Lock(), 1, collate_fn=lambda item: item)


def test_a_loader_within_the_worker_of_another_yields_batches():
    def make(index):
        inner = make_loader([torch.ones(2) * index], batch_size=1, collate_fn=default_collate)
        return next(inner(TrainState()))

    assert [batch.tolist() for batch in read(make, 1)] == [[[k, k]] for k in (0.0, 1.0, 2.0, 3.0)]


def test_a_copy_is_aligned_as_torch_allocates():
    for text, tensor in read(lambda index: ("x" * index, torch.arange(3.0)), 1):
        assert tensor.data_ptr() % 64 == 0, text  # some kernels sum in another order from other addresses
