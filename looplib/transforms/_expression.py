"""Pytrees as expressions: flatten a tree into its tensors, and generate code that rebuilds it from others.

A step takes and returns trees: parameters by name, records, metrics. A graph takes and returns flat lists of tensors.
`expression` returns both the list and a Python expression, such as `{"weight": v[0], "bias": v[1]}`, which rebuilds
the tree faster than a walk over it.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from looplib._core.torch_private import pytree
from looplib._core.tracing import Count, UntraceableError

_LITERALS = {type(None), bool, int, float, str}  # of which repr is code


class Expression(NamedTuple):
    """A tree as an expression over its tensors. Its other leaves are part of the expression.

    Attributes:
        source: Python code in which `v[0]` is a tensor, `c[0]` a constant and `n["step"]` a count of the state.
        tensors: tensors of the tree, in the order of the code.
        constants: values that the code cannot spell: keys, types and other leaves.
    """

    source: str
    tensors: list[Tensor]
    constants: list[Any]

    def key(self, by_gradient: bool = False) -> Any:
        """Cache key of a program: equal for trees that the same program accepts.

        With `by_gradient`, it includes which tensors require a gradient.
        """
        kinds = tuple((*kind_of(tensor), by_gradient and tensor.requires_grad) for tensor in self.tensors)
        return self.source, kinds, tuple(map(_hashable, self.constants))

    def build(self, names: str = "v") -> Callable[..., Any]:
        """Function of these names whose body is the expression."""
        known = {"c": self.constants, "nan": math.nan, "inf": math.inf}
        built: Callable[..., Any] = eval(f"lambda {names}: {self.source}", known)
        return built


def kind_of(tensor: Tensor) -> tuple[Any, ...]:
    """Metadata of a tensor that a graph is specialized to."""
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def _hashable(value: Any) -> Any:
    try:
        hash(value)
    except TypeError:
        raise UntraceableError(
            f"a {type(value).__name__} stands in the state, in the batch, or in what on_host returned: a compiled "
            "step takes tensors, numbers, strings, and dicts, lists, tuples and dataclasses of these; turn NumPy "
            "arrays into tensors (torch.from_numpy)"
        ) from None
    return type(value), value


def expression(tree: Any, leaf: Callable[[Tensor, int], str] = lambda tensor, index: f"v[{index}]") -> Expression:
    """Expression that rebuilds such a tree from other tensors. `leaf` gives the code for a tensor and its index."""
    tensors: list[Tensor] = []
    constants: list[Any] = []

    def constant(value: Any) -> str:
        constants.append(value)
        return f"c[{len(constants) - 1}]"

    def joined(members: Iterable[Any]) -> str:
        return ", ".join([write(member) for member in members])

    def write(node: Any) -> str:
        kind = type(node)
        if isinstance(node, Tensor):
            tensors.append(node)
            return leaf(node, len(tensors) - 1)
        if kind is Count:
            return f"n[{node.name!r}]"
        if kind in _LITERALS:
            return repr(node)
        if kind is dict:
            return f"{{{', '.join([f'{write(name)}: {write(value)}' for name, value in node.items()])}}}"
        if kind is list:
            return f"[{joined(node)}]"
        if kind is tuple:
            return f"({joined(node)}{',' * bool(node)})"
        if isinstance(node, tuple) and hasattr(node, "_fields"):
            return f"{constant(kind)}({joined(node)})"
        return record(node)

    def record(node: Any) -> str:
        """Write a node of torch's pytrees, a mapping, a record with attributes, or a leaf."""
        leaves, spec = pytree.tree_flatten(node)
        if len(leaves) != 1 or leaves[0] is not node:
            return f"{constant(pytree.tree_unflatten)}([{joined(leaves)}], {constant(spec)})"
        if isinstance(node, Mapping):  # such as a tokenizer's
            return f"{constant(type(node))}({write(dict(node))})"
        if (fields := _fields(node)) is not None:
            return f"{constant(_with_fields)}({constant(type(node))}, {write(fields)})"
        return constant(node)

    made = Expression(write(tree), [*tensors], constants)
    tensors.clear()  # these functions refer to each other, and so they and their list wait for the garbage collector
    return made


def _fields(node: Any) -> dict[str, Any] | None:
    """Fields of a record: a dataclass, or an object with tensors as attributes."""
    if isinstance(node, (type, nn.Module)):
        return None
    if dataclasses.is_dataclass(node):
        return {field.name: getattr(node, field.name) for field in dataclasses.fields(node)}
    attributes = dict(getattr(node, "__dict__", {}))
    return attributes if any(isinstance(leaf, Tensor) for leaf in pytree.tree_iter(attributes)) else None


def _with_fields(kind: type, values: dict[str, Any]) -> Any:
    new: Any = object.__new__(kind)
    for name, value in values.items():
        object.__setattr__(new, name, value)
    return new


def reader(tree: Any) -> Callable[[Any], list[Tensor]]:
    """Function that lists the tensors of a tree like this one, in the order of `expression`, without inspecting it."""
    try:
        read: Callable[[Any], list[Tensor]] = eval(f"lambda t: [{', '.join(_paths(tree, 't'))}]")
    except LookupError:
        return lambda t: expression(t).tensors
    return read


def _paths(node: Any, path: str) -> Iterator[str]:
    if isinstance(node, (list, tuple)):
        node = dict(enumerate(node))
    if isinstance(node, Tensor):
        yield path
    elif isinstance(node, dict) and {str, int}.issuperset(map(type, node)):
        for key, value in node.items():
            yield from _paths(value, f"{path}[{key!r}]")
    elif expression(node).tensors:
        raise LookupError(path)


def as_answer(returned: Any) -> Expression:
    """Expression of a host function's result, with floats as tensors."""
    return expression(_floats_as_tensors(returned))


def _floats_as_tensors(tree: Any) -> Any:
    if isinstance(tree, numbers.Real) and not isinstance(tree, numbers.Integral):  # including NumPy's
        return torch.tensor(float(tree), dtype=torch.float64)
    if type(tree) is dict:
        return {key: _floats_as_tensors(value) for key, value in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(map(_floats_as_tensors, tree))
    return tree
