"""TensorBoard sink, and the kinds of values that trackers take: numbers and texts, histograms, and images."""

from __future__ import annotations

import importlib
import io
import os
import socket
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from looplib.log._sinks import CodedSink, plain_values
from looplib.log._tables import append
from looplib.types import Sink, TrainState


def tensorboard(
    directory: str | os.PathLike[str], *, hyperparameters: Mapping[str, bool | int | float | str] | None = None
) -> Sink:
    """TensorBoard sink: numbers as scalars, vectors as histograms, image tensors as images.

    >>> import looplib as ll, pathlib, tempfile, torch
    >>> folder = tempfile.mkdtemp()
    >>> model = torch.nn.Linear(2, 1)
    >>> state = ll.init_state(model)
    >>> board = ll.log.tensorboard(folder, hyperparameters={"lr": 3e-4})
    >>> board(state, {"train/loss": 0.5, "note": "warm", "digits": torch.rand(1, 8, 8)})
    >>> board(state, {f"params/{name}": value.flatten() for name, value in state.params.items()})
    >>> len(list(pathlib.Path(folder).glob("events.out.tfevents.*")))
    1

    A number or bool is written as a scalar (32 bits, as in TensorBoard), a str as text, a tensor or array with one
    dimension as the histogram of its finite elements, and one with three dimensions, (channels, height, width) with
    1, 3 or 4 channels, as an image: floats from 0 to 1 or uint8 from 0 to 255. The step is `state.step`.

    A resumed run writes a new file into the same directory. TensorBoard then hides what the earlier run wrote from
    the step of the new file's first call on. The file is opened, appended to and closed at each call.

    Args:
        directory: directory of one run, created if missing.
        hyperparameters: names and values for the HPARAMS table of runs. Its metrics are the run's scalars.

    Raises:
        ImportError: tensorboard is not installed.

    The sink raises TypeError for a value of a different kind, naming it, and OSError if the file cannot be written;
    earlier records stay readable.
    """
    _extra("tensorboard", "tensorboard")
    summary = _extra("torch.utils.tensorboard.summary", "tensorboard")
    event_pb2 = _extra("tensorboard.compat.proto.event_pb2", "tensorboard")
    record_writer = _extra("tensorboard.summary.writer.record_writer", "tensorboard")
    folder = Path(directory).absolute()
    unique = f"{socket.gethostname()}.{os.getpid()}.{uuid.uuid4().hex[:8]}"
    file_path = folder / f"events.out.tfevents.{int(time.time()):010}.{unique}"
    begun = False

    # SummaryWriter is not used: its thread ends at the first error and raises that error at every later call.
    def write(state: TrainState, values: Mapping[str, Any]) -> None:
        nonlocal begun
        scalars, histograms, pictures = by_kind(values)
        events: list[dict[str, Any]] = []
        if not begun:
            events.append({"file_version": "brain.Event:2"})
            start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            events.append({"step": state.step, "session_log": start})
            if hyperparameters:
                # An experiment record would fix the table's columns; without it they are those of all runs.
                _, session, _ = summary.hparams(plain_values(hyperparameters), {})
                events.append({"summary": session})
        made = [
            summary.text(name, value) if isinstance(value, str) else summary.scalar(name, value)
            for name, value in scalars.items()
        ]
        for name, values_of in histograms.items():
            made.append(
                summary.histogram_raw(
                    name,
                    min=values_of.least,
                    max=values_of.largest,
                    num=sum(values_of.counts),
                    sum=values_of.total,
                    sum_squares=values_of.squares,
                    bucket_limits=values_of.edges[1:],
                    bucket_counts=values_of.counts,
                )
            )
        made += [summary.image(name, picture, dataformats="CHW") for name, picture in pictures.items()]
        events += [{"step": state.step, "summary": one} for one in made]
        buffer = io.BytesIO()
        now = time.time()
        for event in events:
            record_writer.RecordWriter(buffer).write(event_pb2.Event(wall_time=now, **event).SerializeToString())
        folder.mkdir(parents=True, exist_ok=True)
        append(file_path, buffer.getvalue())
        begun = True

    options = "" if hyperparameters is None else f", hyperparameters={dict(hyperparameters)!r}"
    return CodedSink(write, f"tensorboard({os.fspath(directory)!r}{options})", first_rank=True)


class Histogram(NamedTuple):
    """Histogram of the finite elements of a tensor, with bins of equal width. `edges` has one more entry than `counts`."""

    counts: list[int]
    edges: list[float]
    least: float
    largest: float
    total: float
    squares: float


_BINS = 64


def histogram_of(tensor: Tensor) -> Histogram | None:
    """Histogram of a tensor, counted on its device. None if it has no finite element."""
    values = tensor.detach().flatten()
    values = values.float() if values.dtype in (torch.float16, torch.bfloat16, torch.bool) else values
    values = values[values.isfinite()]
    if not len(values):
        return None
    least, largest = (float(end) for end in values.aminmax())
    low, high = (least, largest) if least < largest else (least - 0.5, largest + 0.5)
    bins = ((values - low) * (_BINS / (high - low))).long().clamp_(0, _BINS - 1)  # exact counts, unlike torch.histc
    wide = values if values.device.type == "mps" else values.double()
    counts: list[int] = torch.bincount(bins, minlength=_BINS).tolist()
    edges: list[float] = torch.linspace(low, high, _BINS + 1, dtype=torch.float64).tolist()
    return Histogram(counts, edges, least, largest, float(wide.sum()), float(wide.square().sum()))


def by_kind(values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Histogram], dict[str, Tensor]]:
    """Split values into plain ones, histograms (of vectors with a finite element), and images."""
    scalars: dict[str, Any] = {}
    histograms: dict[str, Histogram] = {}
    pictures: dict[str, Tensor] = {}
    for name, value in values.items():
        shape = tuple(getattr(value, "shape", ()))
        if isinstance(value, Histogram):
            histograms[name] = value
        elif not shape:
            scalars[name] = value
        elif len(shape) == 1:
            if (histogram := histogram_of(torch.as_tensor(value))) is not None:
                histograms[name] = histogram
        elif len(shape) == 3 and shape[0] in (1, 3, 4):
            tensor = torch.as_tensor(value).detach().cpu()
            pictures[name] = tensor.float() if tensor.is_floating_point() else tensor
        else:
            raise TypeError(
                f"{name!r} is a {type(value).__name__} of shape {shape}; one dimension makes a histogram, and (1, 3 "
                "or 4 channels, height, width) a picture: for a histogram of all its elements give .flatten()"
            )
    return plain_values(scalars), histograms, pictures


def _extra(module: str, extra: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(f"the sink {extra} needs its package: pip install {extra} pillow") from error
