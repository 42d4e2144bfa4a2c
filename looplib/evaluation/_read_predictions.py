"""Reading predictions from disk."""

from __future__ import annotations

import math
import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import orjson
import torch
from torch import Tensor

from looplib.evaluation._columns import TEXT, tensor_of
from looplib.evaluation._prediction_files import Index, file_names, index_path, is_lines, read_index, too_short

Run = tuple[int, list[int]]  # number of rows, and the shape of each


def read_predictions(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read the columns that `predict_to` wrote, by name. Tensors are memory-mapped and not loaded.

    >>> import looplib as ll, tempfile, torch
    >>> predict_step = ll.make_predict_step(model := torch.nn.Linear(1, 3), lambda model, x: model(x))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = ll.predict_to(folder, predict_step, ll.init_state(model), torch.zeros(7, 1).split(3))
    ...     ll.evaluation.read_predictions(path)["output"].shape
    torch.Size([7, 3])

    A column whose rows share one shape is returned as a tensor, one whose rows differ in shape as a list of tensors,
    and strings as a list, which is loaded into memory.

    A `.jsonl` file cannot be mapped, so it is loaded completely, as tensors with the same names, shapes and dtypes
    and with NaN for non-finite values. Incomplete batches are left out.

    Args:
        path: the path passed to `predict_to`.

    Raises:
        FileNotFoundError: there are no predictions at this path.
        ValueError: a file is shorter than its index says, for example after a power failure.
    """
    target = Path(path)
    index = read_index(target)
    if index.head is None:
        about = "empty" if index_path(target).exists() else "not there"
        raise FileNotFoundError(
            f"{target} holds no predictions: {index_path(target)} is {about}; give the path that ll.predict_to returned"
        )
    if index.batches and (file := too_short(index, index.batches[-1])):
        raise ValueError(
            f"{file} is shorter than its index says, as a power cut may leave it: call ll.predict_to as before, which "
            "predicts the lost batches again"
        )
    return _read_lines(index) if is_lines(target) else _map_files(index)


def _map_files(index: Index) -> dict[str, Any]:
    outputs: dict[str, Any] = (index.head or {})["outputs"]
    columns: dict[str, Any] = {}
    for name, file in file_names(outputs).items():
        if index.batches and file not in index.ends:
            raise ValueError(f"the index of {index.target} knows no file {file!r} for {name!r}; predict again")
        about, end = outputs[name], index.ends.get(file, 0)
        if about["dtype"] == TEXT:
            columns[name] = _lines(index.target / file, end) if end else []
            continue
        dtype = getattr(torch, about["dtype"])
        ends = [0, *[batch["ends"][file] for batch in index.batches]]
        width = dtype.itemsize * math.prod(about["shape"])  # bytes in a row; if it is 0, the index lists each run
        runs = _runs(index, name, about["shape"], [(b - a) // (width or 1) for a, b in pairwise(ends)])
        count = end // dtype.itemsize
        path = str(index.target / file)
        flat = torch.from_file(path, shared=False, size=count, dtype=dtype) if count else torch.empty(0, dtype=dtype)
        columns[name] = _rows(flat, runs, about["shape"])
    return columns


def _read_lines(index: Index) -> dict[str, Any]:
    outputs: dict[str, Any] = (index.head or {})["outputs"]
    ends = [0, *[batch["ends"][index.target.name] for batch in index.batches]]
    batches = _batches_of_lines(index.target, ends)
    rows = [row for batch in batches for row in batch]
    columns: dict[str, Any] = {}
    for name, about in outputs.items():
        values = [row[name] for row in rows]
        if about["dtype"] == TEXT:
            columns[name] = values
            continue
        dtype, runs = getattr(torch, about["dtype"]), _runs(index, name, about["shape"], [*map(len, batches)])
        if (shape := _one_shape(runs, about["shape"])) is not None:
            columns[name] = tensor_of(values, dtype, [len(values), *shape])
        else:
            shapes = [shape for count, shape in runs for _ in range(count)]
            columns[name] = [tensor_of(value, dtype, shape) for value, shape in zip(values, shapes, strict=True)]
    return columns


def _batches_of_lines(file: Path, ends: list[int]) -> list[list[Any]]:
    if len(ends) == 1:
        return []
    data = file.read_bytes()
    return [[orjson.loads(line) for line in data[a:b].splitlines()] for a, b in pairwise(ends)]


def _lines(file: Path, end: int) -> list[Any]:
    with open(file, "rb") as lines:
        return [orjson.loads(line) for line in lines.read(end).splitlines()]


def _runs(index: Index, name: str, shape: list[int], counts: list[int]) -> list[Run]:
    """Shapes of the rows of all batches: the head's, except for those listed in the index."""
    runs: list[Run] = []
    for batch, count in zip(index.batches, counts, strict=True):
        runs += batch.get("shapes", {}).get(name, [(count, shape)])
    return runs


def _one_shape(runs: list[Run], first: list[int]) -> list[int] | None:
    """Shape of all rows, or None if they differ."""
    shapes = {tuple(shape) for count, shape in runs if count} or {tuple(first)}
    return [*shapes.pop()] if len(shapes) == 1 else None


def _rows(flat: Tensor, runs: list[Run], first: list[int]) -> Tensor | list[Tensor]:
    if (shape := _one_shape(runs, first)) is not None:
        return flat.view(sum(count for count, _ in runs), *shape)
    sizes = [count * math.prod(shape) for count, shape in runs]
    parts = zip(torch.split(flat, sizes), runs, strict=True)
    return [row for part, (count, shape) in parts for row in part.view(count, *shape).unbind()]
