"""Data loading: a state goes in and the remaining batches of its epoch come out."""

from looplib._core.hints import give_hints
from looplib._core.samples import count_samples
from looplib.data._growing import growing
from looplib.data._loader import Loader, make_loader
from looplib.data._microbatches import collate_microbatches
from looplib.data._mixture import mixture
from looplib.data._orders import (
    Order,
    batch_sampler,
    by_length,
    sampler,
    sequential,
    shuffled,
    weighted,
    with_replacement,
)
from looplib.data._position import with_position
from looplib.data._windows import windows

__all__ = [
    "Loader",
    "Order",
    "batch_sampler",
    "by_length",
    "collate_microbatches",
    "count_samples",
    "growing",
    "make_loader",
    "mixture",
    "sampler",
    "sequential",
    "shuffled",
    "weighted",
    "windows",
    "with_position",
    "with_replacement",
]

give_hints(globals())
