"""Signature of a traced graph: the inputs that it needs and the outputs that it computes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from looplib.transforms._program import ANSWER, GIVEN, RESULT, Inputs, Program, draws, storage
from looplib.transforms._watch import Held

HOSTS = "looplib_host"  # key in a node's metadata: index of the tensor in the host's answers

Sources = dict[Node, tuple[int, int]]


class Recorded(NamedTuple):
    """Results of a traced step's Python, with the fields of a `Program`."""

    outcome: Any
    afterwards: list[Callable[..., None]]
    successors: list[tuple[int, int]]
    streams: list[int]


def signed(graph: GraphModule, recorded: Recorded, inputs: Inputs) -> Program:
    """Program of a traced graph, reduced to necessary inputs and outputs."""
    nodes = graph.graph
    nodes.set_codegen(torch.fx.graph.CodeGen())
    placeholders = [node for node in nodes.find_nodes(op="placeholder") if HOSTS not in node.meta]
    sources = _sources(nodes, placeholders)
    outputs = _without_inputs(graph, sources, placeholders, dict(recorded.successors))
    constants = _lifted(graph, inputs.held)
    for node, stream in zip(filter(draws, nodes.nodes), recorded.streams, strict=True):
        node.meta["stream"] = stream
    nodes.eliminate_dead_code()
    streams = [node.meta["stream"] for node in nodes.nodes if draws(node)]
    needed = [*constants, *_needed(nodes, sources)]
    nodes.lint()
    graph.recompile()
    trained = (i for i, name in enumerate(recorded.outcome[0][0]) if inputs.state.params[name].requires_grad)
    return Program(
        graph=graph,
        inputs=needed,
        outputs=outputs,
        outcome=recorded.outcome,
        afterwards=recorded.afterwards,
        successors=recorded.successors,
        trained=frozenset(trained),
        held=inputs.held,
        streams=streams,
    )


def _sources(nodes: Graph, placeholders: list[Node]) -> Sources:
    """Move the inputs from the host's answers to the front, and return the source of each input."""
    answers = [node for node in nodes.nodes if HOSTS in node.meta]
    for node in answers:  # they are at the point where they were requested
        placeholders[0].prepend(node)
    sources = {node: (GIVEN, index) for index, node in enumerate(placeholders)}
    return sources | {node: (ANSWER, node.meta[HOSTS]) for node in answers}


def _without_inputs(
    graph: GraphModule, sources: Sources, placeholders: list[Node], successors: dict[int, int]
) -> list[tuple[int, int]]:
    """Make the graph return only what it computes, and return the location of each output."""
    (output,) = graph.graph.find_nodes(op="output")
    outputs: list[tuple[int, int]] = []
    computed: dict[Node, int] = {}
    written = _written(graph)
    for index, node in enumerate(output.args[0]):
        if index in successors and _is_copy(node, placeholders[successors[index]], written):
            node = placeholders[successors[index]]
        if node not in sources:
            computed.setdefault(node, len(computed))
        outputs.append(sources.get(node) or (RESULT, computed[node]))
    output.args = (list(computed),)
    return outputs


def _written(graph: GraphModule) -> set[int]:
    """Storages that may be written, at most: batch norm's kernels write without declaring it."""
    writers = filter(_may_write, graph.graph.nodes)
    return {storage(node) for writer in writers for node in writer.all_input_nodes if "val" in node.meta}


def _may_write(node: Node) -> bool:
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and (target._schema.is_mutable or "batch_norm" in str(target))


def _is_copy(node: Node, of: Node, written: set[int]) -> bool:
    """True if an output is a tensor of the state that a gradient function has copied in case it is written."""
    while node.target in (torch.ops.aten.clone.default, torch.ops.aten.detach.default):
        if storage(node) in written:
            return False
        (node,) = node.all_input_nodes
    return node is of


def _lifted(graph: GraphModule, held: list[Held]) -> list[tuple[int | None, Any]]:
    """Turn tensors that the step holds in Python into inputs, so that each run reads their current values."""
    nodes = graph.graph
    inputs: list[tuple[int | None, Any]] = []
    reads = {id(value): read for _, read, value in held if isinstance(value, Tensor)}
    for node in nodes.find_nodes(op="get_attr"):
        if isinstance(value := getattr(graph, str(node.target), None), Tensor):
            with nodes.inserting_before(next(iter(nodes.nodes))):
                constant = nodes.placeholder(f"constant_{len(inputs)}")
            constant.meta.update(node.meta)
            node.replace_all_uses_with(constant)
            nodes.erase_node(node)
            inputs.insert(0, (None, reads.get(id(value), partial(_itself, value))))
    return inputs


def _itself(value: Any) -> Any:
    return value


def _needed(nodes: Graph, sources: Sources) -> list[tuple[int | None, Any]]:
    """The inputs that are used, in order. The others are erased."""
    needed: list[tuple[int | None, Any]] = []
    for node in [node for node in nodes.nodes if node in sources]:
        if node.users:
            needed.append(sources[node])
        else:
            nodes.erase_node(node)
    return needed
