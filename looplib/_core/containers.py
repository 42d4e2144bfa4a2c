"""Containers: how each kind of tree node is split into children and rebuilt from new ones. `trees` has the rules."""

from __future__ import annotations

import copy
import dataclasses
import operator
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from looplib._core.torch_private import pytree


class Key(NamedTuple):
    """One step of a path: an item `[name]`, or an attribute `.name`."""

    name: Any
    attribute: bool = False


Path = tuple[Key, ...]


class Node(NamedTuple):
    """A container split into its children.

    Attributes:
        names: key, index or attribute of each child.
        children: trees.
        rebuild: makes a container like this one from a list of new children.
        attributes: True if the names are attributes.
    """

    names: Sequence[Any]
    children: Sequence[Any]
    rebuild: Callable[[list[Any]], Any]
    attributes: bool = False

    def keys(self) -> list[Key]:
        return [Key(name, self.attributes) for name in self.names]


def _dict(node: dict[Any, Any]) -> Node:
    names = list(node)
    return Node(names, list(node.values()), partial(_dict_of, names))


def _dict_of(names: Sequence[Any], children: list[Any]) -> dict[Any, Any]:
    return dict(zip(names, children, strict=True))


def _refilled(put: Callable[..., Any], node: Any, names: Sequence[Any], children: list[Any]) -> Any:
    """A copy of a container with other children."""
    new = copy.copy(node)
    for name, child in zip(names, children, strict=True):
        put(new, name, child)
    return new


def _mapping(node: Mapping[Any, Any]) -> Node:
    names = list(node)
    refilled = partial(_refilled, operator.setitem, node, names)
    rebuild = refilled if isinstance(node, MutableMapping) else partial(_dict_of, names)
    return Node(names, [node[name] for name in names], rebuild)


def _namedtuple(node: Any) -> Node:
    return Node(node._fields, node, type(node)._make, True)


def _sequence(node: Sequence[Any]) -> Node:
    return Node(range(len(node)), node, type(node))


def _dataclass(node: Any) -> Node:
    names = [field.name for field in dataclasses.fields(node) if hasattr(node, field.name)]
    rebuild = partial(_refilled, object.__setattr__, node, names)  # also if frozen
    return Node(names, [getattr(node, name) for name in names], rebuild, True)


def _registered(node: Any) -> Node:
    def below(part: Any) -> bool:
        return part is not node

    children, structure = pytree.tree_flatten(node, is_leaf=below)
    try:
        keys: list[Any] = [path[0] for path, _ in pytree.tree_flatten_with_path(node, is_leaf=below)[0]]
    except ValueError:  # registered without key names
        keys = list(range(len(children)))
    attributes = bool(keys) and isinstance(keys[0], pytree.GetAttrKey)
    names = [_name_of(key) for key in keys]
    return Node(names, children, lambda children: pytree.tree_unflatten(children, structure), attributes)


def _name_of(key: Any) -> Any:
    """The name in a key of torch's pytrees."""
    return next((getattr(key, name) for name in ("key", "idx", "name") if hasattr(key, name)), key)


OWN: dict[type, Callable[[Any], Node]] = {dict: _dict, list: _sequence, tuple: _sequence}

_KINDS: tuple[tuple[Callable[[Any], bool], Callable[[Any], Node]], ...] = (
    (lambda node: isinstance(node, Mapping), _mapping),
    (lambda node: isinstance(node, tuple) and hasattr(node, "_fields"), _namedtuple),
    (lambda node: isinstance(node, (list, tuple)), _sequence),
    (lambda node: dataclasses.is_dataclass(node) and not isinstance(node, type), _dataclass),
    (lambda node: type(node) in pytree.SUPPORTED_NODES, _registered),
)

PLAIN = (Tensor, type(None), bool, int, float, complex, str, bytes, torch.Size, torch.dtype, torch.device, type)


def register(kind: type, take_apart: Callable[[Any], Node]) -> None:
    """Register one of looplib's containers with the function that splits it."""
    OWN[kind] = take_apart


def node_of(tree: Any) -> Node | None:
    """Split a container by one level, or return None for a leaf."""
    if (take_apart := OWN.get(type(tree))) is not None:
        return take_apart(tree)
    if isinstance(tree, PLAIN):
        return None
    return next((take_apart(tree) for is_one, take_apart in _KINDS if is_one(tree)), None)
