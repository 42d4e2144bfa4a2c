"""Data loading: a state goes in and the remaining batches of its epoch come out."""

from typing import TYPE_CHECKING as _TYPE_CHECKING

from looplib._core.hints import in_room as _in_room
from looplib._core.samples import count_samples
from looplib.data._blocks import shards, shuffled_blocks, shuffled_stream
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
from looplib.data._zipped import endless, zipped

__all__ = [
    "Loader",
    "Order",
    "batch_sampler",
    "by_length",
    "collate_microbatches",
    "count_samples",
    "endless",
    "growing",
    "make_loader",
    "mixture",
    "sampler",
    "sequential",
    "shards",
    "shuffled",
    "shuffled_blocks",
    "shuffled_stream",
    "weighted",
    "windows",
    "with_position",
    "with_replacement",
    "zipped",
]

if not _TYPE_CHECKING:  # type checkers would take any name for one that there is
    __getattr__ = _in_room(__name__)
