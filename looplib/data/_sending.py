"""Batches from workers: the bytes of small tensors are copied instead of shared.

torch sends a tensor through a file in shared memory: it makes the file, sends its descriptor over a socket, and maps it
on both sides, in about 200 us for a tensor of any size. To copy a small one through the pipe takes a few. The numbers
are the same, and a batch that the training loop changes in place is no longer what a worker holds.
"""

from __future__ import annotations

import ctypes
import io
import pickle
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import default_collate

from looplib._core import torch_private
from looplib.data._divide import unchanged

LARGEST = 1 << 18  # bytes of a tensor that is copied


class Sent:
    """A batch on its way from a worker, which pickle turns into the batch itself."""

    def __init__(self, batch: Any) -> None:
        file = io.BytesIO()
        _Pickler(file).dump(batch)  # here, where the DataLoader reports an error; its queue would print it and hang
        self.data = file.getvalue()

    def __reduce__(self) -> tuple[Any, ...]:
        return pickle.loads, (self.data,)


class _Pickler(ForkingPickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.storages: dict[tuple[int, int], torch.UntypedStorage] = {}  # tensors that share one still do afterwards

    def reducer_override(self, value: Any) -> Any:
        if type(value) is torch.UntypedStorage and _key(value) in self.storages:
            return _storage_of, (ctypes.string_at(value.data_ptr(), value.nbytes()),)
        if type(value) is not Tensor or not _is_plain(value):
            return NotImplemented
        if value.is_conj() or value.is_neg():  # torch would send the numbers without this
            return unchanged, (value.resolve_conj().resolve_neg(),)
        storage = value.untyped_storage()
        if not 0 < storage.nbytes() <= LARGEST or storage.is_shared():  # empty ones are told apart by no address
            return NotImplemented
        storage = self.storages.setdefault(_key(storage), storage)
        return _tensor_of, (storage, value.dtype, value.storage_offset(), tuple(value.shape), value.stride())


def _key(storage: torch.UntypedStorage) -> tuple[int, int]:
    return storage.data_ptr(), storage.nbytes()


def _is_plain(tensor: Tensor) -> bool:
    plain = tensor.layout == torch.strided and tensor.device.type == "cpu" and not tensor.is_nested
    return plain and not (tensor.requires_grad or tensor.is_quantized)


def _storage_of(data: bytes) -> torch.UntypedStorage:
    storage = torch.UntypedStorage(len(data), device="cpu")  # type: ignore[no-untyped-call]
    ctypes.memmove(storage.data_ptr(), data, len(data))
    return storage


def _tensor_of(storage: Any, dtype: torch.dtype, offset: int, shape: Any, stride: Any) -> Tensor:
    return torch.empty(0, dtype=dtype, device="cpu").set_(storage, offset, shape, stride)


def collate_of_worker(collate: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The same function, but for `default_collate`, which in a worker stacks all tensors in shared memory."""
    usual = torch_private.collate_functions.get(Tensor) is torch_private.collate_tensors
    return _collated if collate is default_collate and usual else collate


def _collated(samples: Any) -> Any:
    functions = {**torch_private.collate_functions, Tensor: _stacked}
    return torch_private.collate(samples, collate_fn_map=functions)


def _stacked(tensors: Sequence[Tensor], *, collate_fn_map: Mapping[Any, Any] | None = None) -> Any:
    first = tensors[0]
    # In workers, torch would convert mixed dtypes to that of the first sample, which it does nowhere else.
    mixed = len({getattr(tensor, "dtype", None) for tensor in tensors}) > 1
    if type(first) is Tensor and _is_plain(first) and (mixed or first.nbytes * len(tensors) <= LARGEST):
        return torch.stack(tuple(tensors))
    return torch_private.collate_tensors(tensors, collate_fn_map=collate_fn_map)
