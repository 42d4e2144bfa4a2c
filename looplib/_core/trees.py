"""Trees of tensors and plain values: what a batch may be, its size, and how it is split."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from itertools import accumulate as accumulated_sum
from typing import Any

import torch
from torch import Tensor

from looplib._core.torch_private import pytree


def _leaves(batch: Any) -> Iterator[Tensor]:
    if isinstance(batch, Tensor):
        if batch.dim():
            yield batch
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from _leaves(value)
    elif isinstance(batch, (list, tuple)):
        for value in batch:
            yield from _leaves(value)
    elif not isinstance(batch, (str, bytes, int, float)):
        leaves = pytree.tree_leaves(batch)
        if leaves != [batch]:
            yield from _leaves(leaves)


def batch_size(batch: Any) -> int:
    """The number of examples in a batch: the length of the first dimension of its first tensor.

    >>> batch_size({"x": torch.zeros(16, 3), "y": torch.zeros(16)}), batch_size(["a", "b"])
    (16, 2)

    Args:
        batch: a tensor, or any pytree of such; what is no tensor is passed over.

    A batch without a tensor of at least one dimension counts as `len(batch)`. Raises TypeError if it has no
    length either.
    """
    first = batch[0] if type(batch) in (tuple, list) and batch else batch
    if isinstance(first, Tensor) and first.dim():  # the common case, which each step passes
        return first.size(0)
    for leaf in _leaves(batch):
        return leaf.size(0)
    try:
        return len(batch)
    except TypeError:
        raise TypeError(
            f"cannot count the examples in a {type(batch).__name__}: a batch is a tensor, or a dict, list or "
            "tuple with one, whose first dimension is the examples; for another, give make_grad_fn(..., "
            "batch_size=lambda batch: ...)"
        ) from None


def split(
    batch: Any, count: int, sizes: int | list[int], batch_size: Callable[[Any], int] = batch_size
) -> Sequence[Any]:
    """A batch of `count` examples in pieces of these sizes, or of one size, the last one smaller."""
    if isinstance(sizes, int):
        sizes = [min(sizes, count - low) for low in range(0, count, sizes)]
    if len(sizes) <= 1:
        return [batch]
    pieces = _split(batch, count, sizes, "")
    found = [batch_size(piece) for piece in pieces]
    if sum(found) != count:
        raise ValueError(
            f"a {type(batch).__name__} of {count} examples cannot be cut: its pieces would have "
            f"{', '.join(map(str, found))}. Give a batch of tensors (a dict, list, tuple or dataclass), smaller "
            "batches that need not be cut, or another count (batch_size=)"
        )
    return pieces


def _split(node: Any, count: int, sizes: list[int], place: str) -> list[Any]:
    pieces = len(sizes)
    if isinstance(node, Tensor):
        if not node.dim():
            return [node] * pieces
        if node.size(0) != count:
            raise ValueError(_odd(place, f"shape {tuple(node.shape)}", count))
        return list(torch.split(node, sizes))
    if isinstance(node, Mapping):
        cut = {key: _split(value, count, sizes, f"{place}[{key!r}]") for key, value in node.items()}
        rows: list[dict[Any, Any]] = [{key: cut[key][i] for key in cut} for i in range(pieces)]
        return rows if type(node) is dict or not isinstance(node, MutableMapping) else [_like(node, r) for r in rows]
    if isinstance(node, (list, tuple)):
        if len(node) == count and not _structure(node, count):
            return [node[low : low + size] for low, size in zip(accumulated_sum([0, *sizes]), sizes, strict=False)]
        members = [_split(value, count, sizes, f"{place}[{i}]") for i, value in enumerate(node)]
        if not members:
            return [node] * pieces
        columns = zip(*members, strict=True)
        if hasattr(node, "_fields"):
            return [type(node)(*column) for column in columns]
        return [type(node)(column) for column in columns]
    if dataclasses.is_dataclass(node) and not isinstance(node, type):
        names = [field.name for field in dataclasses.fields(node)]
        cut = {name: _split(getattr(node, name), count, sizes, f"{place}.{name}") for name in names}
        return [dataclasses.replace(node, **{name: cut[name][i] for name in names}) for i in range(pieces)]
    if getattr(node, "ndim", 0) and hasattr(node, "__getitem__"):  # a NumPy array and its like
        if len(node) != count:
            raise ValueError(_odd(place, f"shape {tuple(node.shape)}", count))
        return [node[low : low + size] for low, size in zip(accumulated_sum([0, *sizes]), sizes, strict=False)]
    leaves, structure = pytree.tree_flatten(node)
    if len(leaves) == 1 and leaves[0] is node:
        return [node] * pieces
    cut_leaves = [_split(leaf, count, sizes, place) for leaf in leaves]
    return [pytree.tree_unflatten(list(column), structure) for column in zip(*cut_leaves, strict=True)]


def _structure(node: Sequence[Any], count: int) -> bool:
    """Whether a list as long as the batch holds its fields, rather than one item for each example."""
    leaves = pytree.tree_leaves(list(node))
    lengths = {leaf.size(0) for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim()}
    return lengths == {count}


def _like(node: Any, values: dict[Any, Any]) -> Any:
    new = copy.copy(node)
    for key, value in values.items():
        new[key] = value
    return new


def _odd(place: str, found: str, count: int) -> str:
    return (
        f"batch{place} has {found}, and the batch {count} examples: it cannot be cut along its first dimension. "
        "Give tensors with one row for each example, say how examples are counted (batch_size=), or make smaller "
        "batches; a gradient may have its pieces as a list (accumulate(grad_fn) without a count; a loader's "
        "collate_fn can make it)"
    )
