"""Distributed training: join the processes that torchrun started, and combine their results."""

from looplib._core.hints import give_hints
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
from looplib.distributed._reduce import reduce
from looplib.distributed._replicas import check_replicas

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

give_hints(globals())
