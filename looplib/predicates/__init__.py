"""Predicates: a state goes in and True or False comes out."""

from typing import TYPE_CHECKING as _TYPE_CHECKING

from looplib._core.hints import in_room as _in_room
from looplib.predicates._best import BestSoFar, at_best, early_stopping, update_best
from looplib.predicates._counts import (
    after_epochs,
    after_samples,
    after_steps,
    at_epoch_end,
    at_step,
    every_n_batches,
    every_n_epochs,
    every_n_samples,
    every_n_steps,
)
from looplib.predicates._outside import after_seconds, after_signal, every_seconds
from looplib.predicates._plateau import Plateau, at_plateau
from looplib.predicates._predicate import Predicate, predicate

__all__ = [
    "BestSoFar",
    "Plateau",
    "Predicate",
    "after_epochs",
    "after_samples",
    "after_seconds",
    "after_signal",
    "after_steps",
    "at_best",
    "at_epoch_end",
    "at_plateau",
    "at_step",
    "early_stopping",
    "every_n_batches",
    "every_n_epochs",
    "every_n_samples",
    "every_n_steps",
    "every_seconds",
    "predicate",
    "update_best",
]

if not _TYPE_CHECKING:  # type checkers would take any name for one that there is
    __getattr__ = _in_room(__name__)
