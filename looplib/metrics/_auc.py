"""Area under the ROC curve."""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from looplib._core.checks import check_argument
from looplib._core.widening import wide_dtype
from looplib.metrics._scores import _copy, _fit, _integers, _kept, _wide


class AUC(NamedTuple):
    """Area under the ROC curve (AUC): the probability that a positive sample scores above a negative one.

    >>> import looplib as ll, torch
    >>> ll.compute({"auc": ll.metrics.AUC.of(torch.tensor([0.1, 0.4, 0.35, 0.8]), torch.tensor([0, 0, 1, 1]))})
    {'auc': 0.75}

    The value is exact, because all scores are collected. Memory therefore grows with the dataset: 5 bytes per sample
    in float32, and 8 more with weights. `StreamingAUC` has bounded memory. Ties count one half, as in scikit-learn.
    The value is NaN if one of the classes is missing or has no weight, or a score is NaN.

    Attributes:
        scores, labels, weights: those of the batches, on their device.
    """

    scores: tuple[Tensor, ...] = ()
    labels: tuple[Tensor, ...] = ()
    weights: tuple[Tensor | None, ...] = ()

    @classmethod
    def empty(cls) -> AUC:
        """Record without samples."""
        return cls()

    @classmethod
    def of(cls, scores: Tensor, labels: Tensor, weights: Tensor | None = None) -> AUC:
        """Record of a batch.

        Args:
            scores: of any shape; higher means more likely positive. bfloat16 and float16 are converted to float32.
            labels: of the same shape; positive if above 0.
            weights: of the same shape.

        Raises:
            ValueError: the shapes do not match.
        """
        _fit(scores.shape, labels, weights, "scores")
        return cls((_kept(scores),), (labels.flatten() > 0,), (None if weights is None else _copy(_wide(weights)),))

    def merge(self, other: AUC) -> AUC:
        return AUC(self.scores + other.scores, self.labels + other.labels, self.weights + other.weights)

    def compute(self) -> Tensor | float:
        if not sum(part.numel() for part in self.scores):
            return torch.nan
        scores, weights = torch.cat(self.scores), _all_weights(self.scores, self.weights)
        won, positive, negative = _pairs(scores, torch.cat(self.labels), weights)
        return torch.where(scores.isnan().any(), torch.nan, won / (positive * negative)).squeeze(0)


class GroupedAUC(NamedTuple):
    """Grouped AUC (GAUC): the AUC within each user or session, averaged over groups.

    >>> import looplib as ll, torch
    >>> model = torch.nn.Linear(4, 1)
    >>> def metric_fn(model, batch):
    ...     logits, clicked = model(batch["x"]).squeeze(-1), batch["clicked"]
    ...     by_user = ll.metrics.GroupedAUC.of(logits, clicked, batch["user"])
    ...     return {
    ...         "loss": torch.nn.functional.binary_cross_entropy_with_logits(logits, clicked),
    ...         "auc": ll.metrics.AUC.of(logits, clicked),
    ...         "calibration": ll.metrics.calibration(logits.sigmoid(), clicked),
    ...         "user_auc": by_user,
    ...         "users_left_out": ll.metrics.Reading(by_user, ll.metrics.GroupedAUC.left_out),
    ...         "users": ll.metrics.Reading(by_user, ll.metrics.GroupedAUC.number_of_groups),
    ...     }
    >>> eval_step = ll.make_eval_step(model, metric_fn)
    >>> data = {"x": torch.randn(6, 4), "clicked": torch.tensor([0.0, 1, 1, 0, 0, 0]), "user": torch.arange(6) // 2}
    >>> batches = [{name: column[rows] for name, column in data.items()} for rows in (slice(4), slice(4, 6))]
    >>> scores = ll.evaluate(eval_step, ll.init_state(model), batches, prefix="eval/")
    >>> scores["eval/users_left_out"], scores["eval/users"]
    (1.0, 3.0)

    A group may be spread over several batches, so everything is collected, and memory grows with the dataset as for
    `AUC`, plus 8 bytes per sample. A group with a single class has no AUC; it is left out and counted by `left_out`.
    `number_of_groups` counts all groups. The value is NaN if no group is left, or a score is NaN.

    Attributes:
        scores, labels, groups, weights: those of the batches, on their device.
        average: "examples" weights each group by its number of samples, or by the sum of their weights; "groups"
            weights all groups equally.

    Source: Zhu et al., "Optimized cost per click in Taobao display advertising", 2017, equation 16.
    """

    scores: tuple[Tensor, ...] = ()
    labels: tuple[Tensor, ...] = ()
    groups: tuple[Tensor, ...] = ()
    weights: tuple[Tensor | None, ...] = ()
    average: Literal["examples", "groups"] = "examples"

    @classmethod
    def empty(cls, average: Literal["examples", "groups"] = "examples") -> GroupedAUC:
        """Record without samples."""
        return cls(average=average)

    @classmethod
    def of(
        cls,
        scores: Tensor,
        labels: Tensor,
        groups: Tensor,
        weights: Tensor | None = None,
        *,
        average: Literal["examples", "groups"] = "examples",
    ) -> GroupedAUC:
        """Record of a batch.

        Args:
            scores: of any shape. bfloat16 and float16 are converted to float32.
            labels: of the same shape; positive if above 0.
            groups: integers of the same shape, such as user ids.
            weights: of the same shape.
            average: "examples" or "groups".

        Raises:
            ValueError: shapes or dtypes do not match, or `average` is unknown.
        """
        _fit(scores.shape, labels, weights, "scores")
        _fit(groups.shape, labels, None, "groups")
        _integers("groups", groups)
        check_argument(average in ("examples", "groups"), "average", average, 'give "examples" or "groups"')
        kept = None if weights is None else _copy(_wide(weights))
        return cls((_kept(scores),), (labels.flatten() > 0,), (_copy(groups.long()),), (kept,), average)

    def merge(self, other: GroupedAUC) -> GroupedAUC:
        if self.average != other.average:
            raise ValueError(f"grouped AUCs to merge are averaged over {self.average!r} and {other.average!r}")
        return GroupedAUC(
            self.scores + other.scores,
            self.labels + other.labels,
            self.groups + other.groups,
            self.weights + other.weights,
            self.average,
        )

    def compute(self) -> Tensor | float:
        if not sum(part.numel() for part in self.scores):
            return torch.nan
        won, positive, negative = self._by_group()
        has_both = (positive * negative) > 0
        auc = torch.where(has_both, won / (positive * negative), 0)
        share = (
            torch.where(has_both, positive + negative, 0) if self.average == "examples" else has_both.to(auc.dtype)
        )
        invalid = torch.stack([part.isnan().any() for part in self.scores]).any()
        return torch.where(invalid, torch.nan, (auc * share).sum() / share.sum())

    def left_out(self) -> Tensor | int:
        """Number of groups with a single class, which are left out."""
        if not sum(part.numel() for part in self.scores):
            return 0
        _, positive, negative = self._by_group()
        return ((positive * negative) == 0).sum()

    def number_of_groups(self) -> int:
        """Number of all groups, including those left out."""
        return len(torch.unique(torch.cat(self.groups))) if self.groups else 0

    def _by_group(self) -> tuple[Tensor, Tensor, Tensor]:
        weights = _all_weights(self.scores, self.weights)
        return _pairs(torch.cat(self.scores), torch.cat(self.labels), weights, torch.cat(self.groups))


def _pairs(
    scores: Tensor, labels: Tensor, weights: Tensor, groups: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """For each group: weights of its correctly ordered pairs (ties count half), of its positives and its negatives."""
    keys, order = _as_integers(scores).sort()
    new_group = keys.new_zeros(len(keys) - 1, dtype=torch.bool)
    if groups is not None:
        by_group = groups[order].argsort(stable=True)
        keys, order = keys[by_group], order[by_group]
        new_group = groups[order[1:]] != groups[order[:-1]]
    labels = labels[order]
    weights = weights[order] if any(weights.stride()) else weights
    group, tie = _runs(new_group), _runs((keys[1:] != keys[:-1]) | new_group)
    ties, count = int(tie[-1]) + 1, int(group[-1]) + 1
    positive, negative = (
        weights.new_zeros(ties).index_add_(0, tie, torch.where(side, weights, 0)) for side in (labels, ~labels)
    )
    group_of = group.new_zeros(ties).scatter_(0, tie, group)
    positives, negatives = (weights.new_zeros(count).index_add_(0, group_of, sums) for sums in (positive, negative))
    below = negative.cumsum(0) - negative / 2 - (negatives.cumsum(0) - negatives)[group_of]
    won = weights.new_zeros(count).index_add_(0, group_of, positive * below)
    return won, positives, negatives


def _as_integers(scores: Tensor) -> Tensor:
    """Integers in the order of the scores, since torch sorts integers by radix on a CPU, four times as fast.

    The bits of a float are in order but for the sign: those of negative numbers are in reverse. Adding 0 makes -0.0
    equal to 0.0. NaN is first or last.
    """
    if not scores.is_floating_point():
        return scores
    integer = {4: torch.int32, 8: torch.int64}[scores.dtype.itemsize]
    bits = (scores + 0).view(integer)
    return torch.where(bits < 0, bits ^ torch.iinfo(integer).max, bits)


def _runs(new: Tensor) -> Tensor:
    """Index of each element's run, given a mask of the elements that start one."""
    return nn.functional.pad(new.cumsum(0), (1, 0))


def _all_weights(scores: tuple[Tensor, ...], weights: tuple[Tensor | None, ...]) -> Tensor:
    if all(part is None for part in weights):  # ones that take no memory
        dtype = wide_dtype(scores[0].device)
        return scores[0].new_ones(1, dtype=dtype).expand(sum(map(len, scores)))
    parts = zip(scores, weights, strict=True)
    return torch.cat([_wide(torch.ones_like(s, dtype=torch.float32)) if w is None else w for s, w in parts])


class StreamingAUC(NamedTuple):
    """Streaming AUC from a histogram: bounded memory, with a bound on its error.

    >>> import looplib as ll, torch
    >>> auc = ll.metrics.StreamingAUC.of(torch.tensor([0.1, 0.4, 0.35, 0.8]), torch.tensor([0, 0, 1, 1]), bins=4)
    >>> ll.compute({"auc": auc, "error": ll.metrics.Reading(auc, ll.metrics.StreamingAUC.error)})
    {'auc': 0.875, 'error': 0.125}

    Pairs from different bins are counted exactly, and pairs within one bin as ties, one half. The exact AUC is
    therefore within `error` of the value, half the fraction of pairs that share a bin. Memory is 16 bytes per bin for
    any number of samples. The value is NaN if one of the classes is missing or has no weight, or a score is NaN.

    Attributes:
        histogram: (2, bins + 1), counts of negatives and positives; the last column counts NaN scores.
        low, high: range of the bins. Scores outside it count in the first or last bin, within the same bound.
    """

    histogram: Tensor
    low: float = 0.0
    high: float = 1.0

    @classmethod
    def empty(cls, *, bins: int = 10_000, low: float = 0.0, high: float = 1.0, device: Any = None) -> StreamingAUC:
        """Record without samples, on the device of those that it is merged with."""
        return cls(torch.zeros(2, bins + 1, dtype=torch.int64, device=device), low, high)

    @classmethod
    def of(
        cls,
        scores: Tensor,
        labels: Tensor,
        weights: Tensor | None = None,
        *,
        bins: int = 10_000,
        low: float = 0.0,
        high: float = 1.0,
    ) -> StreamingAUC:
        """Record of a batch.

        Args:
            scores: of any shape; probabilities, or other scores with a suitable range.
            labels: of the same shape; positive if above 0.
            weights: of the same shape.
            bins: number of bins of equal width, at least 1.
            low, high: range of the bins.

        Raises:
            ValueError: the shapes do not match, there are no bins, or the range is empty.
        """
        from einops import rearrange  # takes 1.5 ms

        _fit(scores.shape, labels, weights, "scores")
        if bins < 1 or not (low < high and math.isfinite(high - low)):
            raise ValueError(
                f"{bins} bins from {low} to {high}: give at least one bin, and a finite low below a high"
            )
        values = _wide(scores)
        column = ((values - low) * (bins / (high - low))).clamp(0, bins - 1).nan_to_num(0).long()
        column = torch.where(values.isnan(), bins, column)
        cell = (labels.flatten() > 0) * (bins + 1) + column
        counts = torch.ones_like(cell) if weights is None else _wide(weights)
        histogram = counts.new_zeros(2 * (bins + 1)).index_add_(0, cell, counts)
        return cls(rearrange(histogram, "(side bin) -> side bin", side=2), low, high)

    def merge(self, other: StreamingAUC) -> StreamingAUC:
        mine, theirs = ((x.histogram.shape[1] - 1, x.low, x.high) for x in (self, other))
        if mine != theirs:
            raise ValueError(f"AUCs to merge must have the same (bins, low, high): found {mine} and {theirs}")
        return StreamingAUC(self.histogram + other.histogram, self.low, self.high)

    def compute(self) -> Tensor:
        negative, positive = self._sides()
        return (positive * (negative.cumsum(0) - negative / 2)).sum() / (positive.sum() * negative.sum())

    def error(self) -> Tensor:
        """Largest possible difference from the exact AUC."""
        negative, positive = self._sides()
        return (positive * negative).sum() / 2 / (positive.sum() * negative.sum())

    def _sides(self) -> tuple[Tensor, Tensor]:
        wide = self.histogram.to(wide_dtype(self.histogram.device))
        wide = torch.where((wide[:, -1] != 0).any(), torch.nan, wide[:, :-1])
        return wide[0], wide[1]
