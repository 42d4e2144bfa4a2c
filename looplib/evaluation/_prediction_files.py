"""Prediction files: the data, and an index of the complete batches.

The index has one line of JSON that describes the columns, and one for each batch, written after the batch's data: its
number of samples, and in each file its end and the checksum of its bytes. Data after the last end are incomplete.
"""

from __future__ import annotations

import os
import warnings
import zlib
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any

import orjson
import torch
from torch.utils.data import BatchSampler

from looplib._core.checks import are_counts, check, check_own_file, count_of, few
from looplib._core.ranks import world_size
from looplib.evaluation._batches import is_estimate, length_of
from looplib.evaluation._columns import TEXT, check_alike, columns_of, described, line_of, lines_of, special_runs
from looplib.evaluation._predict import samples_of

_SUFFIXES = (".bin", ".strings.jsonl")


@dataclass
class Index:
    """Index of predictions.

    Attributes:
        target: path passed to `predict_to`.
        head: the line about the columns; empty if nothing is written yet.
        batches: the lines of the complete batches.
    """

    target: Path
    head: dict[str, Any] = field(default_factory=dict)
    batches: list[dict[str, Any]] = field(default_factory=list)

    @property
    def outputs(self) -> dict[str, Any]:
        """Dtype and shape of each column."""
        outputs: dict[str, Any] = self.head.get("outputs", {})
        return outputs

    @property
    def ends(self) -> dict[str, int]:
        """End of the last complete batch in each file, by file name."""
        ends: dict[str, int] = self.batches[-1]["ends"] if self.batches else {}
        return ends

    @property
    def sizes(self) -> list[int | None]:
        """Number of samples of each batch, if known."""
        return [batch["examples"] for batch in self.batches]

    def file(self, name: str) -> Path:
        return self.target if is_lines(self.target) else self.target / name


def is_lines(target: Path) -> bool:
    return target.suffix == ".jsonl"


def index_path(target: Path) -> Path:
    return target.with_name(target.name + ".index") if is_lines(target) else target / "index.jsonl"


def read_index(target: Path) -> Index:
    """Read the index, without a last line that is incomplete after a kill or a power failure."""
    lines: list[Any] = []
    if not index_path(target).is_file():  # a pipe would be waited for
        return Index(target)
    with suppress(orjson.JSONDecodeError), open(index_path(target), "rb") as file:
        lines.extend(takewhile(_is_record, (orjson.loads(line) for line in file if line.endswith(b"\n"))))
    head, *batches = lines or [{}]
    index = Index(target, head, batches)
    if not head:
        return index
    line = 1
    try:
        check(isinstance(head["run"], dict) and "batch_size" in head, "no description of a run")
        for name, about in index.outputs.items():
            count_of(about["shape"], name)
            check(about["dtype"] == TEXT or isinstance(getattr(torch, about["dtype"]), torch.dtype), "no dtype")
        files = {target.name} if is_lines(target) else {*file_names(index.outputs).values()}
        before = dict.fromkeys(files, 0)
        for line, batch in enumerate(batches, 2):  # noqa: B007 - the message says which
            _check_line(batch, before, index.outputs)
            before = batch["ends"]
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(
            f"{index_path(target)} holds something that predict_to does not write, in line {line} ({error!r}): delete "
            f"{target}, or give another path"
        ) from error
    return index


def _check_line(batch: Mapping[str, Any], before: Mapping[str, int], outputs: Mapping[str, Any]) -> None:
    """Raise unless this line of an index may follow one with the ends `before`."""
    ends, samples = batch["ends"], batch["examples"]
    check(ends.keys() == before.keys(), f"files {few(ends)}")
    grow = are_counts(ends.values()) and all(ends[file] >= end for file, end in before.items())
    check(grow, "ends that are smaller than those before")
    check(samples is None or are_counts([samples]), "a number of samples")
    check(isinstance(batch.get("checksums", {}), dict), "checksums")
    for name, runs in batch.get("shapes", {}).items():
        for count, shape in runs:
            check(name in outputs, f"rows of {name!r}")
            count_of([count, *shape], name)


def _is_record(line: Any) -> bool:
    return isinstance(line, dict) and (line.keys() >= {"run", "outputs"} or line.keys() >= {"examples", "ends"})


def file_names(outputs: Mapping[str, Any]) -> dict[str, str]:
    """File name for each column, also distinct on file systems that ignore case."""
    files: dict[str, str] = {}
    taken: set[str] = set()
    for name, about in outputs.items():
        stem, suffix = name.replace("/", "."), _SUFFIXES[about["dtype"] == TEXT]
        file, number = stem + suffix, 2
        while file.casefold() in taken:
            file, number = f"{stem}.{number}{suffix}", number + 1
        taken.add(file.casefold())
        files[name] = file
    return files


def too_short(index: Index) -> Path | None:
    """A file in which the last batch is incomplete although the index lists it."""
    files = ((index.file(name), end) for name, end in index.ends.items())
    return next((file for file, end in files if not file.exists() or file.stat().st_size < end), None)


def resume(target: Path, run: Mapping[str, Any], batches: Any) -> Index:
    """Read the index of existing predictions, and cut off incomplete data."""
    path = index_path(target)
    path.parent.mkdir(parents=True, exist_ok=True)
    check_own_file(path)
    if not path.exists():
        _refuse_strangers(target)
        return Index(target)
    index = read_index(target)
    before = index.head.get("run", {})
    check(
        before.items() <= run.items(),  # an earlier version knew less of the state
        f"{target} holds predictions of another state ({before}, this one is {run}): delete it, or give another path",
    )
    for name in index.ends:
        check_own_file(index.file(name))
    _check_cut(index, batches)
    _drop_lost(index)
    for name, end in index.ends.items():
        os.truncate(index.file(name), end)
    # Without a batch, the head is written again.
    kept = path.read_bytes().splitlines(keepends=True)[: len(index.batches) + bool(index.batches)]
    os.truncate(path, sum(map(len, kept)))
    return index


def _refuse_strangers(target: Path) -> None:
    """Raise for files without an index, which looplib must not overwrite."""
    files: Iterable[Path] = [target] if is_lines(target) else target.iterdir()
    suffixes = (*_SUFFIXES, ".jsonl")
    strange = [file for file in files if file.name.endswith(suffixes) and file.exists() and file.stat().st_size]
    check(
        not strange,
        f"{', '.join(map(str, strange[:1]))} is there without {index_path(target).name}, which says which batches it "
        "holds: delete it, or give another path",
    )


def _drop_lost(index: Index) -> None:
    """Remove batches from the index whose data were lost in a power failure, so that they are predicted again."""
    if (found := _first_lost(index)) is not None:
        first, what = found
        warnings.warn(
            f"{what}, as a power cut may leave it: the batches from {first} on are predicted again", stacklevel=2
        )
        del index.batches[first:]


def _first_lost(index: Index) -> tuple[int, str] | None:
    """The first batch whose data differ from those that were written, and the difference."""
    begins: dict[str, int] = {}
    with ExitStack() as stack:
        files = {
            name: stack.enter_context(open(path, "rb")) for name in index.ends if (path := index.file(name)).exists()
        }
        for number, batch in enumerate(index.batches):
            for name, end in batch["ends"].items():
                size, begins[name] = end - begins.get(name, 0), end
                data = files[name].read(size) if name in files else b""
                if what := _lost(data, size, batch.get("checksums", {}).get(name), number):
                    return number, f"{index.file(name)} {what}"
    return None


def _lost(data: bytes, size: int, checksum: int | None, number: int) -> str:
    """Damage to the bytes of a batch, in words, or an empty string. An index of an earlier version has no checksum."""
    if len(data) < size:
        return "is shorter than its index says"
    changed = checksum is not None and zlib.crc32(data) != checksum
    return f"has other bytes in batch {number} than were written" if changed else ""


def _check_cut(index: Index, batches: Any) -> None:
    """Raise for batches of different sizes, which would start at a sample other than the next one."""
    if not index.batches:
        return
    size, new_size = index.head["batch_size"], size_of(batches)
    check(
        None in (size, new_size) or size == new_size,
        f"{index.target} holds predictions of a loader with batch_size={size}, and this one has "
        f"batch_size={new_size}: give the same, or delete it to start over",
    )
    length, done = None if is_estimate(batches) else length_of(batches), len(index.batches)
    check(length is None or length >= done, _other_cut(index, f"{length} batches"))
    sizes = index.sizes if (known := _sizes_of(batches)) is None else known[:done]
    check(sizes == index.sizes, _other_cut(index, few(sizes)))


def _sizes_of(batches: Any) -> list[int | None] | None:
    """Number of samples in each batch, or None if batches must be read to know it."""
    if isinstance(batches, (list, tuple)):
        return [samples_of(batch) for batch in batches]
    sampler = getattr(batches, "batch_sampler", None)
    if type(sampler) is BatchSampler and (count := length_of(sampler.sampler)) is not None:
        full, rest = divmod(count, sampler.batch_size)
        sizes: list[int | None] = [sampler.batch_size] * full
        return sizes if sampler.drop_last or not rest else [*sizes, rest]
    return None


def check_of_skipped(index: Index, batches: Any) -> Callable[[int, Any], None] | None:
    """Make a check that each batch that is read and skipped has the size in the index.

    None if the sizes of all batches are known without reading them.
    """
    if not index.batches or _sizes_of(batches) is not None:
        return None
    return partial(_check_size, index, world_size() if getattr(batches, "divide", False) else 1)


def _check_size(index: Index, ranks: int, number: int, batch: Any) -> None:
    expected, size = index.sizes[number], samples_of(batch)
    if expected is not None and size is not None:
        of_a_rank = expected // ranks <= size <= -(-expected // ranks)  # this rank's part of a divided batch
        check(of_a_rank, _other_cut(index, f"{size} in batch {number}"))


def _other_cut(index: Index, sizes: str) -> str:
    return (
        f"{index.target} holds batches of {few(index.sizes)} samples, and those given have {sizes}: give the "
        "same batches, or delete it to start over"
    )


def size_of(batches: Any) -> int | None:
    size = getattr(batches, "batch_size", None)
    return size if isinstance(size, int) else None


class Writer:
    """Append batches to the files, and a line to the index once a batch's data are written."""

    def __init__(self, index: Index, run: Mapping[str, Any], batch_size: int | None) -> None:
        self._index, self._run, self._batch_size = index, run, batch_size
        self._number, self._ends = len(index.batches), dict(index.ends)
        self._outputs = index.outputs

    def __enter__(self) -> Writer:
        self._record = open(index_path(self._index.target), "ab")
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        with self._record:
            if kind is None and self._number > len(self._index.batches):
                for name in self._ends:
                    with open(self._index.file(name), "rb+") as file:
                        os.fsync(file.fileno())
                self._record.flush()
                os.fsync(self._record.fileno())

    def add(self, samples: int | None, output: Any) -> None:
        columns = columns_of(output)
        if self._number == 0:
            self._outputs = described(columns)
            head = {"run": self._run, "outputs": self._outputs, "batch_size": self._batch_size}
            self._record.write(line_of(head))
        check_alike(self._number, columns, self._outputs)
        target = self._index.target
        if is_lines(target):
            data = {target.name: lines_of(columns)}
        else:
            data = {file: columns[name].raw() for name, file in file_names(self._outputs).items()}
        checksums = {}
        for name, raw in data.items():
            self._ends[name] = _write_after(self._index.file(name), self._ends.get(name, 0), raw)
            checksums[name] = zlib.crc32(raw)
        line: dict[str, Any] = {"examples": samples, "ends": self._ends, "checksums": checksums}
        if runs := special_runs(columns, self._outputs):
            line["shapes"] = runs
        self._record.write(line_of(line))  # the batch counts from here on
        self._record.flush()
        self._number += 1


def _write_after(path: Path, end: int, data: bytes) -> int:
    """Write the data at `end`, replacing what follows, and return the new end."""
    check_own_file(path)
    path.touch()
    with open(path, "r+b") as file:
        whole = file.seek(0, os.SEEK_END) >= end
        check(whole, f"{path} has become shorter since {end} bytes of it were written; does another run use it?")
        file.seek(end)
        file.write(data)
        file.truncate()
    return end + len(data)
