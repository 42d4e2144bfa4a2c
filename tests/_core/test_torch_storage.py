"""Storages of torch, as leases need them, and the memory of tensors of all classes."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from shared import one_report
from storages import CHECKS, Renamed, check_aliases, check_freed_and_back
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor

import looplib as ll
from looplib._core.lease import lease_over, lies_on, overwritten
from looplib._core.memory import overlaps, tensors_in
from looplib._core.torch_storage import WHOLE, byte_range, identity_of_memory, lease_on, memory_of, set_lease_on
from looplib.types import TrainState

OF_TORCH = (  # its warnings when it makes such tensors, or imports its formulas for jvp
    "torch.quantize_per_tensor",
    "Sparse CSR tensor support",
    "The PyTorch API of nested",
    "`torch.jit.script` is deprecated",
)
pytestmark = [pytest.mark.every_case, *(pytest.mark.filterwarnings(f"ignore:{text}") for text in OF_TORCH)]


# What torch must keep (on a GPU, tests/gpu/test_storages.py)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_lease_is_seen_by_whatever_has_the_memory(device):
    # On meta, a tensor has no values for a backward pass.
    check_aliases(device, left_out=["a tensor in autograd"] if device == "meta" else [])


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_torch_keeps_what_lies_on_a_storage_as_long_as_the_memory(device):
    for check in CHECKS:
        if (check, device) != (check_freed_and_back, "meta"):
            check(device)


def test_memory_shared_through_numpy_has_another_storage_and_another_lease():
    """As the page of leases says: if torch ever gives one storage to both, the sentence can go."""
    tensor = torch.zeros(4, 3)
    set_lease_on(tensor, SimpleNamespace())
    other = torch.from_numpy(tensor.numpy())
    assert memory_of(other) == memory_of(tensor)
    assert lease_on(other) is None


# Tensors of all classes


class Several(Tensor):
    """Several tensors inside, and no operation."""

    inner = ("a", "b")

    @staticmethod
    def __new__(cls, a, b):
        return Tensor._make_wrapper_subclass(cls, a.shape, dtype=a.dtype, device=a.device)

    def __init__(self, a, b):
        self.a, self.b = a, b

    def __tensor_flatten__(self):
        return [*self.inner], None

    @classmethod
    def __tensor_unflatten__(cls, tensors, context, size, stride):
        return cls(tensors["a"], tensors["b"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise PermissionError(f"no {func}")


class Forbidden(Several):
    """Forbids torch's functions too, of which `tensor.shape` is one."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        raise KeyError(f"never {func}")


class Private(Tensor):
    """Memory of its own, and none of torch's functions."""

    __torch_function__ = Forbidden.__dict__["__torch_function__"]


class Nothing(Several):
    inner = ()


class Failing(Several):
    def __tensor_flatten__(self):
        raise ZeroDivisionError


class Itself(Several):
    def __tensor_flatten__(self):
        return ["itself"], None

    @property
    def itself(self):
        return self


class NoTensor(Several):
    inner = ("__class__",)


class Asks(Several):
    """Is asked by torch for its sizes, strides, device and layout, and answers none."""

    @staticmethod
    def __new__(cls, a, b):
        kept = {"dispatch_sizes_strides_policy": "sizes", "dispatch_device": True, "dispatch_layout": True}
        return Tensor._make_wrapper_subclass(cls, a.shape, dtype=a.dtype, device=a.device, **kept)


class Hidden(Tensor):
    """Numbers where no protocol of torch tells."""

    @staticmethod
    def __new__(cls, a):
        return Tensor._make_wrapper_subclass(cls, a.shape, dtype=a.dtype)

    def __init__(self, a):
        self.secret = a

    __torch_dispatch__ = Several.__torch_dispatch__


A, B = torch.ones(4, 3), torch.ones(4, 3)


def fake():
    with FakeTensorMode():
        return torch.ones(3)


def inference():
    with torch.inference_mode():
        return torch.ones(3)


def freed():
    tensor = torch.ones(3)
    tensor.untyped_storage().resize_(0)
    return tensor


def jagged(layout):
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=layout)


def deep():
    return Several(Several(A, B), B)


KNOWN = {  # name: a tensor, and one whose memory stands for it
    "plain": lambda: (A, A),
    "view": lambda: (A[1:].T, A),
    "expanded": lambda: (A[:1].expand(9, 3), A),
    "parameter": lambda: (nn.Parameter(A), A),
    "conjugate": lambda: ((z := torch.ones(3, dtype=torch.complex64)).conj(), z),
    "subclass": lambda: (A.as_subclass(Renamed), A),
    "quantized": lambda: (q := torch.quantize_per_tensor(A, 0.1, 0, torch.qint8), q),
    "channels quantized": lambda: (q := torch.quantize_per_channel(A, torch.ones(4), torch.zeros(4), 0, torch.qint8), q),
    "coo": lambda: (s := A.to_sparse(), s._values()),
    "uncoalesced": lambda: (s := torch.cat([A.to_sparse(), A.to_sparse()]), s._values()),
    "csr": lambda: (s := A.to_sparse_csr(), s.values()),
    "csc": lambda: (s := A.to_sparse_csc(), s.values()),
    "bsr": lambda: (s := torch.ones(4, 4).to_sparse_bsr((2, 2)), s.values()),
    "jagged": lambda: (n := jagged(torch.jagged), n.values()),
    "nested": lambda: (n := jagged(torch.strided), n.values()),
    "several": lambda: (Several(A, B), A),
    "private": lambda: (A.as_subclass(Private), A),
    "forbidden": lambda: (Forbidden(A, B), A),
    "asks": lambda: (Asks(A, B), A),
    "deep": lambda: (deep(), A),
    "of a sparse one": lambda: (Several(s := A.to_sparse(), B), s._values()),
    "inference": lambda: (i := inference(), i.view(-1)),
}  # fmt: skip
UNKNOWN = {  # no memory, or none that is known
    "nothing inside": lambda: Nothing(A, B),
    "failing": lambda: Failing(A, B),
    "itself": lambda: Itself(A, B),
    "no tensor inside": lambda: NoTensor(A, B),
    "hidden": lambda: Hidden(A),
    "meta": lambda: torch.ones(3, device="meta"),
    "fake": fake,
    "freed": freed,
    "empty": lambda: torch.ones(0),
    "mkldnn": lambda: torch.ones(3).to_mkldnn(),
}


@one_report
@pytest.mark.parametrize("name", KNOWN)
def test_the_memory_of_a_tensor_is_that_of_its_numbers(name):
    tensor, holder = KNOWN[name]()
    assert memory_of(tensor) == holder.untyped_storage().data_ptr() != 0
    assert identity_of_memory(tensor) == holder.untyped_storage()._cdata
    lease = lease_over("a test", [tensor])
    state = TrainState(extra=[tensor])
    try:
        assert lease_on(tensor) is lease_on(holder) is lease
        assert lies_on(lease, {"a": [tensor]})
        lease.write()
        assert overwritten(state, [[tensor]]) is lease
        assert overlaps({"one": tensor, "two": holder}) == [("one", "two")]
    finally:
        set_lease_on(tensor, None)
    begin, end = byte_range(tensor)
    assert (begin, end) == WHOLE or 0 <= begin < end <= holder.untyped_storage().nbytes()


@one_report
@pytest.mark.parametrize("name", UNKNOWN)
def test_of_what_is_not_known_nothing_is_said(name):
    tensor = UNKNOWN[name]()
    assert memory_of(tensor) is None
    lease = lease_over("a test", [tensor])
    assert lease_on(tensor) in (None, lease)
    lease.write()
    assert overwritten(TrainState(), [[tensor]]) is None  # a state that begins after the write
    assert overlaps({"one": tensor, "two": tensor, "three": A}) == []
    assert len(byte_range(tensor)) == 2
    assert [id(leaf) for leaf in tensors_in({"x": tensor})] == [id(tensor)]


TRANSFORMS = {
    "vmap": torch.func.vmap,
    "grad": torch.func.grad,
    "vmap of grad": lambda function: torch.func.vmap(torch.func.grad(function)),
    "jvp": lambda function: lambda x: torch.func.jvp(function, (x,), (x,)),
    "functionalize": torch.func.functionalize,
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_inside_a_transform_a_tensor_has_the_memory_of_the_one_outside(name):
    tensor, seen = torch.ones(4, 3), []
    lease = lease_over("a test", [tensor])

    def function(x):
        seen.append((lease_on(x), memory_of(x), [*overlaps({"x": x, "tensor": tensor})]))
        byte_range(x)
        return x.sum()

    TRANSFORMS[name](function)(tensor)
    # functionalize gives it a storage of its own, without an address.
    expected = (lease, tensor.data_ptr(), [("x", "tensor")]) if name != "functionalize" else (None, None, [])
    assert seen[0] == expected


def test_a_shard_of_a_dtensor_has_the_memory_of_the_local_tensor(tmp_path):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        local = torch.ones(4, 3)
        tensor = DTensor.from_local(local, init_device_mesh("cpu", (1,)), [Shard(0)])
        lease = lease_over("a test", [tensor])
        assert (memory_of(tensor), lease_on(local)) == (local.data_ptr(), lease)
        assert lease_on(tensor.detach()) is lease
        assert overlaps({"shard": tensor, "local": local[1:]}) == [("shard", "local")]
    finally:
        torch.distributed.destroy_process_group()


@given(st.lists(st.sampled_from([*KNOWN, *UNKNOWN]), max_size=6))
def test_no_mixture_of_classes_fails(names):
    tensors = {}
    for name in names:
        made = KNOWN[name]() if name in KNOWN else (UNKNOWN[name](),)
        tensors |= {f"{name} {len(tensors)}": tensor for tensor in made}
    for one, other in overlaps(tensors):
        assert memory_of(tensors[one]) == memory_of(tensors[other]) is not None
    state = TrainState(extra=tensors)
    lease = lease_over("a test", tensors.values())
    lease.write()
    written = overwritten(state, [tensors])
    assert written is (lease if any(lease_on(tensor) is not None for tensor in tensors.values()) else None)
    for tensor in tensors.values():
        set_lease_on(tensor, None)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=3), st.data())
def test_the_range_of_a_view_holds_all_of_its_elements_and_no_more(shape, data):
    memory = torch.arange(256, dtype=torch.int16)
    strides = data.draw(st.lists(st.integers(0, 9), min_size=len(shape), max_size=len(shape)))
    begin = data.draw(st.integers(0, 50))
    view = memory.as_strided(shape, strides, begin)
    elements = np.unique(view.numpy())  # each is its own index in the memory
    assert byte_range(view) == (2 * elements.min(), 2 * (elements.max() + 1))


def test_a_wrapper_of_its_own_over_the_same_tensors_is_spent_with_them():
    """Views and `detach()` of such a class give a new wrapper over the same tensors."""
    tensor = TwoTensor(torch.ones(2), torch.ones(2))
    state = ll.TrainState(params={"w": tensor.detach()})
    lease = lease_over("a run", [tensor])
    lease.write()
    with pytest.raises(ll.DonatedStateError, match="a run"):
        _ = state.params
