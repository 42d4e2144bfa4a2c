"""Atomic directory entries: a checkpoint is complete or it does not exist.

A save writes into a temporary entry in the same directory, syncs it, and renames it. Whenever the process is killed,
every entry named step-... is therefore complete. The others are leftovers, which the next process that may write
deletes. A second save of a step gets a name with a number, such as step-00000500.1. A listing uses the latest, and the
first one is deleted like others that are no longer needed.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import uuid
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from looplib._core.checks import check
from looplib._core.collective import RankGroup
from looplib._core.mappings import pick
from looplib.checkpoint._format import DATA, FORMAT, MANIFEST, DamagedCheckpointError
from looplib.checkpoint._read import read_manifest
from looplib.checkpoint._shards import boxes_written_here
from looplib.checkpoint._write import Parts, sync, write_manifest, write_tensors

_NAME = r"step-(\d+)(?:\.(\d+))?"

_WRITING, _DELETING = ".writing-", ".deleting-"


def number_of(path: Path) -> tuple[int, ...]:
    """Step of an entry, and the number of the save of that step; empty for anything that is not a checkpoint."""
    match = re.fullmatch(_NAME, path.name)
    return (int(match[1]), int(match[2] or 0)) if match else ()


def entries_of(folder: Path) -> list[Path]:
    """Entries of checkpoints in the order of their steps, and of the saves of a step."""
    return sorted(filter(number_of, folder.iterdir() if folder.is_dir() else ()), key=number_of)


class Entry(NamedTuple):
    """Temporary path of a new checkpoint, the path that it is renamed to, and the last one of the same step, if any."""

    writing: Path
    target: Path
    earlier: Path | None


def new_entry(folder: Path, step: int) -> Entry:
    earlier = [path for path in entries_of(folder) if number_of(path)[0] == step]
    name = f"step-{step:08d}"
    if earlier:
        name += f".{number_of(earlier[-1])[1] + 1}"
    writing = folder / f"{_WRITING}{name}-{uuid.uuid4().hex[:6]}"
    return Entry(writing, folder / name, earlier[-1] if earlier else None)


def write_entry(ranks: RankGroup, entry: Entry, parts: Parts, about: Mapping[str, Any]) -> None:
    """Write a new entry, on all ranks together. If one of them fails, nothing is left behind."""
    writing, target, earlier = entry

    named = naming_the_checkpoint(target, parts.size())

    @named
    def write_files() -> dict[str, Any]:
        parts.wait()
        files = {}
        if ranks.first:
            files[DATA] = write_tensors(writing / DATA, parts.tensors, parts.about)
        if boxes := boxes_written_here(parts.sharded):
            name = f"tensors-{ranks.rank:05d}.safetensors"
            files[name] = write_tensors(writing / name, pick(parts.shards, boxes), parts.about, boxes)
        sync(*(writing / name for name in files))
        return files

    @named
    def finish() -> None:
        files = {name: written for files in of_ranks for name, written in files.items()}
        manifest = {
            "format": FORMAT, **about, "files": files,
            "tensors": parts.about, "ties": parts.ties, "values": parts.values,
        }  # fmt: skip
        if earlier and not manifest["metrics"]:
            manifest["metrics"] = _metrics_of(earlier, files)
        write_manifest(writing, manifest)
        sync(writing / MANIFEST, writing)
        writing.rename(target)
        sync(target.parent)

    try:
        ranks.on_rank0(named(writing.mkdir))
        of_ranks = ranks.gather(ranks.all_or_raise(write_files))
        ranks.on_rank0(finish)
    except BaseException:
        if ranks.first:
            clear(writing)
        raise


def _metrics_of(path: Path, files: Mapping[str, Any]) -> dict[str, Any]:
    """Metrics of an earlier save if its data files are the same as those of a later one that has no metrics."""
    with contextlib.suppress(DamagedCheckpointError):
        manifest, _ = read_manifest(path)
        if manifest["files"] == files:
            return dict(manifest["metrics"])
    return {}


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


def quarantine(path: Path) -> None:
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
    it. To close any file of it would release it, so the process has one `Lock` of a folder (`lock_of`).
    """

    def __init__(self, folder: Path) -> None:
        import fcntl

        _check_own_file(folder / ".lock")
        file = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            holder = os.read(file, 20).decode(errors="replace") or "unknown"
            os.close(file)
            raise BlockingIOError(
                f"process {holder} is writing checkpoints into {folder} already; give each run a directory of its "
                "own, or end that process"
            ) from None
        weakref.finalize(self, os.close, file)
        for path in folder.iterdir():
            if path.name.startswith((_WRITING, _DELETING)):
                clear(path)
        with contextlib.suppress(OSError):  # the disk is full: the number is only used in messages
            os.ftruncate(file, 0)
            os.pwrite(file, str(os.getpid()).encode(), 0)


_locks: weakref.WeakValueDictionary[tuple[int, str], Lock] = weakref.WeakValueDictionary()


def lock_of(folder: Path) -> Lock:
    """Create a folder of checkpoints, and lock it for this process."""
    try:
        made = [path for path in (folder, *folder.parents) if not path.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        sync(*(path.parent for path in made))
        key = os.getpid(), os.path.realpath(folder)
        lock = _locks[key] = _locks.get(key) or Lock(folder)
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


def _check_own_file(path: Path) -> None:
    """Raise ValueError for a link, a pipe or a device where looplib keeps a file: to write it could write elsewhere."""
    check(
        not path.is_symlink() and (path.is_file() or not path.exists()),
        f"{path} is a link, or no file; looplib writes a file there, and follows no link out of its folder: delete it",
    )
