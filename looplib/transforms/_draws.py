"""Random draws of a stack: the numbers that one member's graph needs are drawn beforehand, with each member's seed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from looplib._core.random import mix
from looplib._core.ranks import rank
from looplib._core.tracing import UntraceableError
from looplib.transforms._program import draws, memory_like
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
    """Turn the random numbers of a graph into its first inputs, and return the operations that draw them.

    Each member's numbers then come from its own stream, as they would alone.
    """
    nodes = graph.graph
    first = next(iter(nodes.nodes))
    drawn: list[Drawing] = []
    for node in list(filter(draws, nodes.nodes)):
        drawn.append(_drawing(node))
        with nodes.inserting_before(first):
            placeholder = nodes.placeholder(f"drawn_{len(drawn)}")
        placeholder.meta.update(node.meta)
        node.replace_all_uses_with(placeholder)
    nodes.eliminate_dead_code(is_impure_node=lambda node: node.op in ("placeholder", "output"))
    graph.recompile()
    return drawn


class Drawing(NamedTuple):
    """Operation that draws random numbers: `fill(into)` draws those of one member, in memory order."""

    like: Tensor
    fill: Callable[[Tensor], Any]

    def empty(self, count: int) -> Tensor:
        span = 1 + sum((size - 1) * stride for size, stride in zip(self.like.size(), self.like.stride(), strict=True))
        size, stride = (count, *self.like.size()), (span, *self.like.stride())
        return torch.empty_strided(size, stride, dtype=self.like.dtype, device=self.like.device)


def _drawing(node: Node) -> Drawing:
    """The drawing of an operation, independent of its graph. Its distribution may depend only on shapes, not on tensors."""
    target = cast(Any, node.target)
    name = str(target).split(".")[1]
    if node.all_input_nodes and name not in _IN_PLACE | _LIKE:
        raise UntraceableError(
            f"the step draws random numbers by {target}, whose distribution depends on tensors, and which cannot be "
            "mapped over members: draw them from torch.rand, and make of them what is needed"
        )
    args: Any = torch.fx.node.map_aggregate(node.args, _like)
    kwargs = node.kwargs
    if name in _IN_PLACE:  # draws like a single step; the functional forms in a graph do not keep memory order
        method = getattr(Tensor, f"{name.removesuffix('_functional')}_")
        return Drawing(args[0], lambda into: method(into, *args[1:], **kwargs))
    return Drawing(_like(node), lambda into: into.copy_(target(*args, **kwargs)))


def _like(value: Any) -> Any:
    """Memory with the layout of a node's value; anything else unchanged."""
    return memory_like(value.meta["val"]) if isinstance(value, Node) else value


def draw_members(
    drawings: Sequence[tuple[Drawing, int]], state: TrainState, generators: Sequence[torch.Generator]
) -> list[Tensor]:
    """Draw for each member from its own stream, as its step alone would.

    Args:
        drawings: the operations, each with the index of its microbatch.
        state: the stack.
        generators: generators of the device that is used.
    """
    seeds: Any = state.seed
    drawn = [drawing.empty(len(seeds)) for drawing, _ in drawings]
    rows = list(zip(*(tensor.unbind() for tensor in drawn), strict=True))
    for seed, row in zip(seeds, rows, strict=True):
        before = None
        for (drawing, stream), into in zip(drawings, row, strict=True):
            if stream != before:  # each microbatch has its own stream, and draws everything at once
                begin, before = mix(seed, state.step, rank(), stream), stream
                for generator in generators:
                    generator.manual_seed(begin)
            drawing.fill(into)
    return [tensor.contiguous() for tensor in drawn]
