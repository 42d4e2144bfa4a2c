"""Checkpoint descriptions: the record of one, and the policy that says which are kept."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from looplib._core.checks import check, check_optional_count, warn
from looplib._core.ranks import is_first


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
        """The best of these checkpoints. Raises ValueError if no metric is monitored."""
        check(self.monitor is not None, "there is no best without a metric: give checkpoint_io(..., monitor=...)")
        return next(iter(self.ranked(checkpoints)), None)

    def kept(self, checkpoints: Sequence[Checkpoint]) -> set[Path]:
        """Paths of the checkpoints to keep, given a list ordered oldest first."""
        best = self.ranked(checkpoints)[: max(self.keep_best, 1)]
        latest = checkpoints[-(self.keep_last or len(checkpoints)) :]
        asked_for = [each for each in checkpoints if self.keep is not None and self.keep(each)]
        return {each.path for each in (*best, *latest, *asked_for)}

    def check_scores(self, scores: Mapping[str, float]) -> None:
        """Raise ValueError if the monitored metric is missing, and warn if it is NaN."""
        if self.monitor is None:
            return
        title = f"the monitored metric {self.monitor!r} is"
        check(self.monitor in scores, f"{title} not among the metrics given: {', '.join(scores) or 'none'}")
        if math.isnan(scores[self.monitor]) and is_first():
            warn(f"{title} NaN: the checkpoint is saved, and is never the best")
