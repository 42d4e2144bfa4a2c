"""Published techniques: gradient functions and optimizers go in and come out."""

from looplib._core.hints import give_hints
from looplib.contrib._contrastive import make_contrastive_grad_fn
from looplib.contrib._find_lr import LRCurve, find_lr
from looplib.contrib._neftune import neftune
from looplib.contrib._per_sample import make_per_sample_grad_fn
from looplib.contrib._privacy import add_noise, clip_per_sample
from looplib.contrib._sam import sam

__all__ = [
    "LRCurve",
    "add_noise",
    "clip_per_sample",
    "find_lr",
    "make_contrastive_grad_fn",
    "make_per_sample_grad_fn",
    "neftune",
    "sam",
]

give_hints(globals())
