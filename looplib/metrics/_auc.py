"""Area under the ROC curve."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from looplib._core.mappings import wide_dtype
from looplib.metrics._scores import _fit, _integers, real


class AUC(NamedTuple):
    """Area under the ROC curve (AUC): the probability that a positive sample scores above a negative one.

    >>> import looplib as ll, torch
    >>> ll.compute({"auc": ll.metrics.AUC.of(torch.tensor([0.1, 0.4, 0.35, 0.8]), torch.tensor([0, 0, 1, 1]))})
    {'auc': 0.75}

    The value is exact, because all scores are collected. Memory therefore grows with the dataset: 5 bytes per sample
    in float32. For bounded memory, use torchmetrics' histogram:
    `ll.metrics.torchmetric(torchmetrics.AUROC("binary", thresholds=10_000))`. Ties count one half, as in scikit-learn.
    The value is NaN if one of the classes is missing, or a score is NaN. `AUC()` is the record without samples.

    Samples count equally. For weights, give `Corpus.of` a function that calls
    `sklearn.metrics.roc_auc_score(labels, scores, sample_weight=weights)`.

    Attributes:
        columns: scores and labels of each batch, on their device.
    """

    columns: tuple[Columns, ...] = ()

    @classmethod
    def of(cls, scores: Tensor, labels: Tensor) -> AUC:
        """Record of a batch.

        Args:
            scores: of any shape; higher means more likely positive. bfloat16 and float16 are converted to float32.
            labels: of the same shape; positive if above 0.

        Raises:
            ValueError: the shapes do not match.
            TypeError: scores or labels are complex.
        """
        return cls((_columns(scores, labels),))

    def merge(self, other: AUC) -> AUC:
        return AUC(self.columns + other.columns)

    def compute(self) -> Tensor:
        won, pairs, _ = _pairs(self.columns)
        return won.sum() / pairs.sum()  # of its one group


class GroupedAUC(NamedTuple):
    """Grouped AUC (GAUC): the AUC within each user or session, averaged with the groups' numbers of samples as weights.

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
    `number_of_groups` counts all groups. The value is NaN if no group is left, or a score is NaN. `GroupedAUC()` is the
    record without samples.

    Attributes:
        columns: scores, labels and groups of each batch, on their device.

    Source: Zhu et al., "Optimized cost per click in Taobao display advertising", 2017, equation 16.
    """

    columns: tuple[Columns, ...] = ()

    @classmethod
    def of(cls, scores: Tensor, labels: Tensor, groups: Tensor) -> GroupedAUC:
        """Record of a batch.

        Args:
            scores: of any shape. bfloat16 and float16 are converted to float32.
            labels: of the same shape; positive if above 0.
            groups: integers of the same shape, such as user ids.

        Raises:
            ValueError: shapes or dtypes do not match.
            TypeError: scores or labels are complex.
        """
        _fit(groups.shape, labels, None, "groups")
        _integers("groups", groups)
        return cls(((*_columns(scores, labels), groups.flatten().long().clone()),))

    def merge(self, other: GroupedAUC) -> GroupedAUC:
        return GroupedAUC(self.columns + other.columns)

    def compute(self) -> Tensor:
        won, pairs, samples = _pairs(self.columns)
        share = torch.where(pairs == 0, 0, samples)
        auc = torch.where(pairs == 0, 0, won / pairs)
        return (auc * share).sum() / share.sum()

    def left_out(self) -> Tensor:
        """Number of groups with a single class, which are left out."""
        return (_pairs(self.columns)[1] == 0).sum()

    def number_of_groups(self) -> int:
        """Number of all groups, including those left out."""
        return len(_pairs(self.columns)[0])


Columns = tuple[Tensor, ...]  # scores, labels, and groups if there are any


def _columns(scores: Tensor, labels: Tensor) -> Columns:
    """Copies, since a slice would keep all of its logits alive, and a batch may be overwritten."""
    _fit(scores.shape, labels, None, "scores")
    real("scores", scores)
    real("labels", labels)
    kept = scores.detach().flatten()
    kept = kept.float() if kept.is_floating_point() and kept.dtype.itemsize < 4 else kept.clone()
    return kept, labels.flatten() > 0


def _pairs(columns: tuple[Columns, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """For each group: its correctly ordered pairs of both classes (ties count half), all such pairs, and its samples."""
    if not any(len(scores) for scores, *_ in columns):
        none = torch.zeros(0, device="cpu")
        return none, none, none
    scores, labels, *groups = map(torch.cat, zip(*columns, strict=True))
    # A NaN among the scores makes all counts NaN.
    ones = torch.where(scores.isnan().any(), torch.nan, torch.ones_like(labels, dtype=wide_dtype(labels.device)))
    scores, order = scores.sort()  # 0.0 and -0.0 are equal
    new_group = torch.zeros_like(labels[1:])
    if groups:
        by_group = groups[0][order].argsort(stable=True)
        scores, order = scores[by_group], order[by_group]
        new_group = groups[0][order[1:]] != groups[0][order[:-1]]
    new_score = (scores[1:] != scores[:-1]) | new_group
    group, tie = (nn.functional.pad(new.cumsum(0), (1, 0)) for new in (new_group, new_score))
    positive, negative = (_sums(tie, torch.where(side[order], ones, 0)) for side in (labels, ~labels))
    group_of = group.new_zeros(len(positive)).scatter_(0, tie, group)  # of each run of equal scores
    positives, negatives = _sums(group_of, positive), _sums(group_of, negative)
    below = negative.cumsum(0) - negative / 2 - (negatives.cumsum(0) - negatives)[group_of]
    return _sums(group_of, positive * below), positives * negatives, positives + negatives


def _sums(index: Tensor, values: Tensor) -> Tensor:
    """Sum of the values with each index, which counts up from 0."""
    return values.new_zeros(int(index[-1]) + 1).index_add_(0, index, values)
