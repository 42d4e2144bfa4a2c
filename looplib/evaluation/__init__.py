"""Evaluation and prediction: a state and a dataset go in and metrics or outputs come out."""

from looplib._core.hints import give_hints
from looplib.evaluation._evaluate import evaluate, measure
from looplib.evaluation._oom import split_on_oom
from looplib.evaluation._predict import predict
from looplib.evaluation._predict_to import predict_to, read_predictions

__all__ = ["evaluate", "measure", "predict", "predict_to", "read_predictions", "split_on_oom"]

give_hints(globals())
