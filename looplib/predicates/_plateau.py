"""Plateaus of a metric, with a relative threshold and a cooldown."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

from torch import Tensor

from looplib._core.checks import check, check_argument, check_number, check_type, is_count
from looplib.predicates._best import Watched, mode_of, record_of, register
from looplib.predicates._predicate import Predicate
from looplib.types import TrainState


@dataclass(frozen=True, slots=True)
class Plateau(Watched):
    """Plateau of a metric: counts the evaluations without an improvement as torch's ReduceLROnPlateau does.

    >>> import looplib as ll
    >>> plateau = ll.predicates.Plateau("eval/loss", patience=1, cooldown=2)
    >>> for step, loss in enumerate([0.9, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5]):
    ...     plateau = plateau.update(loss, step)
    ...     if plateau.reached == step:
    ...         print("a plateau at step", step)
    a plateau at step 3
    a plateau at step 7

    Put it into `state.extra`. `ll.optim.reduce_on_plateau(state, scores)` updates it and lowers the learning rate. For
    anything else, call `ll.update_best(state, scores, key="plateau")` after each evaluation and ask `at_plateau`, or use
    `count`: `schedule(state.step) * 0.1 ** state.extra["plateau"].count`.

    A checkpoint stores what it has counted: `reference`, `waited`, `cooling`, `count` and `reached`. The settings are those
    of the record that a run is restored into. A record of a different metric or mode is refused.

    Attributes:
        monitor: name of the metric.
        mode: "min" if lower is better, "max" if higher is. Needed if the name does not say it, as for `BestSoFar`.
        patience: evaluations without an improvement that are accepted; one more makes a plateau.
        threshold: smallest improvement over `reference` that counts (exclusive), at least 0.
        threshold_mode: "rel" if the threshold is a share of `reference`, which is what makes it suit losses of any size;
            "abs" if it is a difference.
        cooldown: evaluations after a plateau that do not count as ones without an improvement.
        reference: value at the last improvement, or None before the first evaluation.
        waited: evaluations without an improvement that count towards the next plateau.
        cooling: evaluations that are left of the cooldown.
        count: plateaus so far.
        reached: step of the last evaluation if it made a plateau, else None.

    Raises:
        ValueError: a value is out of range, or `mode` is missing for a name that does not say it.
        TypeError: `monitor` is not a name, or `threshold` not a number.

    Source: `torch.optim.lr_scheduler.ReduceLROnPlateau`. The two differ for a relative threshold and a negative metric, where
    torch's rule (`best * (1 - threshold)`) takes a value that is worse for an improvement. Here the share is that of the
    absolute value.
    """

    USE: ClassVar = ("ll.optim.reduce_on_plateau", "the learning rate would never be lowered")
    monitor: str
    mode: Literal["min", "max"] | None = field(default=None, kw_only=True)
    patience: int = field(default=10, kw_only=True)
    threshold: float = field(default=1e-4, kw_only=True)
    threshold_mode: Literal["rel", "abs"] = field(default="rel", kw_only=True)
    cooldown: int = field(default=0, kw_only=True)
    reference: float | None = field(default=None, kw_only=True)
    waited: int = field(default=0, kw_only=True)
    cooling: int = field(default=0, kw_only=True)
    count: int = field(default=0, kw_only=True)
    reached: int | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        check_type("monitor is", self.monitor, str, "give the name of a metric, such as 'eval/loss'")
        object.__setattr__(self, "mode", mode_of(self.monitor, self.mode))
        here = f"Plateau({self.monitor!r}): "
        for name in ("patience", "cooldown"):
            value = getattr(self, name)
            check(
                is_count(value, 0), f"{here}{name} is {value!r}; give a number of evaluations, an int of at least 0"
            )
        advice = 'give "rel" for a share of the best value, or "abs" for a difference'
        check_argument(self.threshold_mode in ("rel", "abs"), f"{here}threshold_mode", self.threshold_mode, advice)
        share = self.threshold_mode == "rel" and self.mode == "min"
        advice = "give a share of at least 0 and below 1" if share else "give a finite number of at least 0"
        limit = 1.0 if share else math.inf
        check_number(f"{here}threshold", self.threshold, lambda least: 0 <= least < limit, advice)

    def update(self, value: float | Tensor, step: int) -> Plateau:
        """Return the record after one more evaluation, at `step`. NaN is no improvement, and gets a warning.

        >>> Plateau("accuracy", patience=0).update(0.5, step=10).update(0.5, step=20).reached
        20
        """
        value = float(value)
        improved = not self.is_nan(value, step) and self._improves(value)
        waited = 0 if improved or self.cooling else self.waited + 1
        reached = waited > self.patience
        return replace(
            self,
            reference=value if improved else self.reference,
            waited=0 if reached else waited,
            cooling=self.cooldown if reached else max(0, self.cooling - 1),
            count=self.count + reached,
            reached=step if reached else None,
        )

    def _improves(self, value: float) -> bool:
        sign = 1 if self.mode == "max" else -1
        if self.reference is None:
            return sign * value > -math.inf
        if self.threshold_mode == "abs":
            return sign * value > sign * (self.reference + sign * self.threshold)
        away = sign if self.reference >= 0 else -sign  # a product, as in torch, so that both round alike
        return sign * value > sign * (self.reference * (1.0 + away * self.threshold))


register(
    Plateau,
    ("monitor", "mode", "patience", "threshold", "threshold_mode", "cooldown"),
    ("reference", "waited", "cooling", "count", "reached"),
)


@dataclass(frozen=True, slots=True, repr=False)
class at_plateau(Predicate):
    """True if the last evaluation made a plateau. Ask it after `reduce_on_plateau` or `update_best`.

    >>> import looplib as ll
    >>> grow_now = ll.predicates.at_plateau()
    >>> state = ll.TrainState(extra={"plateau": ll.predicates.Plateau("eval/loss", patience=1)})
    >>> for step, loss in [(100, 0.5), (200, 0.6), (300, 0.7)]:
    ...     state = ll.update_best(state.replace(step=step), {"eval/loss": loss}, key="plateau")
    ...     print(step, grow_now(state))
    100 False
    200 False
    300 True

    It is false again after the next update, and before the first evaluation.

    Args:
        key: key of the `Plateau` in `state.extra`.

    Raises:
        ValueError: when called, if the state has no such record.
    """

    key: str = field(default="plateau", kw_only=True)

    def fires(self, state: TrainState) -> bool:
        return record_of(state, self.key, Plateau).reached == state.step

    def __repr__(self) -> str:
        return "at_plateau()" if self.key == "plateau" else f"at_plateau(key={self.key!r})"
