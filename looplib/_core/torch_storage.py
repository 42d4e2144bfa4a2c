"""The memory of tensors: which storage holds a tensor's numbers, and the lease that lies on it.

A lease is an attribute of torch's storage object (`looplib_lease`). torch keeps that object, or its attributes, for as
long as the memory exists, and hands it to every tensor over it, so views, `detach()`, `tensor.data` and other threads see
the lease, and it ends with the memory. tests/_core/test_torch_storage.py names what is lost where a version of torch does
not. This is what the mark of a deleted buffer is in JAX.

One storage stands for a tensor:

- of torch's own strided tensors, quantized ones included: their own;
- of sparse tensors: that of their values. An operation in place may give such a tensor other memory, without a lease;
- of tensors inside a `torch.func` transform: that of the tensor inside;
- of DTensor, jagged and other classes with `__tensor_flatten__`: that of the first tensor that it names. Two that share a
  later one alone, such as a table of scales, are taken for apart;
- of other classes: their own, which has no address if they hold their numbers elsewhere;
- of mkldnn tensors and of some devices: none.

Nothing here raises, whatever a user's class does or forbids: where nothing can be known, there is no lease, no address and
the range of a whole memory.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from looplib._core.checks import PLAIN
from looplib._core.torch_private import (
    identity_of_storage,
    in_transform,
    values_of_coo,
    without_torch_function,
    wrapped_by_transform,
    wraps_tensors,
)

WHOLE = (0, sys.maxsize)  # the range of a tensor whose place in its memory is not known


def lease_on(tensor: Tensor) -> Any:
    """The lease on a tensor's memory; None if there is none, or no memory that is known."""
    return getattr(_storage(tensor), "looplib_lease", None)


def set_lease_on(tensor: Tensor, lease: Any) -> None:
    """Put a lease on a tensor's memory, in place of the one before; on none if its memory is not known."""
    storage = _storage(tensor)
    if storage is not None:
        storage.looplib_lease = lease


def take(tensor: Tensor, lease: Any) -> bool:
    """Put a lease on a tensor's memory if it has none. Returns False if it has one."""
    storage = _storage(tensor)
    if storage is None:
        return True
    if getattr(storage, "looplib_lease", None) is not None:
        return False
    storage.looplib_lease = lease
    return True


def memory_of(tensor: Tensor) -> int | None:
    """Address of the memory that holds a tensor's numbers.

    None if there is none, as on the meta device, in a trace, and where FSDP has freed it, and if it is not known.
    """
    storage = _storage(tensor)
    if storage is None or storage.device.type == "meta":  # of which torch warns for tensors of a trace
        return None
    try:
        return storage.data_ptr() or None
    except RuntimeError:  # of a class whose numbers lie elsewhere
        return None


def byte_range(tensor: Tensor) -> tuple[int, int]:
    """The first byte of a tensor in the memory at `memory_of`, and one past the last; `WHOLE` where that is not known."""
    tensor = _holder(tensor)
    if type(tensor) not in PLAIN or tensor.layout is not torch.strided or tensor.is_nested:
        return WHOLE
    size, begin = tensor.element_size(), int(tensor.storage_offset())
    if not tensor.numel():
        return begin * size, begin * size
    last = begin + sum(int((n - 1) * step) for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return begin * size, (last + 1) * size


def identity_of_memory(tensor: Tensor) -> int | None:
    """Number that two tensors over one memory share, also where it has no address, as in a trace; None if not known."""
    storage = _storage(tensor)
    return None if storage is None else int(identity_of_storage(storage))


def _storage(tensor: Tensor) -> Any:
    if type(tensor) in PLAIN:
        try:
            return tensor.untyped_storage()
        except RuntimeError:  # of a sparse tensor, or of one inside a transform
            pass
    try:
        with without_torch_function():  # what a class makes of torch's functions
            return _holder(tensor).untyped_storage()
    except Exception:  # torch's for tensors without storage, and any kind from a user's class
        return None


def _holder(tensor: Tensor) -> Tensor:
    """The tensor whose storage stands for this one."""
    while (inner := _inside(tensor)) is not None:
        tensor = inner
    return tensor


def _inside(tensor: Tensor) -> Tensor | None:
    """The tensor directly inside one of another class or layout; None if there is none, or it is not known."""
    if in_transform(tensor):
        inner: Tensor = wrapped_by_transform(tensor)
        return inner
    if type(tensor) in PLAIN:
        values_of = _VALUES.get(tensor.layout)
        return None if values_of is None else values_of(tensor)
    try:
        names: Any = tensor.__tensor_flatten__()[0] if wraps_tensors(tensor) else []
        part: Any = getattr(tensor, names[0]) if names else None
    except Exception:  # any kind: it is the method of a user's class
        return None
    return part if isinstance(part, Tensor) and part is not tensor else None


_COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
# The values of a sparse tensor, by its layout.
_VALUES: dict[torch.layout, Callable[[Tensor], Tensor]] = {
    torch.sparse_coo: values_of_coo,
    **dict.fromkeys(_COMPRESSED, Tensor.values),
}
