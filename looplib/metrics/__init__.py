"""Metrics: outputs of batches go in and mergeable records come out."""

from typing import TYPE_CHECKING as _TYPE_CHECKING

from looplib._core.hints import in_room as _in_room
from looplib.metrics._auc import AUC, GroupedAUC
from looplib.metrics._collected import Cat, Corpus
from looplib.metrics._confusion import ConfusionMatrix
from looplib.metrics._mean import Mean, Window, compute, merge
from looplib.metrics._scores import Reading, accuracy, calibration, mae, mse, perplexity, rmse
from looplib.metrics._torchmetrics import TorchMetric, torchmetric

__all__ = [
    "AUC",
    "Cat",
    "ConfusionMatrix",
    "Corpus",
    "GroupedAUC",
    "Mean",
    "Reading",
    "TorchMetric",
    "Window",
    "accuracy",
    "calibration",
    "compute",
    "mae",
    "merge",
    "mse",
    "perplexity",
    "rmse",
    "torchmetric",
]

if not _TYPE_CHECKING:  # type checkers would take any name for one that there is
    __getattr__ = _in_room(__name__)
