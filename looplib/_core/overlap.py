"""Overlapping tensors: those that share memory without being the same tensor."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Set
from itertools import chain, product

import torch
from torch import Tensor

from looplib._core.checks import is_plain


def overlapping(tensors: Mapping[str, Tensor], written: Set[str]) -> tuple[str, str] | None:
    """Names of two tensors that share an element and of which the first is written; None if there are none.

    Tensors that share a storage but no element, such as the columns of a matrix or the weights of an LSTM on a GPU,
    do not overlap.
    """
    by_storage: dict[tuple[torch.device, int], list[str]] = defaultdict(list)
    for name, tensor in tensors.items():
        if address := tensor.untyped_storage().data_ptr() if is_plain(tensor) else 0:  # 0 for one without memory
            by_storage[tensor.device, address].append(name)
    pairs = (product(sorted(written & set(names)), names) for names in by_storage.values())
    shared = (
        (one, other)
        for one, other in chain.from_iterable(pairs)
        if one != other and _share(tensors[one], tensors[other])
    )
    return next(shared, None)


def share_elements(one: Tensor, other: Tensor) -> bool:
    """True if two tensors of one storage share an element, or if that is unknown."""
    return not (is_plain(one) and is_plain(other)) or _share(one, other)


def _share(one: Tensor, other: Tensor) -> bool:
    """True if two tensors of one storage share an element."""
    if one.dtype != other.dtype:
        return True  # a view of computed numbers, whose positions are unknown
    (begin, end), (other_begin, other_end) = map(_extent, (one, other))
    if end <= other_begin or other_end <= begin:
        return False
    touched = torch.zeros(max(end, other_end), dtype=torch.bool)
    _on(touched, one).fill_(True)
    return bool(_on(touched, other).any())


def _extent(tensor: Tensor) -> tuple[int, int]:
    """Index of the first element in the storage, and one past the last."""
    begin = int(tensor.storage_offset())
    if not tensor.numel():
        return begin, begin
    return begin, begin + 1 + sum(int((n - 1) * s) for n, s in zip(tensor.shape, tensor.stride(), strict=True))


def _on(elements: Tensor, tensor: Tensor) -> Tensor:
    """Storage indices of a tensor's elements, once each if it is expanded."""
    size = [n if s else min(n, 1) for n, s in zip(tensor.shape, tensor.stride(), strict=True)]
    return elements.as_strided(size, tensor.stride(), tensor.storage_offset())


def same_value(tensor: Tensor, value: Tensor) -> bool:
    """True for a tensor that is not trained and has this value already, so that it need not be written."""
    if tensor.requires_grad or tensor.dtype != value.dtype or not (is_plain(tensor) and is_plain(value)):
        return False
    return tensor is value or torch.equal(tensor, value.to(tensor.device))
