"""More places for numbers, what stands between them and the loop, and the way back from a log.

Each is a sink or a function from a sink to a sink. A file is written whole lines at a time and held open by none of
them, so that a process may die at any moment. What fails is told and counted where `safely` or `in_background` stand
before it; elsewhere it is raised.
"""

from __future__ import annotations

import copy
import csv
import importlib
import io
import os
import queue
import re
import shutil
import socket
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Collection, Mapping, MutableMapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from looplib._ranks import rank
from looplib.metrics import Metric, Metrics, merge
from looplib.sinks import COUNTS, Sink, _plain, _Sink, read_jsonl, row_of
from looplib.state import TrainState


def csv_file(path: str | os.PathLike[str]) -> Sink:
    """A sink that appends one row of a CSV table at each call: step, epoch, batch, samples, then the values.

    >>> import looplib as ll, pathlib, tempfile
    >>> path = tempfile.mkdtemp() + "/log.csv"
    >>> log = ll.csv_file(path)
    >>> log(ll.TrainState(step=5, batch=5, samples=320), {"train/loss": 0.25})
    >>> log(ll.TrainState(step=9, batch=9, samples=576), {"eval/auc": 0.75})
    >>> print(pathlib.Path(path).read_text(), end="")
    step,epoch,batch,samples,train/loss,eval/auc
    5,0,5,320,0.25,
    9,0,9,576,,0.75

    A name that comes for the first time is a new column: the table is written anew beside the old one and takes its
    place at once. Other rows are appended. A process killed at any moment loses no row but the one in flight, whose
    beginning the next row removes; so does a row that a full disk cuts off. Nothing else is ever taken away: where a
    run went back to a checkpoint, both passes are there, as with `jsonl`, and `read_columns` joins them.

    Args:
        path: the file, written by one process. A relative one belongs to the working directory of now.

    The sink raises:
        TypeError: a value that is no number, bool or str; it names the value.
        ValueError: a value named as one of the state's counts, or a file that is no table of this sink.
        OSError: the file cannot be written; it is as it was.
    """
    file_path = Path(path).absolute()
    columns: list[str] = []
    size = -1  # of the file as this sink left it; another one has to be read first

    def write(state: TrainState, values: Mapping[str, Any]) -> None:
        nonlocal columns, size
        row = {name: _cell(value) for name, value in row_of(state, values).items()}
        file_path.parent.mkdir(parents=True, exist_ok=True)
        here = file_path.stat().st_size if file_path.exists() else 0
        if here != size:
            columns, _, whole = _table(file_path, here)
            if whole < here:
                os.truncate(file_path, whole)
        new = [name for name in row if name not in columns]
        if new and columns:
            grown = columns + new
            _, rows, _ = _table(file_path, file_path.stat().st_size)
            lines = [old + [""] * (len(grown) - len(old)) for old in rows]
            _put(file_path, b"".join(map(_line, [grown, *lines, [row.get(name, "") for name in grown]])))
            columns = grown
        else:
            header = _line(new) if new else b""
            columns = columns or new
            size = -1
            _append(file_path, header + _line([row.get(name, "") for name in columns]))
        size = file_path.stat().st_size

    return _Sink(write, f"csv_file({os.fspath(path)!r})")


def record(into: list[dict[str, Any]] | MutableMapping[str, list[Any]]) -> Sink:
    """A sink that keeps what is logged in a Python list of rows, or in a dict of columns, for a notebook.

    >>> import looplib as ll
    >>> rows, columns = [], {}
    >>> log = ll.tee(ll.record(rows), ll.record(columns))
    >>> log(ll.TrainState(step=5), {"train/loss": 0.5})
    >>> log(ll.TrainState(step=9), {"eval/auc": 0.75})
    >>> rows[0]
    {'step': 5, 'epoch': 0, 'batch': 0, 'samples': 0, 'train/loss': 0.5}
    >>> columns["step"], columns["train/loss"], columns["eval/auc"]
    ([5, 9], [0.5, None], [None, 0.75])

    Args:
        into: a list, to which one dict is appended at each call; or a dict of lists of one length, with None where a
            call had no such name.

    The sink raises TypeError for a value that is no number, bool or str, and ValueError for one named as a count.
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

    return _Sink(write, f"record(<{type(into).__name__}>)")


def tensorboard(
    directory: str | os.PathLike[str], *, hyperparameters: Mapping[str, bool | int | float | str] | None = None
) -> Sink:
    """A sink that writes for TensorBoard: numbers as scalars, vectors as histograms, images as pictures.

    >>> import looplib as ll, pathlib, tempfile, torch
    >>> folder = tempfile.mkdtemp()
    >>> model = torch.nn.Linear(2, 1)
    >>> state = ll.init_state(model)
    >>> board = ll.tensorboard(folder, hyperparameters={"lr": 3e-4})
    >>> board(state, {"train/loss": 0.5, "note": "warm", "digits": torch.rand(1, 8, 8)})
    >>> board(state, {f"params/{name}": value.flatten() for name, value in state.params.items()})
    >>> len(list(pathlib.Path(folder).glob("events.out.tfevents.*")))
    1

    A number or bool is a scalar (of 32 bits, as TensorBoard holds them), a str is a text, a tensor or array of one
    dimension the histogram of its finite elements, and one of three dimensions, (channels, height, width) with 1, 3
    or 4 channels, a picture: floats from 0 to 1 or uint8 from 0 to 255. The step is the state's.

    A resumed run writes a file of its own into the same directory, and TensorBoard then leaves out what the earlier
    one wrote from the step of its first call on. The file is appended to and closed at each call.

    Args:
        directory: of one run; made where missing.
        hyperparameters: names and values, for the table of runs under HPARAMS. Its metrics are the run's scalars.

    Raises ImportError without `pip install looplib[tensorboard]`. The sink raises TypeError for a value of another
    kind, naming it, and OSError when the file cannot be written; the records before it stay readable.
    """
    _extra("tensorboard", "tensorboard")
    summary = _extra("torch.utils.tensorboard.summary", "tensorboard")
    event_pb2 = _extra("tensorboard.compat.proto.event_pb2", "tensorboard")
    record_writer = _extra("tensorboard.summary.writer.record_writer", "tensorboard")
    folder = Path(directory).absolute()
    unique = f"{socket.gethostname()}.{os.getpid()}.{uuid.uuid4().hex[:8]}"
    file_path = folder / f"events.out.tfevents.{int(time.time()):010}.{unique}"
    begun = False

    # Not by SummaryWriter: its thread ends at the first error, and raises that error for ever after.
    def write(state: TrainState, values: Mapping[str, Any]) -> None:
        nonlocal begun
        scalars, histograms, pictures = _by_kind(values)
        events: list[dict[str, Any]] = []
        if not begun:
            events.append({"file_version": "brain.Event:2"})
            start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            events.append({"step": state.step, "session_log": start})
            if hyperparameters:
                # The experiment's own record would fix the table's columns; without it they are those of all runs.
                _, session, _ = summary.hparams(_plain(hyperparameters), {})
                events.append({"summary": session})
        made = [
            summary.text(name, value) if isinstance(value, str) else summary.scalar(name, value)
            for name, value in scalars.items()
        ]
        for name, vector in histograms.items():
            if len(finite := vector[vector.isfinite()]):
                made.append(summary.histogram(name, finite.numpy(), bins=64))
        made += [summary.image(name, picture, dataformats="CHW") for name, picture in pictures.items()]
        events += [{"step": state.step, "summary": one} for one in made]
        buffer = io.BytesIO()
        now = time.time()
        for event in events:
            record_writer.RecordWriter(buffer).write(event_pb2.Event(wall_time=now, **event).SerializeToString())
        folder.mkdir(parents=True, exist_ok=True)
        _append(file_path, buffer.getvalue())
        begun = True

    given = "" if hyperparameters is None else f", hyperparameters={dict(hyperparameters)!r}"
    return _Sink(write, f"tensorboard({os.fspath(directory)!r}{given})")


def wandb(*, mode: str = "offline", **init: Any) -> Sink:
    """A sink that logs to a run of Weights & Biases, which its first call begins; offline unless asked otherwise.

    >>> import looplib as ll
    >>> log = ll.wandb(project="digits", dir="runs/digits", config={"lr": 3e-4})
    >>> log
    wandb(mode='offline', project='digits', dir='runs/digits', config={'lr': 0.0003})

    Numbers, bools and strs are logged as they are, a tensor or array of one dimension as a histogram, and one of
    three, (channels, height, width), as a picture, all at the state's step. W&B takes steps in order only, so a
    resumed run is one of its own, unless `id` and `resume` say otherwise. `wandb sync` uploads an offline run. The
    run is finished when the process ends.

    Args:
        mode: "offline", "online" or "disabled".
        **init: for `wandb.init`: project, name, dir, config (the hyperparameters), id, resume, ...

    Raises ImportError without `pip install looplib[wandb]`. The sink raises TypeError for a value of another kind,
    naming it, and what W&B raises.
    """
    library = _extra("wandb", "wandb")
    run: Any = None

    def write(state: TrainState, values: Mapping[str, Any]) -> None:
        nonlocal run
        scalars, histograms, pictures = _by_kind(values)
        run = run or library.init(mode=mode, **init)
        made: dict[str, Any] = {
            name: library.Histogram(vector[vector.isfinite()].numpy()) for name, vector in histograms.items()
        }
        # W&B rescales floats by their own range; 8 bits are taken as they are.
        for name, picture in pictures.items():
            bits = picture if picture.dtype == torch.uint8 else (picture.clamp(0, 1) * 255).to(torch.uint8)
            made[name] = library.Image(bits.permute(1, 2, 0).squeeze(-1).numpy())
        run.log({**scalars, **made}, step=state.step)

    given = {"mode": mode, **init}
    return _Sink(write, f"wandb({', '.join(f'{name}={value!r}' for name, value in given.items())})")


def rename(sink: Sink, names: Mapping[str, str] | Callable[[str], str]) -> Sink:
    """A sink that gives values other names on their way to another one.

    >>> import looplib as ll
    >>> log = ll.rename(ll.console(), {"eval/auc": "eval_auc"})
    >>> log(ll.TrainState(step=5), {"train/loss": 0.5, "eval/auc": 0.75})
    step      5  epoch      0  train/loss 0.5         eval_auc 0.75
    >>> log = ll.rename(ll.console(), lambda name: name.replace("/", "_"))

    Args:
        sink: what is called.
        names: old names to new ones (the others stay), or a function from one to the other.

    The sink raises ValueError when two values would have one name.
    """
    new_name = names if callable(names) else lambda name: names.get(name, name)

    def write(state: TrainState, values: Mapping[str, Any]) -> None:
        renamed: dict[str, Any] = {}
        came_from: dict[str, str] = {}
        for old, value in values.items():
            new = new_name(old)
            if new in renamed:
                raise ValueError(f"{came_from[new]!r} and {old!r} would both be named {new!r}; give one another name")
            renamed[new], came_from[new] = value, old
        sink(state, renamed)

    return _Sink(write, f"rename({sink!r}, {names!r})")


def only(sink: Sink, names: Collection[str] | Callable[[str], bool]) -> Sink:
    """A sink that hands on some of the values, and does not call the other one where none is left.

    >>> import looplib as ll
    >>> log = ll.only(ll.console(), lambda name: name.startswith("eval/"))
    >>> log(ll.TrainState(step=5), {"train/loss": 0.5})
    >>> log(ll.TrainState(step=9), {"train/loss": 0.5, "eval/auc": 0.75})
    step      9  epoch      0  eval/auc 0.75
    >>> log = ll.only(ll.console(), ["train/loss", "eval/auc"])

    Args:
        sink: what is called.
        names: a list or set of those that pass, or a predicate of a name.

    Raises TypeError when given one name by itself.
    """
    if isinstance(names, str):
        raise TypeError(f"only takes several names, or a predicate, and found the str {names!r}; write [{names!r}]")
    passes: Callable[[str], bool] = names if callable(names) else names.__contains__

    def write(state: TrainState, values: Mapping[str, Any]) -> None:
        if passed := {name: value for name, value in values.items() if passes(name)}:
            sink(state, passed)

    return _Sink(write, f"only({sink!r}, {names!r})")


def first_rank_only(sink: Sink) -> Sink:
    """A sink that is silent in all processes of a distributed run but the first.

    >>> import looplib as ll
    >>> log = ll.first_rank_only(ll.console())
    >>> log(ll.TrainState(step=5), {"train/loss": 0.5})
    step      5  epoch      0  train/loss 0.5

    The rank is asked for at each call, so the sink may be made before the processes know each other.
    """

    def write(state: TrainState, values: Mapping[str, Any]) -> None:
        if rank() == 0:
            sink(state, values)

    return _Sink(write, f"first_rank_only({sink!r})")


def safely(sink: Sink) -> Sink:
    """A sink whose errors stop no training: the first one is a warning, and each call is tried anew.

    >>> import looplib as ll, warnings
    >>> def server(state, values):
    ...     raise ConnectionError("no route to it")
    >>> log = ll.safely(server)
    >>> with warnings.catch_warnings(record=True) as told:
    ...     warnings.simplefilter("always")
    ...     for step in range(3):
    ...         log(ll.TrainState(step=step), {"train/loss": 0.5})
    >>> [str(warning.message) for warning in told]
    ["<function server at ...> failed at step 0: ConnectionError('no route to it'); training goes on, ..."]

    What failed is lost. An interrupt is no error, and is raised. For a sink that takes its time, see `in_background`.
    """
    told = False

    def write(state: TrainState, values: Mapping[str, Any]) -> None:
        nonlocal told
        try:
            sink(state, values)
        except Exception as error:
            if not told:
                told = True
                warnings.warn(_failed(sink, state.step, error), RuntimeWarning, stacklevel=3)

    return _Sink(write, f"safely({sink!r})")


def in_background(sink: Sink, max_pending: int = 1000, *, patience: float = 10.0) -> Background:
    """A sink that hands each call to a thread, so that a slow disk or a dead server never holds the loop up.

    >>> import looplib as ll, tempfile
    >>> path = tempfile.mkdtemp() + "/log.jsonl"
    >>> log = ll.in_background(ll.jsonl(path))
    >>> log(ll.TrainState(step=5), {"train/loss": 0.5})
    >>> log.flush()
    >>> ll.read_jsonl(path)[0]["train/loss"]
    0.5

    Calls reach the inner sink in their order, with a copy of the values (a tensor's is on the host) and a state that
    has the counts alone: no parameters, so none are kept from being freed or donated.

    An error stops nothing: the first one is a warning at the next call, later calls are tried each on its own, and
    `flush()` and `close()` tell how many were lost. So are calls made while `max_pending` wait.

    `flush()` waits for all calls so far. `close()` does too and ends the thread, which another call starts again;
    nothing need be closed, for the end of the process does. Where the inner sink finishes no call in `patience`
    seconds, neither waits on. A forked process, such as a worker of a DataLoader, has none of the calls that wait.

    Args:
        sink: what is called, by one thread; a `tee` for several.
        max_pending: calls that may wait.
        patience: in seconds.

    Raises ValueError when max_pending is not positive.
    """
    if max_pending < 1:
        raise ValueError(f"max_pending is {max_pending}; at least one call must be able to wait: give 1 or more")
    return Background(sink, max_pending, patience)


class Background:
    """What `in_background` returns: a sink with `flush` and `close`."""

    def __init__(self, sink: Sink, max_pending: int, patience: float) -> None:
        self._sink, self._max_pending, self._patience = sink, max_pending, patience
        self._renew()
        # Before what atexit runs, which ends what the sink works with (a run of W&B); as concurrent.futures does it.
        threading._register_atexit(self.close)  # type: ignore[attr-defined]

    def _renew(self) -> None:
        self._pid = os.getpid()
        # Of all queues the one with no lock of Python's, which a signal or a fork could leave taken.
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread = threading.Thread()
        self._given = 0
        self._dropped = 0
        self._finished = 0
        self._failures = 0
        self._lost_told = 0
        self._error: tuple[int, BaseException] | None = None
        self._told = False

    def __call__(self, state: TrainState, values: Mapping[str, Any]) -> None:
        held = {name: _copied(value) for name, value in values.items()}
        if self._pid != os.getpid():
            self._renew()
        if self._error is not None and not self._told:
            self._told = True
            warnings.warn(_failed(self._sink, *self._error), RuntimeWarning, stacklevel=2)
        self._given += 1
        if self._queue.qsize() >= self._max_pending:
            self._dropped += 1
            if self._dropped == 1:
                message = (
                    f"{self._sink!r} is behind by {self._max_pending} calls; the one at step {state.step} is lost, "
                    "as are others while so many wait"
                )
                warnings.warn(message, RuntimeWarning, stacklevel=2)
            return
        self._queue.put((_counts(state), held))
        if not self._thread.is_alive():
            self._thread = threading.Thread(target=self._work, args=(self._queue,), name=repr(self), daemon=True)
            self._thread.start()

    def flush(self) -> None:
        """Wait until the calls so far are written, and warn of those that are lost."""
        self._wait()
        self._tell()

    def close(self) -> None:
        """As `flush`, and the thread ends."""
        if self._wait():
            self._queue.put(None)
            self._thread.join()
        self._tell()

    def __repr__(self) -> str:
        return f"in_background({self._sink!r}, max_pending={self._max_pending})"

    def _work(self, calls: queue.SimpleQueue[Any]) -> None:
        while (call := calls.get()) is not None:
            if isinstance(call, threading.Event):
                call.set()
                continue
            state, values = call
            try:
                self._sink(state, values)
            except BaseException as error:  # an interrupt comes to no thread but the main one
                self._failures += 1
                self._error = self._error or (state.step, error.with_traceback(None))
            self._finished += 1
            del call, state, values

    def _wait(self) -> bool:
        """Whether the thread has done all that it was given so far."""
        if self._pid != os.getpid() or not self._thread.is_alive():
            return False
        reached = threading.Event()
        self._queue.put(reached)
        finished = -1
        while not reached.wait(self._patience):
            if finished == self._finished:
                return False
            finished = self._finished
        return True

    def _tell(self) -> None:
        if self._pid != os.getpid():
            return
        waiting = self._given - self._dropped - self._finished
        lost = self._dropped + self._failures + waiting
        if lost > self._lost_told:
            self._lost_told, self._told = lost, True
            parts = [f"{self._sink!r} lost {lost} of {self._given} calls"]
            if self._failures:
                step, error = self._error  # type: ignore[misc]
                parts.append(f"{self._failures} failed, the first at step {step}: {error!r}")
            if self._dropped:
                parts.append(f"{self._dropped} came while {self._max_pending} waited")
            if waiting:
                parts.append(f"{waiting} wait still, and none was finished in {self._patience} seconds")
            warnings.warn("; ".join(parts), RuntimeWarning, stacklevel=3)


@dataclass(frozen=True)
class Window:
    """The metrics of several steps, to be logged together: exact, and without a wait for the device.

    >>> import looplib as ll
    >>> window = ll.Window()
    >>> window = window.add({"loss": ll.Mean(6.0, 3)})
    >>> window = window.add({"loss": ll.Mean(2.0, 1)})
    >>> len(window), ll.compute(window.metrics(), prefix="train/")
    (2, {'train/loss': 2.0})

    In a loop:

        window = ll.Window()
        for batch in loader(state):
            state, metrics = train_step(state, batch)
            window = window.add(metrics)
            if log_now(state):
                log(state, ll.compute(window.metrics(), prefix="train/"))
                window = ll.Window()

    It is a record that never changes, so an interrupt leaves the old one or the new one, and adding again what was
    added is adding it twice. Records wait in it unmerged until there are 64: a step costs a few operations in 64, and
    a window of any length the memory of 64 steps.

    `metrics()` raises ValueError when nothing was added, or when steps differ in their names.
    """

    merged: tuple[Metrics, ...] = ()
    waiting: tuple[Metrics, ...] = ()
    steps: int = 0

    def add(self, metrics: Metrics) -> Window:
        """The window with the metrics of one more step."""
        waiting = (*self.waiting, metrics)
        if len(waiting) == 64:
            return Window((merge(*self.merged, *waiting),), (), self.steps + 1)
        return Window(self.merged, waiting, self.steps + 1)

    def metrics(self) -> dict[str, Metric]:
        """Those of all steps together, for `ll.compute`."""
        if not self.steps:
            raise ValueError("the window is empty; add the metrics of a step first: window = window.add(metrics)")
        return merge(*self.merged, *self.waiting)

    def __len__(self) -> int:
        return self.steps


def read_columns(path: str | os.PathLike[str]) -> dict[str, list[Any]]:
    """A log of `jsonl` or `csv_file` as a dict of columns, one entry for a step, None where it has no such value.

    >>> import looplib as ll, tempfile
    >>> path = tempfile.mkdtemp() + "/log.jsonl"
    >>> log = ll.jsonl(path)
    >>> for step in (1, 2, 3):
    ...     log(ll.TrainState(step=step), {"train/loss": 1 / step})
    >>> log(ll.TrainState(step=2), {"train/loss": 0.25})  # a run that went back
    >>> log(ll.TrainState(step=2), {"eval/auc": 0.75})
    >>> columns = ll.read_columns(path)
    >>> columns["step"], columns["train/loss"], columns["eval/auc"]
    ([1, 2], [1.0, 0.25], [None, 0.75])

    What was logged at one step (in several calls, or in a run and the one that resumed it) is one entry, in which the
    later value of a name counts. Where a run went back to a checkpoint, the steps beyond the first that it logged
    anew are those of the later pass alone. Steps that made no update are told apart by their samples.

    Args:
        path: the file; which of the two it is, its first byte tells.

    A half-written line at the end is left out. A CSV cell has no type: it is read as an int, a float or a bool where
    it is written as Python writes one, else as a str; an empty one is None. `pandas.DataFrame(columns)` is the table.

    Raises FileNotFoundError when nothing was logged yet, and ValueError for a file of another kind.
    """
    file_path = Path(path)
    with open(file_path, "rb") as file:
        first = file.read(1)
    if first in (b"{", b"\n"):  # a newline follows half a line that was lost to the last byte
        rows = read_jsonl(file_path)
    else:
        header, lines, _ = _table(file_path, file_path.stat().st_size)
        rows = [
            {name: value for name, cell in zip(header, line, strict=True) if (value := _value(cell)) is not None}
            for line in lines
        ]
    joined: list[dict[str, Any]] = []
    for row in rows:
        place = (row["step"], row["samples"])
        if joined and place < (joined[-1]["step"], joined[-1]["samples"]):
            while joined and joined[-1]["step"] >= place[0] and (joined[-1]["step"], joined[-1]["samples"]) != place:
                joined.pop()
        if joined and (joined[-1]["step"], joined[-1]["samples"]) == place:
            joined[-1].update(row)
        else:
            joined.append(dict(row))
    names = dict.fromkeys(name for row in joined for name in row)
    return {name: [row.get(name) for row in joined] for name in names}


def _counts(state: TrainState) -> TrainState:
    return TrainState(
        step=state.step,
        epoch=state.epoch,
        batch=state.batch,
        epoch_length=state.epoch_length,
        samples=state.samples,
        seed=state.seed,
    )


def _copied(value: Any) -> Any:
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else copy.copy(value)


def _failed(sink: Sink, step: int, error: BaseException) -> str:
    return (
        f"{sink!r} failed at step {step}: {error!r}; training goes on, each later call is tried anew, and what "
        "cannot be written is lost"
    )


def _by_kind(values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor], dict[str, Tensor]]:
    """The plain values, the vectors for histograms, and the pictures."""
    scalars: dict[str, Any] = {}
    histograms: dict[str, Tensor] = {}
    pictures: dict[str, Tensor] = {}
    for name, value in values.items():
        shape = tuple(getattr(value, "shape", ()))
        if not shape:
            scalars[name] = value
            continue
        tensor = torch.as_tensor(value).detach().cpu()
        tensor = tensor.float() if tensor.is_floating_point() else tensor
        if len(shape) == 1:
            histograms[name] = tensor
        elif len(shape) == 3 and shape[0] in (1, 3, 4):
            pictures[name] = tensor
        else:
            raise TypeError(
                f"{name!r} is a {type(value).__name__} of shape {shape}; one dimension makes a histogram, and (1, 3 "
                "or 4 channels, height, width) a picture: for a histogram of all its elements give .flatten()"
            )
    return _plain(scalars), histograms, pictures


def _extra(module: str, extra: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(f"the sink {extra} needs its package: pip install looplib[{extra}]") from error


def _append(path: Path, data: bytes) -> None:
    """All of it, or nothing where the disk is full or an interrupt comes."""
    with open(path, "ab", buffering=0) as file:
        size = file.seek(0, os.SEEK_END)
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[file.write(rest) :]
        except BaseException:
            with suppress(OSError):  # of a device, which cannot be cut
                file.truncate(size)
            raise


def _put(path: Path, data: bytes) -> None:
    """The whole file anew, at once."""
    target = path.resolve()  # what a link leads to, for the link is to stay
    beside = target.with_name(f".{target.name}.writing")
    try:
        with open(beside, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        shutil.copymode(target, beside)
        beside.replace(target)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


def _table(path: Path, size: int) -> tuple[list[str], list[list[str]], int]:
    """The header and rows of a CSV log, and the length up to the end of its last whole row."""
    if not size:  # a device has none, and may have no end
        return [], [], 0
    whole = place = 0
    quoted = False
    data = path.read_bytes()
    for line in io.BytesIO(data):
        place += len(line)
        quoted ^= line.count(b'"') % 2 == 1
        if not quoted and line.endswith(b"\n"):
            whole = place
    lines = list(csv.reader(io.StringIO(data[:whole].decode(), newline="")))
    header = lines[0] if lines else []
    if header[:4] != list(COUNTS) if whole else not b"step,epoch,batch,samples".startswith(data[:24]):
        raise ValueError(
            f"{path} is no log of csv_file: it begins with {data[:40]!r}, not with {','.join(COUNTS)!r}; give "
            "another path, or move that file away"
        )
    return header, lines[1:], whole


def _line(cells: list[str]) -> bytes:
    quoted = ['"' + cell.replace('"', '""') + '"' if re.search('[",\r\n]', cell) else cell for cell in cells]
    return (",".join(quoted) + "\n").encode()


def _cell(value: bool | int | float | str) -> str:
    if isinstance(value, (bool, str)):
        return str(value)
    return int.__repr__(value) if isinstance(value, int) else float.__repr__(value)


_FLOAT = re.compile(r"-?([0-9]+\.[0-9]+|[0-9]+(\.[0-9]+)?e[+-][0-9]+|inf|nan)")


def _value(cell: str) -> bool | int | float | str | None:
    if cell in ("True", "False"):
        return cell == "True"
    if re.fullmatch("-?[0-9]+", cell):
        return int(cell)
    if _FLOAT.fullmatch(cell):
        return float(cell)
    return cell or None
