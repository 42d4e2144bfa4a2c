"""Graph passes: rewrite a graph so that Inductor generates correct and fast code."""

from __future__ import annotations

from typing import Any

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
                if y.meta["val"].dtype is not wide:
                    value = y.meta["val"].to(wide)
                    y = graph.graph.call_function(torch.ops.aten._to_copy.default, (y,), {"dtype": wide})
                    y.meta["val"] = value
                product = graph.graph.call_function(torch.ops.aten.mul.Tensor, (y, node.kwargs["alpha"]))
            product.meta["val"] = y.meta["val"]
            node.args, node.kwargs = (x, product), {}
    graph.recompile()


def stacked_where_it_goes(graph: GraphModule) -> None:
    """Replace a copied permutation of a stack by a stack of permuted tensors, which needs no copy.

    The gradient of `q, k, v = qkv.permute(...)` is an example. Inductor would write it to memory twice.
    """
    aten = torch.ops.aten
    for copy in graph.graph.find_nodes(op="call_function", target=aten.clone.default):
        if not _copies_a_permuted_stack(copy):
            continue
        permuted = copy.args[0]
        stacked, order = permuted.args
        tensors, dim = stacked.args[0], stacked.args[1] % len(order) if len(stacked.args) > 1 else 0
        order = [axis % len(order) for axis in order]
        rest = [axis - (axis > dim) for axis in order if axis != dim]
        values = [tensor.meta["val"] for tensor in tensors]
        alike = [torch.empty_strided(v.size(), v.stride(), device="meta").permute(rest) for v in values]
        if not torch.stack(alike, order.index(dim)).is_contiguous():
            continue
        with graph.graph.inserting_before(stacked):  # not at the copy: the tensors may be written in between
            parts = [graph.graph.call_function(aten.permute.default, (tensor, rest)) for tensor in tensors]
            copy.replace_all_uses_with(graph.graph.call_function(aten.stack.default, (parts, order.index(dim))))
        for node in (copy, permuted, stacked):
            graph.graph.erase_node(node)
    graph.recompile()


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
                like = power.meta["val"]
                with graph.graph.inserting_before(node):
                    arguments = (power, list(like.size()), list(like.stride()), like.storage_offset())
                    once = graph.graph.call_function(aten.as_strided.default, arguments)
                node.replace_input_with(power, once)
        if node.target in powers or any(sizes.get(power) == value.numel() for power in node.all_input_nodes):
            sizes[node] = value.numel()
    graph.recompile()
