"""Pytrees: the structure of batches, outputs and states.

The same rules apply in training, evaluation, prediction, replay, microbatching, per-sample gradients and tests.

A **tree** is a leaf, or a container of trees. Containers are, in this order:

1. a type passed to `register` (a `TrainState`);

2. a mapping: dict, OrderedDict, UserDict, a tokenizer's BatchEncoding. A mutable one is copied and its values
replaced, so that it keeps its type and attributes; an immutable one becomes a dict;

3. a namedtuple, by its fields; a list or a tuple, by its items;

4. a dataclass, by its fields. It is copied and its fields replaced: `__post_init__` does not run a second time;

5. a type registered with torch's pytrees, by its registration.

Everything else is a **leaf**: a tensor, an array, None, a number, a string, or an unknown object.

The **samples** of a batch lie along the first dimension of every tensor and array with at least one dimension, and
along every list or tuple that is as long as the batch and does not itself consist of such tensors (one string or one
image per sample). Leaves without samples (a scalar, a name) belong to the whole batch, so each part of it has them
too. An object that holds samples where looplib cannot see them is refused, since each part would contain all of them.
If both readings of a list are possible (two tensors with two rows each, in a batch of two), its items are fields.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import accumulate, chain, pairwise
from typing import Any

import torch
from torch import Tensor

from looplib._core.checks import check
from looplib._core.containers import OWN, PLAIN, Key, Node, Path, node_of


def _node(tree: Any, is_leaf: Callable[[Any], bool] | None) -> Node | None:
    return None if is_leaf is not None and is_leaf(tree) else node_of(tree)


def _children(tree: Any) -> Sequence[Any]:
    node = node_of(tree)
    return () if node is None else node.children


# ---- paths ----


def named(path: Path, root: str = "") -> str:
    """A path in Python syntax: `batch['x'][0].mask` with the root "batch"."""
    text = root + "".join(f".{key.name}" if key.attribute else f"[{key.name!r}]" for key in path)
    return text if root else text.removeprefix(".")


def pointer(path: Path) -> str:
    """A path as a JSON pointer (RFC 6901): `/x/0/mask`."""
    return "".join("/" + str(key.name).replace("~", "~0").replace("/", "~1") for key in path)


# ---- every leaf ----


def leaves(tree: Any, is_leaf: Callable[[Any], bool] | None = None, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Leaves of a tree in order, each with its path. `is_leaf` makes containers for which it is true leaves."""
    node = _node(tree, is_leaf)
    if node is None:
        yield path, tree
        return
    for key, child in zip(node.keys(), node.children, strict=True):
        yield from leaves(child, is_leaf, (*path, key))


def map_leaves(function: Callable[..., Any], tree: Any, *others: Any, is_leaf: Any = None) -> Any:
    """Map `function(leaf)` over a tree, or with other trees, `function(leaf, leaf of other, ...)`.

    The others must have the same keys in each container. Raises ValueError if they do not.
    """
    node = _node(tree, is_leaf)
    if node is None:
        return function(tree, *others)
    columns = [node.children, *(_children_like(node, other) for other in others)]
    return node.rebuild([map_leaves(function, *members, is_leaf=is_leaf) for members in zip(*columns, strict=True)])


def map_tensors(function: Callable[[Tensor], Any], tree: Any) -> Any:
    """Map `function(tensor)` over the tensors of a tree. Other leaves are unchanged."""
    return map_leaves(lambda leaf: function(leaf) if isinstance(leaf, Tensor) else leaf, tree)


def _children_like(node: Node, other: Any) -> Sequence[Any]:
    """Children of another container with the same names, in the order of this one."""
    other_node = node_of(other)
    if other_node is not None and other_node.names == node.names:
        return other_node.children
    if other_node is None or set(other_node.names) != set(node.names):
        structure = f"a {type(other).__name__}" if other_node is None else str(list(other_node.names))
        raise ValueError(f"two trees differ in their structure: {list(node.names)} and {structure}")
    by_name = dict(zip(other_node.names, other_node.children, strict=True))
    return [by_name[name] for name in node.names]


class _Missing:
    def __repr__(self) -> str:
        return "nothing"


MISSING = _Missing()  # marks a leaf that one of two trees does not have


def paired(one: Iterable[tuple[Any, Any]], other: Iterable[tuple[Any, Any]]) -> Iterator[tuple[Any, Any, Any]]:
    """Leaves of two trees side by side: path, leaf of one, leaf of the other, in the order of the first.

    Takes pairs of a path (or a name) and a leaf, as from `leaves`. A leaf that one of them does not have is
    `MISSING`.
    """
    first, second = dict(one), dict(other)
    for path in {**first, **second}:
        yield path, first.get(path, MISSING), second.get(path, MISSING)


# ---- samples ----


class UnevenBatchError(ValueError):
    """A tensor or array in a batch, `leaf` at `path`, does not have one row per sample."""

    def __init__(self, leaf: Any, path: Path, count: int) -> None:
        self.leaf, self.path = leaf, path
        super().__init__(
            f"{named(path, 'batch')} has shape {tuple(leaf.shape)}, and the batch {count} samples: it cannot be cut "
            "along its first dimension. Give tensors with one row for each sample, say how samples are counted "
            "(batch_size=), or make smaller batches; a gradient may have its pieces as a list (accumulate(grad_fn) "
            "without a count; a loader's collate_fn can make it)"
        )


def _dimensions(leaf: Any) -> bool:
    """True for a tensor, a NumPy array or a similar object with at least one dimension."""
    if isinstance(leaf, Tensor):
        return bool(leaf.dim())
    if type(leaf) in OWN:
        return False
    return bool(getattr(leaf, "ndim", 0)) and hasattr(leaf, "shape") and hasattr(leaf, "__getitem__")


def batch_size(batch: Any) -> int:
    """Number of samples in a batch: the length of the first dimension of its first tensor or array.

    >>> batch_size({"x": torch.zeros(16, 3), "y": torch.zeros(16)}), batch_size(["a", "b"])
    (16, 2)
    >>> batch_size({"text": ["to", "be", "or"], "language": "en"})
    3

    A batch without a tensor or array of at least one dimension has the length of its first list of plain values, or
    without such lists, `len(batch)`.

    Args:
        batch: a tensor, an array, or any container of these: a mapping, list, tuple, namedtuple, dataclass, or a type
            registered with torch's pytrees.

    Raises:
        TypeError: the batch has none of these lengths.
    """
    # Each step calls this, so the common cases come first.
    kind, first = type(batch), batch
    if (kind is tuple or kind is list) and batch:
        first = batch[0]
    elif kind is dict and batch:
        first = next(iter(batch.values()))
    if isinstance(first, Tensor) and first.dim():
        return first.size(0)
    if (length := _first_length(batch)) is not None:
        return length
    return _length_of_list(batch)


def _length_of_list(batch: Any) -> int:
    """Number of samples in a batch without tensors."""
    for members in _lists(batch):
        return len(members)
    try:
        return len(batch)
    except TypeError:
        raise TypeError(
            f"cannot count the samples in a {type(batch).__name__}: a batch is a tensor, or a dict, list or "
            "tuple with one, whose first dimension is the samples; for another, give make_grad_fn(..., "
            "batch_size=lambda batch: ...)"
        ) from None


def _first_length(tree: Any) -> int | None:
    """Length of the first tensor or array."""
    return next((len(leaf) for _, leaf in leaves(tree, _dimensions) if _dimensions(leaf)), None)


def _lists(tree: Any) -> Iterator[Sequence[Any]]:
    """Lists and tuples that contain only leaves."""
    return (leaf for _, leaf in leaves(tree, _is_plain_list) if _is_list(leaf))


def _is_plain_list(node: Any) -> bool:
    return _is_list(node) and all(node_of(child) is None for child in node)


def _is_list(node: Any) -> bool:
    return isinstance(node, (list, tuple)) and not hasattr(node, "_fields") and not isinstance(node, torch.Size)


def one_for_each(node: Any, count: int) -> bool:
    """True for a list or tuple with one item per sample, as opposed to one with fields of the batch."""
    return _is_list(node) and len(node) == count and not _holds_fields(node, count)


def _holds_fields(node: Any, count: int) -> bool:
    """True if the items of a list as long as the batch are fields, because every tensor has one row per sample."""
    return set(_lengths(node, count)) == {count}


def _lengths(node: Any, count: int) -> Iterator[int]:
    """Lengths of the tensors and arrays in a container, except those in lists with one item per sample."""
    for child in _children(node):
        if _dimensions(child):
            yield len(child)
        elif not one_for_each(child, count):
            yield from _lengths(child, count)


def split(
    batch: Any, count: int, sizes: int | list[int], batch_size: Callable[[Any], int] = batch_size
) -> Sequence[Any]:
    """Split a batch of `count` samples into parts of these sizes, or of one size, with a smaller last part."""
    if isinstance(sizes, int):
        sizes = [min(sizes, count - low) for low in range(0, count, sizes)]
    if len(sizes) <= 1:
        return [batch]
    parts = _cut(batch, count, partial(_slices, sizes), len(sizes), None)
    part_sizes = [*map(batch_size, parts)]
    if sum(part_sizes) != count:
        raise ValueError(
            f"a {type(batch).__name__} of {count} samples cannot be cut: its parts would have "
            f"{', '.join(map(str, part_sizes))}. Give a batch of tensors (a dict, list, tuple or dataclass), smaller "
            "batches that need not be cut, or another count (batch_size=)"
        )
    return parts


def _slices(sizes: list[int], rows: Any) -> list[Any]:
    if isinstance(rows, Tensor):
        return list(torch.split(rows, sizes))
    indexed = getattr(rows, "iloc", rows)  # pandas objects are indexed by position
    return [indexed[low:high] for low, high in pairwise([0, *accumulate(sizes)])]


def without_samples(sample: Any) -> Any:
    """A batch of no samples, from a batch of one: the same dtypes and further dimensions."""
    return split(sample, 1, [0, 1])[0]


def stand_in(batch: Any) -> Any:
    """Two samples of ones for a batch of none, with its dtypes and further dimensions."""
    [made] = _cut(batch, 0, _ones, 1, None)
    return made


def _ones(rows: Any) -> list[Any]:
    check(
        isinstance(rows, Tensor),
        f"this rank has no sample of the batch, and a {type(rows).__name__} is no tensor to run the model on in their "
        "place: give the loader drop_last=True, or another batch_size",
        TypeError,
    )
    return [rows.new_ones(2, *rows.shape[1:])]


def take(batch: Any, count: int, index: Sequence[int]) -> Any:
    """Samples of a batch of `count` at these indices, in this order."""
    [taken] = _cut(batch, count, partial(_at, list(index)), 1, None)
    return taken


def _at(index: list[int], rows: Any) -> list[Any]:
    if _is_list(rows):
        return [type(rows)(rows[place] for place in index)]
    return [getattr(rows, "iloc", rows)[index]]


def _cut(node: Any, count: int, cut: Callable[[Any], list[Any]], parts: int, above: Any) -> list[Any]:
    """Copies of the tree, with the parts that `cut` makes of each leaf or list that holds samples.

    `above` is the path so far, as (the same for the container, key), which is only converted to a path for messages.
    """
    rows = _dimensions(node)
    if rows and len(node) != count:
        raise UnevenBatchError(node, _path(above), count)
    if rows or one_for_each(node, count):
        return cut(node)
    inner = node_of(node)
    if inner is None:
        _check_whole(node, count, above)
    if inner is None or not inner.children:
        return [node] * parts
    columns = [
        _cut(child, count, cut, parts, (above, Key(name, inner.attributes)))
        for name, child in zip(inner.names, inner.children, strict=True)
    ]
    return [inner.rebuild(list(members)) for members in zip(*columns, strict=True)]


def _check_whole(node: Any, count: int, above: Any) -> None:
    """Raise ValueError for an object with samples that looplib cannot see."""
    if above is not None and _hides_samples(node, count):
        raise ValueError(
            f"{named(_path(above), 'batch')} is a {type(node).__name__}, an object that cannot be cut into "
            f"{count} samples: each part of the batch would have all of it. Give tensors, arrays or lists with "
            "one item for each sample, or make it a dataclass or a registered pytree"
        )


def _path(above: Any) -> Path:
    return () if above is None else (*_path(above[0]), above[1])


def _hides_samples(leaf: Any, count: int) -> bool:
    """True if an unknown object contains tensors, or as many items as there are samples."""
    if isinstance(leaf, (*PLAIN, torch.nn.Module)):
        return False
    if any(isinstance(value, Tensor) and value.dim() for value in getattr(leaf, "__dict__", {}).values()):
        return True
    try:
        return len(leaf) == count
    except TypeError:
        return False


def concat(parts: Sequence[Any], counts: Sequence[int], root: str = "batch") -> Any:
    """Concatenate several batches, the inverse of `split`. `counts` are the numbers of samples of the parts.

    Leaves without samples must be the same in all parts. Raises ValueError if the parts differ in structure or in
    such a leaf, and TypeError for arrays that NumPy cannot join.
    """
    return _joined(list(parts), list(counts), (), root)


def _joined(parts: list[Any], counts: list[int], path: Path, root: str) -> Any:
    if all(map(_dimensions, parts)):
        return _joined_rows(parts, counts, named(path, root))
    if _are_lists_of_samples(parts, counts):
        return type(parts[0])(chain.from_iterable(parts))
    node = node_of(parts[0])
    if node is None or any(type(part) is not type(parts[0]) for part in parts):
        return _in_all(parts, named(path, root))
    columns = zip(*(_children_like(node, part) for part in parts), strict=True)
    return node.rebuild(
        [
            _joined(list(members), counts, (*path, key), root)
            for key, members in zip(node.keys(), columns, strict=True)
        ]
    )


def _are_lists_of_samples(parts: list[Any], counts: list[int]) -> bool:
    """True for lists with one item per sample, of which at least one cannot be anything else."""
    pairs = list(zip(parts, counts, strict=True))
    lists = all(_is_list(part) and len(part) == count for part, count in pairs)
    return lists and not all(_holds_fields(part, count) for part, count in pairs)


def _in_all(parts: list[Any], name: str) -> Any:
    """The leaf without samples that all parts share."""
    if not all(same(parts[0], part) for part in parts):
        raise ValueError(
            f"{name} has no samples and differs between the parts: {', '.join(map(_short, parts[:3]))}; give the "
            "same value with each, or one for each sample"
        )
    return parts[0]


def _joined_rows(parts: list[Any], counts: list[int], name: str) -> Any:
    for part, count in zip(parts, counts, strict=True):
        shape = tuple(part.shape)
        check(
            len(part) == count, f"{name} has shape {shape} in a part of {count} samples: give one row for each sample"
        )
    if all(isinstance(part, Tensor) for part in parts):
        return torch.cat(parts)
    if {type(part).__module__ for part in parts} == {"numpy"}:
        return sys.modules["numpy"].concatenate(parts)
    kinds = sorted({type(part).__name__ for part in parts})
    raise TypeError(f"{name} is a {' or a '.join(kinds)}, whose parts cannot be joined; give tensors or NumPy arrays")


def _short(leaf: Any) -> str:
    text = repr(leaf)
    return text if len(text) <= 40 else f"a {type(leaf).__name__}"


def same(one: Any, other: Any) -> bool:
    """True if two leaves are equal. NaN equals NaN, and tensors and arrays need the same dtype, shape and device."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        return same_kind(one, other) and (torch.equal(one, other) or bool(_equal_or_nan(one, other).all()))
    if hasattr(one, "tobytes") and hasattr(one, "shape"):  # NumPy values
        return bool((one.shape, one.dtype, one.tobytes()) == (other.shape, other.dtype, other.tobytes()))
    return bool(one == other or (one != one and other != other))


def _equal_or_nan(one: Tensor, other: Tensor) -> Tensor:
    return (one == other) | ((one != one) & (other != other))


def same_kind(one: Tensor, other: Tensor) -> bool:
    """True if two tensors have the same shape, dtype and device."""
    return (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)
