"""Loggers: JSON Lines, the console, and several at once.

A logger is a function of a state and a mapping of names to numbers, and so is a function that wraps one or combines
several. No logger holds a file open or keeps a buffer: when a call returns, the values have been handed to the
operating system, and there is nothing to close.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import orjson
from tqdm import tqdm

from looplib._core.mappings import fields_of, without
from looplib._core.ranks import is_first
from looplib._core.records import check_kind, kinds_of_classes
from looplib.types import Logger, Metric, TrainState, check_state

COUNTS = ("step", "epoch", "batch", "samples")


_NOT_FINITE = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}  # the names in JSON of what Python calls so
_READ = {name: float(number) for number, name in _NOT_FINITE.items()}


@dataclass(repr=False, eq=False)
class CodedLogger:
    """A logger whose repr is the code that made it."""

    write: Logger
    code: str
    first_rank: bool = False  # does nothing on the other ranks

    def __call__(self, state: TrainState, values: Mapping[str, float]) -> None:
        check_state(state, "log(state, values)")
        if not self.first_rank or is_first():
            self.write(state, values)

    def __repr__(self) -> str:
        return self.code


kinds_of_classes[CodedLogger] = "logger"
CodedLogger.__call__.__qualname__ = "log"  # in Python's error for a call without the state


def jsonl(path: str | os.PathLike[str]) -> Logger:
    """JSON Lines log: a logger that appends one line per call with step, epoch, batch, samples and the values.

    >>> import looplib as ll, pathlib, tempfile
    >>> path = tempfile.mkdtemp() + "/runs/digits/log.jsonl"
    >>> log = ll.jsonl(path)
    >>> log(ll.TrainState(step=5, batch=5, samples=320), {"train/loss": 0.25, "grad_norm": float("inf")})
    >>> print(pathlib.Path(path).read_text(), end="")
    {"step":5,"epoch":0,"batch":5,"samples":320,"train/loss":0.25,"grad_norm":"Infinity"}
    >>> ll.log.read_jsonl(path)[0]["grad_norm"]
    inf

    Numbers that JSON cannot represent are written as the strings "NaN", "Infinity" and "-Infinity". `read_jsonl`,
    `float()` and `pandas.read_json(path, lines=True)` convert them back.

    The file is opened, appended to and closed at each call, and its folders are created if missing. An existing log
    is never truncated: after a return to a checkpoint, the repeated steps stand in it twice, and `read_columns` takes the
    later ones. If the process is killed, at most the line being written is lost, and the next line after an
    incomplete one starts on a new line. In a loop of your own, give the counts that you have,
    `ll.TrainState(step=step, epoch=epoch)`: all others are written as 0. (Calls do not wait for the disk, so a power
    failure can lose more.)

    Args:
        path: the file. A relative path refers to the working directory at the time of this call.

    The logger raises: TypeError: a value is not a number, bool or str (a tensor or array without dimensions is
    accepted), and the message names it; or an integer has more than 64 bits. ValueError: a value has the name of one
    of the state's counts. OSError: the file cannot be written.
    """
    file_path = Path(path).absolute()

    def write(state: TrainState, values: Mapping[str, Any]) -> None:
        row = {name: _written(value) for name, value in row_of(state, values).items()}
        line = orjson.dumps(row) + b"\n"
        file_path.parent.mkdir(parents=True, exist_ok=True)
        with open(file_path, "a+b") as file:
            if file.seek(0, os.SEEK_END):
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":  # half a line, from a killed process or a full disk
                    line = b"\n" + line
            file.write(line)

    return CodedLogger(write, f"jsonl({os.fspath(path)!r})", first_rank=True)


def read_jsonl(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Read a `jsonl` log: its lines as dicts, in order, with NaN and infinity converted back to floats.

    >>> import looplib as ll, tempfile
    >>> path = tempfile.mkdtemp() + "/log.jsonl"
    >>> ll.jsonl(path)(ll.TrainState(step=1), {"train/loss": float("nan")})
    >>> ll.log.read_jsonl(path)
    [{'step': 1, 'epoch': 0, 'batch': 0, 'samples': 0, 'train/loss': nan}]

    `pandas.DataFrame(ll.log.read_jsonl(path))` makes a table of it. An incomplete last line, from a killed process, is
    left out. Lines with bare NaN, as Python's `json` writes them, are read too. A str logged as exactly "NaN", "Infinity" or
    "-Infinity" also becomes a float. If a run went back to a checkpoint, the repeated steps appear twice.

    Args:
        path: the file. The run may still be writing it.

    Raises:
        FileNotFoundError: nothing has been logged yet.
    """
    rows = []
    with open(path, "rb") as file:
        for line in file:
            try:
                row = orjson.loads(line)
            except orjson.JSONDecodeError:
                try:
                    row = json.loads(line)  # bare NaN and Infinity, as Python's json writes them
                except ValueError:
                    continue
            rows.append(
                {name: _READ.get(value, value) if isinstance(value, str) else value for name, value in row.items()}
            )
    return rows


def console(*, file: TextIO | None = None) -> Logger:
    """Console logger: print one aligned line per call, above a progress bar if there is one.

    >>> import looplib as ll
    >>> log = ll.console()
    >>> log(ll.TrainState(step=50, batch=50, epoch_length=100), {"train/loss": 0.693147, "train/lr": 3e-4})
    step     50  epoch   0.50  train/loss 0.6931      train/lr 0.0003
    >>> log(ll.TrainState(step=400, epoch=4, epoch_length=100), {"train/loss": 0.0123456, "train/lr": 1e-5})
    step    400  epoch   4.00  train/loss 0.01235     train/lr 1e-05

    The epoch is the number of epochs completed, plus the fraction of the current one (whole epochs for a stream).
    Floats have 4 significant digits.

    Args:
        file: text stream to print to. Defaults to standard output at the time of the call.

    The logger raises TypeError for a value that is not a number, bool or str, and ValueError for one with the name of a
    count.
    """

    def write(state: TrainState, values: Mapping[str, Any]) -> None:
        if state.epoch_length:
            epoch = f"{state.epoch + state.batch / state.epoch_length:.2f}"
        else:
            epoch = str(state.epoch)
        plain = without(row_of(state, values), COUNTS)
        pairs = (f"  {name} {_shown(value):<10}" for name, value in plain.items())
        # print would break the progress bar of the surrounding loop
        tqdm.write(f"step {state.step:>6}  epoch {epoch:>6}{''.join(pairs)}".rstrip(), file=file)

    return CodedLogger(write, "console()" if file is None else f"console(file={file!r})", first_rank=True)


def tee(*loggers: Logger) -> Logger:
    """Combine loggers: pass each call to all of them, in order.

    >>> import looplib as ll, tempfile
    >>> path = tempfile.mkdtemp() + "/log.jsonl"
    >>> log = ll.tee(ll.jsonl(path), ll.console())
    >>> log(ll.TrainState(step=3), {"train/loss": 0.5})
    step      3  epoch      0  train/loss 0.5
    >>> ll.log.read_jsonl(path)[0]["train/loss"]
    0.5

    If a logger raises an error, the others are still called. Then the first error is raised, with a note that names the
    logger and those that failed after it. An interrupt is raised immediately.

    Args:
        loggers: any number of loggers.

    Raises:
        TypeError: an argument is not a logger.
    """
    for logger in loggers:
        check_kind(logger, "tee", "logger", advice="; for a list of loggers write ll.tee(*loggers)")

    def write(state: TrainState, values: Mapping[str, Any]) -> None:
        first: Exception | None = None
        for logger in loggers:
            try:
                logger(state, values)
            except Exception as error:
                error.add_note(f"raised by the logger {logger!r}")
                if first is None:
                    first = error
                else:
                    first.add_note(f"the logger {logger!r} failed too: {error!r}")
        if first is not None:
            raise first

    return CodedLogger(write, f"tee({', '.join(map(repr, loggers))})")


def row_of(state: TrainState, values: Mapping[str, Any]) -> dict[str, bool | int | float | str]:
    """Row of a log: the counts, then the values."""
    row: dict[str, bool | int | float | str] = fields_of(state, COUNTS)
    plain = plain_values(values)
    for name in row.keys() & plain.keys():
        raise ValueError(
            f"the name {name!r} is taken by the state's own; give the value another, such as 'train/{name}'"
        )
    return row | plain


def plain_values(values: Mapping[str, Any]) -> dict[str, bool | int | float | str]:
    """Convert the values to Python numbers, bools and strs."""
    plain: dict[str, bool | int | float | str] = {}
    for name, raw in values.items():
        # Accept tensors, and scalars and arrays of NumPy and similar libraries, without importing them.
        value = raw.item() if getattr(raw, "shape", None) == () else raw
        if not isinstance(value, (bool, int, float, str)):
            raise TypeError(_refused(name, value))
        plain[name] = value
    return plain


def _refused(name: str, value: Any) -> str:
    description = f"{name!r} is a {type(value).__name__}"
    if isinstance(value, Metric):
        return f"{description}, not a number yet; log its value: log(state, ll.compute(metrics))"
    if hasattr(value, "shape"):
        description += f" of shape {tuple(value.shape)}"
        advice = "reduce it to one, by .mean() or .item(), or log its elements under names of their own"
    else:
        advice = f"convert it, by float() or str(), leave it out, or log its items as '{name}/0', '{name}/1'"
    return f"{description}; a logger takes one number, bool or str for a name: {advice}"


def _written(value: bool | int | float | str) -> bool | int | float | str:
    if isinstance(value, float) and not math.isfinite(value):
        return _NOT_FINITE[float.__repr__(value)]
    return value


def _shown(value: bool | int | float | str) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


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
