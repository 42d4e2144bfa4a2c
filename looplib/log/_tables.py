"""Tables: rows in memory, and reading a log as columns."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

from looplib.log._loggers import CodedLogger, read_jsonl, row_of
from looplib.types import Logger, TrainState


def record(rows: list[dict[str, Any]]) -> Logger:
    """In-memory log: collect logged values in a list of rows, for notebooks.

    >>> import looplib as ll
    >>> rows = []
    >>> log = ll.log.record(rows)
    >>> log(ll.TrainState(step=5), {"train/loss": 0.5})
    >>> log(ll.TrainState(step=9), {"eval/auc": 0.75})
    >>> rows[0]
    {'step': 5, 'epoch': 0, 'batch': 0, 'samples': 0, 'train/loss': 0.5}

    `ll.plot(rows)` draws them, and `pandas.DataFrame(rows)` makes a table.

    Args:
        rows: a list, to which each call appends one dict.

    The logger raises TypeError for a value that is not a number, bool or str, and ValueError for one with the name of a
    count.
    """

    def write(state: TrainState, values: Mapping[str, Any]) -> None:
        rows.append(row_of(state, values))

    return CodedLogger(write, "record(<list>)")


def read_columns(path: str | os.PathLike[str]) -> dict[str, list[Any]]:
    """Read a `jsonl` log as columns, with one entry per step and None for missing values.

    >>> import looplib as ll, tempfile
    >>> path = tempfile.mkdtemp() + "/log.jsonl"
    >>> log = ll.jsonl(path)
    >>> for step in (1, 2, 3):
    ...     log(ll.TrainState(step=step), {"train/loss": 1 / step})
    >>> log(ll.TrainState(step=2), {"train/loss": 0.25})  # a run that went back
    >>> log(ll.TrainState(step=2), {"eval/auc": 0.75})
    >>> columns = ll.log.read_columns(path)
    >>> columns["step"], columns["train/loss"], columns["eval/auc"]
    ([1, 2], [1.0, 0.25], [None, 0.75])

    Values logged at the same step (in several calls, or by a run and its resumed run) are one entry. If a name was
    logged twice, its later value counts. If a run went back to a checkpoint, the steps from the first repeated one on
    are taken from the later pass only. Steps without an update are told apart by their samples.

    Args:
        path: the file, as for `read_jsonl`.

    `pandas.DataFrame(columns)` makes a table, and its `to_csv` a CSV file.

    Raises:
        FileNotFoundError: nothing has been logged yet.
    """
    joined = _joined(read_jsonl(path))
    names = dict.fromkeys(name for row in joined for name in row)
    return {name: [row.get(name) for row in joined] for name in names}


def _joined(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row for each step, dropping earlier rows that a run repeated after going back."""
    joined: list[dict[str, Any]] = []
    for row in rows:
        if joined and _position(row) < _position(joined[-1]):
            while joined and joined[-1]["step"] >= row["step"] and _position(joined[-1]) != _position(row):
                joined.pop()
        if joined and _position(joined[-1]) == _position(row):
            joined[-1].update(row)
        else:
            joined.append(dict(row))
    return joined


def _position(row: Mapping[str, Any]) -> tuple[int, int]:
    return row["step"], row["samples"]
