"""Confusion matrix."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from looplib._core.checks import check
from looplib._core.mappings import wide_dtype
from looplib.metrics._scores import _wide, fit_labels


class ConfusionMatrix(NamedTuple):
    """Confusion matrix: counts of predicted classes for each label. Its value is the accuracy.

    >>> import looplib as ll, torch
    >>> matrix = ll.metrics.ConfusionMatrix.of(torch.tensor([0, 1, 1, 2]), torch.tensor([0, 1, 2, 2]), classes=3)
    >>> matrix.matrix
    tensor([[1, 0, 0],
            [0, 1, 0],
            [0, 1, 1]])
    >>> ll.compute({"accuracy": matrix, "macro_f1": ll.metrics.Reading(matrix, ll.metrics.ConfusionMatrix.macro_f1)})
    {'accuracy': 0.75, 'macro_f1': 0.777...}

    Scores per class are float64 tensors of shape (classes,), with NaN for 0 / 0. Means over classes leave out classes
    that occur neither as label nor as prediction, as in scikit-learn.

    Attributes:
        counts: (classes * classes + 1,), counts or weights; the last entry is for values outside the classes.
        classes: number of classes.
    """

    counts: Tensor
    classes: int

    @classmethod
    def empty(cls, classes: int, device: Any = None) -> ConfusionMatrix:
        """Record without samples, on the device of those that it is merged with."""
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
        """Record of a batch.

        Args:
            predictions: logits or probabilities of shape (..., classes), or predicted classes of shape (...),
                integers or booleans.
            labels: (...), integers or booleans.
            classes: number of classes.
            ignore_index: label to ignore, such as -100 for padding.
            weights: (...), weight of each label.

        Raises:
            ValueError: shapes or dtypes do not match. A class out of range is reported when the matrix is read,
                because checking earlier would wait for the device.
            TypeError: logits or weights are complex.
        """
        shape = tuple(predictions.shape)
        if fit_labels(predictions, labels, weights):
            check(shape[-1] == classes, f"logits have shape {shape}; {classes} classes need (..., {classes})")
            predictions = predictions.max(-1).indices  # the argmax, which torch finds faster so on CPUs
        row, column = labels.flatten().long(), predictions.flatten().long()
        inside = (row.clamp(0, classes - 1) == row) & (column.clamp(0, classes - 1) == column)
        counts = torch.ones_like(row) if weights is None else _wide(weights)
        if ignore_index is not None:
            counts = torch.where(row == ignore_index, 0, counts)
        cell = torch.where(inside, row * classes + column, classes * classes)
        return cls(counts.new_zeros(classes * classes + 1).index_add_(0, cell, counts), classes)

    def merge(self, other: ConfusionMatrix) -> ConfusionMatrix:
        advice = "give the same number of classes for every batch"
        message = f"confusion matrices to merge have {self.classes} and {other.classes} classes; {advice}"
        check(self.classes == other.classes, message)
        return ConfusionMatrix(self.counts + other.counts, self.classes)

    @property
    def matrix(self) -> Tensor:
        """Matrix of shape (classes, classes): one row per label, one column per predicted class.

        Raises:
            ValueError: a label or prediction was outside the classes.
        """
        from einops import rearrange  # takes 1.5 ms

        outside = self.counts[-1].item()
        check(
            not outside,
            f"{outside} labels or predictions lie outside 0 to {self.classes - 1}, for {self.classes} classes; "
            "give more classes, or ignore_index= for the label of padding",
        )
        return rearrange(self.counts[:-1], "(label prediction) -> label prediction", label=self.classes)

    def compute(self) -> Tensor:
        """Accuracy."""
        matrix = self._wide_matrix()
        return matrix.trace() / matrix.sum()

    def precision(self) -> Tensor:
        """Precision of each class: the fraction of its predictions that were right."""
        matrix = self._wide_matrix()
        return matrix.diagonal() / matrix.sum(0)

    def recall(self) -> Tensor:
        """Recall of each class: the fraction of its labels that were predicted."""
        matrix = self._wide_matrix()
        return matrix.diagonal() / matrix.sum(1)

    def f1(self) -> Tensor:
        """F1 score of each class: the harmonic mean of precision and recall."""
        matrix = self._wide_matrix()
        return 2 * matrix.diagonal() / (matrix.sum(0) + matrix.sum(1))

    def macro_f1(self) -> Tensor:
        """Macro F1: the mean F1 score over the classes that occur."""
        return self.f1().nanmean()

    def _wide_matrix(self) -> Tensor:
        return self.matrix.to(wide_dtype(self.counts.device))
