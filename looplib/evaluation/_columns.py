"""Prediction columns: an output as named columns with one row per sample, and their bytes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson
import torch
from torch import Tensor

from looplib._core import trees
from looplib._core.trees import pointer
from looplib.checkpoint._format import bytes_of

TEXT = "str"  # the dtype of a column of strings


@dataclass(frozen=True)
class Column:
    """Column of an output, for the samples of one batch.

    Attributes:
        dtype: such as "float32", or "str".
        parts: tensors with one row per sample, each of a single row shape; a nested tensor has one for each sample.
            For strings: the list of them.
    """

    dtype: str
    parts: list[Any]

    @property
    def runs(self) -> list[tuple[int, list[int]]]:
        """Counts and shapes of consecutive rows with the same shape."""
        if self.dtype == TEXT:
            return [(len(self.parts), [])]
        return [(len(part), list(part.shape[1:])) for part in self.parts]

    @property
    def rows(self) -> int:
        return sum(count for count, _ in self.runs)


def is_texts(value: Any) -> bool:
    """True for a list of strings, which is one leaf of an output."""
    return isinstance(value, (list, tuple)) and bool(value) and all(isinstance(item, str) for item in value)


def named_leaves(output: Any) -> dict[str, Any]:
    """Leaves of an output by name, such as `chance` or `deep/x/0`, or `output` if the output is a single leaf."""
    leaves = [(pointer(path).removeprefix("/") or "output", leaf) for path, leaf in trees.leaves(output, is_texts)]
    if twice := [name for name, count in Counter(name for name, _ in leaves).items() if count > 1]:
        raise ValueError(f"two leaves of the output are both named {twice[0]!r}: give their keys different names")
    return dict(leaves)


def columns_of(output: Any) -> dict[str, Column]:
    """Columns of a batch, which all have the same number of rows."""
    columns = {name: _column(name, leaf) for name, leaf in named_leaves(output).items()}
    if len({column.rows for column in columns.values()}) != 1:
        shapes = ", ".join(f"{name!r} {_shape(column)}" for name, column in columns.items())
        raise ValueError(f"the output's columns differ in their number of rows: {shapes}; one row for each example")
    return columns


def _shape(column: Column) -> str:
    runs = column.runs
    return str((column.rows, *runs[0][1])) if len(runs) == 1 else f"{column.rows} rows of different shapes"


def _column(name: str, leaf: Any) -> Column:
    if is_texts(leaf):
        return Column(TEXT, list(leaf))
    if not isinstance(leaf, Tensor) or not leaf.dim():
        raise TypeError(
            f"the output's {name!r} is a {type(leaf).__name__}; predict_to writes tensors with one row for each "
            "example, and lists of strings"
        )
    dtype = str(leaf.dtype).removeprefix("torch.")
    if leaf.is_nested:
        return Column(dtype, [row.unsqueeze(0) for row in leaf.unbind()])
    if leaf.layout != torch.strided:
        raise TypeError(f"the output's {name!r} is a sparse tensor ({leaf.layout}); give {name}.to_dense()")
    return Column(dtype, [leaf])


def described(columns: Mapping[str, Column]) -> dict[str, Any]:
    """Dtype of each column and shape of its first row, for the head of the index."""
    return {
        name: {"dtype": column.dtype, "shape": column.runs[0][1] if column.runs else []}
        for name, column in columns.items()
    }


def check_alike(number: int, columns: Mapping[str, Column], head: Mapping[str, Any]) -> None:
    """Raise if columns change between batches in name, dtype or number of dimensions. Row widths may change."""
    alike = columns.keys() == head.keys() and all(
        column.dtype == head[name]["dtype"]
        and all(len(shape) == len(head[name]["shape"]) for _, shape in column.runs)
        for name, column in columns.items()
    )
    if not alike:
        raise ValueError(
            f"the outputs of batch {number} are {described(columns)}, before it {head}: give all the same names, "
            "dtypes and numbers of dimensions"
        )


def special_runs(columns: Mapping[str, Column], head: Mapping[str, Any]) -> dict[str, Any]:
    """Runs of columns whose rows cannot be counted from their bytes, since rows differ in shape or are empty."""
    return {
        name: column.runs
        for name, column in columns.items()
        if any(shape != head[name]["shape"] or 0 in shape for _, shape in column.runs)
    }


def bytes_by_column(columns: Mapping[str, Column]) -> dict[str, bytes]:
    """Bytes of each column's rows as they are in memory; a string becomes a line of JSON."""
    return {
        name: b"".join(orjson.dumps(text) + b"\n" for text in column.parts)
        if column.dtype == TEXT
        else b"".join(_raw(part) for part in column.parts)
        for name, column in columns.items()
    }


def _raw(tensor: Tensor) -> bytes:
    plain = tensor.resolve_conj().resolve_neg().flatten().clone(memory_format=torch.contiguous_format)
    return bytes(bytes_of(plain.view(torch.uint8)))


def lines_of(columns: Mapping[str, Column]) -> bytes:
    """One line of JSON for each sample."""
    values = {name: _values(column) for name, column in columns.items()}
    rows = [dict(zip(values, row, strict=True)) for row in zip(*values.values(), strict=True)]
    return b"".join(orjson.dumps(row) + b"\n" for row in rows)


def _values(column: Column) -> list[Any]:
    if column.dtype == TEXT:
        return column.parts
    return [row for part in column.parts for row in _real(part).tolist()]


def _real(tensor: Tensor) -> Tensor:
    """Complex numbers as pairs, real and imaginary."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def tensor_of(values: list[Any], dtype: torch.dtype, shape: list[int]) -> Tensor:
    """Tensor of the values written by `lines_of`, with NaN for null."""
    values = _with_nan(values)
    if not dtype.is_complex:
        return torch.tensor(values, dtype=dtype).view(shape)
    return torch.view_as_complex(torch.tensor(values, dtype=dtype.to_real()).view(*shape, 2))


def _with_nan(value: Any) -> Any:
    if isinstance(value, list):
        return [_with_nan(item) for item in value]
    return math.nan if value is None else value
