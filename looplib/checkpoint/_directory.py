"""Directory entries that are written whole or not at all.

A save writes into an entry beside the others, syncs it, and renames it. So whatever kills the process, every entry
named step-... is whole; others are leftovers, which the next process that may write clears.
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

from looplib.checkpoint._format import sync_directory
from looplib.checkpoint._format_read import read_manifest
from looplib.checkpoint._format_write import Parts, write, write_document

_NAME = re.compile(r"step-(\d+)(?:\.(\d+))?")


_WRITING, _DELETING = ".writing-", ".deleting-"


def number_of(path: Path) -> tuple[int, int] | tuple[()]:
    """The step of an entry, and which save of that step it is; empty for anything that is no checkpoint."""
    match = _NAME.fullmatch(path.name)
    return (int(match[1]), int(match[2] or 0)) if match else ()


def entries_of(folder: Path, step: int) -> list[Path]:
    """The entries of a step, the latest save last: more than one only while one of them replaces the others."""
    entries = [path for path in folder.iterdir() if number_of(path)[:1] == (step,)]
    return sorted(entries, key=number_of)


class Entry(NamedTuple):
    """Where a new checkpoint is written, and the path that it takes once it is whole."""

    writing: Path
    target: Path


def new_entry(folder: Path, step: int) -> Entry:
    target = folder / f"step-{step:08d}"
    return Entry(folder / f"{_WRITING}{target.name}-{uuid.uuid4().hex[:6]}", target)


def put(entry: Entry, parts: Parts, about: Mapping[str, Any], helped: bool = True) -> None:
    """Write a new entry; one that cannot be finished leaves nothing."""
    try:
        with told(entry.target, parts.size()):
            entry.writing.mkdir()
            write(entry.writing, parts, about, helped)
            take_place(entry)
    except BaseException:
        clear(entry.writing)
        raise


def take_place(entry: Entry) -> None:
    """Rename a finished entry to its name; an earlier save of the same step goes.

    The new one stands beside the earlier one under a later number until that is gone, and then takes its name. So at
    each moment one of the two is whole, and a listing, which takes the latest number of a step, never sees both.
    """
    writing, target = entry
    earlier = entries_of(target.parent, _step_of(target))
    if not earlier:
        writing.rename(target)
        sync_directory(target.parent)
        return
    _keep_metrics(earlier[-1], writing)
    newest = target.with_name(f"{target.name}.{_save_of(earlier[-1]) + 1}")
    writing.rename(newest)
    sync_directory(target.parent)
    for path in earlier:
        remove(path)
    newest.rename(target)
    sync_directory(target.parent)


def _step_of(path: Path) -> int:
    return number_of(path)[0]  # type: ignore[misc]


def _save_of(path: Path) -> int:
    return number_of(path)[1]  # type: ignore[misc]


def _keep_metrics(earlier: Path, later: Path) -> None:
    """A save without metrics of the very weights that an earlier save has metrics of keeps these."""
    try:
        old, new = read_manifest(earlier), read_manifest(later)
        if new["metrics"] or not old["metrics"] or _weights(old) != _weights(new):
            return
    except (ValueError, LookupError):  # a damaged one has nothing to keep
        return
    write_document(later, {**new, "metrics": old["metrics"]})


def _weights(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """The checksums and layouts of parameters and buffers, by path."""
    data, weights = manifest["data"], {}
    for path, entry in (*manifest["tensors"].items(), *manifest.get("shards", {}).items()):
        if path.startswith(("/params/", "/buffers/")):
            chunks = entry.get("chunks", [{"data": entry.get("data")}])
            checksums = [data[chunk["data"]]["crc32"] for chunk in chunks]
            layout = [(chunk.get("offsets"), chunk.get("sizes")) for chunk in chunks]
            view = [entry.get(key) for key in ("dtype", "shape", "stride", "offset")]
            weights[path] = checksums, layout, view
    return weights


def clear(path: Path) -> None:
    """Delete an entry that nobody lists any more; of a symbolic link the link alone."""
    if path.is_symlink() or path.is_file():
        with contextlib.suppress(OSError):
            path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def told(target: Path, size: int) -> Iterator[None]:
    """Raise an OSError again with the name of what could not be saved, and whether there was room."""
    try:
        yield
    except OSError as error:
        folder = target.parent
        room = ""
        if folder.exists():
            room = f" ({in_words(size)} to write, {in_words(shutil.disk_usage(folder).free)} free there)"
        raise OSError(
            error.errno,
            f"{target.name} could not be saved: {error.strerror}{room}; the checkpoints before it are untouched",
            str(target),
        ) from error


def in_words(count: float) -> str:
    """A number of bytes in units, such as 1.5 MB."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def put_aside(path: Path) -> None:
    """Rename a damaged entry out of the way, and leave its content to its owner."""
    if os.path.lexists(path):
        path.rename(path.with_name(f"damaged-{uuid.uuid4().hex[:6]}-{path.name}"))


def remove(path: Path) -> None:
    """Delete an entry: out of sight in one step, so that a half-deleted one is never taken for a checkpoint."""
    aside = path.with_name(f"{_DELETING}{uuid.uuid4().hex[:6]}-{path.name}")
    path.rename(aside)
    clear(aside)


class Lock:
    """File lock on a folder of checkpoints, held while a CheckpointIO of this process has it.

    It is a lock of the process, not of an open file: workers that outlive a killed process must not keep it.
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
            if path.name.startswith((_WRITING, _DELETING)):
                clear(path)
        with contextlib.suppress(OSError):  # a full disk: the number is for messages alone
            os.ftruncate(self.file, 0)
            os.pwrite(self.file, str(os.getpid()).encode(), 0)

    def __del__(self, close: Callable[[int], None] = os.close) -> None:  # os is gone when the interpreter ends
        if hasattr(self, "file"):
            close(self.file)
