"""Confusion matrix."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from einops import rearrange
from torch import Tensor

from looplib.metrics._scores import _fit, _integers, _wide, _wide_dtype


class ConfusionMatrix(NamedTuple):
    """Confusion matrix: how often each class was predicted for each; it computes to the accuracy.

    >>> import looplib as ll, torch
    >>> matrix = ll.metrics.ConfusionMatrix.of(torch.tensor([0, 1, 1, 2]), torch.tensor([0, 1, 2, 2]), classes=3)
    >>> matrix.matrix
    tensor([[1, 0, 0],
            [0, 1, 0],
            [0, 1, 1]])
    >>> ll.compute({"accuracy": matrix, "macro_f1": ll.metrics.Reading(matrix, ll.metrics.ConfusionMatrix.macro_f1)})
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
