"""Reading predictions from disk."""

from __future__ import annotations

import math
import os
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import Any

import orjson
import torch
from torch import Tensor

from looplib._core.checks import check
from looplib.evaluation._columns import TEXT, numbers_of
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
        ValueError: a file is shorter than its index says, for example after a power failure; or the index holds
            something that `predict_to` does not write.
    """
    target = Path(path)
    index = read_index(target)
    if not index.head:
        about = "empty" if index_path(target).exists() else "not there"
        raise FileNotFoundError(
            f"{target} holds no predictions: {index_path(target)} is {about}; give the path that ll.predict_to returned"
        )
    file = too_short(index)
    check(
        file is None,
        f"{file} is shorter than its index says, as a power cut may leave it: call ll.predict_to as before, which "
        "predicts the lost batches again",
    )
    return _read_lines(index) if is_lines(target) else _read_files(index)


def _read_files(index: Index) -> dict[str, Any]:
    columns: dict[str, Any] = {}
    for name, file in file_names(index.outputs).items():
        about, path, end = index.outputs[name], index.target / file, index.ends.get(file, 0)
        columns[name] = _lines(path, [0, end])[0] if about["dtype"] == TEXT else _map_file(index, name, file, end)
    return columns


def _map_file(index: Index, name: str, file: str, end: int) -> Tensor | list[Tensor]:
    shape, dtype = index.outputs[name]["shape"], getattr(torch, index.outputs[name]["dtype"])
    width = dtype.itemsize * math.prod(shape)  # bytes in a row; if it is 0, the index lists each run
    ends = [0, *[batch["ends"][file] for batch in index.batches]]
    runs = _runs(index, name, [(b - a) // (width or 1) for a, b in pairwise(ends)])
    if not end:
        return _rows(torch.empty(0, dtype=dtype), runs, shape)
    flat = torch.from_file(str(index.target / file), shared=False, size=end // dtype.itemsize, dtype=dtype)
    return _rows(flat, runs, shape)


def _read_lines(index: Index) -> dict[str, Any]:
    batches = _lines(index.target, [0, *[batch["ends"][index.target.name] for batch in index.batches]])
    columns: dict[str, Any] = {}
    for name, about in index.outputs.items():
        values = [row[name] for row in chain.from_iterable(batches)]
        columns[name] = values if about["dtype"] == TEXT else _numbers(index, name, values, [*map(len, batches)])
    return columns


def _numbers(index: Index, name: str, values: list[Any], counts: list[int]) -> Tensor | list[Tensor]:
    """A column of tensors, from the JSON values of its rows and the number of rows in each batch."""
    about, rest, runs = index.outputs[name], iter(values), _runs(index, name, counts)
    dtype = getattr(torch, about["dtype"])
    parts = [numbers_of([*islice(rest, count)], dtype) for count, _ in runs]
    return _rows(torch.cat([torch.empty(0, dtype=dtype), *parts]), runs, about["shape"])


def _lines(file: Path, ends: list[int]) -> list[list[Any]]:
    """Lines of JSON in each part of a file, which need not exist if the parts are empty."""
    data = file.read_bytes() if ends[-1] else b""
    return [[*map(orjson.loads, data[a:b].splitlines())] for a, b in pairwise(ends)]


def _runs(index: Index, name: str, counts: list[int]) -> list[Run]:
    """Shapes of the rows of all batches: the head's, except for those listed in the index."""
    shape, runs = index.outputs[name]["shape"], []
    for batch, count in zip(index.batches, counts, strict=True):
        runs += batch.get("shapes", {}).get(name, [(count, shape)])
    return runs


def _rows(flat: Tensor, runs: list[Run], first: list[int]) -> Tensor | list[Tensor]:
    """Rows of these shapes as one tensor, or if the shapes differ, as a list."""
    shapes = {tuple(shape) for count, shape in runs if count} or {tuple(first)}
    if len(shapes) == 1:
        return flat.view(sum(count for count, _ in runs), *shapes.pop())
    sizes = [count * math.prod(shape) for count, shape in runs]
    parts = zip(torch.split(flat, sizes), runs, strict=True)
    return [*chain.from_iterable(part.view(count, *shape).unbind() for part, (count, shape) in parts)]
