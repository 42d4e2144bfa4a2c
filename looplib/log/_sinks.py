"""Sinks: JSON lines, the console, several at once.

A sink is a function of a state and a mapping of names to numbers, and so is what wraps one or joins several.
None of them holds a file open or keeps a buffer: what was logged is on its way to the disk when the call
returns, and there is nothing to close.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import orjson
from tqdm import tqdm

from looplib._core.kinds import check_kind
from looplib._core.ranks import is_first
from looplib.types import Metric, Sink, TrainState

COUNTS = ("step", "epoch", "batch", "samples")


_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


@dataclass(frozen=True)
class CodedSink:
    """A function with the code that made it as its repr."""

    write: Sink
    code: str
    first_rank: bool = False  # silent on the others

    def __call__(self, state: TrainState, values: Mapping[str, float]) -> None:
        if not self.first_rank or is_first():
            self.write(state, values)

    def __repr__(self) -> str:
        return self.code


def jsonl(path: str | os.PathLike[str]) -> Sink:
    """JSON Lines log: a sink that appends one line at each call: step, epoch, batch, samples, then the values.

    >>> import looplib as ll, pathlib, tempfile
    >>> path = tempfile.mkdtemp() + "/runs/digits/log.jsonl"
    >>> log = ll.jsonl(path)
    >>> log(ll.TrainState(step=5, batch=5, samples=320), {"train/loss": 0.25, "grad_norm": float("inf")})
    >>> print(pathlib.Path(path).read_text(), end="")
    {"step":5,"epoch":0,"batch":5,"samples":320,"train/loss":0.25,"grad_norm":"Infinity"}
    >>> ll.read_jsonl(path)[0]["grad_norm"]
    inf

    Numbers that JSON cannot hold are written as the strings "NaN", "Infinity" and "-Infinity", which
    `read_jsonl`, `float()` and `pandas.read_json(path, lines=True)` turn back.

    The file is opened, appended to and closed at each call, its folders made where missing; an earlier log is
    never truncated. A process killed at any moment loses no line but the one in flight, and the line after a
    half-written one starts afresh. (The system, not the disk, is waited for: a power cut can take more.)

    Args:
        path: the file. A relative one belongs to the working directory of now, wherever the process goes.

    The sink raises:
        TypeError: a value that is no number, bool or str (a tensor or array of no dimensions will do); it
            names the value.
        ValueError: a value named as one of the state's counts, or an integer beyond 64 bits.
        OSError: the file cannot be written.
    """
    file_path = Path(path).absolute()

    def write(state: TrainState, values: Mapping[str, Any]) -> None:
        row = row_of(state, values)
        for name, value in row.items():
            if isinstance(value, int) and not -(2**63) <= value < 2**64:
                raise ValueError(
                    f"{name!r} is {value}, beyond the 64 bits that readers of JSON hold; give it as a float or a str"
                )
            row[name] = _written(value)
        line = orjson.dumps(row) + b"\n"
        file_path.parent.mkdir(parents=True, exist_ok=True)
        with open(file_path, "a+b") as file:
            if file.seek(0, os.SEEK_END):
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":  # half a line, of a process that was killed or a disk that was full
                    line = b"\n" + line
            file.write(line)

    return CodedSink(write, f"jsonl({os.fspath(path)!r})", first_rank=True)


def read_jsonl(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Read a `jsonl` log: its lines as dicts, in the order written, NaN and infinity as floats again.

    >>> import looplib as ll, tempfile
    >>> path = tempfile.mkdtemp() + "/log.jsonl"
    >>> ll.jsonl(path)(ll.TrainState(step=1), {"train/loss": float("nan")})
    >>> ll.read_jsonl(path)
    [{'step': 1, 'epoch': 0, 'batch': 0, 'samples': 0, 'train/loss': nan}]

    `pandas.DataFrame(ll.read_jsonl(path))` is the table of it. A half-written line, of a process that was
    killed, is left out. A str that was logged as exactly "NaN", "Infinity" or "-Infinity" becomes a float
    too. Where a run went back to a checkpoint, both passes over the same steps are there.

    Args:
        path: the file, also of a run that is still writing it.

    Raises FileNotFoundError when nothing was logged yet.
    """
    rows = []
    with open(path, "rb") as file:
        for line in file:
            try:
                row = orjson.loads(line)
            except orjson.JSONDecodeError:
                continue
            rows.append({name: _read(value) for name, value in row.items()})
    return rows


def console(*, file: TextIO | None = None) -> Sink:
    """Console sink: prints one aligned line at each call, above a progress bar if there is one.

    >>> import looplib as ll
    >>> log = ll.console()
    >>> log(ll.TrainState(step=50, batch=50, epoch_length=100), {"train/loss": 0.693147, "train/lr": 3e-4})
    step     50  epoch   0.50  train/loss 0.6931      train/lr 0.0003
    >>> log(ll.TrainState(step=400, epoch=4, epoch_length=100), {"train/loss": 0.0123456, "train/lr": 1e-5})
    step    400  epoch   4.00  train/loss 0.01235     train/lr 1e-05

    The epoch is the number of epochs done, with the part of the one begun (whole epochs for a stream). Floats
    have 4 significant digits. Names keep the order in which they first came.

    Args:
        file: the text stream to print to; standard output, as it is at the time of the call, by default.

    The sink raises TypeError for a value that is no number, bool or str, naming it.
    """
    order: dict[str, int] = {}

    def write(state: TrainState, values: Mapping[str, Any]) -> None:
        plain = plain_values(values)
        for name in plain:
            order.setdefault(name, len(order))
        if state.epoch_length:
            epoch = f"{state.epoch + state.batch / state.epoch_length:.2f}"
        else:
            epoch = str(state.epoch)
        pairs = (f"  {name} {_shown(plain[name]):<10}" for name in sorted(plain, key=order.__getitem__))
        # print would tear the bar of a loop that this is called in
        tqdm.write(f"step {state.step:>6}  epoch {epoch:>6}{''.join(pairs)}".rstrip(), file=file)

    return CodedSink(write, "console()" if file is None else f"console(file={file!r})", first_rank=True)


def tee(*sinks: Sink) -> Sink:
    """Combine sinks: hand each call to all of these, in order.

    >>> import looplib as ll, tempfile
    >>> path = tempfile.mkdtemp() + "/log.jsonl"
    >>> log = ll.tee(ll.jsonl(path), ll.console())
    >>> log(ll.TrainState(step=3), {"train/loss": 0.5})
    step      3  epoch      0  train/loss 0.5
    >>> ll.read_jsonl(path)[0]["train/loss"]
    0.5

    When a sink raises an error, the others are still called; then the first error is raised, with a note of
    the sink that it came from and of those that failed after it. An interrupt is raised at once.

    Args:
        sinks: any number of them.

    Raises TypeError for an argument that cannot be called.
    """
    for place, sink in enumerate(sinks, 1):
        if not callable(sink):
            raise TypeError(
                f"tee takes sinks, each a function of (state, values); argument {place} is a "
                f"{type(sink).__name__}; for a list of sinks write ll.tee(*sinks)"
            )
        check_kind(sink, "tee", "sink")

    def write(state: TrainState, values: Mapping[str, Any]) -> None:
        failed: list[tuple[Sink, Exception]] = []
        for sink in sinks:
            try:
                sink(state, values)
            except Exception as error:  # noqa: PERF203
                failed.append((sink, error))
        if failed:
            (sink, first), *later = failed
            notes = [f"raised by the sink {sink!r}; {len(sinks) - len(failed)} of {len(sinks)} sinks wrote"]
            notes += [f"the sink {sink!r} failed too: {error!r}" for sink, error in later]
            # What add_note does, on Python 3.10 as well (where a traceback does not print it).
            first.__notes__ = getattr(first, "__notes__", []) + notes  # type: ignore[attr-defined]
            raise first

    return CodedSink(write, f"tee({', '.join(map(repr, sinks))})")


def row_of(state: TrainState, values: Mapping[str, Any]) -> dict[str, bool | int | float | str]:
    """Row of a log: the counts, then the values."""
    row: dict[str, bool | int | float | str] = {name: getattr(state, name) for name in COUNTS}
    for name, value in plain_values(values).items():
        if name in row:
            raise ValueError(
                f"the name {name!r} is taken by the state's own; give the value another, such as 'train/{name}'"
            )
        row[name] = value
    return row


def plain_values(values: Mapping[str, Any]) -> dict[str, bool | int | float | str]:
    """The values as numbers, bools and strs of Python."""
    plain: dict[str, bool | int | float | str] = {}
    for name, given in values.items():
        # Tensors, and the scalars and arrays of NumPy and its kin, without importing any of these.
        value = given.item() if getattr(given, "shape", None) == () else given
        if not isinstance(value, (bool, int, float, str)):
            raise TypeError(_refused(name, value))
        plain[name] = value
    return plain


def _refused(name: str, value: Any) -> str:
    found = f"{name!r} is a {type(value).__name__}"
    if isinstance(value, Metric):
        return f"{found}, not a number yet; log its value: log(state, ll.compute(metrics))"
    if hasattr(value, "shape"):
        found += f" of shape {tuple(value.shape)}"
        advice = "reduce it to one, by .mean() or .item(), or log its elements under names of their own"
    elif isinstance(value, Mapping):
        advice = f"log its items under names of their own, such as '{name}/{next(iter(value), 'item')}'"
    elif isinstance(value, (list, tuple)):
        found += f" of {len(value)}"
        advice = f"log its items under names of their own, such as '{name}/0'"
    else:
        advice = "convert it, by float() or str(), or leave it out"
    return f"{found}; a sink takes one number, bool or str for a name: {advice}"


def _written(value: bool | int | float | str) -> bool | int | float | str:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def _read(value: Any) -> Any:
    return _NOT_FINITE.get(value, value) if isinstance(value, str) else value


def _shown(value: bool | int | float | str) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
