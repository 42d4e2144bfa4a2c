"""Programs: a traced step as a graph, with the inputs that it needs and the outputs that it computes.

A step takes and returns trees: parameters by name, records, metrics. A graph takes and returns flat lists of tensors.
`expression` returns both the list and a Python expression, such as `{"weight": v[0], "bias": v[1]}`, which rebuilds
the tree faster than a walk over it.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node

from looplib._core.copies import is_shared, leaves_of
from looplib._core.forward_writes import INTACT, WROTE
from looplib._core.torch_private import pytree
from looplib._core.tracing import UntraceableError
from looplib._core.trees import same
from looplib.optim.traced_update import FUSED_UPDATE
from looplib.steps import Outcome
from looplib.transforms.closures import Variable, is_installed, is_plain, walk
from looplib.types import COUNTS as _COUNTS
from looplib.types import TrainState


class Count:
    """Placeholder for a state's field that is not a tensor, whose value a trace would freeze if it were read."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name

    def refuse(self, *_: Any) -> Any:
        raise UntraceableError(
            f"state.{self.name} was read for its value, which the graph of a step would keep for ever: ask for what "
            f"follows from it by ll.transforms.on_host(function, state.{self.name}), which is called again at each step"
        )


# All that can be done with a number, or with the user's `extra`, which is often a dict.
_names = {*vars(int), *vars(dict), "__str__", "__format__"} - {"__new__", "__getattribute__", *vars(Count)}
for _name in _names:
    setattr(Count, _name, Count.refuse)


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

    written = Expression(write(tree), [*tensors], constants)
    tensors.clear()  # these functions refer to each other, and so they and their list wait for the garbage collector
    return written


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
    tensors = expression(tree).tensors
    paths = [path for path, leaf in pytree.tree_flatten_with_path(tree)[0] if isinstance(leaf, Tensor)]
    try:
        read: Callable[[Any], list[Tensor]] = eval(
            f"lambda t: [{', '.join([f't{pytree.keystr(p)}' for p in paths])}]"
        )
        if list(map(id, read(tree))) == list(map(id, tensors)):
            return read
    except Exception:  # of any kind: a key, or a container of the user's, has a name that is no code
        pass
    return lambda t: expression(t).tensors


def as_answer(returned: Any) -> Expression:
    """Expression of a host function's result, with floats as tensors."""
    return expression(pytree.tree_map(_float_as_tensor, returned))


def _float_as_tensor(leaf: Any) -> Any:
    is_float = isinstance(leaf, numbers.Real) and not isinstance(leaf, numbers.Integral)  # NumPy's too
    return torch.tensor(float(leaf), dtype=torch.float64, device="cpu") if is_float else leaf


# Programs


COUNTS = (*_COUNTS, "extra")  # values outside a graph

StepForGraphs = Callable[[TrainState, Any], Outcome]  # a step without its counts


def held_by(*functions: Any) -> list[Variable]:
    """Plain values and tensors outside the state that these functions may read.

    Variables of looplib's own wrappers are left out, since they never change.
    """
    variables = walk(*functions)
    return [variable for variable in variables if is_plain(variable.value) and not is_installed(variable.owner)]


def changed(captured: Iterable[Variable]) -> list[str]:
    """Names of the values that have changed. A tensor may be replaced by one of the same shape and dtype."""
    return [path for _, path, read, value in captured if (now := read()) is not value and not _alike(now, value)]


def _alike(now: Any, value: Any) -> bool:
    if isinstance(now, Tensor) and isinstance(value, Tensor):
        return kind_of(now) == kind_of(value)
    return same(now, value)


class HostInput(NamedTuple):
    """A call of `on_host`: a question to the host before the graph runs.

    Attributes:
        function: the function passed to `on_host`.
        sources: source of each argument: ("input", index), ("count", name) or ("value", the value itself).
        answers: the next HostInput, or a compiled program, by the part of the answer that is not a tensor.
    """

    function: Callable[..., Any]
    sources: list[Any]
    answers: dict[Any, Any]

    def arguments(self, flat: list[Tensor] | dict[int, Tensor], counts: Mapping[str, Any]) -> list[Any]:
        """Values of its arguments for this state."""
        return [
            flat[value] if kind == "input" else counts[value] if kind == "count" else value
            for kind, value in self.sources
        ]


class Inputs(NamedTuple):
    """Inputs for which a program is made.

    Attributes:
        state, batch: examples of the shapes, dtypes and devices that the program accepts.
        flat: tensors of both.
        counts: fields of the state that are not trees of tensors.
        captured: values outside the state that the step may read.
        questions: table of the questions that the step asks, from its first on.
    """

    state: TrainState
    batch: Any
    flat: list[Tensor]
    counts: Mapping[str, Any]
    captured: list[Variable]
    questions: dict[Any, Any]


@dataclass(frozen=True)
class Traced:
    """A step as it was recorded.

    Attributes:
        graph: takes numbers drawn beforehand (if any), the constants, the tensors of the host's answers, and those of
            state and batch, in this order. It returns every tensor of the outcome.
        constants: functions that read the tensors that the step holds in Python.
        input_count: number of tensors of state and batch.
        outcome: an `Outcome` and the arguments of `checks`, as a tree.
        checks: functions to call after a run.
        replaced: index of a tensor of the outcome -> index in the state of the one that it replaces.
        trained: indices of the parameters of the outcome that require a gradient.
        captured: values outside the state that it may have read.
        streams: for each operation that draws random numbers, the index of its microbatch.
        place: table of answers, and the key under which the compiled program belongs there.
    """

    graph: GraphModule
    constants: list[Callable[[], Tensor]]
    input_count: int
    outcome: Any
    checks: list[Callable[..., None]]
    replaced: dict[int, int]
    trained: frozenset[int]
    captured: list[Variable]
    streams: list[int]
    place: tuple[dict[Any, Any], Any]


@dataclass(frozen=True)
class Program:
    """A graph and its calling convention.

    Attributes:
        graph: takes the tensors that it needs as arguments, and returns those that it computes.
        inputs: index of each argument among all that the traced graph takes.
        rebuild: `rebuild(result, values, counts) -> (outcome, arguments of checks)`, from the graph's result and all
            that the traced graph takes.
        written: names of the parameters that it writes in place.
        traced: the step that it was made from.
    """

    graph: GraphModule
    inputs: list[int]
    rebuild: Callable[[Any, Any, Any], tuple[Any, Any]]
    written: set[str]
    traced: Traced


def program_of(traced: Traced, donate: bool = False, own_memory: bool = True) -> Program:
    """Program of a traced step, whose graph is changed for it.

    Args:
        traced: the step.
        donate: if True, the graph overwrites the old state with the new one as its last operation.
        own_memory: if True, results share no memory with the states, which a later step may overwrite, nor do tensors of
            the new state with each other. Tensors that autograd wraps have no memory that could be compared.
    """
    graph = traced.graph.graph
    (output,) = graph.find_nodes(op="output")
    placeholders = graph.find_nodes(op="placeholder")
    values = {node: index for index, node in enumerate(placeholders)}
    inputs = placeholders[len(placeholders) - traced.input_count :]
    old = {index: inputs[place] for index, place in traced.replaced.items()}
    results: list[Node] = list(output.args[0])
    graph.erase_node(output)

    if not donate:
        _check_unwritten(graph, {name: old[index] for index, name in enumerate(traced.outcome[0][0]) if index in old})
    written = written_in(graph)
    for index, node in old.items():
        if is_copy(results[index], node, written):
            results[index] = node
    if own_memory:
        _separate(graph, results, old, {*map(storage, inputs)}, len(expression(traced.outcome[0][:3]).tensors))
    names = _overwrite(traced, graph, results, old) if donate else set[str]()

    computed = {node: index for index, node in enumerate(dict.fromkeys(n for n in results if n not in values))}
    graph.output(list(computed))
    graph.eliminate_dead_code()
    needed = [node for node in placeholders if node.users]
    for node in values.keys() - needed:
        graph.erase_node(node)
    graph.lint()
    traced.graph.recompile()

    def code_of(_: Tensor, index: int) -> str:
        node = results[index]
        if node in values:
            return f"v[{values[node]}]"
        code = f"r[{computed[node]}]"
        return f"{code}.requires_grad_()" if index in traced.trained else code

    return Program(
        graph=traced.graph,
        inputs=[values[node] for node in needed],
        rebuild=expression(traced.outcome, code_of).build("r, v, n"),
        written=names,
        traced=traced,
    )


def _check_unwritten(graph: Graph, params: Mapping[str, Node]) -> None:
    """Raise if the forward pass writes to parameters through `tensor.data`, which torch does not count."""
    written: set[int] = set()
    for node in graph.nodes:
        if isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable:
            for argument, value in zip(node.target._schema.arguments, node.args, strict=False):
                written |= {storage(leaf) for leaf in leaves_of(value) if argument.is_write and is_tensor(leaf)}
    if names := [name for name, node in params.items() if storage(node) in written]:
        raise RuntimeError(WROTE.format(names=", ".join(names), state=INTACT))


def written_in(graph: Graph) -> set[int]:
    """Storages that may be written, at most: batch norm's kernels write without declaring it."""
    writers = filter(_may_write, graph.nodes)
    return {storage(node) for writer in writers for node in writer.all_input_nodes if "val" in node.meta}


def _may_write(node: Node) -> bool:
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and (target._schema.is_mutable or "batch_norm" in str(target))


def is_copy(node: Node, of: Node, written: set[int]) -> bool:
    """True if an output is a tensor of the state that a gradient function has copied in case it is written."""
    while node.target in (torch.ops.aten.clone.default, torch.ops.aten.detach.default):
        if storage(node) in written:
            return False
        (node,) = node.all_input_nodes
    return node is of


def _separate(graph: Graph, results: list[Node], old: Mapping[int, Node], taken: set[int], of_state: int) -> None:
    """Copy results that share memory in `taken` or with the new state, whose tensors come first and are `of_state`."""
    for index, node in enumerate(results):
        if node is old.get(index):
            continue
        if storage(node) in taken or (index < of_state and node.op == "placeholder"):
            clone = graph.call_function(torch.ops.aten.clone.default, (node,))
            clone.meta["val"] = node.meta["val"].clone()
            results[index] = clone
        if index < of_state:
            taken.add(storage(results[index]))


def _overwrite(traced: Traced, graph: Graph, results: list[Node], old: Mapping[int, Node]) -> set[str]:
    """Overwrite the old state with the new one, and return the names of the parameters written."""
    # A tensor that the members of a stack have shared, if it is written after all, gets new memory with one for each member.
    unshared = {index: node for index, node in old.items() if not is_shared(node.meta["val"])}
    new = {index: results[index] for index, node in unshared.items() if results[index] is not node}
    for index in new:
        results[index] = old[index]
    for index in new.keys() - _written_by_kernels(graph, results, old, new):
        copy = graph.call_function(torch.ops.aten.copy_.default, (old[index], new[index]))
        copy.meta["val"] = old[index].meta["val"]
    return {name for index, name in enumerate(traced.outcome[0][0]) if index in new}  # the parameters come first


def _written_by_kernels(
    graph: Graph, results: Sequence[Node], old: Mapping[int, Node], new: Mapping[int, Node]
) -> set[int]:
    """Let fused kernels write to tensors of the state that nothing reads later, in place of copies of them."""
    last_read: dict[int, Node] = {}
    for node in graph.nodes:
        last_read |= {storage(read): node for read in node.all_input_nodes if is_tensor(read)}
    returned, changed = {*results}, set[int]()
    for index, copy in new.items():
        state = old[index]
        copied = copy.target is torch.ops.aten.clone.default and is_same(copy.all_input_nodes[0], state)
        written = [node.target for node in copy.users] == [FUSED_UPDATE]
        alike = kind_of(copy.meta["val"]) == kind_of(state.meta["val"])
        if copied and written and alike and copy not in returned and last_read[storage(state)] is copy:
            replace_node(copy, state)
            changed.add(index)
    return changed


def replace_node(node: Node, by: Node) -> None:
    """Remove an operation, and use another result in place of its own."""
    node.replace_all_uses_with(by)
    node.graph.erase_node(node)


def draws(node: Node) -> bool:
    """True if an operation draws random numbers."""
    return isinstance(node.target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags


def storage(node: Node) -> int:
    """Memory that holds the result of an operation."""
    value: Tensor = node.meta["val"]
    return int(value.untyped_storage()._cdata)


def is_tensor(node: Any) -> bool:
    """True if the result of an operation is one tensor."""
    return isinstance(node, Node) and isinstance(node.meta.get("val"), Tensor)


def is_same(node: Node, viewed: Node) -> bool:
    """True if two results are the same numbers in the same memory, read in the same way."""
    if not is_tensor(viewed) or storage(node) != storage(viewed):
        return False
    value, of_viewed = node.meta["val"], viewed.meta["val"]
    # A conjugate is a view of the same memory that is read differently, and so is its imaginary part.
    read_alike = value.is_conj() == of_viewed.is_conj() and value.is_neg() == of_viewed.is_neg()
    return (
        read_alike and kind_of(value) == kind_of(of_viewed) and value.storage_offset() == of_viewed.storage_offset()
    )


def memory_like(tensor: Tensor) -> Tensor:
    """New memory with the layout of a tensor, outside all transforms."""
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=tensor.device)


def fakes(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Tensors without values like these."""
    from torch.fx.experimental.symbolic_shapes import ShapeEnv  # imported here because it imports sympy

    with FakeTensorMode(shape_env=ShapeEnv()):  # otherwise Inductor would not use its cache
        return [*map(memory_like, tensors)]


def examples_of(graph: GraphModule) -> list[Tensor]:
    """Tensors without values like the graph's inputs."""
    return fakes(node.meta["val"] for node in graph.graph.find_nodes(op="placeholder"))
