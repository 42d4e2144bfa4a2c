"""Predictions on disk."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from looplib._core.checks import check
from looplib._core.collective import together
from looplib._core.kinds import check_kind
from looplib._core.ranks import is_first
from looplib.evaluation._batches import Reading, is_loader
from looplib.evaluation._evaluate import check_order
from looplib.evaluation._predict import check_unshuffled, predicted, samples_of
from looplib.evaluation._prediction_files import (
    ABOUT,
    batch_of,
    description,
    files_of,
    read_batch,
    resume,
    write_batch,
)
from looplib.types import TrainState


def predict_to(
    path: str | os.PathLike[str],
    predict_step: Callable[[TrainState, Any], Any],
    state: TrainState,
    batches: Any,
    *,
    progress: bool = False,
) -> Path:
    """Write predictions to a folder batch by batch. Calling it again resumes an interrupted run.

    >>> import looplib as ll, tempfile, torch
    >>> model = torch.nn.Linear(1, 3)
    >>> def predict_fn(model, x):
    ...     return {"logits": (logits := model(x)), "class": logits.argmax(1)}
    >>> predict_step, state = ll.make_predict_step(model, predict_fn), ll.init_state(model)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = ll.predict_to(f"{folder}/predictions", predict_step, state, torch.zeros(7, 1).split(3))
    ...     outputs = ll.evaluation.read_predictions(path)
    ...     {name: tuple(tensor.shape) for name, tensor in outputs.items()}
    {'logits': (7, 3), 'class': (7,)}

    Outputs are tensors with samples along the first dimension, or lists of strings, one per sample. A column's name is
    the leaf's path in the output, such as `class` or `deep/x/0`, or `output` if the output is a single leaf. Batches
    may differ in the width of their rows, as for generated text. Such a column is read as a list of tensors.

    Each batch is one file, `batch-00000000.pt` and so on. It is written under another name and then renamed, so a
    process that is killed leaves no incomplete batch. The next call counts these files and continues after them, or does
    nothing if all are there. On several ranks the first one writes, and any number of ranks may resume.

    `predictions.json` describes the batches and has a fingerprint of all weights and buffers. A call with a different
    state or different batches is refused. The contents of the dataset and the code of `predict_fn` are not described:
    delete the folder if these change.

    `read_predictions` reads all files into memory. For sets that are larger, read the files one at a time:

        for file in sorted(path.glob("batch-*.pt")):
            columns = torch.load(file)["columns"]

    Args:
        path: a new or empty folder, or that of an interrupted run.
        predict_step, state, batches: as for `predict`. The batches must be the same at each call.
        progress: if True, show a progress bar, removed when done.

    Raises:
        ValueError: the folder holds something else, or predictions of a different state or of batches of different
            sizes; an output's columns differ in length, or change from batch to batch in name, dtype or number of
            dimensions; two leaves have the same name, such as those of the keys 1 and "1"; or the loader shuffles.
        TypeError: an output contains something other than tensors and lists of strings.
    """
    check_order("predict_to", predict_step, state, "path, ")
    predict_step = check_kind(predict_step, "predict_to", "predict_step")
    check_unshuffled(batches)
    folder, described = Path(path), description(state, batches)
    done = together().on_rank0(lambda: resume(folder, described))

    def check_skipped(number: int, batch: Any) -> None:
        expected, samples = done[number].samples, samples_of(batch)
        check(
            None in (expected, samples) or samples == expected,
            f"{folder} holds {expected} samples of batch {number}, which now has {samples}: give the same batches, or "
            "delete it to start over",
        )

    reading = Reading(
        batches,
        title="prediction" if progress else None,
        start=len(done),
        skipped=None if is_loader(batches) else check_skipped,  # a loader's description says how it divides the data
    )
    kinds = done[0].kinds if done else None
    for number, (samples, output) in enumerate(predicted(predict_step, state, reading, "cpu"), len(done)):
        batch = batch_of(samples, output)
        kinds = kinds or batch.kinds
        check(
            batch.kinds == kinds,
            f"the outputs of batch {number} are {batch.kinds}, before it {kinds}: give all the same names, dtypes and "
            "numbers of dimensions",
        )
        if is_first():
            write_batch(folder, number, batch)
    together().barrier()  # all ranks return when everything is written
    return folder


def read_predictions(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read the columns that `predict_to` wrote, by name, with the batches concatenated in order.

    >>> import looplib as ll, tempfile, torch
    >>> predict_step = ll.make_predict_step(model := torch.nn.Linear(1, 3), lambda model, x: model(x))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = ll.predict_to(folder, predict_step, ll.init_state(model), torch.zeros(7, 1).split(3))
    ...     ll.evaluation.read_predictions(path)["output"].shape
    torch.Size([7, 3])

    A column whose rows share one shape is returned as a tensor on the CPU, one whose rows differ in shape as a list of
    tensors, and strings as a list. Of an interrupted run, these are the batches before the interruption.

    Args:
        path: the folder passed to `predict_to`.

    Raises:
        FileNotFoundError: there are no predictions in this folder.
        ValueError: a file is damaged.
    """
    folder = Path(path)
    parts = [read_batch(file).columns for file in files_of(folder)] if (folder / ABOUT).exists() else []
    check(bool(parts), f"{folder} holds no predictions: give the path that ll.predict_to returned", FileNotFoundError)
    return {name: _concatenated([columns.pop(name) for columns in parts]) for name in [*parts[0]]}


def _concatenated(parts: Sequence[Any]) -> Any:
    if all(isinstance(part, Tensor) for part in parts) and len({part.shape[1:] for part in parts}) == 1:
        return torch.cat(list(parts))
    return [*chain.from_iterable(parts)]  # rows of different shapes, or strings
