"""Predictions on disk: one file for each batch, and reading them."""

from __future__ import annotations

import os
import pickle
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, count
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import orjson
import torch
from torch import Tensor

from looplib._core.checks import check, few
from looplib._core.checksums import checksum
from looplib._core.collective import together
from looplib._core.ranks import is_first, whole
from looplib._core.records import check_kind
from looplib._core.samples import counter_of
from looplib.evaluation._batches import Reading, is_loader
from looplib.evaluation._evaluate import check_order
from looplib.evaluation._outputs import count_rows, is_texts, named_leaves
from looplib.evaluation._predict import check_unshuffled, predicted, samples_of
from looplib.types import TrainState

ABOUT = "predictions.json"
_PARTIAL = ".looplib-partial"


class Batch(NamedTuple):
    """Contents of a batch's file.

    Attributes:
        samples: number of samples in the batch, or None if it is unknown.
        kinds: dtype and number of dimensions of each column, which are the same in all batches.
        columns: name -> tensor or list of strings.
    """

    samples: int | None
    kinds: dict[str, str]
    columns: dict[str, Any]


def description(state: TrainState, batches: Any) -> dict[str, Any]:
    """Plain values that change with the weights, and with the batches of a loader. Other batches are counted."""
    facts = {"state": _fingerprint(state), "batches": batches.description if is_loader(batches) else None}
    plain: dict[str, Any] = orjson.loads(orjson.dumps(facts))
    return plain


def _fingerprint(state: TrainState) -> dict[str, Any]:
    """Fingerprint of a state: its step, its seed, and a checksum of the bits of its weights and buffers."""
    facts = []
    for name, tensor in {**state.params, **state.buffers}.items():
        full = whole(tensor).detach()  # one at a time, since a sharded model may not fit as a whole
        facts.append((name, str(full.dtype), tuple(full.shape), int(checksum(full))))
    return {"step": state.step, "seed": state.seed, "bits": zlib.crc32(repr(facts).encode())}


def resume(folder: Path, described: Mapping[str, Any]) -> list[Batch]:
    """Prepare the folder, and return the batches that are there, without their columns.

    Raises ValueError if the folder holds something else.
    """
    check(folder.is_dir() or not folder.exists(), f"{folder} is not a folder: give the path of one, or a new path")
    folder.mkdir(parents=True, exist_ok=True)
    for partial in folder.glob(f"*{_PARTIAL}"):  # of a process that was killed
        partial.unlink()
    saved = _described(folder)
    if not any(folder.glob("batch-*.pt")):
        _write(folder / ABOUT, lambda file: file.write(orjson.dumps(described)))
        return []
    for part, other in (("state", "another state"), ("batches", "other batches")):
        check(
            saved[part] == described[part],
            f"{folder} holds predictions of {other}, {saved[part]}, and these are {described[part]}: give the same, or "
            "another path, or delete it to start over",
        )
    return [read_batch(path, mmap=True)._replace(columns={}) for path in files_of(folder)]


def _described(folder: Path) -> Mapping[str, Any]:
    """The description in a folder of predictions, or of nothing if the folder is empty."""
    about = folder / ABOUT
    if not about.exists():
        others = sorted(path.name for path in folder.iterdir())
        check(not others, f"{folder} holds {few(others)} and no {ABOUT}: give a new folder")
        return {}
    try:
        description = orjson.loads(about.read_bytes())
        return {"state": description["state"], "batches": description["batches"]}
    except (orjson.JSONDecodeError, LookupError, TypeError) as error:
        raise ValueError(
            f"{about} holds something that predict_to does not write ({error!r}): give another path"
        ) from error


def files_of(folder: Path) -> Iterator[Path]:
    """Files of the batches, up to the first that is not there."""
    for number in count():
        if not (path := _path(folder, number)).exists():
            return
        yield path


def _path(folder: Path, number: int) -> Path:
    return folder / f"batch-{number:08d}.pt"


def write_batch(folder: Path, number: int, batch: Batch) -> None:
    _write(_path(folder, number), lambda file: torch.save(batch._asdict(), file))


def _write(path: Path, save: Callable[[BinaryIO], Any]) -> None:
    """Write a file that is either complete or not there, after a power failure too."""
    partial = path.with_name(f"{path.name}.{os.getpid()}{_PARTIAL}")
    with open(partial, "xb") as file:
        save(file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def read_batch(path: Path, *, mmap: bool = False) -> Batch:
    """Read a batch's file. With `mmap=True`, the numbers in its tensors are read when they are used, and not verified."""
    try:
        if not mmap:  # torch writes checksums and does not compare them
            with zipfile.ZipFile(path) as file:
                check(not file.testzip(), "a checksum is wrong", zipfile.BadZipFile)
        return Batch(**torch.load(path, map_location="cpu", mmap=mmap, weights_only=True))
    except (
        RuntimeError,
        zipfile.BadZipFile,
        zlib.error,
        pickle.UnpicklingError,
        EOFError,
        TypeError,
        LookupError,
    ) as error:
        raise ValueError(
            f"{path} is damaged: delete it and call ll.evaluation.predict_to as before, which predicts it again"
        ) from error


def batch_of(samples: int | None, output: Any) -> Batch:
    """The output of a batch as columns, which all have the same number of rows."""
    leaves = named_leaves(output)
    rows = {name: count_rows(name, leaf) for name, leaf in leaves.items()}
    check(
        len({*rows.values()}) == 1,
        f"the output's columns differ in their number of rows: {rows}; give one row for each sample",
    )
    kinds = {name: "str" if is_texts(leaf) else f"{leaf.dtype}, {leaf.dim()}D" for name, leaf in leaves.items()}
    return Batch(samples, kinds, {name: _column(name, leaf) for name, leaf in leaves.items()})


def _column(name: str, leaf: Any) -> Any:
    """A list of strings, or a copy of a tensor, since torch.save would write all of the memory that it is a view of."""
    if is_texts(leaf):
        return list(leaf)
    dense = leaf.layout == torch.strided and not leaf.is_nested
    check(dense, f"the output's {name!r} is sparse or nested; give dense tensors, {name}.to_dense()", TypeError)
    return leaf.detach().resolve_conj().resolve_neg().clone()


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
    ...     path = ll.evaluation.predict_to(f"{folder}/predictions", predict_step, state, torch.zeros(7, 1).split(3))
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
    counter, folder, described = counter_of(predict_step), Path(path), description(state, batches)
    done = together().on_rank0(lambda: resume(folder, described))

    def check_skipped(number: int, batch: Any) -> None:
        expected, samples = done[number].samples, samples_of(counter, batch)
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
    together().barrier("predict_to")  # all ranks return when everything is written
    return folder


def read_predictions(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read the columns that `predict_to` wrote, by name, with the batches concatenated in order.

    >>> import looplib as ll, tempfile, torch
    >>> predict_step = ll.make_predict_step(model := torch.nn.Linear(1, 3), lambda model, x: model(x))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = ll.evaluation.predict_to(folder, predict_step, ll.init_state(model), torch.zeros(7, 1).split(3))
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
    check(
        bool(parts),
        f"{folder} holds no predictions: give the path that ll.evaluation.predict_to returned",
        FileNotFoundError,
    )
    return {name: _concatenated([columns.pop(name) for columns in parts]) for name in [*parts[0]]}


def _concatenated(parts: Sequence[Any]) -> Any:
    if all(isinstance(part, Tensor) for part in parts) and len({part.shape[1:] for part in parts}) == 1:
        return torch.cat(list(parts))
    return [*chain.from_iterable(parts)]  # rows of different shapes, or strings
