"""Retention policy: which checkpoints are kept, and which one is the best."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from looplib._core.checks import check, check_optional_count, warn
from looplib._core.directions import mode_of
from looplib._core.ranks import is_first
from looplib.checkpoint._describe import Checkpoint


@dataclass(frozen=True, slots=True)
class Policy:
    """Retention policy: keep each checkpoint that any setting asks for, besides the latest and the best.

    The arguments are those of `checkpoint_io`. Raises ValueError for inconsistent values.
    """

    keep_last: int | None = None
    keep_best: int = 0
    monitor: str | None = None
    mode: str | None = None
    keep_every: int | None = None
    keep: Callable[[Checkpoint], bool] | None = None

    def __post_init__(self) -> None:
        check_optional_count("keep_last", self.keep_last)
        check_optional_count("keep_best", self.keep_best, 0)
        check_optional_count("keep_every", self.keep_every)
        check(
            self.monitor is not None or not self.keep_best,
            f"keep_best={self.keep_best} needs monitor=, the name of the metric that the best is judged by",
        )
        if self.monitor is not None:
            object.__setattr__(self, "mode", mode_of(self.monitor, self.mode))

    def ranked(self, checkpoints: Sequence[Checkpoint]) -> list[Checkpoint]:
        """Checkpoints that have the monitored metric, best first. Among equal ones, the earlier comes first."""
        scored = [checkpoint for checkpoint in checkpoints if not math.isnan(self._score(checkpoint))]
        return sorted(scored, key=self._score, reverse=self.mode == "max")

    def _score(self, checkpoint: Checkpoint) -> float:
        return checkpoint.metrics.get(self.monitor, math.nan)  # type: ignore[arg-type]

    def check_monitors(self) -> None:
        """Raise ValueError if no metric is monitored."""
        check(self.monitor is not None, "there is no best without a metric: give checkpoint_io(..., monitor=...)")

    def best(self, checkpoints: Sequence[Checkpoint]) -> Checkpoint | None:
        """The best of these checkpoints. Raises ValueError if no metric is monitored."""
        self.check_monitors()
        return next(iter(self.ranked(checkpoints)), None)

    def dropped(self, checkpoints: Sequence[Checkpoint]) -> list[Path]:
        """Paths of the checkpoints to delete, given a list ordered oldest first."""
        best = self.ranked(checkpoints)[: max(self.keep_best, 1)]
        latest = checkpoints[-(self.keep_last or len(checkpoints)) :]
        kept = {checkpoint.path for checkpoint in (*best, *latest)}
        return [
            checkpoint.path
            for checkpoint in checkpoints
            if checkpoint.path not in kept and not self._asks_for(checkpoint)
        ]

    def _asks_for(self, checkpoint: Checkpoint) -> bool:
        every = self.keep_every is not None and checkpoint.step % self.keep_every == 0
        return every or (self.keep is not None and self.keep(checkpoint))

    def check_scores(self, scores: Mapping[str, float]) -> None:
        """Raise ValueError if the monitored metric is missing, and warn if it is NaN."""
        if self.monitor is None:
            return
        title = f"the monitored metric {self.monitor!r} is"
        check(self.monitor in scores, f"{title} not among the metrics given: {', '.join(scores) or 'none'}")
        if math.isnan(scores[self.monitor]) and is_first():
            warn(f"{title} NaN: the checkpoint is saved, and is never the best")
