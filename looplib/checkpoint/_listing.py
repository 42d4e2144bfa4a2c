"""Directory listing: complete and damaged checkpoints, and the choice among them."""

from __future__ import annotations

import warnings
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from looplib._core.mappings import mapped
from looplib.checkpoint._checkpoints import Checkpoint, Checkpoints, Policy
from looplib.checkpoint._directory import entries_of
from looplib.checkpoint._format import MANIFEST, DamagedCheckpointError, counts_in, errors_as_damage
from looplib.checkpoint._read import bytes_in, check_files, read_manifest


class Found(NamedTuple):
    """A path, with inode and time, which change if another entry takes this name; None if there is none."""

    path: Path
    inode: int | None = None
    time: int | None = None


def look(path: Path) -> Found:
    try:
        status = path.lstat()
    except FileNotFoundError:
        return Found(path)
    return Found(path, status.st_ino, status.st_mtime_ns)


class Listing:
    """Checkpoints of a folder. Each manifest is read once, since a finished entry never changes.

    Another process may write to the folder. An entry that it has removed or replaced in the meantime is not a damaged
    one.

    Attributes:
        folder: the directory, which need not exist.
        damaged: entries found to be damaged, here or by a restore.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.damaged: set[Path] = set()
        self._known: dict[Found, Checkpoint] = {}

    def read(self) -> Checkpoints:
        """Complete checkpoints, oldest first, the latest one for each step."""
        while not self._try_to_read():
            pass
        return Checkpoints({checkpoint.step: checkpoint for checkpoint in self._known.values()}.values())

    def _try_to_read(self) -> bool:
        """Describe all complete entries. Returns False if one has been removed or replaced since they were listed."""
        known: dict[Found, Checkpoint] = {}
        for found in [look(path) for path in entries_of(self.folder) if path not in self.damaged]:
            try:
                known[found] = self._known.get(found) or describe(found.path)
            except DamagedCheckpointError as error:
                if not self.is_damaged(found):
                    return False
                warnings.warn(f"{error}; this checkpoint is left out", stacklevel=6)
        self._known = known
        return True

    def is_damaged(self, found: Found) -> bool:
        """Mark an unreadable entry as damaged, unless another process has removed or replaced it."""
        if found.inode is None or look(found.path) != found:
            return False
        self.damaged.add(found.path)
        return True

    def choose(self, which: str | int, policy: Policy) -> Found | None:
        """The entry to restore, or None if the latest is requested and there is none."""
        checkpoints = self.read()
        if which == "best":
            chosen = policy.best(checkpoints)
            missing = f"no checkpoint in {self.folder} was saved with the metric {policy.monitor!r}"
        else:
            matching = [checkpoint for checkpoint in checkpoints if which in ("latest", checkpoint.step)]
            chosen = matching[-1] if matching else None
            missing = f"{self.folder} has {_asked(which)}"
        if chosen is not None:
            return next(found for found, checkpoint in self._known.items() if checkpoint is chosen)
        if which == "latest" and not self.damaged:
            return None
        missing += f"; steps there: {', '.join(str(checkpoint.step) for checkpoint in checkpoints) or 'none'}"
        if self.damaged and which != "best":
            damaged = ", ".join(sorted(path.name for path in self.damaged))
            raise DamagedCheckpointError(f"{missing}; damaged: {damaged}")
        raise ValueError(missing)


def _asked(which: str | int) -> str:
    if type(which) is int:
        return f"no checkpoint of step {which}"
    return "no whole checkpoint" if which == "latest" else f"no {which!r} (give 'latest', 'best' or a step)"


def describe(path: Path) -> Checkpoint:
    """Describe a checkpoint after checking its manifest and the sizes of its files."""
    manifest, _ = read_manifest(path)
    with errors_as_damage(path / MANIFEST):
        counts = counts_in(manifest)
        size = check_files(path, manifest)
        parts: Counter[str] = Counter()
        for leaf_path, entry in manifest["tensors"].items():
            parts[leaf_path.split("/")[1]] += bytes_in(leaf_path, entry)
        return Checkpoint(
            path=path,
            step=counts["step"],
            epoch=counts["epoch"],
            batch=counts["batch"],
            samples=counts["samples"],
            metrics=mapped(float, manifest["metrics"]),
            bytes=size,
            parts=dict(parts),
            created=str(manifest["created"]),
        )
