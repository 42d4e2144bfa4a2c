"""Pytrees: the structure of batches, outputs and states.

The same rules apply in training, evaluation, prediction, replay, microbatching, per-sample gradients and tests.

A **tree** is a leaf, or a container of trees. Containers are, in this order:

1. a list or a tuple, by its items;

2. a mapping: dict, OrderedDict, UserDict, a tokenizer's BatchEncoding. A mutable one is copied and its values
replaced, so that it keeps its type and attributes; an immutable one becomes a dict;

3. a type registered with torch's pytrees, by its registration; a namedtuple, by its fields. (A `TrainState` is
an exception: to torch its counts are structure, and here they are leaves, so that a comparison sees every field);

4. a dataclass, by its fields. It is copied and its fields replaced: `__post_init__` does not run a second time.

Everything else is a **leaf**: a tensor, an array, None, a number, a string, or an unknown object.

The **samples** of a batch lie along the first dimension of every tensor and array with at least one dimension, and
along every list or tuple that is as long as the batch and does not itself consist of such tensors (one string or one
image per sample). Leaves without samples (a scalar, a name) belong to the whole batch, so each part of it has them
too. An object that holds samples where looplib cannot see them is refused, since each part would contain all of them.
If both readings of a list are possible (two tensors with two rows each, in a batch of two), its items are fields.
"""

from __future__ import annotations

import copy
import dataclasses
import operator
from collections import namedtuple
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from looplib._core.checks import check
from looplib._core.torch_private import pytree


class Attribute(str):
    """A name in a path that is an attribute, `.name`. Any other name in a path is an item, `[name]`."""

    __slots__ = ()


Path = tuple[Any, ...]


class Node(NamedTuple):
    """A container split into its children.

    Attributes:
        names: key, index or `Attribute` of each child.
        children: trees.
        rebuild: makes a container like this one from a list of new children.
    """

    names: Sequence[Any]
    children: Sequence[Any]
    rebuild: Callable[[list[Any]], Any]


# ---- containers ----

_LEAVES = (Tensor, str, bytes, int, float, type(None), torch.Size, type)

# Dataclasses that are walked by their fields although torch's pytrees know them.
by_fields: set[type] = set()


def _node_of(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> Node | None:
    """Split a container by one level, or return None for a leaf."""
    if isinstance(tree, _LEAVES) or (is_leaf is not None and is_leaf(tree)):
        return None
    if type(tree) in (list, tuple):
        return Node(range(len(tree)), tree, type(tree))
    if isinstance(tree, Mapping):
        names, start = list(tree), tree if isinstance(tree, MutableMapping) else {}
        return Node(names, [tree[name] for name in names], partial(_refilled, operator.setitem, start, names))
    registered: Any = namedtuple if isinstance(tree, tuple) and hasattr(tree, "_fields") else type(tree)
    if registered not in by_fields and (kind := pytree.SUPPORTED_NODES.get(registered)) is not None:
        children, structure = kind.flatten_fn(tree)
        with_keys = kind.flatten_with_keys_fn
        keys = range(len(children)) if with_keys is None else [_name_of(key) for key, _ in with_keys(tree)[0]]
        return Node(keys, children, lambda children: kind.unflatten_fn(children, structure))
    if dataclasses.is_dataclass(tree):
        fields = [Attribute(field.name) for field in dataclasses.fields(tree) if hasattr(tree, field.name)]
        rebuild = partial(_refilled, object.__setattr__, tree, fields)  # also if frozen
        return Node(fields, [getattr(tree, name) for name in fields], rebuild)
    return None


def _refilled(put: Callable[..., Any], node: Any, names: Sequence[Any], children: list[Any]) -> Any:
    """A copy of a container with other children."""
    new = copy.copy(node)
    for name, child in zip(names, children, strict=True):
        put(new, name, child)
    return new


def _name_of(key: Any) -> Any:
    """The name in a key of torch's pytrees."""
    if isinstance(key, pytree.GetAttrKey):
        return Attribute(key.name)
    return getattr(key, "key", getattr(key, "idx", key))


# ---- paths ----


def named(path: Path, root: str = "") -> str:
    """A path in Python syntax: `batch['x'][0].mask` with the root "batch"."""
    text = root + "".join(f".{name}" if isinstance(name, Attribute) else f"[{name!r}]" for name in path)
    return text if root else text.removeprefix(".")


def pointer(path: Path) -> str:
    """A path as a JSON pointer (RFC 6901): `/x/0/mask`."""
    return "".join("/" + str(name).replace("~", "~0").replace("/", "~1") for name in path)


# ---- every leaf ----


def leaves(tree: Any, is_leaf: Callable[[Any], bool] | None = None, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Leaves of a tree in order, each with its path. `is_leaf` makes containers for which it is true leaves."""
    node = _node_of(tree, is_leaf)
    if node is None:
        yield path, tree
        return
    for name, child in zip(node.names, node.children, strict=True):
        yield from leaves(child, is_leaf, (*path, name))


def map_leaves(function: Callable[..., Any], tree: Any, *others: Any, is_leaf: Any = None) -> Any:
    """Map `function(leaf)` over a tree, or with other trees, `function(leaf, leaf of other, ...)`.

    The others must have the same keys in each container. Raises ValueError if they do not.
    """
    node = _node_of(tree, is_leaf)
    if node is None:
        return function(tree, *others)
    columns = [node.children, *(_children_like(node, other) for other in others)]
    return node.rebuild([map_leaves(function, *members, is_leaf=is_leaf) for members in zip(*columns, strict=True)])


def map_tensors(function: Callable[[Tensor], Any], tree: Any) -> Any:
    """Map `function(tensor)` over the tensors of a tree. Other leaves are unchanged."""
    return map_leaves(lambda leaf: function(leaf) if isinstance(leaf, Tensor) else leaf, tree)


def _children_like(node: Node, other: Any) -> Sequence[Any]:
    """Children of another container with the same names, in the order of this one."""
    other_node = _node_of(other)
    by_name = {} if other_node is None else dict(zip(other_node.names, other_node.children, strict=True))
    if other_node is None or by_name.keys() != {*node.names}:
        found = [*by_name] or f"a {type(other).__name__}"
        raise ValueError(f"two trees differ in their structure: {[*node.names]} and {found}")
    return [by_name[name] for name in node.names]


class _Missing:
    def __repr__(self) -> str:
        return "not given"


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


def is_array(leaf: Any) -> bool:
    """True for a tensor, a NumPy array or a similar object with at least one dimension."""
    return bool(getattr(leaf, "ndim", 0)) and hasattr(leaf, "shape") and hasattr(leaf, "__getitem__")


def _is_list(node: Any) -> bool:
    return isinstance(node, (list, tuple)) and not hasattr(node, "_fields") and not isinstance(node, torch.Size)


def _holds_values(node: Any) -> bool:
    """True for a list or tuple of strings, numbers or unknown objects."""
    return _is_list(node) and all(_node_of(child) is None and not is_array(child) for child in node)


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
    first = batch
    if type(batch) in (tuple, list, dict) and batch:  # each step calls this, so the common cases come first
        first = next(iter(batch.values() if type(batch) is dict else batch))
    if isinstance(first, Tensor) and first.dim():
        return first.size(0)
    columns = [leaf for _, leaf in leaves(batch, lambda node: is_array(node) or _holds_values(node))]
    first, *_ = [*filter(is_array, columns), *filter(_is_list, columns), batch]
    try:
        return len(first)
    except TypeError:
        kind = "tensor of shape ()" if isinstance(batch, Tensor) else type(batch).__name__
        raise TypeError(
            f"cannot count the samples in a {kind}: a batch is a tensor, or a dict, list or tuple with one, whose first "
            "dimension is the samples. For another kind, return ll.Mean(total, weight) from the function of the model, or "
            "give batch_size=lambda batch: ... to make_grad_fn, or to what divides the batch"
        ) from None


def one_for_each(node: Any, count: int) -> bool:
    """True for a list or tuple with one item per sample.

    The items of a list as long as the batch are fields instead if every tensor in it has one row per sample.
    """
    if not _is_list(node) or len(node) != count:
        return False
    inside = leaves(node, lambda inner: inner is not node and (is_array(inner) or one_for_each(inner, count)))
    return {len(leaf) for _, leaf in inside if is_array(leaf)} != {count}


def split(
    batch: Any, count: int, sizes: int | list[int], batch_size: Callable[[Any], int] = batch_size
) -> Sequence[Any]:
    """Split a batch of `count` samples into parts of these sizes, or of one size, with a smaller last part."""
    if isinstance(sizes, int):
        sizes = [min(sizes, count - low) for low in range(0, count, sizes)]
    if len(sizes) <= 1:
        return [batch]
    ends = pairwise([0, *accumulate(sizes)])
    parts = cut(batch, count, [operator.itemgetter(slice(low, high)) for low, high in ends])
    part_sizes = [*map(batch_size, parts)]
    if sum(part_sizes) != count:
        raise ValueError(
            f"a {type(batch).__name__} of {count} samples cannot be cut: its parts would have "
            f"{', '.join(map(str, part_sizes))}. Give a batch of tensors (a dict, list, tuple or dataclass), smaller "
            "batches that need not be cut, or another count (batch_size=)"
        )
    return parts


def padding_batch(batch: Any) -> Any:
    """Two samples of ones in place of a batch of none, with its dtypes and further dimensions."""

    def ones(rows: Any) -> Tensor:
        check(
            isinstance(rows, Tensor),
            f"this rank has no sample of the batch, and a {type(rows).__name__} is no tensor to run the model on in their "
            "place: give the loader drop_last=True, or another batch_size",
            TypeError,
        )
        return rows.new_ones(2, *rows.shape[1:])  # type: ignore[no-any-return]

    [padding] = cut(batch, 0, [ones])
    return padding


def cut(node: Any, count: int, cuts: Sequence[Callable[[Any], Any]], path: Path = ()) -> list[Any]:
    """A copy of the tree for each function of `cuts`, with what it makes of each array or list that holds samples."""
    has_rows = is_array(node)
    if has_rows and len(node) != count:
        raise ValueError(
            f"{named(path, 'batch')} has shape {tuple(node.shape)}, and the batch {count} samples: it cannot be cut "
            "along its first dimension. Give tensors with one row for each sample, say how samples are counted "
            "(batch_size=), or make smaller batches; a gradient may have its pieces as a list (accumulate(grad_fn) "
            "without a count; a loader's collate_fn can make it)"
        )
    if has_rows or one_for_each(node, count):
        rows = getattr(node, "iloc", node)  # pandas objects are indexed by position
        return [one(rows) for one in cuts]
    inner = _node_of(node)
    if inner is None and path and _hides_samples(node, count):
        raise ValueError(
            f"{named(path, 'batch')} is a {type(node).__name__}, an object that cannot be cut into "
            f"{count} samples: each part of the batch would have all of it. Give tensors, arrays or lists with "
            "one item for each sample, or make it a dataclass or a registered pytree"
        )
    if inner is None or not inner.children:
        return [node] * len(cuts)
    columns = [
        cut(child, count, cuts, (*path, name)) for name, child in zip(inner.names, inner.children, strict=True)
    ]
    return [inner.rebuild(list(members)) for members in zip(*columns, strict=True)]


def _hides_samples(leaf: Any, count: int) -> bool:
    """True if an unknown object contains tensors, or as many items as there are samples."""
    if isinstance(leaf, (*_LEAVES, torch.nn.Module)):
        return False
    if any(isinstance(value, Tensor) and value.dim() for value in getattr(leaf, "__dict__", {}).values()):
        return True
    try:
        return len(leaf) == count
    except TypeError:
        return False


# ---- equality ----


def same(one: Any, other: Any) -> bool:
    """True if two leaves are equal. NaN equals NaN, and tensors and arrays need the same dtype, shape and device."""
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        if not same_kind(one, other):
            return False
        return torch.equal(one, other) or torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)
    if hasattr(one, "tobytes") and hasattr(one, "shape"):  # NumPy values
        return bool((one.shape, one.dtype, one.tobytes()) == (other.shape, other.dtype, other.tobytes()))
    return bool(one == other or (one != one and other != other))


def same_kind(one: Tensor, other: Tensor) -> bool:
    """True if two tensors have the same shape, dtype and device."""
    return (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)
