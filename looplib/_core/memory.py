"""Tensors of trees, and which of them share memory without being the same tensor."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from looplib._core.torch_private import pytree
from looplib._core.torch_storage import byte_range, memory_of


def tensors_in(tree: Any) -> Iterator[Tensor]:
    return (leaf for leaf in pytree.tree_iter(tree) if isinstance(leaf, Tensor))


def named_tensors(root: str, tree: Any) -> dict[str, Tensor]:
    """The tensors of a tree by their paths, which start with the name of its root."""
    leaves = pytree.tree_flatten_with_path(tree)[0]
    return {root + pytree.keystr(path): leaf for path, leaf in leaves if isinstance(leaf, Tensor)}


def overlaps(tensors: Mapping[str, Tensor]) -> list[tuple[str, str]]:
    """Names of each two tensors whose ranges in one memory overlap, in their order.

    The columns of a matrix count as overlapping too, though none of their elements is the same. Tensors whose memory is
    not known overlap with none, and those that may lie anywhere in it with all of it (see `_core.torch_storage`).
    """
    spans: list[tuple[int, int, int, int]] = []
    for number, tensor in enumerate(tensors.values()):
        begin, end = byte_range(tensor)
        if (address := memory_of(tensor)) is not None and begin < end:
            spans.append((address, begin, end, number))
    pairs: list[tuple[int, int]] = []
    # Of each earlier tensor that ends after this one begins: its memory, end and number.
    reaching: list[tuple[int, int, int]] = []
    for address, begin, end, number in sorted(spans):
        reaching = [span for span in reaching if span[0] == address and span[1] > begin]
        pairs += [(max(other, number), min(other, number)) for _, _, other in reaching]
        reaching.append((address, end, number))
    names = [*tensors]
    return [(names[first], names[second]) for second, first in sorted(pairs)]
