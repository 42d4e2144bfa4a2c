"""What the processes of one run must know of each other, and nothing where there is one.

The ranks here are those that divide the data: all of torch.distributed's, or those of the group that
`distributed.setup` was told of, where some processes hold parts of one model and see the same batches.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeGuard, cast

import torch
from torch import Tensor, distributed

from looplib._core import torch_private

_group: Any = None  # of those that divide the data; None for all


_on_host: dict[Any, Any] = {}  # a group that reduces tensors of the CPU, for each group that does not


def use(group: Any) -> None:
    """From now on the data is divided among the processes of this group; None for all."""
    global _group
    _group = group
    _on_host.clear()


_available = distributed.is_available()


def running() -> bool:
    return _available and distributed.is_initialized()


def group() -> Any:
    """torch's group of these ranks."""
    return _group if _group is not None else distributed.group.WORLD


def rank() -> int:
    """This process's rank, 0 without torch.distributed."""
    return distributed.get_rank(_group) if running() else 0


def world_size() -> int:
    """How many ranks there are, 1 without torch.distributed."""
    return distributed.get_world_size(_group) if running() else 1


def several() -> bool:
    """Whether there are other processes to agree with."""
    return running() and distributed.get_world_size(_group) > 1


def is_first() -> bool:
    """Whether this is the first of all processes, whichever group divides the data."""
    return not running() or distributed.get_rank() == 0


def host_group(own: Any = None) -> Any:
    """A group that reduces tensors of the CPU, which no device waits for; of these ranks, or those of another group.

    Made at the first call, which all ranks must make.
    """
    own = own or group()
    if own not in _on_host:
        if "cpu:" in str(distributed.get_backend_config(own)):
            _on_host[own] = own
        else:
            ranks = distributed.get_process_group_ranks(own)
            _on_host[own] = distributed.new_group(ranks, backend="gloo", use_local_synchronization=True)
    return _on_host[own]


def any_rank(flag: Tensor | bool) -> bool:
    """Whether the flag is set on one of all processes at least: the same answer on each, and a wait for all."""
    if running() and distributed.get_world_size() > 1:
        flag = torch.tensor([float(flag)])
        distributed.all_reduce(flag, distributed.ReduceOp.MAX, host_group(distributed.group.WORLD))
    return bool(flag)


def all_ranks(flag: Tensor) -> Tensor:
    """Whether the flag is set on every process, as a tensor on its device, which the host does not wait for."""
    if not (running() and distributed.get_world_size() > 1):
        return flag
    votes = flag.float().reshape(1)
    on = host_group(distributed.group.WORLD) if votes.device.type == "cpu" else None
    distributed.all_reduce(votes, distributed.ReduceOp.MIN, on)
    return votes[0] > 0


def largest_over_ranks(values: Sequence[float]) -> list[float]:
    """Of each of a few numbers the largest of all ranks', the same answer on each."""
    largest = torch.tensor(values, dtype=torch.float64)
    distributed.all_reduce(largest, distributed.ReduceOp.MAX, host_group())
    return cast(list[float], largest.tolist())


_BUCKET = 25 << 20  # bytes, as DistributedDataParallel's


def add_up_over_ranks(tensors: Iterable[Tensor], factor: Tensor | float) -> None:
    """Each times this rank's factor, and the sums over all ranks, in place and in buckets."""
    for bucket in _buckets(tensors):
        flat = torch.cat([tensor.flatten() for tensor in bucket])
        flat *= factor.to(flat.device) if isinstance(factor, Tensor) else factor
        sum_over_ranks(flat)
        parts = torch.split(flat, [tensor.numel() for tensor in bucket])
        torch_private.foreach_copy_(
            bucket, [part.view_as(tensor) for part, tensor in zip(parts, bucket, strict=True)]
        )


def _buckets(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Tensors of one device and dtype each, of some bytes together."""
    kinds: dict[Any, list[Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    for alike in kinds.values():
        bucket: list[Tensor] = []
        for tensor in alike:
            if bucket and sum(held.nbytes for held in bucket) + tensor.nbytes > _BUCKET:
                yield bucket
                bucket = []
            bucket.append(tensor)
        yield bucket


def sum_over_ranks(values: Tensor) -> Tensor:
    """The elementwise sum of all ranks' tensors, in place; they are alike in shape and dtype."""
    if several():
        distributed.all_reduce(values, group=group())
    return values


def total_over_ranks(value: Tensor | float) -> Tensor | float:
    """One number's sum over all ranks, in float64 where it can be: on its own device, or a number if it is one."""
    if not several():
        return value
    if not isinstance(value, Tensor):
        return Sums([value]).read()[0]
    wide = value.detach().reshape(()).to(torch.float32 if value.device.type == "mps" else torch.float64, copy=True)
    return sum_over_ranks(wide)


class Sums:
    """The sums of a few numbers over all ranks, asked for now and waited for when they are read."""

    def __init__(self, values: Sequence[float]) -> None:
        self._values = torch.tensor(values, dtype=torch.float64)
        self._work: Any = None
        if several():
            self._work = distributed.all_reduce(self._values, group=host_group(), async_op=True)

    def read(self) -> list[float]:
        if self._work is not None:
            self._work.wait()
            self._work = None
        return cast(list[float], self._values.tolist())


def gather(value: Any) -> list[Any]:
    """Each rank's value, in the order of ranks, on each; pickled on the way, so of plain values and tensors."""
    if not several():
        return [value]
    found: list[Any] = [None] * world_size()
    distributed.all_gather_object(found, value, host_group())
    return found


_PLAIN = {Tensor, torch.nn.Parameter}  # asked first: to ask a tensor for what it lacks takes ten times as long


def is_sharded(leaf: Any) -> TypeGuard[Any]:
    """Whether it is a DTensor, of which this process may hold a part only; without importing DTensor."""
    return type(leaf) not in _PLAIN and isinstance(leaf, Tensor) and hasattr(leaf, "to_local")


def shards(tensors: Iterable[Tensor]) -> list[Tensor]:
    """This rank's part of each DTensor, with its memory, and other tensors as they are; called without grad mode."""
    return [tensor.to_local() if is_sharded(tensor) else tensor for tensor in tensors]
