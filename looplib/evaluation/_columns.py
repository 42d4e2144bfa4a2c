"""Prediction columns: an output as named columns with one row per sample, and their bytes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple, Protocol

import orjson
import torch
from torch import Tensor

from looplib._core import trees
from looplib._core.checks import check
from looplib._core.trees import pointer
from looplib.checkpoint._format import bytes_of

TEXT = "str"  # the dtype of a column of strings


class Column(Protocol):
    """Column of an output, for the samples of one batch."""

    @property
    def dtype(self) -> str:
        """Such as "float32", or "str"."""

    @property
    def runs(self) -> list[tuple[int, list[int]]]:
        """Counts and shapes of consecutive rows with the same shape."""

    def raw(self) -> bytes:
        """Bytes of the rows as they are in memory; a string becomes a line of JSON."""

    def values(self) -> Iterable[Any]:
        """The rows as JSON values."""


class _Texts(NamedTuple):
    """One string per sample."""

    texts: Sequence[str]
    dtype: str = TEXT

    @property
    def runs(self) -> list[tuple[int, list[int]]]:
        return [(len(self.texts), [])]

    def raw(self) -> bytes:
        return b"".join(map(line_of, self.texts))

    def values(self) -> Iterable[Any]:
        return self.texts


class _Rows(NamedTuple):
    """Tensors with one row per sample, each of a single row shape; a nested tensor has one for each sample."""

    parts: Sequence[Tensor]
    dtype: str

    @property
    def runs(self) -> list[tuple[int, list[int]]]:
        return [(len(part), list(part.shape[1:])) for part in self.parts]

    def raw(self) -> bytes:
        return b"".join(map(_raw, self.parts))

    def values(self) -> Iterable[Any]:
        return chain.from_iterable(_real(part).tolist() for part in self.parts)


def rows_in(column: Column) -> int:
    """Number of rows of a column."""
    return sum(count for count, _ in column.runs)


def is_texts(value: Any) -> bool:
    """True for a list of strings, which is one leaf of an output."""
    return isinstance(value, (list, tuple)) and bool(value) and all(isinstance(item, str) for item in value)


def named_leaves(output: Any) -> dict[str, Any]:
    """Leaves of an output by name, such as `chance` or `deep/x/0`, or `output` if the output is a single leaf."""
    leaves = [(pointer(path).removeprefix("/") or "output", leaf) for path, leaf in trees.leaves(output, is_texts)]
    (twice, count), *_ = [*Counter(name for name, _ in leaves).most_common(1), ("", 0)]
    check(count < 2, f"two leaves of the output are both named {twice!r}: give their keys different names")
    return dict(leaves)


def columns_of(output: Any) -> dict[str, Column]:
    """Columns of a batch, which all have the same number of rows."""
    columns = {name: _column(name, leaf) for name, leaf in named_leaves(output).items()}
    if len(set(map(rows_in, columns.values()))) != 1:
        shapes = ", ".join(f"{name!r} {_shape(column)}" for name, column in columns.items())
        raise ValueError(f"the output's columns differ in their number of rows: {shapes}; one row for each sample")
    return columns


def _shape(column: Column) -> str:
    runs, rows = column.runs, rows_in(column)
    return str((rows, *runs[0][1])) if len(runs) == 1 else f"{rows} rows of different shapes"


def _column(name: str, leaf: Any) -> Column:
    if is_texts(leaf):
        return _Texts(leaf)
    check(
        isinstance(leaf, Tensor) and leaf.dim(),
        f"the output's {name!r} is a {type(leaf).__name__}; predict_to writes tensors with one row for each sample, and "
        "lists of strings",
        TypeError,
    )
    dense = leaf.is_nested or leaf.layout == torch.strided
    check(dense, f"the output's {name!r} is a sparse tensor ({leaf.layout}); give {name}.to_dense()", TypeError)
    parts = [row.unsqueeze(0) for row in leaf.unbind()] if leaf.is_nested else [leaf]
    return _Rows(parts, str(leaf.dtype).removeprefix("torch."))


def described(columns: Mapping[str, Column]) -> dict[str, Any]:
    """Dtype of each column and shape of its first row, for the head of the index."""
    return {
        name: {"dtype": column.dtype, "shape": next((shape for _, shape in column.runs), [])}
        for name, column in columns.items()
    }


def check_alike(number: int, columns: Mapping[str, Column], head: Mapping[str, Any]) -> None:
    """Raise if columns change between batches in name, dtype or number of dimensions. Row widths may change."""
    kinds = {(name, column.dtype, len(shape)) for name, column in columns.items() for _, shape in column.runs}
    expected = {(name, about["dtype"], len(about["shape"])) for name, about in head.items()}
    check(
        columns.keys() == head.keys() and kinds <= expected,
        f"the outputs of batch {number} are {described(columns)}, before it {head}: give all the same names, dtypes "
        "and numbers of dimensions",
    )


def special_runs(columns: Mapping[str, Column], head: Mapping[str, Any]) -> dict[str, Any]:
    """Runs of columns whose rows cannot be counted from their bytes, since rows differ in shape or are empty."""
    return {
        name: column.runs
        for name, column in columns.items()
        if any(shape != head[name]["shape"] or 0 in shape for _, shape in column.runs)
    }


def line_of(value: Any) -> bytes:
    """A line of JSON."""
    return orjson.dumps(value) + b"\n"


def _raw(tensor: Tensor) -> bytes:
    plain = tensor.resolve_conj().resolve_neg().flatten().clone(memory_format=torch.contiguous_format)
    return bytes(bytes_of(plain.view(torch.uint8)))


def lines_of(columns: Mapping[str, Column]) -> bytes:
    """One line of JSON for each sample."""
    rows = zip(*(column.values() for column in columns.values()), strict=True)
    return b"".join(line_of(dict(zip(columns, row, strict=True))) for row in rows)


def _real(tensor: Tensor) -> Tensor:
    """Complex numbers as pairs, real and imaginary."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def numbers_of(values: list[Any], dtype: torch.dtype) -> Tensor:
    """Numbers of the rows of one shape that `lines_of` wrote, in one dimension and with NaN for null."""
    if dtype.is_complex:
        return torch.view_as_complex(torch.tensor(_with_nan(values), dtype=dtype.to_real()).view(-1, 2))
    return torch.tensor(_with_nan(values), dtype=dtype).flatten()


def _with_nan(value: Any) -> Any:
    if isinstance(value, list):
        return [*map(_with_nan, value)]
    return math.nan if value is None else value
