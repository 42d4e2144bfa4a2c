"""Outputs of prediction: their leaves by name, and concatenation of the outputs of microbatches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from looplib._core import trees
from looplib._core.checks import check
from looplib._core.trees import pointer


def is_texts(value: Any) -> bool:
    """True for a list of strings, which is one leaf of an output."""
    return isinstance(value, (list, tuple)) and bool(value) and all(isinstance(item, str) for item in value)


def named_leaves(output: Any) -> dict[str, Any]:
    """Leaves of an output by name, such as `chance` or `deep/x/0`, or `output` if the output is a single leaf."""
    leaves = [(pointer(path).removeprefix("/") or "output", leaf) for path, leaf in trees.leaves(output, is_texts)]
    for name, count in Counter(name for name, _ in leaves).items():
        check(count == 1, f"two leaves of the output are both named {name!r}: give their keys different names")
    return dict(leaves)


def count_rows(name: str, leaf: Any) -> int:
    """Number of rows of a leaf. Raises TypeError unless it is a tensor or a list of strings."""
    check(
        is_texts(leaf) or (isinstance(leaf, Tensor) and leaf.dim() > 0),
        f"the output's {name!r} is a {type(leaf).__name__}; give tensors with one row for each sample, and lists of "
        "strings",
        TypeError,
    )
    return len(leaf)


def end_to_end(counts: list[int], outputs: list[Any]) -> Any:
    """Concatenate the outputs of parts of one batch, which have these numbers of samples."""
    for count, output in zip(counts, outputs, strict=True):
        for name, leaf in named_leaves(output).items():
            rows = count_rows(name, leaf)
            check(
                rows == count,
                f"the output's {name!r} has {rows} rows for {count} samples, which are part of a batch: give one row "
                "for each sample",
            )
    names = iter(named_leaves(outputs[0]))
    try:
        return trees.map_leaves(lambda *leaves: _joined(next(names), leaves), *outputs, is_leaf=is_texts)
    except ValueError as error:
        raise ValueError(f"the outputs of two parts of a batch do not fit together: {error}") from error


def _joined(name: str, leaves: Sequence[Any]) -> Any:
    if all(map(is_texts, leaves)):
        return [*chain.from_iterable(leaves)]
    kinds = [type(leaf).__name__ for leaf in leaves]
    check(
        all(isinstance(leaf, Tensor) for leaf in leaves),
        f"the output's {name!r} is a {' and a '.join(kinds)} in parts of one batch; give the same kind for each batch",
        TypeError,
    )
    shapes = " and ".join(str(tuple(leaf.shape)) for leaf in leaves)
    check(
        len({leaf.shape[1:] for leaf in leaves}) == 1,
        f"{name!r} has shapes {shapes}; pad the rows to one shape, such as the longest that generate may return, or "
        "decode them to strings",
    )
    return torch.cat(list(leaves))
