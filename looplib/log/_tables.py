"""Tables: a CSV log, rows in memory, and reading a log as columns.

Files are written in whole rows and never held open, so the process may be killed at any moment.
"""

from __future__ import annotations

import csv
import io
import os
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from looplib._core.checks import check
from looplib.log._sinks import COUNTS, CodedSink, read_jsonl, row_of
from looplib.types import Sink, TrainState


def csv_file(path: str | os.PathLike[str]) -> Sink:
    """CSV log: a sink that appends one row per call with step, epoch, batch, samples and the values.

    >>> import looplib as ll, pathlib, tempfile
    >>> path = tempfile.mkdtemp() + "/log.csv"
    >>> log = ll.log.csv_file(path)
    >>> log(ll.TrainState(step=5, batch=5, samples=320), {"train/loss": 0.25})
    >>> log(ll.TrainState(step=9, batch=9, samples=576), {"eval/auc": 0.75})
    >>> print(pathlib.Path(path).read_text(), end="")
    step,epoch,batch,samples,train/loss,eval/auc
    5,0,5,320,0.25,
    9,0,9,576,,0.75

    A new name becomes a new column: the table is rewritten to a temporary file, which then replaces the old one
    atomically. All other rows are appended. If the process is killed or the disk is full, at most the row being written
    is lost; the next row removes its beginning. Nothing else is ever removed: if a run went back to a checkpoint, the
    repeated steps appear twice, as with `jsonl`, and `read_columns` merges them. Each row is one line: line breaks in
    texts become spaces.

    Args:
        path: the file, written by a single sink. A relative path refers to the working directory at the time of
            this call.

    The sink raises: TypeError: a value is not a number, bool or str. The message names it. ValueError: a value has
    the name of one of the state's counts, or the file is not a table of this sink. OSError: the file cannot be
    written.
    """
    file_path = Path(path).absolute()
    columns: list[str] = []  # as this sink left them; empty before its first row and after one that failed

    def write(state: TrainState, values: Mapping[str, Any]) -> None:
        nonlocal columns
        row = {_one_line(name): _one_line(str(value)) for name, value in row_of(state, values).items()}
        known, columns = columns or _repaired_columns(file_path), []
        if new := [name for name in row if name not in known]:
            old = _table(file_path)[1:] if known else []
            rows = [cells + [""] * len(new) for cells in old]
            replace_file(file_path, _lines([known + new, *rows, [row.get(name, "") for name in known + new]]))
        else:
            with open(file_path, "r+b") as file:  # an error if the file has been removed since
                file.seek(0, os.SEEK_END)
                file.write(_lines([[row.get(name, "") for name in known]]))
        columns = known + new

    return CodedSink(write, f"csv_file({os.fspath(path)!r})", first_rank=True)


def _repaired_columns(path: Path) -> list[str]:
    """Columns of a table, whose last row is cut off if it is incomplete. Empty if there is no table yet."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        return []
    rows = _table(path)
    os.truncate(path, path.read_bytes().rfind(b"\n") + 1)
    return rows[0] if rows else []


def _one_line(text: str) -> str:
    return re.sub("[\r\n]+", " ", text)


def _lines(rows: Iterable[list[str]]) -> bytes:
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue().encode()


def _table(path: Path) -> list[list[str]]:
    """Header and complete rows of a CSV log."""
    data, header = path.read_bytes(), ",".join(COUNTS)
    check(
        header.encode().startswith(data[: len(header)]),
        f"{path} is no log of csv_file: it begins with {data[:40]!r}, not with {header!r}; give another path, or move "
        "that file away",
    )
    complete = data[: data.rfind(b"\n") + 1]
    return list(csv.reader(io.StringIO(complete.decode(), newline="")))


def replace_file(path: Path, data: bytes) -> None:
    """Write a whole file atomically."""
    target = path.resolve()  # the target of a link, so that the link is kept
    beside = target.with_name(f".{target.name}.writing")
    beside.unlink(missing_ok=True)  # what a killed process has left, or a link to elsewhere
    try:
        beside.write_bytes(data)
        beside.replace(target)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


def record(rows: list[dict[str, Any]]) -> Sink:
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

    The sink raises TypeError for a value that is not a number, bool or str, and ValueError for one with the name of a
    count.
    """

    def write(state: TrainState, values: Mapping[str, Any]) -> None:
        rows.append(row_of(state, values))

    return CodedSink(write, "record(<list>)")


def read_columns(path: str | os.PathLike[str]) -> dict[str, list[Any]]:
    """Read a `jsonl` or `csv_file` log as columns, with one entry per step and None for missing values.

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
        path: the file. Its first byte shows which format it has.

    An incomplete last line is left out. CSV cells have no types: a cell is read as an int, a float or a bool if it is
    written as Python writes one, otherwise as a str, and an empty cell as None. `pandas.DataFrame(columns)` makes a
    table.

    Raises:
        FileNotFoundError: nothing has been logged yet.
        ValueError: the file has a different format.
    """
    file_path = Path(path)
    with open(file_path, "rb") as file:
        is_json = file.read(1) in (b"{", b"\n")  # a newline after a line whose end was lost
    if is_json:
        rows: Iterable[dict[str, Any]] = read_jsonl(file_path)
    else:
        table = _table(file_path)
        rows = [
            {name: _value(cell) for name, cell in zip(table[0], cells, strict=True) if cell} for cells in table[1:]
        ]
    joined = _joined(rows)
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


def _value(cell: str) -> bool | int | float | str:
    if cell in ("True", "False"):
        return cell == "True"
    for number in (int, float):
        with suppress(ValueError):
            if str(number(cell)) == cell:
                return number(cell)
    return cell
