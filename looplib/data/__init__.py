"""Data loading: a state goes in and the remaining batches of its epoch come out."""

from looplib._core.trees import batch_size
from looplib.data._loader import Loader, make_loader
from looplib.data._microbatches import collate_microbatches
from looplib.data._orders import Order, batch_sampler, by_length, in_order, sampler, shuffled, weighted
from looplib.data._position import with_position
from looplib.data._without_samples import without_samples

__all__ = [
    "Loader",
    "Order",
    "batch_sampler",
    "batch_size",
    "by_length",
    "collate_microbatches",
    "in_order",
    "make_loader",
    "sampler",
    "shuffled",
    "weighted",
    "with_position",
    "without_samples",
]
