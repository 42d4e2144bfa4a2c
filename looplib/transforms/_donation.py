"""Donation in graphs: overwrite the old state with the new one as the graph's last operation."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from looplib.optim._fused_op import FUSED_UPDATE
from looplib.transforms._expression import expression, kind_of
from looplib.transforms._program import GIVEN, RESULT, Program, is_same, is_tensor, storage


def donated(program: Program) -> Program:
    """A program that overwrites the old state with the new one."""
    editing = _Editing(program)
    copies = _copies(program, editing)
    written = _names(program, copies.keys())
    _keep_old_values(program, editing, {storage(old) for old, _ in copies.values()})
    _let_kernels_write(editing, copies)
    for old, new in copies.values():
        copy = editing.graph.call_function(torch.ops.aten.copy_.default, (old, new))
        copy.meta["val"] = old.meta["val"]
    left = sorted({index for kind, index in editing.outputs if kind == RESULT})
    editing.graph.output([editing.returned[index] for index in left])
    return replace(
        program,
        graph=GraphModule(program.graph, editing.graph),
        inputs=editing.inputs,
        outputs=[(kind, left.index(index) if kind == RESULT else index) for kind, index in editing.outputs],
        written=written,
    )


def with_results_apart(program: Program) -> Program:
    """A program whose results share no memory with the states, which a later step may overwrite, nor within a state.

    An update that copies one tensor of a state into another, such as an average's first one, leaves one result for both.
    """
    editing = _Editing(program)
    tensors = expression(program.outcome).tensors
    count = len(expression(program.outcome[0][:3]).tensors)  # the new state comes first
    given = {(GIVEN, old) for _, old in program.successors} | {*program.outputs[:count]}
    state = {storage(editing.placeholders[source]) for source in given & editing.placeholders.keys()}
    state |= {storage(editing.returned[source]) for kind, source in program.outputs[:count] if kind == RESULT}
    seen: set[int] = set()
    for index, (kind, source) in enumerate(program.outputs[:count]):
        if kind == RESULT and (memory := storage(editing.returned[source])) in seen:
            node = editing.output(index, tensors[index])
            editing.outputs[index] = RESULT, len(editing.returned)
            editing.returned.append(editing.clone(node))
        elif kind == RESULT:
            seen.add(memory)
    for index, output in list(enumerate(program.outputs))[count:]:
        kind, source = output
        if output in given or (kind == RESULT and storage(editing.returned[source]) in state):
            node = editing.output(index, tensors[index])
            editing.outputs[index] = RESULT, len(editing.returned)
            editing.returned.append(editing.clone(node))
    if editing.outputs == program.outputs:
        return program
    editing.graph.output(editing.returned)
    graph = GraphModule(program.graph, editing.graph)
    return replace(program, graph=graph, inputs=editing.inputs, outputs=editing.outputs)


class _Editing:
    """A copy of a program's graph to which operations are added."""

    def __init__(self, program: Program) -> None:
        self.graph = Graph()
        self.returned: list[Node] = list(self.graph.graph_copy(program.graph.graph, {}))  # type: ignore[arg-type]
        self.inputs, self.outputs = list(program.inputs), list(program.outputs)
        pairs = zip(self.inputs, self.graph.find_nodes(op="placeholder"), strict=True)
        self.placeholders = {source: node for source, node in pairs if source[0] is not None}

    def input(self, source: tuple[int, int], like: Tensor) -> Node:
        """The placeholder of an input, added if there is none."""
        if source not in self.placeholders:
            with self.graph.inserting_before(next(iter(self.graph.nodes))):
                placeholder = self.graph.placeholder(f"taken_{len(self.inputs)}")
            placeholder.meta["val"] = like
            self.placeholders[source] = placeholder
            self.inputs.insert(0, source)
        node: Node = self.placeholders[source]
        return node

    def output(self, index: int, like: Tensor) -> Node:
        """The node of an output: one that the graph computes, or one of its inputs."""
        kind, source = self.outputs[index]
        return self.returned[source] if kind == RESULT else self.input((kind, source), like)

    def clone(self, node: Node) -> Node:
        clone: Node = self.graph.call_function(torch.ops.aten.clone.default, (node,))
        clone.meta["val"] = node.meta["val"].clone()
        return clone


def _copies(program: Program, editing: _Editing) -> dict[int, tuple[Node, Node]]:
    """Tensors to overwrite and their new values, by index among the outputs, which become those inputs."""
    tensors = expression(program.outcome).tensors
    state = {storage(node) for source, node in editing.placeholders.items() if source[0] == GIVEN}
    copies: dict[int, tuple[Node, Node]] = {}
    for index, old in program.successors:
        if editing.outputs[index] == (GIVEN, old):
            continue
        new = editing.output(index, tensors[index])
        if new.op == "placeholder" or storage(new) in state:  # another copy might overwrite it first
            new = editing.clone(new)
        copies[index] = editing.input((GIVEN, old), tensors[index]), new
        editing.outputs[index] = GIVEN, old
    return copies


def _keep_old_values(program: Program, editing: _Editing, written: set[int]) -> None:
    """Clone other outputs that use overwritten memory, such as a metric that is a tensor of the old state."""
    replaced = {index for index, _ in program.successors}
    holders: dict[Any, Node] = {
        **editing.placeholders,
        **{(RESULT, i): node for i, node in enumerate(editing.returned)},
    }
    for index, output in enumerate(editing.outputs):
        node = None if index in replaced else holders.get(output)
        if node is not None and storage(node) in written:
            editing.outputs[index] = RESULT, len(editing.returned)
            editing.returned.append(editing.clone(node))


def _let_kernels_write(editing: _Editing, copies: dict[int, tuple[Node, Node]]) -> None:
    """Let a fused kernel write to a tensor of the state that nothing reads later, in place of a copy of it."""
    last_read: dict[int, Node] = {}
    for node in editing.graph.nodes:
        last_read |= {storage(read): node for read in node.all_input_nodes if is_tensor(read)}
    returned = {editing.returned[source] for kind, source in editing.outputs if kind == RESULT}
    for index, (old, new) in [*copies.items()]:
        copied = new.target is torch.ops.aten.clone.default and is_same(new.all_input_nodes[0], old)
        written = [node.target for node in new.users] == [FUSED_UPDATE]
        alike = kind_of(new.meta["val"]) == kind_of(old.meta["val"])
        if copied and written and alike and new not in returned and last_read[storage(old)] is new:
            new.replace_all_uses_with(old)
            editing.graph.erase_node(new)
            del copies[index]


def _names(program: Program, indices: Iterable[int]) -> tuple[set[str], set[str]]:
    """Names of the parameters and the buffers at these indices of the outcome."""
    params, opt_state, buffers = program.outcome[0][:3]
    first_buffer = len(params) + len(expression(opt_state).tensors)
    at = {**dict(enumerate(params)), **dict(enumerate(buffers, first_buffer))}
    names = [(index, at[index]) for index in indices if index in at]
    return {name for i, name in names if i < len(params)}, {name for i, name in names if i >= len(params)}
