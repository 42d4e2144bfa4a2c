"""Directory listing: complete and damaged checkpoints, and the choice among them."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

from looplib._core.checks import check, few
from looplib._core.mappings import mapped, pick
from looplib.checkpoint._checkpoints import Checkpoint, Policy
from looplib.checkpoint._directory import entries_of
from looplib.checkpoint._format import DamagedCheckpointError
from looplib.checkpoint._read import errors_as_damage, read_manifest


class Listing:
    """Checkpoints of a folder. Each manifest is read once, since a finished entry never changes.

    Another process may write to the folder. An entry that it has removed in the meantime is not a damaged one.

    Attributes:
        folder: the directory, which need not exist.
        damaged: entries found to be damaged, here or by a restore.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.damaged: set[Path] = set()
        self._known: dict[Any, Checkpoint] = {}

    def read(self) -> list[Checkpoint]:
        """Complete checkpoints, oldest first, the latest one for each step."""
        known = {}
        for path in [path for path in entries_of(self.folder) if path not in self.damaged]:
            try:
                key = path, path.lstat().st_mtime_ns  # another one if the name has been used again
                known[key] = self._known.get(key) or describe(path)
            except (FileNotFoundError, DamagedCheckpointError) as error:
                if not self.is_damaged(path):
                    return self.read()
                warnings.warn(f"{error}; this checkpoint is left out", stacklevel=5)
        self._known = known
        return list({checkpoint.step: checkpoint for checkpoint in known.values()}.values())

    def is_damaged(self, path: Path) -> bool:
        """Mark an unreadable entry as damaged, unless another process has removed it."""
        if os.path.lexists(path):
            self.damaged.add(path)
        return path in self.damaged

    def choose(self, which: str | int, policy: Policy) -> Path | None:
        """The entry to restore, or None if the latest is requested and there is none."""
        checkpoints = self.read()
        if which == "best":
            chosen = policy.best(checkpoints)
        else:
            chosen = next((each for each in reversed(checkpoints) if which in ("latest", each.step)), None)
        if chosen is not None:
            return chosen.path
        if which == "latest" and not self.damaged:
            return None
        raise (DamagedCheckpointError if self.damaged else ValueError)(
            f"{self.folder} has no checkpoint {which!r}: give 'latest', 'best' (of those saved with the monitored metric) "
            f"or a step; steps there: {few([each.step for each in checkpoints])}; "
            f"damaged: {few(sorted(path.name for path in self.damaged))}"
        )


def describe(path: Path) -> Checkpoint:
    """Describe a checkpoint after checking its manifest and the sizes of its files."""
    manifest, _ = read_manifest(path)
    for name, file in manifest["files"].items():
        with errors_as_damage(path / name):
            size = (path / name).stat().st_size
            check(size == file["bytes"], f"it has {size} bytes, and {file['bytes']} were written")
    return Checkpoint(
        path=path,
        **pick(manifest["counts"], ("step", "epoch", "batch", "samples")),
        metrics=mapped(float, manifest["metrics"]),
        bytes=sum(file["bytes"] for file in manifest["files"].values()),
    )
