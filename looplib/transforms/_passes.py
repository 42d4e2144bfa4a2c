"""Graph passes: rewrite a graph so that Inductor generates correct and fast code."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

_SCALED = {getattr(torch.ops.aten, name).Tensor for name in ("add", "add_", "sub", "sub_")}


def without_alpha(graph: GraphModule) -> None:
    """Rewrite `x + alpha * y` as two operations: Inductor fuses x + alpha * (a @ b) and drops alpha."""
    for node in graph.graph.nodes:
        if node.target in _SCALED and node.kwargs.get("alpha", 1) != 1 and isinstance(node.args[1], Node):
            x, y = node.args
            wide = torch.result_type(x.meta["val"], y.meta["val"])  # the dtype in which torch multiplies
            with graph.graph.inserting_before(node):
                y = _as_dtype(graph, y, wide)
                product = graph.graph.call_function(torch.ops.aten.mul.Tensor, (y, node.kwargs["alpha"]))
            product.meta["val"] = y.meta["val"]
            node.args, node.kwargs = (x, product), {}
    graph.recompile()


def _as_dtype(graph: GraphModule, node: Node, dtype: torch.dtype) -> Node:
    """A node for the same value in a dtype."""
    value = node.meta["val"]
    if value.dtype is dtype:
        return node
    converted = graph.graph.call_function(torch.ops.aten._to_copy.default, (node,), {"dtype": dtype})
    converted.meta["val"] = value.to(dtype)
    return converted


def stacked_where_it_goes(graph: GraphModule) -> None:
    """Replace a copied permutation of a stack by a stack of permuted tensors, which needs no copy.

    The gradient of `q, k, v = qkv.permute(...)` is an example. Inductor would write it to memory twice.
    """
    aten = torch.ops.aten
    for copy in graph.graph.find_nodes(op="call_function", target=aten.clone.default):
        if not _copies_a_permuted_stack(copy):
            continue
        permuted = copy.args[0]
        stacked = permuted.args[0]
        tensors, rest, dim = stacked.args[0], *_permutation_of_each(permuted)
        if not _is_contiguous(tensors, rest, dim):
            continue
        with graph.graph.inserting_before(stacked):  # not at the copy: the tensors may be written in between
            parts = [graph.graph.call_function(aten.permute.default, (tensor, rest)) for tensor in tensors]
            copy.replace_all_uses_with(graph.graph.call_function(aten.stack.default, (parts, dim)))
        for node in (copy, permuted, stacked):
            graph.graph.erase_node(node)
    graph.recompile()


def _permutation_of_each(permuted: Node) -> tuple[list[int], int]:
    """The permutation of each tensor of a permuted stack, and the dimension along which they are stacked then."""
    stacked, axes = cast(Any, permuted.args)
    dim = stacked.args[1] % len(axes) if len(stacked.args) > 1 else 0
    order = [axis % len(axes) for axis in axes]
    return [axis - (axis > dim) for axis in order if axis != dim], order.index(dim)


def _is_contiguous(tensors: list[Node], permutation: list[int], dim: int) -> bool:
    """True if a stack of the permuted tensors is contiguous."""
    values = [tensor.meta["val"] for tensor in tensors]
    alike = [torch.empty_strided(v.size(), v.stride(), device="meta").permute(permutation) for v in values]
    return torch.stack(alike, dim).is_contiguous()


def _copies_a_permuted_stack(copy: Node) -> bool:
    """True for the contiguous copy of a permutation of a stack, neither of which is used for anything else."""
    permuted: Any = copy.args[0]
    if permuted.target is not torch.ops.aten.permute.default or len(permuted.users) > 1:
        return False
    stacked = permuted.args[0]
    contiguous = copy.kwargs.get("memory_format") is torch.contiguous_format
    return contiguous and stacked.target is torch.ops.aten.stack.default and len(stacked.users) == 1


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
