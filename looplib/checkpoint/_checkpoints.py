"""The checkpoints of a folder: the record of one, the policy that says which are kept, and the choice among them."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from looplib._core.checks import check, check_optional_count, few, warn
from looplib._core.mappings import mapped, pick
from looplib._core.ranks import is_first
from looplib.checkpoint._directory import entries_of
from looplib.checkpoint._format import DamagedCheckpointError
from looplib.checkpoint._read import check_file, errors_as_damage, read_manifest


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Description of one checkpoint, from its manifest.

    Attributes:
        path: the checkpoint's directory.
        step, epoch, batch, samples: the state's counts.
        metrics: the metrics passed to `save`.
        bytes: size of the tensor files, in bytes.
    """

    path: Path
    step: int
    epoch: int
    batch: int
    samples: int
    metrics: dict[str, float]
    bytes: int


@dataclass(frozen=True, slots=True)
class Policy:
    """Retention policy: keep each checkpoint that any setting asks for, besides the latest and the best.

    The arguments are those of `checkpoint_io`, and the `mode` of its `monitor`. Raises ValueError for inconsistent values.
    """

    keep_last: int | None = None
    keep_best: int = 0
    monitor: str | None = None
    mode: str | None = None
    keep: Callable[[Checkpoint], bool] | None = None

    def __post_init__(self) -> None:
        check_optional_count("keep_last", self.keep_last)
        check_optional_count("keep_best", self.keep_best, 0)
        check(
            self.monitor is not None or not self.keep_best,
            f"keep_best={self.keep_best} needs monitor=, the name of the metric that the best is judged by",
        )

    def ranked(self, checkpoints: Sequence[Checkpoint]) -> list[Checkpoint]:
        """Checkpoints that have the monitored metric, best first. Among equal ones, the earlier comes first."""
        scored = [checkpoint for checkpoint in checkpoints if not math.isnan(self._score(checkpoint))]
        return sorted(scored, key=self._score, reverse=self.mode == "max")

    def _score(self, checkpoint: Checkpoint) -> float:
        return checkpoint.metrics.get(self.monitor, math.nan)  # type: ignore[arg-type]

    def best(self, checkpoints: Sequence[Checkpoint]) -> Checkpoint | None:
        """The best of these checkpoints. Raises ValueError if no metric is monitored, or if they have other metrics alone."""
        check(self.monitor is not None, "there is no best without a metric: give checkpoint_io(..., monitor=...)")
        known = sorted({name for checkpoint in checkpoints for name in checkpoint.metrics})
        check(
            not known or self.monitor in known,
            f"no checkpoint has the monitored metric {self.monitor!r}: they have {few([*map(repr, known)])}",
        )
        return next(iter(self.ranked(checkpoints)), None)

    def kept(self, checkpoints: Sequence[Checkpoint]) -> set[Path]:
        """Paths of the checkpoints to keep, given a list ordered oldest first."""
        best = self.ranked(checkpoints)[: max(self.keep_best, 1)]
        latest = checkpoints[-(self.keep_last or len(checkpoints)) :]
        asked_for = [checkpoint for checkpoint in checkpoints if self.keep is not None and self.keep(checkpoint)]
        return {checkpoint.path for checkpoint in (*best, *latest, *asked_for)}

    def check_scores(self, scores: Mapping[str, float]) -> None:
        """Raise ValueError if the monitored metric is missing, and warn if it is NaN."""
        if self.monitor is None:
            return
        title = f"the monitored metric {self.monitor!r} is"
        check(self.monitor in scores, f"{title} not among the metrics given: {', '.join(scores) or 'none'}")
        if math.isnan(scores[self.monitor]) and is_first():
            warn(f"{title} NaN: the checkpoint is saved, and is never the best")


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
            chosen = next(
                (checkpoint for checkpoint in reversed(checkpoints) if which in ("latest", checkpoint.step)), None
            )
        if chosen is not None:
            return chosen.path
        if which == "latest" and not self.damaged:
            return None
        raise (DamagedCheckpointError if self.damaged else ValueError)(
            f"{self.folder} has no checkpoint {which!r}: give 'latest', 'best' (of those saved with the monitored metric) "
            f"or a step; steps there: {few([checkpoint.step for checkpoint in checkpoints])}; "
            f"damaged: {few(sorted(path.name for path in self.damaged))}"
        )


def describe(path: Path) -> Checkpoint:
    """Describe a checkpoint after checking its manifest and the sizes of its files."""
    manifest = read_manifest(path)
    for name, file in manifest["files"].items():
        with errors_as_damage(path / name):
            check_file(path / name)
            size = (path / name).stat().st_size
            check(size == file["bytes"], f"it has {size} bytes, and {file['bytes']} were written")
    with errors_as_damage(path):
        return Checkpoint(
            path=path,
            **pick(manifest["counts"], ("step", "epoch", "batch", "samples")),
            metrics=mapped(float, manifest["metrics"]),
            bytes=sum(file["bytes"] for file in manifest["files"].values()),
        )
