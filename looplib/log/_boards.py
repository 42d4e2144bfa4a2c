"""Experiment trackers: sinks for TensorBoard and Weights & Biases.

Besides numbers they accept vectors, drawn as histograms, and images.
"""

from __future__ import annotations

import importlib
import io
import os
import socket
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

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
        scalars, histograms, pictures = _by_kind(values)
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
        append(file_path, buffer.getvalue())
        begun = True

    options = "" if hyperparameters is None else f", hyperparameters={dict(hyperparameters)!r}"
    return CodedSink(write, f"tensorboard({os.fspath(directory)!r}{options})", first_rank=True)


def wandb(*, mode: str = "offline", **init: Any) -> Sink:
    """Weights & Biases sink. The first call starts the run, offline by default.

    >>> import looplib as ll
    >>> log = ll.log.wandb(project="digits", dir="runs/digits", config={"lr": 3e-4})
    >>> log
    wandb(mode='offline', project='digits', dir='runs/digits', config={'lr': 0.0003})

    Numbers, bools and strs are logged unchanged, a tensor or array with one dimension as a histogram, and one with
    three, (channels, height, width), as an image, all at `state.step`. W&B accepts steps only in increasing order, so
    a resumed run is a new W&B run, unless you pass `id` and `resume`. `wandb sync` uploads an offline run. The run is
    finished when the process exits.

    Args:
        mode: "offline", "online" or "disabled".
        **init: arguments of `wandb.init`: project, name, dir, config (the hyperparameters), id, resume, ...

    Raises:
        ImportError: wandb is not installed.

    The sink raises TypeError for a value of a different kind, naming it, and W&B's own errors.
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
        # W&B rescales floats by their range; uint8 values are used unchanged.
        for name, picture in pictures.items():
            bits = picture if picture.dtype == torch.uint8 else (picture.clamp(0, 1) * 255).to(torch.uint8)
            made[name] = library.Image(bits.permute(1, 2, 0).squeeze(-1).numpy())
        run.log({**scalars, **made}, step=state.step)

    options = {"mode": mode, **init}
    return CodedSink(
        write, f"wandb({', '.join(f'{name}={value!r}' for name, value in options.items())})", first_rank=True
    )


def _by_kind(values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor], dict[str, Tensor]]:
    """Split values into plain ones, vectors for histograms, and images."""
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
    return plain_values(scalars), histograms, pictures


def _extra(module: str, extra: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(f"the sink {extra} needs its package: pip install {extra} pillow") from error
