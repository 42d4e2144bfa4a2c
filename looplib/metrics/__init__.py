"""Metrics: outputs of batches go in and mergeable records come out."""

from looplib._core.hints import give_hints
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

give_hints(globals())
