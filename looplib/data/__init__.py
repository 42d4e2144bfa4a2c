"""Data loading: a state goes in and the remaining batches of its epoch come out."""

from looplib._core.trees import batch_size
from looplib.data._growing import growing
from looplib.data._loader import Loader, make_loader
from looplib.data._microbatches import collate_microbatches
from looplib.data._mixture import mixture
from looplib.data._orders import (
    Order,
    batch_sampler,
    by_length,
    in_order,
    sampler,
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
    "batch_size",
    "by_length",
    "collate_microbatches",
    "growing",
    "in_order",
    "make_loader",
    "mixture",
    "sampler",
    "shuffled",
    "weighted",
    "windows",
    "with_position",
    "with_replacement",
]
