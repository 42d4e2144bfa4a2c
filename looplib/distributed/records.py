"""Metrics merged over ranks, and values of all ranks with tensors of any dtype among them."""

from __future__ import annotations

import io
import pickle
import sys
import types
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from looplib._core import ranks as _ranks
from looplib._core.checks import check_type
from looplib._core.collective import together_with_data
from looplib.metrics import merge
from looplib.types import Metric, Metrics


def reduce(metrics: Metrics) -> dict[str, Metric]:
    """Merge the metrics of all ranks, with the same result on each. Call it before `compute` to log.

    >>> import looplib as ll
    >>> ll.compute(ll.distributed.reduce({"loss": ll.Mean(6.0, 3)}))  # unchanged with one process
    {'loss': 2.0}

    A train step returns the metrics of this rank's part of the batch. All ranks must call `reduce` together. Records
    are merged in the order of the ranks, from their totals and weights and not from means, so the result does not
    depend on how samples were divided beyond float rounding. The records are sent through the CPU.

    Args:
        metrics: name -> record with `merge`, of a step or a window.

    Raises:
        TypeError: `metrics` is no mapping.
        ValueError: the ranks' metrics have different names.
    """
    check_type(
        "reduce got",
        metrics,
        Mapping,
        "give metrics, name -> record, as a train step returns; of a number, {'loss': ll.Mean(x, 1)}",
    )
    together_with_data().barrier("reduce")
    return merged(metrics, metrics) or {}


def merged(metrics: Metrics | None, like: Metrics | None) -> dict[str, Metric] | None:
    """Metrics of all ranks that have any. A rank without metrics passes `like`, a template of what they would be."""
    of_rank = None if metrics is None else dict(metrics)
    if not _ranks.is_distributed():
        return of_rank
    unsent: _Unsent = {}
    if of_rank is None and like is not None:
        _pickled(dict(like), unsent)
    parts = [part for part in _exchanged(of_rank, unsent) if part is not None]
    return merge(*parts) if parts else None


def gather_tensors(value: Any) -> list[Any]:
    """Values of all ranks in order, on each rank. They may contain tensors, which come on the CPU."""
    return _exchanged(value, {}) if _ranks.is_distributed() else [value]


_Unsent = dict[tuple[str, int], Any]  # functions and modules that each rank has, by name and number


def _exchanged(value: Any, unsent: _Unsent) -> list[Any]:
    return [_Unpickler(sent, unsent).load() for sent in _ranks.gather(_pickled(value, unsent))]


def _pickled(value: Any, unsent: _Unsent) -> bytes:
    file = io.BytesIO()
    _Pickler(file, unsent).dump(value)
    return file.getvalue()


class _Pickler(pickle.Pickler):
    """Pickles the parts of a record that can be sent. Lambdas and modules are the same on each rank and are not sent.

    Tensors may have all dtypes. torch cannot read its own pickles of the younger ones, such as uint16 and float8.
    """

    def __init__(self, file: io.BytesIO, unsent: _Unsent) -> None:
        super().__init__(file)
        self.unsent = unsent

    def reducer_override(self, thing: Any) -> Any:
        if type(thing) is not Tensor or thing.layout != torch.strided or thing.is_nested:
            return NotImplemented
        plain = thing.detach().cpu().resolve_conj().resolve_neg().flatten()
        plain = plain.clone(memory_format=torch.contiguous_format)  # a view as bytes needs a stride of 1
        return _tensor_of, (plain.view(torch.uint8).numpy(), thing.dtype, thing.shape)

    def persistent_id(self, thing: Any) -> tuple[str, int] | None:
        if isinstance(thing, types.FunctionType) and not _importable(thing):
            return self.numbered(f"{thing.__module__}.{thing.__qualname__}", thing)
        return self.numbered(type(thing).__qualname__, thing) if isinstance(thing, nn.Module) else None

    def numbered(self, name: str, thing: Any) -> tuple[str, int]:
        index = 0
        while self.unsent.setdefault((name, index), thing) is not thing:
            index += 1
        return name, index


def _tensor_of(data: Any, dtype: torch.dtype, shape: torch.Size) -> Tensor:
    return torch.from_numpy(data).view(dtype).view(shape)


def _importable(function: types.FunctionType) -> bool:
    member: Any = sys.modules.get(function.__module__)
    for name in function.__qualname__.split("."):
        member = getattr(member, name, None)
    return member is function


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes, unsent: _Unsent) -> None:
        super().__init__(io.BytesIO(data))
        self.unsent = unsent

    def persistent_load(self, key: tuple[str, int]) -> Any:
        return self.unsent[key]
