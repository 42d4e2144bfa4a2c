"""Graphs that run operation by operation, without machine code.

In a traced graph each operation writes memory of its own, and a donated step copies its results into the state at the
end. Inductor turns that into few loops. Here each operation is a call, so the graph is rewritten to have fewer of them,
to write in place where the old value is not read again, and to call torch the shortest way. Every operation that is
left computes the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from looplib.optim._traced_update import FUSED_UPDATE, fused_update
from looplib.transforms._expression import kind_of
from looplib.transforms._program import draws, is_same, is_tensor, storage

_COPY = torch.ops.aten.copy_.default
_METHODS = {"_to_copy": "to"}  # methods that are not named like their operation


def eager(graph: GraphModule) -> Callable[[list[Tensor]], Any]:
    """Function that runs a graph operation by operation, on a list of its inputs."""
    nodes = Graph()
    nodes.output(nodes.graph_copy(graph.graph, {}))
    numbers = _computed_once(nodes)
    _in_place(nodes)
    _call_directly(nodes)
    forward = GraphModule(graph, nodes).forward
    return lambda values: forward(*numbers, *values)


def _operations(nodes: Graph) -> list[Node]:
    return [node for node in nodes.nodes if _only_computes(node)]


def _only_computes(node: Node) -> bool:
    """True for an operation that returns one tensor, writes nothing and draws no random numbers."""
    plain = isinstance(node.target, torch._ops.OpOverload) and not node.target._schema.is_mutable
    return plain and not draws(node) and is_tensor(node)


def _memory(some: Iterable[Node]) -> set[int]:
    return {storage(node) for node in some if is_tensor(node)}


def _replace(node: Node, by: Node) -> None:
    node.replace_all_uses_with(by)
    node.graph.erase_node(node)


def _computed_once(nodes: Graph) -> list[Tensor]:
    """Remove views that are like the tensor that they view, and compute numbers that depend on nothing beforehand.

    Returns the numbers, which become the graph's first inputs. Results are always new.
    """
    first = next(iter(nodes.nodes))
    results = _memory(nodes.find_nodes(op="output")[0].all_input_nodes)
    numbers: list[Tensor] = []
    for node in _operations(nodes):
        inputs = node.all_input_nodes
        if len(inputs) == 1 and is_same(node, inputs[0]):
            _replace(node, inputs[0])
        elif not inputs and not node.meta["val"].dim() and storage(node) not in results:
            numbers.append(cast(Any, node.target)(*node.args, **node.kwargs))
            with nodes.inserting_before(first):
                number = nodes.placeholder(f"number_{len(numbers)}")
            number.meta["val"] = node.meta["val"]
            _replace(node, number)
    return numbers


def _in_place(nodes: Graph) -> None:
    """Write results over values that are not read again: intermediate ones, and tensors of a donated state."""
    order = {node: index for index, node in enumerate(nodes.nodes)}
    last_read = {
        storage(read): index
        for node, index in order.items()
        for read in node.all_input_nodes
        if is_tensor(read) and not (node.target is _COPY and read is node.args[0])
    }

    def writable(node: Node) -> bool:
        """True if an operation can write its result over its first argument."""
        return _in_place_form(node) is not None and last_read[storage(cast(Node, node.args[0]))] == order[node]

    results = _memory(nodes.find_nodes(op="output")[0].all_input_nodes)
    for copy in nodes.find_nodes(op="call_function", target=_COPY):
        old, new = copy.args
        # A result that is also the new value, such as a metric of a buffer, must not change with the state.
        for node in [] if storage(new) in results else _path(old, new, writable):
            node.target = _in_place_form(node)
            if node is new:
                _replace(copy, new)
    inputs = _memory(nodes.find_nodes(op="placeholder"))
    for node in _operations(nodes):
        if writable(node) and storage(cast(Node, node.args[0])) not in inputs:
            node.target = _in_place_form(node)


def _path(old: Node, new: Node, writable: Callable[[Node], bool]) -> list[Node]:
    """Operations that lead from a tensor of the state to the one that replaces it, if all can write in place."""
    path: list[Node] = []
    while new is not old:
        if not writable(new):
            return []
        path.append(new)
        new = cast(Node, new.args[0])
    return path


def _in_place_form(node: Node) -> Any:
    """The operation that writes an elementwise operation's result over its first argument, or None."""
    if not _only_computes(node) or torch.Tag.pointwise not in cast(Any, node.target).tags:
        return None
    into = node.args[0] if node.args else None
    if not isinstance(into, Node) or not is_tensor(into):
        return None
    value, shared = into.meta["val"], [other for other in node.all_input_nodes if storage(other) == storage(into)]
    if shared != [into] or kind_of(value) != kind_of(node.meta["val"]) or value.is_complex() or value.is_neg():
        return None  # torch rounds some products of complex numbers differently in place
    _, name, overload = str(node.target).replace("::", ".").split(".")
    return getattr(getattr(torch.ops.aten, f"{name}_", None), overload, None)


def _call_directly(nodes: Graph) -> None:
    """Call operations by torch's own methods and functions where these call that operation and nothing else.

    `torch.ops` converts arguments by the operation's schema, which takes about as long as a small operation does.
    """
    for node in nodes.nodes:
        if node.target is FUSED_UPDATE:
            node.target = fused_update
        elif isinstance(node.target, torch._ops.OpOverload) and node.all_input_nodes:
            name = str(node.target).split(".")[1]
            args, kwargs = map_arg((node.args, node.kwargs), lambda value: value.meta["val"])
            method = getattr(Tensor, _METHODS.get(name, name), None)
            if is_tensor(node.args[0]) and _calls(method, node.target, args, kwargs):
                node.op, node.target = "call_method", cast(Any, method).__name__
            elif _calls(getattr(torch, name, None), node.target, args, kwargs):
                node.target = getattr(torch, name)


def _calls(function: Any, operation: Any, args: Any, kwargs: Any) -> bool:
    """True if a function of torch calls an operation with these arguments, and nothing else."""
    try:
        with torch.no_grad(), _Expecting((operation, args, kwargs)) as mode:
            function(*args, **kwargs)
    except Exception:  # of any kind: the function takes different arguments or calls something else
        return False
    return bool(mode.calls == 1)


class _Expecting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raise at any call of an operation but one, before it runs: torch would log how another one fails."""

    def __init__(self, expected: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.expected, self.calls = expected, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace != "prim":  # such as a question for the device
            self.calls += 1
            if self.calls > 1 or not _is_equal((func, args, kwargs), self.expected):
                raise LookupError(func)
        return func(*args, **kwargs)


def _is_equal(one: Any, two: Any) -> bool:
    leaves, others = tree_leaves(one), tree_leaves(two)
    return len(leaves) == len(others) and all(
        a is b or (not isinstance(a, Tensor) and type(a) is type(b) and bool(a == b))
        for a, b in zip(leaves, others, strict=True)
    )
