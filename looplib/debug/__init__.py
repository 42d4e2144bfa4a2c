"""Debugging: two runs or a suspicious step go in and their differences or causes come out."""

from typing import TYPE_CHECKING as _TYPE_CHECKING

from looplib._core.hints import in_room as _in_room
from looplib.debug._differences import Difference, LeafDifference, differences, first_difference
from looplib.debug._fingerprint import fingerprint, read_fingerprints
from looplib.debug._misuse import warn_of_misuse
from looplib.debug._record_steps import nbytes, record_steps
from looplib.debug._replay import Replayed, replay, step_seed
from looplib.debug._run_twice import CorruptionError, checksums, run_twice
from looplib.debug._worst_samples import SampleScore, worst_samples

__all__ = [
    "CorruptionError",
    "Difference",
    "LeafDifference",
    "Replayed",
    "SampleScore",
    "checksums",
    "differences",
    "fingerprint",
    "first_difference",
    "nbytes",
    "read_fingerprints",
    "record_steps",
    "replay",
    "run_twice",
    "step_seed",
    "warn_of_misuse",
    "worst_samples",
]

if not _TYPE_CHECKING:  # type checkers would take any name for one that there is
    __getattr__ = _in_room(__name__)
