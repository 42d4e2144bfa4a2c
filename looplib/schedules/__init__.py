"""Schedules: a step number goes in and a hyperparameter's value comes out.

Curves take their arguments in one order: the value to scale by position (`peak`, or `start` where the schedule only decays),
then by keyword the number of steps (`warmup=`, `total=`), the values elsewhere (`start=`, `final=`) and the shape.
`warmup`, `scaled` and `join` take the schedules that they change, and then what to do with them. Defaults are those of
torch's schedulers where torch has them.
"""

from typing import TYPE_CHECKING as _TYPE_CHECKING

from looplib._core.hints import in_room as _in_room
from looplib.schedules._cycles import cosine_restarts, one_cycle
from looplib.schedules._decay import (
    constant,
    cosine,
    exponential,
    inverse_sqrt,
    linear,
    multistep_decay,
    polynomial,
    step_decay,
)
from looplib.schedules._schedule import join, scaled
from looplib.schedules._warmup import warmup, warmup_cosine, warmup_linear, warmup_stable_decay

__all__ = [
    "constant",
    "cosine",
    "cosine_restarts",
    "exponential",
    "inverse_sqrt",
    "join",
    "linear",
    "multistep_decay",
    "one_cycle",
    "polynomial",
    "scaled",
    "step_decay",
    "warmup",
    "warmup_cosine",
    "warmup_linear",
    "warmup_stable_decay",
]

if not _TYPE_CHECKING:  # type checkers would take any name for one that there is
    __getattr__ = _in_room(__name__)
