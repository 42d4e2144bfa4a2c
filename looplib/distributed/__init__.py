"""Distributed training: join the processes that torchrun started, and combine their results."""

from typing import TYPE_CHECKING as _TYPE_CHECKING

from looplib._core.hints import in_room as _in_room
from looplib.distributed._processes import (
    barrier,
    is_rank_zero,
    launched,
    rank,
    rank_zero_only,
    set_data_parallel_group,
    setup,
    watch,
    world_size,
)
from looplib.distributed._replicas import check_replicas
from looplib.distributed.records import reduce

__all__ = [
    "barrier",
    "check_replicas",
    "is_rank_zero",
    "launched",
    "rank",
    "rank_zero_only",
    "reduce",
    "set_data_parallel_group",
    "setup",
    "watch",
    "world_size",
]

if not _TYPE_CHECKING:  # type checkers would take any name for one that there is
    __getattr__ = _in_room(__name__)
