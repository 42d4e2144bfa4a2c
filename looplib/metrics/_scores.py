"""Prediction scores: accuracy, perplexity, calibration, regression errors.

Each is a small record of a batch that merges with those of other batches and ranks into the record of the whole
dataset: a `Mean` if sums are sufficient, otherwise a histogram, moments, or the scores themselves. Sums are in
float64 (float32 on devices without it), so counts are exact.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from looplib._core.checks import as_tensor, check, check_number
from looplib._core.mappings import wide_dtype
from looplib.metrics._mean import Mean


class Reading(NamedTuple):
    """Derived metric: a further number of a record, as a metric of its own.

    >>> import looplib as ll, torch
    >>> matrix = ll.metrics.ConfusionMatrix.of(torch.tensor([0, 1, 1, 2]), torch.tensor([0, 1, 2, 2]), classes=3)
    >>> metrics = {"accuracy": matrix, "macro_f1": ll.metrics.Reading(matrix, ll.metrics.ConfusionMatrix.macro_f1)}
    >>> metrics["recall_of_2"] = ll.metrics.Reading(matrix, lambda matrix: matrix.recall()[2])
    >>> ll.compute(metrics)
    {'accuracy': 0.75, 'macro_f1': 0.777..., 'recall_of_2': 0.5}

    Attributes:
        record: the record that is merged. Several readings share its tensors.
        read: function from the merged record to the number. Unlike a lambda, a function at the top of a module can be
            pickled.
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
    ignore_index: int | None = -100,
    weights: Tensor | None = None,
    top_k: int = 1,
) -> Mean:
    """Accuracy: the fraction of labels that were predicted, or are among the `top_k` highest scores.

    >>> import looplib as ll, torch
    >>> logits, labels = torch.tensor([[0.1, 0.7, 0.2], [0.5, 0.1, 0.4]]), torch.tensor([1, 2])
    >>> ll.compute({"top1": ll.accuracy(logits, labels), "top2": ll.accuracy(logits, labels, top_k=2)})
    {'top1': 0.5, 'top2': 1.0}

    Args:
        predictions: logits or probabilities of shape (..., classes), or predicted classes of shape (...), integers or
            booleans.
        labels: (...), integers or booleans.
        ignore_index: label to ignore. Defaults to that of torch's losses; None counts every label.
        weights: (...), weight of each label.
        top_k: a label counts as predicted if fewer than k classes score higher. Among equal scores the first class
            ranks higher, as with argmax. NaN is never a hit.

    Raises:
        ValueError: shapes or dtypes do not match, or `top_k` is larger than the number of classes.
        TypeError: logits or weights are complex.
    """
    of_logits = fit_labels(predictions, labels, weights)
    # As int64, since torch would compare a uint8 with 156 instead of -100.
    labels = labels.long()
    valid = torch.ones_like(labels, dtype=torch.bool) if ignore_index is None else labels != ignore_index
    if of_logits:
        advice = f"logits of shape {tuple(predictions.shape)} allow 1 to their last size"
        check_number("top_k", top_k, lambda k: 1 <= k <= predictions.shape[-1], advice)
        right = _in_top(top_k, predictions, torch.where(valid, labels, 0).unsqueeze(-1))
    else:
        check(top_k == 1, f"top_k is {top_k}, with predicted classes; give logits (..., classes)")
        right = predictions == labels
    weights = valid.flatten() if weights is None else torch.where(valid.flatten(), _wide(weights), 0)
    return Mean((weights * right.flatten()).sum(), weights.sum())


def _in_top(k: int, logits: Tensor, labels: Tensor) -> Tensor:
    """True where fewer than k classes rank above the label (..., 1), and its score is not NaN."""
    scores = logits.gather(-1, labels)
    if k == 1:
        # The first of the highest scores: the same answer, ties included, without a mask of all scores. On CPUs,
        # torch finds it faster by max than by argmax.
        right = logits.max(-1, keepdim=True).indices == labels
    else:
        first = torch.arange(logits.shape[-1], device=labels.device) < labels
        behind = torch.where(first, logits < scores, logits <= scores)
        right = (~behind).sum(-1, keepdim=True) < k
    return right & (scores == scores)  # NaN differs from itself


def perplexity(loss: Mean) -> Reading:
    """Perplexity: the exponential of the mean loss per token, over all tokens.

    >>> import looplib as ll, torch
    >>> logits, tokens = torch.zeros(2, 5, 8), torch.randint(0, 8, (2, 5))
    >>> round(ll.compute({"perplexity": ll.metrics.perplexity(ll.next_token_loss(logits, tokens))})["perplexity"], 3)
    8.0

    Args:
        loss: the summed negative log-likelihood in nats and the number of tokens, as from `next_token_loss`.

    Raises:
        TypeError: the loss is complex.
    """
    check(not as_tensor(loss.total).is_complex(), "the loss is complex; give a real one", TypeError)
    return Reading(loss, _exp_of_mean)


def _exp_of_mean(mean: Mean) -> Tensor:
    value = as_tensor(mean.compute())
    return value.to(wide_dtype(value.device)).exp()


def calibration(predictions: Tensor, labels: Tensor, weights: Tensor | None = None) -> Mean:
    """Calibration ratio: the mean prediction divided by the mean label; 1 is ideal.

    >>> import looplib as ll, torch
    >>> ll.compute({"calibration": ll.metrics.calibration(torch.tensor([0.2, 0.7]), torch.tensor([0, 1]))})
    {'calibration': 0.89999...}

    The value is infinity if no label is above 0, or NaN if nothing was predicted either.

    Args:
        predictions: probabilities or predicted amounts, floats of any shape.
        labels: of the same shape, any dtype.
        weights: of the same shape.

    Raises:
        ValueError: the shapes do not match.
        TypeError: an argument is complex.

    Source: He et al., "Practical lessons from predicting clicks on ads at Facebook", 2014, section 2.
    """
    _fit(predictions.shape, labels, weights, "predictions")
    real("predictions", predictions)
    real("labels", labels)
    return Mean(_weighted(predictions, weights).sum(), _weighted(labels, weights).sum())


def mae(predictions: Tensor, targets: Tensor, weights: Tensor | None = None) -> Mean:
    """Mean absolute error (MAE) over all elements.

    >>> import looplib as ll, torch
    >>> ll.compute({"mae": ll.metrics.mae(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 4.0]))})
    {'mae': 1.0}

    Args:
        predictions: of any shape; may be complex.
        targets: of the same shape.
        weights: of the same shape.

    Raises:
        ValueError: the shapes do not match.
        TypeError: the weights are complex.
    """
    return _mean(_errors(predictions, targets, weights), weights)


def mse(predictions: Tensor, targets: Tensor, weights: Tensor | None = None) -> Mean:
    """Mean squared error (MSE) over all elements.

    >>> import looplib as ll, torch
    >>> ll.compute({"mse": ll.metrics.mse(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 4.0]))})
    {'mse': 2.0}

    Args:
        predictions: of any shape; may be complex.
        targets: of the same shape.
        weights: of the same shape.

    Raises:
        ValueError: the shapes do not match.
        TypeError: the weights are complex.
    """
    return _mean(_errors(predictions, targets, weights).square(), weights)


def _errors(predictions: Tensor, targets: Tensor, weights: Tensor | None) -> Tensor:
    """Absolute errors, real numbers also for complex tensors."""
    _fit(predictions.shape, targets, weights, "predictions", "targets")
    wide = torch.promote_types(wide_dtype(predictions.device), torch.promote_types(predictions.dtype, targets.dtype))
    predictions, targets = (tensor.detach().flatten().to(wide) for tensor in (predictions, targets))
    return (predictions - targets).abs()


def rmse(predictions: Tensor, targets: Tensor, weights: Tensor | None = None) -> Reading:
    """Root mean squared error (RMSE) over all elements.

    >>> import looplib as ll, torch
    >>> ll.compute({"rmse": ll.metrics.rmse(torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0]))})
    {'rmse': 2.0}

    Args:
        predictions: of any shape; may be complex.
        targets: of the same shape.
        weights: of the same shape.

    Raises:
        ValueError: the shapes do not match.
        TypeError: the weights are complex.
    """
    return Reading(mse(predictions, targets, weights), _root_of_mean)


def _root_of_mean(mean: Mean) -> Tensor:
    return as_tensor(mean.compute()).sqrt()


def _mean(values: Tensor, weights: Tensor | None) -> Mean:
    return Mean(_weighted(values, weights).sum(), values.numel() if weights is None else _wide(weights).sum())


def _weighted(values: Tensor, weights: Tensor | None) -> Tensor:
    return _wide(values) if weights is None else _wide(values) * _wide(weights)


def _wide(tensor: Tensor) -> Tensor:
    return tensor.detach().flatten().to(wide_dtype(tensor.device))


def _fit(shape: torch.Size, labels: Tensor, weights: Tensor | None, name: str, of: str = "labels") -> None:
    wanted = tuple(labels.shape)
    check(shape == wanted, f"{name} have shape {tuple(shape)} and {of} {wanted}; give both the same shape")
    if weights is not None:
        of_weights = tuple(weights.shape)
        check(of_weights == wanted, f"weights have shape {of_weights}; {of} need {wanted}")
        real("weights", weights)


def real(name: str, tensor: Tensor) -> None:
    check(not tensor.is_complex(), f"{name} are {tensor.dtype}; give real numbers", TypeError)


def fit_labels(predictions: Tensor, labels: Tensor, weights: Tensor | None) -> bool:
    """Check labels of classes against logits or predicted classes. True for logits."""
    _integers("labels", labels)
    of_logits = predictions.dim() == labels.dim() + 1
    if of_logits:
        _fit(predictions.shape[:-1], labels, weights, "logits without their last dimension")
        real("logits", predictions)
    else:
        _fit(predictions.shape, labels, weights, "predicted classes")
        _integers("predicted classes", predictions, " such as logits > 0, or logits (..., classes)")
    return of_logits


def _integers(name: str, tensor: Tensor, advice: str = "") -> None:
    described = f"{name} have shape {tuple(tensor.shape)} and dtype {tensor.dtype}"
    integers = not (tensor.is_floating_point() or tensor.is_complex())
    check(integers, f"{described}; give integers or booleans{advice}")
