"""Area under the ROC curve."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from looplib._core.checks import check, check_argument
from looplib._core.widening import wide_dtype
from looplib.metrics._scores import _fit, _integers, _wide

Average = Literal["examples", "groups"]


class AUC(NamedTuple):
    """Area under the ROC curve (AUC): the probability that a positive sample scores above a negative one.

    >>> import looplib as ll, torch
    >>> ll.compute({"auc": ll.metrics.AUC.of(torch.tensor([0.1, 0.4, 0.35, 0.8]), torch.tensor([0, 0, 1, 1]))})
    {'auc': 0.75}

    The value is exact, because all scores are collected. Memory therefore grows with the dataset: 5 bytes per sample
    in float32, and 8 more with weights. For bounded memory, use torchmetrics' histogram:
    `ll.metrics.torchmetric(torchmetrics.AUROC("binary", thresholds=10_000))`. Ties count one half, as in scikit-learn.
    The value is NaN if one of the classes is missing or has no weight, or a score is NaN.

    Attributes:
        columns: scores, labels and weights of each batch, on their device.
    """

    columns: tuple[Columns, ...] = ()

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
        return cls((_columns(scores, labels, weights),))

    def merge(self, other: AUC) -> AUC:
        return AUC(self.columns + other.columns)

    def compute(self) -> Tensor:
        won, positive, negative = _pairs(self.columns)
        return won.sum() / (positive * negative).sum()  # of its one group


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
        columns: scores, labels, weights and groups of each batch, on their device.
        average: "examples" weights each group by its number of samples, or by the sum of their weights; "groups"
            weights all groups equally.

    Source: Zhu et al., "Optimized cost per click in Taobao display advertising", 2017, equation 16.
    """

    columns: tuple[Columns, ...] = ()
    average: Average = "examples"

    @classmethod
    def empty(cls, average: Average = "examples") -> GroupedAUC:
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
        average: Average = "examples",
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
        _fit(groups.shape, labels, None, "groups")
        _integers("groups", groups)
        check_argument(average in ("examples", "groups"), "average", average, 'give "examples" or "groups"')
        return cls(((*_columns(scores, labels, weights), groups.flatten().long().clone()),), average)

    def merge(self, other: GroupedAUC) -> GroupedAUC:
        averages = f"{self.average!r} and {other.average!r}"
        check(self.average == other.average, f"grouped AUCs to merge are averaged over {averages}")
        return GroupedAUC(self.columns + other.columns, self.average)

    def compute(self) -> Tensor:
        won, positive, negative = _pairs(self.columns)
        has_both = positive * negative != 0  # also where a score is NaN
        auc = torch.where(has_both, won / (positive * negative), 0)
        share = torch.where(has_both, positive + negative if self.average == "examples" else 1.0, 0)
        return (auc * share).sum() / share.sum()

    def left_out(self) -> Tensor:
        """Number of groups with a single class, which are left out."""
        _, positive, negative = _pairs(self.columns)
        return (positive * negative == 0).sum()

    def number_of_groups(self) -> int:
        """Number of all groups, including those left out."""
        return len(_pairs(self.columns)[0])


Columns = tuple[Tensor, ...]  # scores, labels, weights, and groups if there are any


def _columns(scores: Tensor, labels: Tensor, weights: Tensor | None) -> Columns:
    """Copies, since a slice would keep all of its logits alive, and a batch may be overwritten."""
    _fit(scores.shape, labels, weights, "scores")
    kept = scores.detach().flatten()
    kept = kept.float() if kept.is_floating_point() and kept.dtype.itemsize < 4 else kept.clone()
    ones = kept.new_ones((), dtype=wide_dtype(kept.device)).expand(len(kept))  # which take no memory
    return kept, labels.flatten() > 0, ones if weights is None else _wide(weights).clone()


def _pairs(columns: tuple[Columns, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """For each group: weights of its correctly ordered pairs (ties count half), of its positives and its negatives."""
    if not any(len(scores) for scores, *_ in columns):
        none = torch.zeros(0)
        return none, none, none
    scores, labels, weights, *rest = map(torch.cat, zip(*columns, strict=True))
    weights = torch.where(scores.isnan().any(), torch.nan, weights)
    scores, order = scores.sort()  # 0.0 and -0.0 are equal
    new_group = torch.zeros_like(order[1:], dtype=torch.bool)
    if rest:
        [groups] = rest
        by_group = groups[order].argsort(stable=True)
        scores, order = scores[by_group], order[by_group]
        new_group = groups[order[1:]] != groups[order[:-1]]
    labels, weights = labels[order], weights[order]
    new_score = (scores[1:] != scores[:-1]) | new_group
    group, tie = (nn.functional.pad(new.cumsum(0), (1, 0)) for new in (new_group, new_score))
    positive, negative = (_sums(tie, torch.where(side, weights, 0)) for side in (labels, ~labels))
    group_of = group.new_zeros(len(positive)).scatter_(0, tie, group)  # of each run of equal scores
    positives, negatives = _sums(group_of, positive), _sums(group_of, negative)
    below = negative.cumsum(0) - negative / 2 - (negatives.cumsum(0) - negatives)[group_of]
    return _sums(group_of, positive * below), positives, negatives


def _sums(index: Tensor, values: Tensor) -> Tensor:
    """Sum of the values with each index, which counts up from 0."""
    return values.new_zeros(int(index[-1]) + 1).index_add_(0, index, values)
