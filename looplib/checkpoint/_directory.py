"""Entries of a directory that are whole or not there.

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
from typing import Any, ClassVar

from looplib.checkpoint._format import Parts, sync_directory, write

_NAME = re.compile(r"step-(\d+)(?:\.(\d+))?")


_WRITING, _DELETING = ".writing-", ".deleting-"


def number_of(path: Path) -> tuple[int, int] | tuple[()]:
    """The step of an entry, and which of that step it is; nothing for what is no checkpoint."""
    match = _NAME.fullmatch(path.name)
    return (int(match[1]), int(match[2] or 0)) if match else ()


def free_name(folder: Path, step: int) -> Path:
    """A name for an entry of this step, which comes after those that are there."""
    numbers = [number for path in folder.iterdir() if (number := number_of(path)) and number[0] == step]
    return folder / (f"step-{step:08d}" + (f".{max(numbers)[1] + 1}" if numbers else ""))


def beside(folder: Path, target: Path) -> Path:
    """Where a new entry is written before it takes its place."""
    return folder / f"{_WRITING}{target.name}-{uuid.uuid4().hex[:6]}"


def put(writing: Path, target: Path, parts: Parts, about: Mapping[str, Any], helped: bool = True) -> None:
    """Write a new entry; one that cannot be finished leaves nothing."""
    try:
        with told(target, parts.size()):
            writing.mkdir()
            write(writing, parts, about, helped)
            take_place(writing, target)
    except BaseException:
        clear(writing)
        raise


def take_place(writing: Path, target: Path) -> None:
    writing.rename(target)
    sync_directory(target.parent)


def clear(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def told(target: Path, size: int) -> Iterator[None]:
    """An error of the file system says what could not be saved, and whether there was room."""
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
    """A number of bytes, to be read."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def put_aside(path: Path) -> None:
    """Free the name of a damaged entry, and leave what is in it to its owner."""
    if path.exists():
        path.rename(path.with_name(f"damaged-{uuid.uuid4().hex[:6]}-{path.name}"))


def remove(path: Path) -> None:
    # Out of sight in one step, so that a half-deleted one is never taken for a checkpoint.
    aside = path.with_name(f"{_DELETING}{uuid.uuid4().hex[:6]}-{path.name}")
    path.rename(aside)
    shutil.rmtree(aside, ignore_errors=True)


class Lock:
    """The right to write in a folder, held while a CheckpointIO of this process has it, at most until its end.

    It is a lock of the process, not of an open file: workers that outlive a killed process must not hold it on.
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
                shutil.rmtree(path, ignore_errors=True)
        with contextlib.suppress(OSError):  # a full disk: the number is for messages alone
            os.ftruncate(self.file, 0)
            os.pwrite(self.file, str(os.getpid()).encode(), 0)

    def __del__(self, close: Callable[[int], None] = os.close) -> None:  # os is gone when the interpreter ends
        if hasattr(self, "file"):
            close(self.file)
