"""Evaluation and prediction: a state and a dataset go in and metrics or outputs come out."""

from typing import TYPE_CHECKING as _TYPE_CHECKING

from looplib._core.hints import in_room as _in_room
from looplib.evaluation._batch_norm import recompute_batch_norm
from looplib.evaluation._evaluate import evaluate, evaluate_records
from looplib.evaluation._oom import split_on_oom
from looplib.evaluation._predict import predict
from looplib.evaluation._predict_to import predict_to, read_predictions

__all__ = [
    "evaluate",
    "evaluate_records",
    "predict",
    "predict_to",
    "read_predictions",
    "recompute_batch_norm",
    "split_on_oom",
]

if not _TYPE_CHECKING:  # type checkers would take any name for one that there is
    __getattr__ = _in_room(__name__)
