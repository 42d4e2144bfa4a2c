"""Tables: a CSV log, rows and columns in memory, and reading a log as columns.

Files are written in whole rows and never held open, so the process may be killed at any moment.
"""

from __future__ import annotations

import csv
import io
import os
import re
import shutil
from collections.abc import Iterable, Mapping, MutableMapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from looplib._core.checks import check
from looplib._core.mappings import mapped
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
    atomically. All other rows are appended. If the process is killed, at most the row being written is lost; the next
    row removes its beginning, and likewise for a row cut off by a full disk. Nothing else is ever removed: if a run
    went back to a checkpoint, the repeated steps appear twice, as with `jsonl`, and `read_columns` merges them.

    Args:
        path: the file, written by a single process. A relative path refers to the working directory at the time of
            this call.

    The sink raises: TypeError: a value is not a number, bool or str. The message names it. ValueError: a value has
    the name of one of the state's counts, or the file is not a table of this sink. OSError: the file cannot be
    written. It is left unchanged.
    """
    file_path = Path(path).absolute()
    columns: list[str] = []
    size = -1  # of the file as this sink left it; a changed file is read first

    def write(state: TrainState, values: Mapping[str, Any]) -> None:
        nonlocal columns, size
        row = mapped(_cell, row_of(state, values))
        file_path.parent.mkdir(parents=True, exist_ok=True)
        size_now = file_path.stat().st_size if file_path.exists() else 0
        if size_now != size:
            columns = _repaired(file_path, size_now)
        new = [name for name in row if name not in columns]
        if new and columns:
            columns = _widen(file_path, columns + new, row)
        else:
            header = _line(new) if new else b""
            columns = columns or new
            size = -1
            append(file_path, header + _line([row.get(name, "") for name in columns]))
        size = file_path.stat().st_size

    return CodedSink(write, f"csv_file({os.fspath(path)!r})", first_rank=True)


def _repaired(file_path: Path, size: int) -> list[str]:
    """Cut off a row that is incomplete. Returns the columns."""
    columns, _, end = _table(file_path, size)
    if end < size:
        os.truncate(file_path, end)
    return columns


def _widen(file_path: Path, columns: list[str], row: Mapping[str, Any]) -> list[str]:
    """Rewrite the table with more columns, and the row at its end. Returns the columns."""
    _, rows, _ = _table(file_path, file_path.stat().st_size)
    lines = [old + [""] * (len(columns) - len(old)) for old in rows]
    _put(file_path, b"".join(map(_line, [columns, *lines, [row.get(name, "") for name in columns]])))
    return columns


def record(into: list[dict[str, Any]] | MutableMapping[str, list[Any]]) -> Sink:
    """In-memory log: collect logged values in a list of rows or a dict of columns, for notebooks.

    >>> import looplib as ll
    >>> rows, columns = [], {}
    >>> log = ll.tee(ll.log.record(rows), ll.log.record(columns))
    >>> log(ll.TrainState(step=5), {"train/loss": 0.5})
    >>> log(ll.TrainState(step=9), {"eval/auc": 0.75})
    >>> rows[0]
    {'step': 5, 'epoch': 0, 'batch': 0, 'samples': 0, 'train/loss': 0.5}
    >>> columns["step"], columns["train/loss"], columns["eval/auc"]
    ([5, 9], [0.5, None], [None, 0.75])

    Args:
        into: a list, to which each call appends one dict; or a dict of lists of equal length, with None if a call had
            no such name.

    The sink raises TypeError for a value that is not a number, bool or str, and ValueError for one with the name of a
    count.
    """

    def write(state: TrainState, values: Mapping[str, Any]) -> None:
        row = row_of(state, values)
        if isinstance(into, list):
            into.append(row)
            return
        length = len(into.get("step", ()))
        for name in row:
            into.setdefault(name, [None] * length)
        for name, column in into.items():
            column.append(row.get(name))

    return CodedSink(write, f"record(<{type(into).__name__}>)")


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

    Values logged at the same step (in several calls, or by a run and its resumed run) are one entry, in which the
    later value of a name counts. If a run went back to a checkpoint, the steps from the first repeated one on are
    taken from the later pass only. Steps without an update are told apart by their samples.

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
        first = file.read(1)
    if first in (b"{", b"\n"):  # a newline after a line whose end was lost
        rows = read_jsonl(file_path)
    else:
        header, lines, _ = _table(file_path, file_path.stat().st_size)
        rows = [_row_of_cells(header, line) for line in lines]
    joined = _joined(rows)
    names = dict.fromkeys(name for row in joined for name in row)
    return {name: [row.get(name) for row in joined] for name in names}


def _joined(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row for each step, dropping earlier rows that a run repeated after going back."""
    joined: list[dict[str, Any]] = []
    for row in rows:
        _drop_repeated(joined, _place_of(row))
        if joined and _place_of(joined[-1]) == _place_of(row):
            joined[-1].update(row)
        else:
            joined.append(dict(row))
    return joined


def _drop_repeated(rows: list[dict[str, Any]], place: tuple[int, int]) -> None:
    """Drop the last rows if the next one goes back to before them: from the first step that it repeats on."""
    if rows and place < _place_of(rows[-1]):
        while rows and rows[-1]["step"] >= place[0] and _place_of(rows[-1]) != place:
            rows.pop()


def _place_of(row: Mapping[str, Any]) -> tuple[int, int]:
    return row["step"], row["samples"]


def _row_of_cells(header: list[str], cells: list[str]) -> dict[str, Any]:
    return {name: value for name, cell in zip(header, cells, strict=True) if (value := _value(cell)) is not None}


def append(path: Path, data: bytes) -> None:
    """Append all data, or nothing if the disk is full or an interrupt arrives."""
    with open(path, "ab", buffering=0) as file:
        size = file.seek(0, os.SEEK_END)
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[file.write(rest) :]
        except BaseException:
            with suppress(OSError):  # a device, which cannot be truncated
                file.truncate(size)
            raise


def _put(path: Path, data: bytes) -> None:
    """Replace the whole file atomically."""
    target = path.resolve()  # the target of a link, so that the link is kept
    beside = target.with_name(f".{target.name}.writing")
    try:
        beside.unlink(missing_ok=True)  # what a killed process has left, or a link to elsewhere
        with open(beside, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        shutil.copymode(target, beside)
        beside.replace(target)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


def _table(path: Path, size: int) -> tuple[list[str], list[list[str]], int]:
    """Header and rows of a CSV log, and its length up to the end of the last complete row."""
    if not size:  # a device has no table, and may have no end
        return [], [], 0
    end = position = 0
    quoted = False
    data = path.read_bytes()
    for line in io.BytesIO(data):
        position += len(line)
        quoted ^= line.count(b'"') % 2 == 1
        if not quoted and line.endswith(b"\n"):
            end = position
    lines = list(csv.reader(io.StringIO(data[:end].decode(), newline="")))
    header = next(iter(lines), [])
    check(
        header[:4] == list(COUNTS) if end else b"step,epoch,batch,samples".startswith(data[:24]),
        f"{path} is no log of csv_file: it begins with {data[:40]!r}, not with {','.join(COUNTS)!r}; give another path, "
        "or move that file away",
    )
    return header, lines[1:], end


def _line(cells: list[str]) -> bytes:
    quoted = ['"' + cell.replace('"', '""') + '"' if re.search('[",\r\n]', cell) else cell for cell in cells]
    return (",".join(quoted) + "\n").encode()


def _cell(value: bool | int | float | str) -> str:
    if isinstance(value, (bool, str)):
        return str(value)
    return int.__repr__(value) if isinstance(value, int) else float.__repr__(value)


_FLOAT = re.compile(r"-?([0-9]+\.[0-9]+|[0-9]+(\.[0-9]+)?e[+-][0-9]+|inf|nan)")
_INT = re.compile("-?[0-9]+")
_WORDS = {"True": True, "False": False, "": None}


def _value(cell: str) -> bool | int | float | str | None:
    if _INT.fullmatch(cell):
        return int(cell)
    return float(cell) if _FLOAT.fullmatch(cell) else _WORDS.get(cell, cell)
