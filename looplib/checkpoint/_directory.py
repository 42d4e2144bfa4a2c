"""Atomic directory entries: a checkpoint is complete or it does not exist.

A save writes into a temporary entry in the same directory, syncs it, and renames it. Whenever the process is killed,
every entry named step-... is therefore complete. The others are leftovers, which the next save deletes. A second save of
a step gets a name with a number, such as step-00000500.1. A listing uses the latest, and the first one is deleted like
others that are no longer needed.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from secrets import token_hex
from typing import Any

import orjson

from looplib._core.collective import RankGroup
from looplib.checkpoint._format import DATA, FORMAT, MANIFEST, DamagedCheckpointError
from looplib.checkpoint._read import read_manifest
from looplib.checkpoint._write import Parts, sync, write_tensors

_WRITING, _DELETING = ".writing-", ".deleting-"


def number_of(path: Path) -> tuple[int, ...]:
    """Step of an entry, and the number of the save of that step; empty for anything that is not a checkpoint."""
    match = re.fullmatch(r"step-(\d+)(?:\.(\d+))?", path.name)
    return (int(match[1]), int(match[2] or 0)) if match else ()


def entries_of(folder: Path) -> list[Path]:
    """Entries of checkpoints in the order of their steps, and of the saves of a step."""
    return sorted(filter(number_of, folder.iterdir() if folder.is_dir() else ()), key=number_of)


def _latest_of(folder: Path, step: int) -> Path | None:
    """The last save of a step, if there is any."""
    return next((path for path in reversed(entries_of(folder)) if number_of(path)[0] == step), None)


def new_entry(folder: Path, step: int) -> Path:
    """Path of a new checkpoint. Creates the folder, and deletes what saves that were cut short have left in it."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.iterdir():
        if path.name.startswith((_WRITING, _DELETING)):
            with contextlib.suppress(FileNotFoundError):  # another process has just finished it
                remove(path)
    earlier = _latest_of(folder, step)
    return folder / (f"step-{step:08d}" + (f".{number_of(earlier)[1] + 1}" if earlier else ""))


def write_entry(ranks: RankGroup, target: Path, parts: Parts, about: Mapping[str, Any]) -> None:
    """Write a new entry, on all ranks together. If one of them fails, nothing is left behind."""
    # A name of its own, so that no other process that saves this step writes into the same entry.
    writing = target.with_name(ranks.on_rank0(lambda: f"{_WRITING}{token_hex(4)}-{target.name}"))

    def write_files() -> tuple[dict[str, Any], Callable[[], None]]:
        if not (parts.data or ranks.first):
            return {}, lambda: None
        name = f"tensors-{ranks.rank:05d}.safetensors" if parts.sharded else DATA
        file, synced = write_tensors(writing / name, parts)
        return {name: file}, synced

    def describe() -> None:
        files = {name: file for files in of_ranks for name, file in files.items()}
        manifest = {
            "format": FORMAT, **about, "files": files,
            "tensors": parts.about, "ties": parts.ties, "values": parts.values,
            "shared": parts.shared,
            "metrics": about["metrics"] or _metrics_of_same(target, files),
        }  # fmt: skip
        crc32 = zlib.crc32(orjson.dumps(manifest))
        (writing / MANIFEST).write_bytes(orjson.dumps({**manifest, "crc32": crc32}))
        sync(writing / MANIFEST, writing)

    def finish() -> None:
        writing.rename(target)
        sync(target.parent)

    try:
        ranks.on_rank0(writing.mkdir)
        own, synced = ranks.all_or_raise(write_files)
        of_ranks = ranks.gather(own)
        ranks.on_rank0(describe)
        ranks.all_or_raise(synced)
        ranks.on_rank0(finish)
    except BaseException as error:
        if ranks.first:
            _clear(writing)
        if isinstance(error, OSError):
            message = f"{target.name} could not be saved: {error.strerror}; the checkpoints before it are untouched"
            raise OSError(error.errno, message, str(target)) from error
        raise


def _metrics_of_same(target: Path, files: Mapping[str, Any]) -> dict[str, Any]:
    """Metrics of an earlier save of this step if its data files are the same, so that its weights were scored already."""
    if earlier := _latest_of(target.parent, number_of(target)[0]):
        with contextlib.suppress(DamagedCheckpointError):
            manifest = read_manifest(earlier)
            return dict(manifest["metrics"]) if manifest["files"] == files else {}
    return {}


def remove(path: Path) -> None:
    """Delete an entry: rename it first, so that a half-deleted one is never taken for a checkpoint, or finished as one."""
    aside = path.rename(path.with_name(_DELETING + path.name.removeprefix(_DELETING)))
    _clear(aside)


def _clear(path: Path) -> None:
    """Delete an entry that is no longer listed. If it is a symbolic link, delete only the link."""
    shutil.rmtree(path, ignore_errors=True)  # refuses links and files
    with contextlib.suppress(OSError):
        path.unlink()
