"""Directory listing: complete and damaged checkpoints, and the choice among them."""

from __future__ import annotations

import warnings
from pathlib import Path

from looplib.checkpoint._describe import Checkpoint, Checkpoints, describe
from looplib.checkpoint._directory import number_of
from looplib.checkpoint._format import DamagedCheckpointError
from looplib.checkpoint._policy import Policy

Stamp = tuple[str, int, int]
"""Name, inode and time of an entry: they change when another one takes its name."""


class Listing:
    """Checkpoints of a folder. Each manifest is read once, since a finished entry never changes.

    Attributes:
        folder: the directory, which need not exist.
        damaged: entries found to be damaged, here or by a restore.
        superseded: complete entries that a later save of the same step replaces, as of the last `read`.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.damaged: set[Path] = set()
        self.superseded: list[Path] = []
        self._known: dict[Stamp, Checkpoint] = {}

    def read(self) -> Checkpoints:
        """Complete checkpoints, oldest first, one for each step."""
        while (described := self._try_to_read()) is None:
            pass  # another process has removed or replaced an entry in the meantime, so list again
        self._known = described
        ordered = sorted(described.values(), key=lambda checkpoint: number_of(checkpoint.path))
        latest = {checkpoint.step: checkpoint for checkpoint in ordered}
        self.superseded = [each.path for each in ordered if latest[each.step] is not each]
        return Checkpoints(latest.values())

    def _try_to_read(self) -> dict[Stamp, Checkpoint] | None:
        """Descriptions of the complete entries, or None if one was removed or replaced in the meantime."""
        described: dict[Stamp, Checkpoint] = {}
        entries = self.folder.iterdir() if self.folder.is_dir() else ()
        for path in [path for path in entries if number_of(path) and path not in self.damaged]:
            stamp = stamp_of(path)
            if stamp is None:
                return None
            try:
                described[stamp] = self._known.get(stamp) or describe(path)
            except DamagedCheckpointError as error:
                if not self.is_damaged(path, stamp):
                    return None
                warnings.warn(f"{error}; this checkpoint is left out", stacklevel=6)
        return described

    def choose(self, which: str | int, policy: Policy) -> tuple[Path, Stamp] | None:
        """The checkpoint to restore and its stamp, or None if the latest is requested and there is none."""
        while True:
            checkpoints = self.read()
            chosen = _chosen(checkpoints, which, policy)
            if chosen is None:
                if which == "latest" and not self.damaged:
                    return None
                raise self._nothing_for(which, checkpoints, policy.monitor)
            if (stamp := stamp_of(chosen.path)) in self._known:
                return chosen.path, stamp

    def is_damaged(self, path: Path, stamp: Stamp) -> bool:
        """Mark an unreadable entry as damaged, unless another process has removed or replaced it."""
        if stamp_of(path) == stamp:
            self.damaged.add(path)
        return path in self.damaged

    def _nothing_for(self, which: str | int, checkpoints: Checkpoints, monitor: str | None) -> ValueError:
        complete = ", ".join(str(checkpoint.step) for checkpoint in checkpoints) or "none"
        damaged = ", ".join(sorted(path.name for path in self.damaged))
        if which == "best":
            return ValueError(
                f"no checkpoint in {self.folder} was saved with the metric {monitor!r}; steps there: {complete}"
            )
        where = f"{self.folder} has {_asked(which)}; steps there: {complete}"
        return DamagedCheckpointError(f"{where}; damaged: {damaged}") if damaged else ValueError(where)


def _asked(which: str | int | Checkpoint) -> str:
    if isinstance(which, Checkpoint):
        return f"no checkpoint by its record (give the step: ckpt.restore(state, checkpoint.step), here {which.step})"
    if type(which) is int:
        return f"no checkpoint of step {which}"
    return "no whole checkpoint" if which == "latest" else f"no {which!r} (give 'latest', 'best' or a step)"


def _chosen(checkpoints: Checkpoints, which: str | int, policy: Policy) -> Checkpoint | None:
    if which == "best":
        return policy.best(checkpoints)
    matching = [checkpoint for checkpoint in checkpoints if which in ("latest", checkpoint.step)]
    return next(reversed(matching), None)


def stamp_of(path: Path) -> Stamp | None:
    """Stamp that distinguishes this entry from another of the same name; None if there is none."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        return None
    return path.name, status.st_ino, status.st_mtime_ns
