"""Storages of torch, as leases need them: whatever has the memory sees what lies on its storage, which ends with the memory."""

import gc
import threading
import weakref
from types import SimpleNamespace

import torch
from torch import Tensor, nn


def lease_on(tensor):
    return getattr(tensor.untyped_storage(), "lease", None)


def set_lease_on(tensor, lease):
    tensor.untyped_storage().lease = lease


class Renamed(Tensor):
    """A class of the user's, without memory of its own."""


class InAutograd(torch.autograd.Function):
    """Returns what it was given, and notes how it saw it."""

    seen = None

    @staticmethod
    def forward(ctx, x):
        InAutograd.seen = x
        ctx.save_for_backward(x)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        (InAutograd.saved,) = ctx.saved_tensors
        return grad


def through_autograd(tensor):
    leaf = tensor.detach().requires_grad_()
    out = InAutograd.apply(leaf)
    out.sum().backward()
    return [InAutograd.seen, InAutograd.saved, out]


def of_module(tensor):
    module = nn.Linear(3, 4, bias=False, device="meta")
    module.weight = nn.Parameter(tensor)
    return [module.weight, module.state_dict()["weight"], next(iter(module.parameters())).data]


def in_another_thread(tensor):
    seen = []
    thread = threading.Thread(target=lambda: seen.append(tensor.detach()))
    thread.start()
    thread.join()
    return seen


def swapped_in(tensor):
    other = torch.zeros_like(tensor)
    other.data = tensor
    return [other]


def set_on(tensor):
    return [torch.empty(0, device=tensor.device).set_(tensor.untyped_storage(), 0, tensor.shape, tensor.stride())]


ALIASES = {
    "a view": lambda tensor: [tensor.view(-1), tensor[1:], tensor.T, tensor.expand(2, 4, 3)],
    "detach()": lambda tensor: [tensor.detach(), tensor.requires_grad_().detach()],
    "tensor.data": lambda tensor: [tensor.data],
    "alias and view_as": lambda tensor: [torch.ops.aten.alias(tensor), tensor.view_as(tensor)],
    "a bit view": lambda tensor: [tensor.view(torch.int32)],
    "a real view of a complex one": lambda tensor: [torch.view_as_complex(tensor.view(6, 2))],
    "chunk and unbind": lambda tensor: [*tensor.chunk(2), *tensor.unbind()],
    "a Parameter": lambda tensor: [nn.Parameter(tensor), nn.Buffer(tensor)],
    "a module's parameter": of_module,
    "a subclass": lambda tensor: [tensor.as_subclass(Renamed)],
    "a tensor in autograd": through_autograd,
    "another thread": in_another_thread,
    "an assignment to data": swapped_in,
    "set_": set_on,
    "inference mode": torch.inference_mode()(lambda tensor: [tensor.view(-1), tensor.detach()]),
}


def check_aliases(device, left_out=()):
    for collected in (False, True):
        leased = {
            way: (torch.zeros(4, 3, device=device), SimpleNamespace()) for way in ALIASES if way not in left_out
        }
        for tensor, lease in leased.values():
            set_lease_on(tensor, lease)
        if collected:  # the Python object of the storage may go, and what lies on it must not
            gc.collect()
            for _ in range(100):
                torch.zeros(4, 3, device=device).untyped_storage()
        without = [
            way
            for way, (tensor, lease) in leased.items()
            if not all(lease_on(alias) is lease for alias in ALIASES[way](tensor))
        ]
        assert not without, (
            f"torch {torch.__version__} gives {', '.join(without)} on {device} a storage object without the attributes of "
            "the first: looplib would let a state be read after a donated step has overwritten it"
        )


def check_outlives_the_tensor(device):
    tensor, lease = torch.zeros(4, 3, device=device), SimpleNamespace()
    set_lease_on(tensor, lease)
    alias = tensor[1:]
    del tensor
    gc.collect()
    assert lease_on(alias) is lease, (
        f"torch {torch.__version__} drops the attributes of a storage on {device} with the first tensor over it"
    )


def check_freed_and_back(device):
    """As FSDP does with gathered parameters."""
    tensor, lease = torch.zeros(4, 3, device=device), SimpleNamespace()
    set_lease_on(tensor, lease)
    size = tensor.untyped_storage().nbytes()
    for nbytes in (0, size):
        tensor.untyped_storage().resize_(nbytes)
        gc.collect()
        assert lease_on(tensor.detach()) is lease, (
            f"torch {torch.__version__} drops the attributes of a storage on {device} in resize_({nbytes})"
        )
    tensor.resize_(40, 3)
    assert lease_on(tensor) is lease, (
        f"torch {torch.__version__} drops the attributes of a storage on {device} when a tensor grows"
    )


def check_ends_with_the_memory(device):
    class Lease:
        pass

    lease = Lease()
    gone = weakref.ref(lease)
    tensor = torch.zeros(4, 3, device=device)
    set_lease_on(tensor, lease)
    del lease
    gc.collect()
    assert gone() is not None, (
        f"torch {torch.__version__} drops the attributes of a storage on {device} that is in use"
    )
    del tensor
    gc.collect()
    assert gone() is None, f"torch {torch.__version__} keeps the attributes of a storage on {device} that is gone"
    for _ in range(100):  # which may get the same address
        assert lease_on(torch.zeros(4, 3, device=device)) is None, (
            f"torch {torch.__version__} gives new memory on {device} the attributes of memory that is gone"
        )


def check_other_memory_has_none(device):
    tensor = torch.zeros(4, 3, device=device)
    set_lease_on(tensor, SimpleNamespace())
    copies = [
        tensor.clone(),
        tensor + 1,
        torch.zeros_like(tensor),
        nn.Parameter(tensor.clone()),
        tensor.to(torch.float16),
    ]
    assert [lease_on(copy) for copy in copies] == [None] * len(copies)


CHECKS = (check_outlives_the_tensor, check_freed_and_back, check_ends_with_the_memory, check_other_memory_has_none)
