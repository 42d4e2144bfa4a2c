"""Backends: machine code for a graph by torch's Inductor, or its operations one by one.

For Inductor, a graph is rewritten so that Inductor generates correct and fast code.

Run operation by operation, each operation of a graph is a call. In a traced graph each one writes memory of its own, and a
donated step copies its results into the state at the end. Inductor turns that into few loops; here the graph is rewritten
to have fewer operations, to write in place where the old value is not read again, and to call torch the shortest way. Every
operation that is left computes the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from looplib._core.checks import check
from looplib.optim.traced_update import FUSED_UPDATE, fused_update
from looplib.transforms._program import (
    Program,
    draws,
    examples_of,
    is_same,
    is_tensor,
    kind_of,
    replace_node,
    storage,
)

Compiled = Callable[[list[Tensor]], Any]

_SCALED = {getattr(torch.ops.aten, name).Tensor for name in ("add", "add_", "sub", "sub_")}


def backend(
    backend: str = "inductor", mode: str | None = None, options: Mapping[str, Any] | None = None
) -> Callable[[Program], Compiled]:
    """Function that compiles programs, with the arguments of `compile_step`."""
    check(
        backend in ("inductor", "eager"),
        f'compile_step got backend={backend!r}: give "inductor" or "eager"',
        TypeError,
    )
    check(
        backend == "inductor" or not (mode or options),
        f"compile_step got mode= or options=, which are Inductor's, and the backend {backend!r}",
        TypeError,
    )
    if backend == "eager":
        return lambda program: eager(program.graph)
    chosen = torch._TorchCompileInductorWrapper(mode, options, dynamic=False)  # type: ignore[no-untyped-call]
    return partial(_by_inductor, chosen.config)


def _by_inductor(settings: dict[str, Any], program: Program) -> Compiled:
    from torch._inductor import compile_fx as inductor

    graph: Any = program.graph
    without_alpha(graph)
    powers_once(graph)
    examples = examples_of(graph)

    with torch.no_grad():
        compiled: Any = inductor.compile_fx(graph, examples, config_patches=settings)
    if not settings.get("triton.cudagraphs"):
        return lambda values: compiled(*values)

    def run(values: list[Tensor]) -> list[Tensor]:
        """Copies of the outputs of what may be a CUDA graph, since its next run would overwrite them."""
        torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
        return [tensor.clone() for tensor in compiled(*values)]

    return run


def without_alpha(graph: GraphModule) -> None:
    """Rewrite `x + alpha * y` as two operations: Inductor fuses x + alpha * (a @ b) and drops alpha."""
    for node in graph.graph.nodes:
        if node.target in _SCALED and node.kwargs.get("alpha", 1) != 1 and isinstance(node.args[1], Node):
            (x, y), alpha = node.args, node.kwargs["alpha"]
            with graph.graph.inserting_before(node):
                product = graph.graph.call_function(torch.ops.aten.mul.Tensor, (y, alpha))
            product.meta["val"] = y.meta["val"] * alpha
            node.args, node.kwargs = (x, product), {}
    graph.recompile()


def powers_once(graph: GraphModule) -> None:
    """Compute a power, and values that follow from it, once instead of for each element that it scales.

    Inductor computes `1 - beta**step` inside the loop over a weight's elements, where two double-precision powers
    take as long as everything else. A value whose strides are requested is written to memory first.
    """
    aten = torch.ops.aten
    powers = {aten.pow.Scalar, aten.pow.Tensor_Scalar, aten.pow.Tensor_Tensor}
    sizes: dict[Node, int] = {}  # powers, and values of the same size computed from one
    for node in list(graph.graph.nodes):
        if node.op != "call_function" or not isinstance(value := node.meta.get("val"), Tensor):
            continue
        for power in node.all_input_nodes:
            if sizes.get(power, value.numel()) < value.numel():
                _write_first(graph, power, node)
        if node.target in powers or any(sizes.get(power) == value.numel() for power in node.all_input_nodes):
            sizes[node] = value.numel()
    graph.recompile()


def _write_first(graph: GraphModule, value: Node, user: Node) -> None:
    """Write a value to memory before it is used."""
    like = value.meta["val"]
    with graph.graph.inserting_before(user):
        arguments = (value, list(like.size()), list(like.stride()), like.storage_offset())
        written = graph.graph.call_function(torch.ops.aten.as_strided.default, arguments)
    user.replace_input_with(value, written)


# A graph run operation by operation


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
            replace_node(node, inputs[0])
        elif not inputs and not node.meta["val"].dim() and storage(node) not in results:
            numbers.append(cast(Any, node.target)(*node.args, **node.kwargs))
            with nodes.inserting_before(first):
                number = nodes.placeholder(f"number_{len(numbers)}")
            number.meta["val"] = node.meta["val"]
            replace_node(node, number)
    return numbers


def _in_place(nodes: Graph) -> None:
    """Write results over values that are not read again: intermediate ones, and tensors of a donated state.

    Without it, a donated stack of 4 MLPs takes 1.1 times as long at width 64, and 2.5 times at width 256.
    """
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
                replace_node(copy, new)
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
        with torch.no_grad(), _Expecting(_call(operation, args, kwargs)) as mode:
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
            if self.calls > 1 or _call(func, args, kwargs) != self.expected:
                raise LookupError(func)
        return func(*args, **kwargs)


def _call(operation: Any, args: Any, kwargs: Any) -> Any:
    """A call, equal to another with the same tensors and with numbers of the same types and values."""
    leaves = tree_leaves((args, kwargs))
    return operation, [id(leaf) if isinstance(leaf, Tensor) else repr(leaf) for leaf in leaves]
