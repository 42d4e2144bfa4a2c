"""Prediction files: a folder with one file per batch, and a description of the state and the batches.

A batch's file is written under another name and then renamed, so a file with its own name is complete, and the
predictions are those of batch 0 and of those that follow it without a gap.
"""

from __future__ import annotations

import os
import pickle
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from itertools import count
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import orjson
import torch

from looplib._core.checks import check, few
from looplib._core.checksums import checksum
from looplib.checkpoint._shards import whole
from looplib.evaluation._batches import is_loader
from looplib.evaluation._outputs import count_rows, is_texts, named_leaves
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
    found = _described(folder)
    if not any(folder.glob("batch-*.pt")):
        _write(folder / ABOUT, lambda file: file.write(orjson.dumps(described)))
        return []
    for part, other in (("state", "another state"), ("batches", "other batches")):
        check(
            found[part] == described[part],
            f"{folder} holds predictions of {other}, {found[part]}, and these are {described[part]}: give the same, or "
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
        found = orjson.loads(about.read_bytes())
        return {"state": found["state"], "batches": found["batches"]}
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
            f"{path} is damaged: delete it and call ll.predict_to as before, which predicts it again"
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
