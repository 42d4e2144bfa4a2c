"""Scores of predictions.

Each is a small record of a batch that merges with those of other batches and ranks to the record of the whole set,
however it was cut: a `Mean` where sums are enough, a histogram or moments where they are not, and the scores
themselves where only they will do. Sums are in float64 (float32 on devices without it), so counts are exact.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from einops import rearrange
from torch import Tensor, nn

from looplib.metrics import Mean


class Reading(NamedTuple):
    """Another number of a record, as a metric of its own.

    >>> import looplib as ll, torch
    >>> matrix = ll.ConfusionMatrix.of(torch.tensor([0, 1, 1, 2]), torch.tensor([0, 1, 2, 2]), classes=3)
    >>> metrics = {"accuracy": matrix, "macro_f1": ll.Reading(matrix, ll.ConfusionMatrix.macro_f1)}
    >>> metrics["recall_of_2"] = ll.Reading(matrix, lambda matrix: matrix.recall()[2])
    >>> ll.compute(metrics)
    {'accuracy': 0.75, 'macro_f1': 0.777..., 'recall_of_2': 0.5}

    Attributes:
        record: what merges; several readings share its tensors.
        read: a function of the merged record that gives the number. One at the top of a module, unlike a lambda,
            can be pickled.
    """

    record: Any
    read: Callable[[Any], Any]

    def merge(self, other: Reading) -> Reading:
        return Reading(self.record.merge(other.record), self.read)

    def compute(self) -> Any:
        return self.read(self.record)


def accuracy(
    predictions: Tensor,
    labels: Tensor,
    *,
    ignore_index: int | None = None,
    weights: Tensor | None = None,
    top_k: int = 1,
) -> Mean:
    """The part of the labels that was predicted.

    >>> import looplib as ll, torch
    >>> logits, labels = torch.tensor([[0.1, 0.7, 0.2], [0.5, 0.1, 0.4]]), torch.tensor([1, 2])
    >>> ll.compute({"top1": ll.accuracy(logits, labels), "top2": ll.accuracy(logits, labels, top_k=2)})
    {'top1': 0.5, 'top2': 1.0}

    Args:
        predictions: logits or probabilities (..., classes), or predicted classes (...), integers or booleans.
        labels: (...), integers or booleans.
        ignore_index: a label that counts nothing, such as -100 of padding.
        weights: (...), of each label.
        top_k: a label counts where fewer than k classes score higher; of equal scores the first class is higher,
            as for argmax. A NaN is never a hit.

    Raises ValueError for shapes or dtypes that do not fit, or a top_k that is not among the classes.
    """
    _integers("labels", labels)
    if predictions.dim() == labels.dim() + 1:
        _fit(predictions[..., 0], labels, weights, "logits without their last dimension")
        if not 1 <= top_k <= predictions.shape[-1]:
            raise ValueError(
                f"top_k is {top_k}; logits of shape {tuple(predictions.shape)} allow 1 to their last size"
            )
    else:
        _fit(predictions, labels, weights, "predicted classes")
        if predictions.is_floating_point() or top_k != 1:
            raise ValueError(
                f"predictions have shape {tuple(predictions.shape)} and dtype {predictions.dtype}, with labels "
                f"{tuple(labels.shape)} and top_k={top_k}: give classes as integers or booleans, such as "
                "logits > 0, or logits (..., classes)"
            )
    valid = torch.ones_like(labels, dtype=torch.bool) if ignore_index is None else labels != ignore_index
    if predictions.dim() == labels.dim():
        right = predictions == labels
    else:
        label = rearrange(torch.where(valid, labels, 0).long(), "... -> ... 1")
        score = predictions.gather(-1, label)
        first = torch.arange(predictions.shape[-1], device=label.device) < label
        behind = torch.where(first, predictions < score, predictions <= score)
        right = (~behind).sum(-1) < top_k
        right &= ~score.squeeze(-1).isnan()
    if weights is None:
        return Mean((right & valid).sum(), labels.numel() if ignore_index is None else valid.sum())
    weights = torch.where(valid.flatten(), _wide(weights), 0)
    return Mean((weights * right.flatten()).sum(), weights.sum())


def perplexity(loss: Mean) -> Reading:
    """The exponential of a mean loss per token, over all tokens.

    >>> import looplib as ll, torch
    >>> logits, tokens = torch.zeros(2, 5, 8), torch.randint(0, 8, (2, 5))
    >>> round(ll.compute({"perplexity": ll.perplexity(ll.next_token_loss(logits, tokens))})["perplexity"], 3)
    8.0

    Args:
        loss: the summed negative log-likelihood in nats, and the number of tokens.
    """
    return Reading(loss, _exp_of_mean)


def _exp_of_mean(mean: Mean) -> Tensor:
    value = torch.as_tensor(mean.compute())
    return value.to(_wide_dtype(value)).exp()


def calibration(predictions: Tensor, labels: Tensor, weights: Tensor | None = None) -> Mean:
    """The mean prediction over the mean label: 1 where as much is predicted as happens.

    >>> import looplib as ll, torch
    >>> ll.compute({"calibration": ll.calibration(torch.tensor([0.2, 0.7]), torch.tensor([0, 1]))})
    {'calibration': 0.89999...}

    Args:
        predictions: probabilities, or predicted amounts; floats of any shape.
        labels: of the same shape, any dtype.
        weights: of the same shape.

    Where no label is above 0 it computes to infinity, or NaN if nothing was predicted either. Raises ValueError for
    shapes that do not fit.

    Source: He et al., "Practical lessons from predicting clicks on ads at Facebook", 2014, section 2.
    """
    _fit(predictions, labels, weights, "predictions")
    return Mean(_weighted(predictions, weights).sum(), _weighted(labels, weights).sum())


def mae(predictions: Tensor, targets: Tensor, weights: Tensor | None = None) -> Mean:
    """The mean absolute error, over all elements.

    >>> import looplib as ll, torch
    >>> ll.compute({"mae": ll.mae(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 4.0]))})
    {'mae': 1.0}

    Args:
        predictions: of any shape.
        targets: of the same shape.
        weights: of the same shape.

    Raises ValueError for shapes that do not fit.
    """
    _fit(predictions, targets, weights, "predictions", "targets")
    return _mean((_wide(predictions) - _wide(targets)).abs(), weights)


def mse(predictions: Tensor, targets: Tensor, weights: Tensor | None = None) -> Mean:
    """The mean squared error, over all elements.

    >>> import looplib as ll, torch
    >>> ll.compute({"mse": ll.mse(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 4.0]))})
    {'mse': 2.0}

    Args:
        predictions: of any shape.
        targets: of the same shape.
        weights: of the same shape.

    Raises ValueError for shapes that do not fit.
    """
    _fit(predictions, targets, weights, "predictions", "targets")
    return _mean((_wide(predictions) - _wide(targets)).square(), weights)


def rmse(predictions: Tensor, targets: Tensor, weights: Tensor | None = None) -> Reading:
    """The root of the mean squared error, over all elements.

    >>> import looplib as ll, torch
    >>> ll.compute({"rmse": ll.rmse(torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0]))})
    {'rmse': 2.0}

    Args:
        predictions: of any shape.
        targets: of the same shape.
        weights: of the same shape.

    Raises ValueError for shapes that do not fit.
    """
    return Reading(mse(predictions, targets, weights), _root_of_mean)


def _root_of_mean(mean: Mean) -> Tensor:
    return torch.as_tensor(mean.compute()).sqrt()


class R2(NamedTuple):
    """The coefficient of determination: the part of the targets' variance that is predicted.

    >>> import looplib as ll, torch
    >>> ll.compute({"r2": ll.R2.of(torch.tensor([1.0, 2.0, 4.0]), torch.tensor([1.0, 2.0, 3.0]))})
    {'r2': 0.5}

    Attributes:
        examples: how many.
        weight: sum of their weights.
        mean: of the targets.
        spread: weighted sum of the squared distances of the targets from their mean.
        residual: weighted sum of the squared errors.

    As in scikit-learn, it is 1 or 0 for constant targets, by whether all were hit, and NaN for fewer than two
    examples.

    Source: Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances",
    1979, equation 2.1.
    """

    examples: int
    weight: Tensor
    mean: Tensor
    spread: Tensor
    residual: Tensor

    @classmethod
    def empty(cls, device: Any = None) -> R2:
        """The record of no examples."""
        zero = torch.zeros((), device=device)
        zero = zero.to(_wide_dtype(zero))
        return cls(0, zero, zero, zero, zero)

    @classmethod
    def of(cls, predictions: Tensor, targets: Tensor, weights: Tensor | None = None) -> R2:
        """The record of a batch: arguments and errors as of `mae`."""
        _fit(predictions, targets, weights, "predictions", "targets")
        if not targets.numel():
            return cls.empty(targets.device)
        y, p = _wide(targets), _wide(predictions)
        w = torch.ones_like(y) if weights is None else _wide(weights)
        # From one of the targets, so that the mean of equal targets is that target, and their spread 0.
        near = y.take(w.argmax())
        mean = near + (w * (y - near)).sum() / w.sum()
        # Where no weight is, there is no mean.
        mean = torch.where(w.sum() == 0, near, mean)
        return cls(y.numel(), w.sum(), mean, (w * (y - mean).square()).sum(), (w * (y - p).square()).sum())

    def merge(self, other: R2) -> R2:
        weight = self.weight + other.weight
        distance = other.mean - self.mean
        part = torch.where(weight == 0, 0, other.weight / weight)
        return R2(
            self.examples + other.examples,
            weight,
            torch.where(self.weight == 0, other.mean, self.mean + distance * part),
            self.spread + other.spread + distance.square() * self.weight * part,
            self.residual + other.residual,
        )

    def compute(self) -> Tensor:
        constant = torch.where(self.residual == 0, 1.0, 0.0).to(self.residual.dtype)
        score = torch.where(self.spread == 0, constant, 1 - self.residual / self.spread)
        return torch.where((self.weight == 0) | (self.examples < 2), torch.nan, score)


class AUC(NamedTuple):
    """The area under the ROC curve, exact: the chance that a positive example scores above a negative one.

    >>> import looplib as ll, torch
    >>> ll.compute({"auc": ll.AUC.of(torch.tensor([0.1, 0.4, 0.35, 0.8]), torch.tensor([0, 0, 1, 1]))})
    {'auc': 0.75}

    Scores are collected, so memory grows with the set: 5 bytes for each example in float32, 8 more with weights;
    `StreamingAUC` is bounded. Equal scores count one half, as in scikit-learn. Computes to NaN where one of the
    classes is missing or has no weight, or a score is NaN.

    Attributes:
        scores, labels, weights: the batches' own, on their device.
    """

    scores: tuple[Tensor, ...] = ()
    labels: tuple[Tensor, ...] = ()
    weights: tuple[Tensor | None, ...] = ()

    @classmethod
    def empty(cls) -> AUC:
        """The record of no examples."""
        return cls()

    @classmethod
    def of(cls, scores: Tensor, labels: Tensor, weights: Tensor | None = None) -> AUC:
        """The record of a batch.

        Args:
            scores: of any shape; higher means more likely positive. bfloat16 and float16 are widened.
            labels: of the same shape; positive where above 0.
            weights: of the same shape.

        Raises ValueError for shapes that do not fit.
        """
        _fit(scores, labels, weights, "scores")
        return cls((_kept(scores),), (labels.flatten() > 0,), (None if weights is None else _copy(_wide(weights)),))

    def merge(self, other: AUC) -> AUC:
        return AUC(self.scores + other.scores, self.labels + other.labels, self.weights + other.weights)

    def compute(self) -> Tensor | float:
        if not sum(part.numel() for part in self.scores):
            return torch.nan
        scores, weights = torch.cat(self.scores), _all_weights(self.scores, self.weights)
        groups = torch.zeros_like(scores, dtype=torch.int64)
        won, positive, negative = _pairs(scores, torch.cat(self.labels), weights, groups)
        return torch.where(scores.isnan().any(), torch.nan, won / (positive * negative)).squeeze(0)


class GroupedAUC(NamedTuple):
    """The AUC of each user or session, averaged: how well the examples of one group are ranked among themselves.

    >>> import looplib as ll, torch
    >>> model = torch.nn.Linear(4, 1)
    >>> def metric_fn(model, batch):
    ...     logits, clicked = model(batch["x"]).squeeze(-1), batch["clicked"]
    ...     by_user = ll.GroupedAUC.of(logits, clicked, batch["user"])
    ...     return {
    ...         "loss": torch.nn.functional.binary_cross_entropy_with_logits(logits, clicked),
    ...         "auc": ll.AUC.of(logits, clicked),
    ...         "calibration": ll.calibration(logits.sigmoid(), clicked),
    ...         "user_auc": by_user,
    ...         "users_left_out": ll.Reading(by_user, ll.GroupedAUC.left_out),
    ...         "users": ll.Reading(by_user, ll.GroupedAUC.number_of_groups),
    ...     }
    >>> eval_step = ll.make_eval_step(model, metric_fn)
    >>> data = {"x": torch.randn(6, 4), "clicked": torch.tensor([0.0, 1, 1, 0, 0, 0]), "user": torch.arange(6) // 2}
    >>> batches = [{name: column[rows] for name, column in data.items()} for rows in (slice(4), slice(4, 6))]
    >>> scores = ll.evaluate(eval_step, ll.init_state(model), batches, prefix="eval/")
    >>> scores["eval/users_left_out"], scores["eval/users"]
    (1.0, 3.0)

    A group need not lie in one batch, so everything is collected, and memory grows with the set as that of `AUC`
    and 8 bytes for each example. A group with one class only has no AUC: it is left out, and counted by `left_out`,
    of the `number_of_groups`. Computes to NaN where no group is left, or a score is NaN.

    Attributes:
        scores, labels, groups, weights: the batches' own, on their device.
        average: "examples" weighs each group by its examples, or by the sum of their weights; "groups" weighs all
            groups alike.

    Source: Zhu et al., "Optimized cost per click in Taobao display advertising", 2017, equation 16.
    """

    scores: tuple[Tensor, ...] = ()
    labels: tuple[Tensor, ...] = ()
    groups: tuple[Tensor, ...] = ()
    weights: tuple[Tensor | None, ...] = ()
    average: Literal["examples", "groups"] = "examples"

    @classmethod
    def empty(cls, average: Literal["examples", "groups"] = "examples") -> GroupedAUC:
        """The record of no examples."""
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
        """The record of a batch.

        Args:
            scores: of any shape; bfloat16 and float16 are widened.
            labels: of the same shape; positive where above 0.
            groups: integers of the same shape, such as user ids.
            weights: of the same shape.
            average: "examples" or "groups".

        Raises ValueError for shapes, dtypes or an average that do not fit.
        """
        _fit(scores, labels, weights, "scores")
        _fit(groups, labels, None, "groups")
        _integers("groups", groups)
        if average not in ("examples", "groups"):
            raise ValueError(f'average is {average!r}; give "examples" or "groups"')
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
        there = (positive * negative) > 0
        auc = torch.where(there, won / (positive * negative), 0)
        share = torch.where(there, positive + negative, 0) if self.average == "examples" else there.to(auc.dtype)
        invalid = torch.stack([part.isnan().any() for part in self.scores]).any()
        return torch.where(invalid, torch.nan, (auc * share).sum() / share.sum())

    def left_out(self) -> Tensor | int:
        """How many groups have one class only."""
        if not sum(part.numel() for part in self.scores):
            return 0
        _, positive, negative = self._by_group()
        return ((positive * negative) == 0).sum()

    def number_of_groups(self) -> int:
        """How many groups there are, with those that are left out."""
        return len(torch.unique(torch.cat(self.groups))) if self.groups else 0

    def _by_group(self) -> tuple[Tensor, Tensor, Tensor]:
        weights = _all_weights(self.scores, self.weights)
        return _pairs(torch.cat(self.scores), torch.cat(self.labels), weights, torch.cat(self.groups))


def _pairs(scores: Tensor, labels: Tensor, weights: Tensor, groups: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """For each group: the weight of its pairs that are in order, equal ones half, of its positives, its negatives."""
    order = scores.argsort()
    order = order[groups[order].argsort(stable=True)]
    scores, labels, weights, groups = scores[order], labels[order], weights[order], groups[order]
    group = _runs(groups[1:] != groups[:-1])
    tie = _runs((scores[1:] != scores[:-1]) | (groups[1:] != groups[:-1]))
    ties, count = int(tie[-1]) + 1, int(group[-1]) + 1
    positive, negative = (
        weights.new_zeros(ties).index_add_(0, tie, torch.where(side, weights, 0)) for side in (labels, ~labels)
    )
    group_of = group.new_zeros(ties).scatter_(0, tie, group)
    positives, negatives = (weights.new_zeros(count).index_add_(0, group_of, sums) for sums in (positive, negative))
    below = negative.cumsum(0) - negative / 2 - (negatives.cumsum(0) - negatives)[group_of]
    won = weights.new_zeros(count).index_add_(0, group_of, positive * below)
    return won, positives, negatives


def _runs(new: Tensor) -> Tensor:
    """The index of each element's run, given where one differs from the one before it."""
    return nn.functional.pad(new.cumsum(0), (1, 0))


def _all_weights(scores: tuple[Tensor, ...], weights: tuple[Tensor | None, ...]) -> Tensor:
    parts = zip(scores, weights, strict=True)
    return torch.cat([_wide(torch.ones_like(s, dtype=torch.float32)) if w is None else w for s, w in parts])


class StreamingAUC(NamedTuple):
    """The area under the ROC curve from a histogram: bounded memory, and a bound of its error.

    >>> import looplib as ll, torch
    >>> auc = ll.StreamingAUC.of(torch.tensor([0.1, 0.4, 0.35, 0.8]), torch.tensor([0, 0, 1, 1]), bins=4)
    >>> ll.compute({"auc": auc, "error": ll.Reading(auc, ll.StreamingAUC.error)})
    {'auc': 0.875, 'error': 0.125}

    Pairs of different bins are counted exactly and pairs of one bin as equal, one half; so the exact AUC lies within
    `error` of it, half the share of the pairs that share a bin. It takes 16 bytes a bin, whatever the set. Computes
    to NaN where one of the classes is missing or has no weight, or a score is NaN.

    Attributes:
        histogram: (2, bins + 1), of negatives and positives; the last column holds the scores that are NaN.
        low, high: the range of the bins; scores beyond it count in the bin at its end, within the same bound.
    """

    histogram: Tensor
    low: float = 0.0
    high: float = 1.0

    @classmethod
    def empty(cls, *, bins: int = 10_000, low: float = 0.0, high: float = 1.0, device: Any = None) -> StreamingAUC:
        """The record of no examples, on the device of those that it merges with."""
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
        """The record of a batch.

        Args:
            scores: of any shape; probabilities, or others with a range that fits them.
            labels: of the same shape; positive where above 0.
            weights: of the same shape.
            bins: of equal width, at least 1.
            low, high: the range of the bins.

        Raises ValueError for shapes that do not fit, no bins, or an empty range.
        """
        _fit(scores, labels, weights, "scores")
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
        """How far the exact AUC may be from this one, either way."""
        negative, positive = self._sides()
        return (positive * negative).sum() / 2 / (positive.sum() * negative.sum())

    def _sides(self) -> tuple[Tensor, Tensor]:
        wide = self.histogram.to(_wide_dtype(self.histogram))
        wide = torch.where((wide[:, -1] != 0).any(), torch.nan, wide[:, :-1])
        return wide[0], wide[1]


class ConfusionMatrix(NamedTuple):
    """How often each class was predicted for each; it computes to the accuracy.

    >>> import looplib as ll, torch
    >>> matrix = ll.ConfusionMatrix.of(torch.tensor([0, 1, 1, 2]), torch.tensor([0, 1, 2, 2]), classes=3)
    >>> matrix.matrix
    tensor([[1, 0, 0],
            [0, 1, 0],
            [0, 1, 1]])
    >>> ll.compute({"accuracy": matrix, "macro_f1": ll.Reading(matrix, ll.ConfusionMatrix.macro_f1)})
    {'accuracy': 0.75, 'macro_f1': 0.777...}

    The scores of each class are float64 tensors (classes,), with NaN where they are 0 / 0. The mean over classes
    leaves out those that are neither among the labels nor predicted, as scikit-learn does.

    Attributes:
        counts: (classes * classes + 1,), or weights; the last is of what lies outside the classes.
        classes: how many.
    """

    counts: Tensor
    classes: int

    @classmethod
    def empty(cls, classes: int, device: Any = None) -> ConfusionMatrix:
        """The record of no examples, on the device of those that it merges with."""
        return cls(torch.zeros(classes * classes + 1, dtype=torch.int64, device=device), classes)

    @classmethod
    def of(
        cls,
        predictions: Tensor,
        labels: Tensor,
        classes: int,
        *,
        ignore_index: int | None = None,
        weights: Tensor | None = None,
    ) -> ConfusionMatrix:
        """The record of a batch.

        Args:
            predictions: logits or probabilities (..., classes), or predicted classes (...), integers or booleans.
            labels: (...), integers or booleans.
            classes: how many.
            ignore_index: a label that counts nothing, such as -100 of padding.
            weights: (...), of each label.

        Raises ValueError for shapes or dtypes that do not fit. A class out of range is found when the matrix is
        read, as the device is not waited for before.
        """
        _integers("labels", labels)
        if predictions.dim() == labels.dim() + 1:
            if predictions.shape[-1] != classes:
                raise ValueError(
                    f"logits have shape {tuple(predictions.shape)}; {classes} classes need (..., {classes})"
                )
            predictions = predictions.argmax(-1)
        _fit(predictions, labels, weights, "predicted classes")
        _integers("predicted classes", predictions)
        row, column = labels.flatten().long(), predictions.flatten().long()
        counts = torch.ones_like(row) if weights is None else _wide(weights)
        if ignore_index is not None:
            counts = torch.where(row == ignore_index, 0, counts)
        inside = (row >= 0) & (row < classes) & (column >= 0) & (column < classes)
        cell = torch.where(inside, row * classes + column, classes * classes)
        return cls(counts.new_zeros(classes * classes + 1).index_add_(0, cell, counts), classes)

    def merge(self, other: ConfusionMatrix) -> ConfusionMatrix:
        if self.classes != other.classes:
            raise ValueError(
                f"confusion matrices to merge have shapes ({self.classes}, {self.classes}) and "
                f"({other.classes}, {other.classes}); give the same number of classes for every batch"
            )
        return ConfusionMatrix(self.counts + other.counts, self.classes)

    @property
    def matrix(self) -> Tensor:
        """(classes, classes): a row for each label, a column for each prediction.

        Raises ValueError if a label or prediction lay outside the classes.
        """
        outside = self.counts[-1].item()
        if outside:
            raise ValueError(
                f"{outside} labels or predictions lie outside 0 to {self.classes - 1}, for {self.classes} classes; "
                "give more classes, or ignore_index= for the label of padding"
            )
        return rearrange(self.counts[:-1], "(label prediction) -> label prediction", label=self.classes)

    def compute(self) -> Tensor:
        """The accuracy."""
        matrix = self._wide_matrix()
        return matrix.trace() / matrix.sum()

    def precision(self) -> Tensor:
        """Of each class: the part of its predictions that was right."""
        matrix = self._wide_matrix()
        return matrix.diagonal() / matrix.sum(0)

    def recall(self) -> Tensor:
        """Of each class: the part of its labels that was predicted."""
        matrix = self._wide_matrix()
        return matrix.diagonal() / matrix.sum(1)

    def f1(self) -> Tensor:
        """Of each class: the harmonic mean of precision and recall."""
        matrix = self._wide_matrix()
        return 2 * matrix.diagonal() / (matrix.sum(0) + matrix.sum(1))

    def macro_f1(self) -> Tensor:
        """The mean of F1 over the classes that occur."""
        return self.f1().nanmean()

    def _wide_matrix(self) -> Tensor:
        return self.matrix.to(_wide_dtype(self.counts))


def _mean(values: Tensor, weights: Tensor | None) -> Mean:
    return Mean(_weighted(values, weights).sum(), values.numel() if weights is None else _wide(weights).sum())


def _weighted(values: Tensor, weights: Tensor | None) -> Tensor:
    return _wide(values) if weights is None else _wide(values) * _wide(weights)


def _wide_dtype(tensor: Tensor) -> torch.dtype:
    return torch.float32 if tensor.device.type == "mps" else torch.float64


def _wide(tensor: Tensor) -> Tensor:
    return tensor.detach().flatten().to(_wide_dtype(tensor))


def _copy(tensor: Tensor) -> Tensor:
    # A slice would keep the whole of its logits alive, and a batch may be written over.
    return tensor.detach().flatten().clone(memory_format=torch.contiguous_format)


def _kept(scores: Tensor) -> Tensor:
    narrow = scores.is_floating_point() and scores.dtype.itemsize < 4
    return _copy(scores.float() if narrow else scores)


def _fit(values: Tensor, labels: Tensor, weights: Tensor | None, name: str, of: str = "labels") -> None:
    if values.shape != labels.shape:
        raise ValueError(
            f"{name} have shape {tuple(values.shape)} and {of} {tuple(labels.shape)}; give both the same shape"
        )
    if weights is not None and weights.shape != labels.shape:
        raise ValueError(f"weights have shape {tuple(weights.shape)}; {of} need {tuple(labels.shape)}")


def _integers(name: str, tensor: Tensor) -> None:
    if tensor.is_floating_point() or tensor.is_complex():
        raise ValueError(
            f"{name} have shape {tuple(tensor.shape)} and dtype {tensor.dtype}; give integers or booleans"
        )
