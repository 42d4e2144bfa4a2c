"""What the processes of one run must know of each other, and nothing where there is one."""

from __future__ import annotations

import torch
from torch import Tensor, distributed


def rank() -> int:
    """This process's rank, 0 without torch.distributed."""
    return distributed.get_rank() if distributed.is_available() and distributed.is_initialized() else 0


def several() -> bool:
    """Whether there are other processes to agree with."""
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


def any_rank(flag: Tensor) -> bool:
    """Whether the flag is set on one rank at least: the same answer on each, and a wait for the device."""
    if several():
        flag = flag.to(torch.float32)
        distributed.all_reduce(flag, distributed.ReduceOp.MAX)
    return bool(flag)


def sum_over_ranks(values: Tensor) -> Tensor:
    """The elementwise sum of all ranks' tensors, which are alike in shape and dtype."""
    if several():
        distributed.all_reduce(values)
    return values
