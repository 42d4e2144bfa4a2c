"""Atomic directory entries: a checkpoint is complete or it does not exist.

A save writes into a temporary entry in the same directory, syncs it, and renames it. Whenever the process is killed,
every entry named step-... is therefore complete. The others are leftovers, which the next process that may write
deletes.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import uuid
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from looplib._core.checks import check_own_file
from looplib.checkpoint._format import WEIGHTS, sync_directory
from looplib.checkpoint._format_read import read_manifest
from looplib.checkpoint._format_write import Parts, write, write_document

_NAME = r"step-(\d+)(?:\.(\d+))?"


_WRITING, _DELETING, PUSHING = ".writing-", ".deleting-", ".pushing-"


def number_of(path: Path) -> tuple[int, int] | tuple[()]:
    """Step of an entry, and the number of the save of that step; empty for anything that is not a checkpoint."""
    match = re.fullmatch(_NAME, path.name)
    return (int(match[1]), int(match[2] or 0)) if match else ()


def entries_of(folder: Path, step: int) -> list[Path]:
    """Entries of a step, latest save last. There is more than one only while one replaces the others."""
    entries = [path for path in folder.iterdir() if number_of(path)[:1] == (step,)]
    return sorted(entries, key=number_of)


class Entry(NamedTuple):
    """Temporary path of a new checkpoint, and the path that it is renamed to once complete."""

    writing: Path
    target: Path


def new_entry(folder: Path, step: int) -> Entry:
    target = folder / f"step-{step:08d}"
    return Entry(folder / f"{_WRITING}{target.name}-{uuid.uuid4().hex[:6]}", target)


def put(entry: Entry, parts: Parts, about: Mapping[str, Any], in_thread: bool = True) -> None:
    """Write a new entry. If it cannot be completed, nothing is left behind."""
    try:
        with naming_the_checkpoint(entry.target, parts.size()):
            entry.writing.mkdir()
            write(entry.writing, parts, about, in_thread)
            take_place(entry)
    except BaseException:
        clear(entry.writing)
        raise


def take_place(entry: Entry) -> None:
    """Rename a finished entry to its final name, replacing an earlier save of the same step.

    The new one exists next to the earlier one under a later number until that is deleted, and then takes its name. At
    each moment one of the two is complete, and a listing, which uses the latest number of a step, never shows both.
    """
    writing, target = entry
    step, _ = number_of(target)  # type: ignore[misc]
    if earlier := entries_of(target.parent, step):
        _keep_metrics(earlier[-1], writing)
        _, last = number_of(earlier[-1])  # type: ignore[misc]
        newest = target.with_name(f"{target.name}.{last + 1}")
        writing.rename(newest)
        sync_directory(target.parent)
        for path in earlier:
            remove(path)
        writing = newest
    writing.rename(target)
    sync_directory(target.parent)


def _keep_metrics(earlier: Path, later: Path) -> None:
    """Carry metrics over from an earlier save with identical weights to a save without metrics."""
    with contextlib.suppress(ValueError, LookupError):  # a damaged one has no metrics to carry over
        old, new = read_manifest(earlier), read_manifest(later)
        if old["metrics"] and not new["metrics"] and _weights(old) == _weights(new):
            write_document(later, {**new, "metrics": old["metrics"]})


def _weights(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Checksums and layouts of parameters and buffers, by path, and of the chunks of them by file."""
    data = manifest["data"]
    by_file = {name: checksums["weights"] for name, checksums in manifest.get("described", {}).items()}

    def content(entry: Mapping[str, Any]) -> Any:
        chunks = entry.get("chunks", [entry])
        layout = [{**chunk, "data": data[chunk["data"]]["crc32"]} for chunk in chunks if "data" in chunk]
        return entry["dtype"], entry["shape"], layout

    leaves = {**manifest["tensors"], **manifest.get("shards", {})}
    return by_file | {path: content(entry) for path, entry in leaves.items() if path.startswith(WEIGHTS)}


def clear(path: Path) -> None:
    """Delete an entry that is no longer listed. If it is a symbolic link, delete only the link."""
    shutil.rmtree(path, ignore_errors=True)  # refuses links and files
    with contextlib.suppress(OSError):
        path.unlink()


@contextlib.contextmanager
def naming_the_checkpoint(target: Path, size: int) -> Iterator[None]:
    """Re-raise an OSError with the name of what could not be saved and the free space on the disk."""
    try:
        yield
    except OSError as error:
        room = ""
        with contextlib.suppress(OSError):  # the folder is gone
            free = shutil.disk_usage(target.parent).free
            room = f" ({in_words(size)} to write, {in_words(free)} free there)"
        raise OSError(
            error.errno,
            f"{target.name} could not be saved: {error.strerror}{room}; the checkpoints before it are untouched",
            str(target),
        ) from error


def in_words(count: float) -> str:
    """Format a number of bytes with a unit, such as 1.5 MB."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def put_aside(path: Path) -> None:
    """Rename a damaged entry, so that the user can still look at its content."""
    if os.path.lexists(path):
        path.rename(path.with_name(f"damaged-{uuid.uuid4().hex[:6]}-{path.name}"))


def remove(path: Path) -> None:
    """Delete an entry: rename it first, so that a half-deleted one is never taken for a checkpoint."""
    aside = path.with_name(f"{_DELETING}{uuid.uuid4().hex[:6]}-{path.name}")
    path.rename(aside)
    clear(aside)


class Lock:
    """File lock on a folder of checkpoints, held while a CheckpointIO of this process uses it.

    The lock belongs to the process and not to an open file, since workers that outlive a killed process must not keep
    it.
    """

    held: ClassVar[weakref.WeakValueDictionary[tuple[int, Path], Lock]] = weakref.WeakValueDictionary()
    file: int

    def __new__(cls, folder: Path) -> Lock:
        try:
            made = [path for path in (folder, *folder.parents) if not path.exists()]
            folder.mkdir(parents=True, exist_ok=True)
            for path in made:
                sync_directory(path.parent)
            key = os.getpid(), folder.resolve()
            if (lock := cls.held.get(key)) is None:
                lock = super().__new__(cls)
                lock.acquire(folder)
                cls.held[key] = lock
            return lock
        except BlockingIOError:
            raise
        except OSError as error:
            raise OSError(
                error.errno,
                f"checkpoints cannot be written into {folder} ({error.strerror}): give checkpoint_io a directory "
                "that this process may write",
                error.filename,
            ) from error

    def acquire(self, folder: Path) -> None:
        import fcntl

        check_own_file(folder / ".lock")
        self.file = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.lockf(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            holder = os.read(self.file, 20).decode(errors="replace") or "unknown"
            raise BlockingIOError(
                f"process {holder} is writing checkpoints into {folder} already; give each run a directory of its "
                "own, or end that process"
            ) from None
        for path in folder.iterdir():
            if path.name.startswith((_WRITING, _DELETING, PUSHING)):
                clear(path)
        with contextlib.suppress(OSError):  # the disk is full: the number is only used in messages
            os.ftruncate(self.file, 0)
            os.pwrite(self.file, str(os.getpid()).encode(), 0)

    # `os` is no longer available when the interpreter exits. A lock that could not be made has no file.
    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        if hasattr(self, "file"):
            close(self.file)
