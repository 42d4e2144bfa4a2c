"""Published techniques: gradient functions and optimizers go in and come out."""

from typing import TYPE_CHECKING as _TYPE_CHECKING

from looplib._core.hints import in_room as _in_room
from looplib.contrib._contrastive import make_contrastive_grad_fn
from looplib.contrib._find_lr import LRCurve, find_lr
from looplib.contrib._influence import sample_influence
from looplib.contrib._mup import MuP, mup
from looplib.contrib._neftune import neftune
from looplib.contrib._per_sample import make_per_sample_grad_fn
from looplib.contrib._privacy import add_noise, clip_per_sample
from looplib.contrib._sam import sam

__all__ = [
    "LRCurve",
    "MuP",
    "add_noise",
    "clip_per_sample",
    "find_lr",
    "make_contrastive_grad_fn",
    "make_per_sample_grad_fn",
    "mup",
    "neftune",
    "sam",
    "sample_influence",
]

if not _TYPE_CHECKING:  # type checkers would take any name for one that there is
    __getattr__ = _in_room(__name__)
