"""Random draws of a stack: what the graph of one member draws is drawn beforehand, by each member's own seed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from looplib._core.random import mix
from looplib._core.ranks import rank
from looplib._core.tracing import UntraceableError
from looplib.transforms._program import draws
from looplib.types import TrainState

_IN_PLACE = {
    "bernoulli",
    "cauchy",
    "exponential",
    "geometric",
    "log_normal",
    "normal_functional",
    "random",
    "uniform",
}

_LIKE = {"rand_like", "randn_like", "randint_like"}


def drawn_beforehand(graph: GraphModule) -> list[Drawing]:
    """Take the random numbers of a graph for inputs, its first ones, and return what draws each of them.

    So each member's come from a stream of its own, just as they would alone.
    """
    nodes = graph.graph
    first = next(iter(nodes.nodes))
    drawn: list[Drawing] = []
    for node in [node for node in nodes.nodes if draws(node)]:
        drawn.append(_drawing(node))
        with nodes.inserting_before(first):
            placeholder = nodes.placeholder(f"drawn_{len(drawn)}")
        placeholder.meta.update(node.meta)
        node.replace_all_uses_with(placeholder)
    nodes.eliminate_dead_code(is_impure_node=lambda node: node.op in ("placeholder", "output"))
    graph.recompile()
    return drawn


class Drawing(NamedTuple):
    """An operation that draws random numbers: `fill(into)` draws those of one member, in their order in memory."""

    like: Tensor
    fill: Callable[[Tensor], Any]

    def empty(self, count: int) -> Tensor:
        span = 1 + sum((size - 1) * stride for size, stride in zip(self.like.size(), self.like.stride(), strict=True))
        size, stride = (count, *self.like.size()), (span, *self.like.stride())
        return torch.empty_strided(size, stride, dtype=self.like.dtype, device=self.like.device)


def _drawing(node: Node) -> Drawing:
    """The drawing of an operation, apart from its graph: its distribution must depend on no tensor, only on its shape."""
    target = cast(Any, node.target)
    name = str(target).split(".")[1]
    if node.all_input_nodes and name not in _IN_PLACE | _LIKE:
        raise UntraceableError(
            f"the step draws random numbers by {target}, whose distribution depends on tensors, and which cannot be "
            "mapped over members: draw them from torch.rand, and make of them what is needed"
        )

    def like(value: Any) -> Any:
        if not isinstance(value, Node):
            return value
        meta = value.meta["val"]
        return torch.empty_strided(meta.size(), meta.stride(), dtype=meta.dtype, device=meta.device)

    args: Any = torch.fx.node.map_aggregate(node.args, like)
    kwargs = node.kwargs
    if name in _IN_PLACE:  # as a step alone draws; the functional forms that a graph has keep no order of memory
        method = getattr(Tensor, f"{name.removesuffix('_functional')}_")
        return Drawing(args[0], lambda into: method(into, *args[1:], **kwargs))
    return Drawing(like(node), lambda into: into.copy_(target(*args, **kwargs)))


def draw_members(
    drawings: Sequence[tuple[Drawing, int]], state: TrainState, generators: Sequence[torch.Generator]
) -> list[Tensor]:
    """Draw for each member from its own stream, as a step of it alone would.

    Args:
        drawings: the operations, each with the microbatch that it draws for.
        state: the stack.
        generators: of the device that is drawn on.
    """
    seeds: Any = state.seed
    drawn = [drawing.empty(len(seeds)) for drawing, _ in drawings]
    rows = list(zip(*(tensor.unbind() for tensor in drawn), strict=True))
    for seed, row in zip(seeds, rows, strict=True):
        before = None
        for (drawing, stream), into in zip(drawings, row, strict=True):
            if stream != before:  # each microbatch has a stream of its own, and draws all it needs at once
                begin, before = mix(seed, state.step, rank(), stream), stream
                for generator in generators:
                    generator.manual_seed(begin)
            drawing.fill(into)
    return [tensor.contiguous() for tensor in drawn]
