"""Published techniques: gradient functions and optimizers go in and come out."""

from looplib.contrib._adaptive_clipping import adaptive_grad_clip
from looplib.contrib._contrastive import make_contrastive_grad_fn
from looplib.contrib._find_lr import LRCurve, find_lr
from looplib.contrib._lookahead import lookahead
from looplib.contrib._neftune import neftune
from looplib.contrib._noise_scale import gradient_noise_scale
from looplib.contrib._per_sample import make_per_sample_grad_fn
from looplib.contrib._privacy import add_noise, clip_per_sample
from looplib.contrib._sam import sam

__all__ = [
    "LRCurve",
    "adaptive_grad_clip",
    "add_noise",
    "clip_per_sample",
    "find_lr",
    "gradient_noise_scale",
    "lookahead",
    "make_contrastive_grad_fn",
    "make_per_sample_grad_fn",
    "neftune",
    "sam",
]
