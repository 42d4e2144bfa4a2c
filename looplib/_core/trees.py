"""Pytrees: the structure of batches, outputs and states.

The same rules apply in training, evaluation, prediction, replay, microbatching, per-sample gradients and tests.

A **tree** is a leaf, or a container of trees. Containers are, in this order:

1. a list or a tuple, by its items;

2. a mapping: dict, OrderedDict, UserDict, a tokenizer's BatchEncoding. A mutable one is copied and its values
replaced, so that it keeps its type and attributes; an immutable one becomes a dict;

3. a type registered with torch's pytrees, by its registration; a namedtuple, by its fields. (A `TrainState` is
an exception: to torch its counts are structure, and here they are leaves, so that a comparison sees every field);

4. a dataclass, by its fields. It is copied and its fields replaced: `__post_init__` does not run a second time.

Everything else is a **leaf**: a tensor, an array, None, a number, a string, or an unknown object. What the
samples of a batch are is said in `_core.samples`.
"""

from __future__ import annotations

import copy
import dataclasses
import operator
from collections import namedtuple
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

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

LEAVES = (Tensor, str, bytes, int, float, type(None), torch.Size, type)

# Dataclasses that are walked by these fields although torch's pytrees know them.
by_fields: dict[type, Sequence[str]] = {}


def node_of(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> Node | None:
    """Split a container by one level, or return None for a leaf."""
    if isinstance(tree, LEAVES) or (is_leaf is not None and is_leaf(tree)):
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
        every_field = [field.name for field in dataclasses.fields(tree)]
        fields = [Attribute(name) for name in by_fields.get(registered, every_field) if hasattr(tree, name)]
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


def python_path(path: Path, root: str = "") -> str:
    """A path in Python syntax: `batch['x'][0].mask` with the root "batch"."""
    text = root + "".join(f".{name}" if isinstance(name, Attribute) else f"[{name!r}]" for name in path)
    return text if root else text.removeprefix(".")


def pointer(path: Path) -> str:
    """A path as a JSON pointer (RFC 6901): `/x/0/mask`."""
    return "".join("/" + str(name).replace("~", "~0").replace("/", "~1") for name in path)


def dotted(path: Path) -> str:
    """A path with dots: `params.0.weight`."""
    return ".".join(map(str, path))


# ---- every leaf ----


def leaves(tree: Any, is_leaf: Callable[[Any], bool] | None = None, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Leaves of a tree in order, each with its path. `is_leaf` makes containers for which it is true leaves."""
    node = node_of(tree, is_leaf)
    if node is None:
        yield path, tree
        return
    for name, child in zip(node.names, node.children, strict=True):
        yield from leaves(child, is_leaf, (*path, name))


def map_leaves(function: Callable[..., Any], tree: Any, *others: Any, is_leaf: Any = None) -> Any:
    """Map `function(leaf)` over a tree, or with other trees, `function(leaf, leaf of other, ...)`.

    The others must have the same keys in each container. Raises ValueError if they do not.
    """
    node = node_of(tree, is_leaf)
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
    by_name = {} if other_node is None else dict(zip(other_node.names, other_node.children, strict=True))
    if other_node is None or by_name.keys() != {*node.names}:
        children = [*by_name] or f"a {type(other).__name__}"
        raise ValueError(f"two trees differ in their structure: {[*node.names]} and {children}")
    return [by_name[name] for name in node.names]


class _Missing:
    def __repr__(self) -> str:
        return "not given"


MISSING = _Missing()  # marks a leaf that one of two trees does not have


def paired(first: Iterable[tuple[Any, Any]], second: Iterable[tuple[Any, Any]]) -> Iterator[tuple[Any, Any, Any]]:
    """Leaves of two trees side by side: path, leaf of one, leaf of the other, in the order of the first.

    Takes pairs of a path (or a name) and a leaf, as from `leaves`. A leaf that one of them does not have is
    `MISSING`.
    """
    ones, others = dict(first), dict(second)
    for path in {**ones, **others}:
        yield path, ones.get(path, MISSING), others.get(path, MISSING)


def is_array(leaf: Any) -> bool:
    """True for a tensor, a NumPy array or a similar object with at least one dimension."""
    return bool(getattr(leaf, "ndim", 0)) and hasattr(leaf, "shape") and hasattr(leaf, "__getitem__")


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
