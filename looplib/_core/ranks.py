"""Ranks: communication between the processes of one run, and nothing if there is only one.

The ranks here are those that divide the data: all processes of torch.distributed, or those of the group passed to
`set_data_parallel_group`, if some processes hold parts of one model and see the same batches.

All ranks make a collective call, so a rank that does not come keeps the others waiting. Each rank that has waited for
`watch.seconds` warns: in which looplib function it is, at which line of the user's file. The ranks that say nothing, or
name another call, are those that are missing. When torch's time-out ends the call, its error says the same.

Calls of DDP and FSDP2 are not watched one by one. A step in which they wait for a rank has also requested looplib's count
of the samples, and that is watched until it is read. Calls of other threads, such as background saves, are not reported.
"""

from __future__ import annotations

import math
import os
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType
from typing import Any, NamedTuple, TypeGuard, cast

import torch
from torch import Tensor, distributed

from looplib._core import torch_private
from looplib._core.checks import PLAIN
from looplib._core.mappings import wide_dtype

_group: Any = None  # group of the processes that divide the data; None for all

# group -> a group that reduces CPU tensors, or None if it does so itself. torch's groups end with destroy_process_group.
_on_host: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def use(group: Any) -> None:
    """Divide the data among the processes of this group from now on; None for all."""
    global _group
    _group = group
    _on_host.clear()


_AVAILABLE = distributed.is_available()


class _Thread(threading.local):
    alone = False


_thread = _Thread()  # `alone` is True within the block of that name, in each thread for itself


def running() -> bool:
    return _AVAILABLE and distributed.is_initialized() and not _thread.alone


@contextmanager
def alone() -> Iterator[None]:
    """Act as a single process within the block, which this rank may therefore run by itself.

    It holds for the thread that enters it: others, such as a background save or one that is started in the block, still
    act together with the other ranks. It is no argument, since functions of the user's stand between the block and
    those that ask.
    """
    before, _thread.alone = _thread.alone, True
    try:
        yield
    finally:
        _thread.alone = before


def is_alone() -> bool:
    """True within `alone`, on one of several ranks."""
    return _thread.alone and _AVAILABLE and distributed.is_initialized()


def group() -> Any:
    """torch's group of these ranks."""
    return _group if _group is not None else distributed.group.WORLD


def rank() -> int:
    """This process's rank; 0 without torch.distributed."""
    return distributed.get_rank(_group) if running() else 0


def world_size() -> int:
    """Number of ranks; 1 without torch.distributed."""
    return distributed.get_world_size(_group) if running() else 1


def rank_and_size() -> tuple[int, int]:
    """This process's rank and the number of ranks."""
    return (distributed.get_rank(_group), distributed.get_world_size(_group)) if running() else (0, 1)


def is_distributed() -> bool:
    """True if there are other processes to agree with."""
    return world_size() > 1


def is_first() -> bool:
    """True on the first of all processes, whichever group divides the data."""
    return not (running() or is_alone()) or distributed.get_rank() == 0


def host_group(process_group: Any = None) -> Any:
    """A group that reduces CPU tensors, without waiting for a device; of these ranks, or of another group's.

    It is created at the first call, which all ranks must make.
    """
    process_group = process_group or group()
    if process_group not in _on_host:
        if "cpu:" in str(distributed.get_backend_config(process_group)):
            _on_host[process_group] = None
        else:
            ranks = distributed.get_process_group_ranks(process_group)
            _on_host[process_group] = new_group(ranks)
    return _on_host[process_group] or process_group


def new_group(members: Sequence[int], timeout: timedelta | None = None) -> Any:
    """A group of these ranks that sends CPU tensors. A rank that does not come here is reported."""
    limit = torch_private.timeout_of(distributed.group.WORLD)
    patience = timedelta(seconds=limit) if limit < math.inf else None
    with reported():
        made = distributed.new_group(members, timeout=patience, backend="gloo", use_local_synchronization=True)
    if timeout is not None:
        torch_private.set_timeout(made, timeout)
    return made


def all_ranks(flag: Tensor) -> Tensor:
    """True if the flag is set on every process, as a tensor on its device, without waiting on the host."""
    if not (running() and distributed.get_world_size() > 1):
        return flag
    return _all_reduce(flag.float(), distributed.ReduceOp.MIN, distributed.group.WORLD) > 0


def largest_over_ranks(count: int) -> int:
    """The largest of all ranks' counts, on each of them."""
    if not is_distributed():
        return count
    return int(_all_reduce(torch.tensor(count, device="cpu"), distributed.ReduceOp.MAX, group()))


_BUCKET = 25 << 20  # bytes, as in DistributedDataParallel


def add_up_over_ranks(tensors: Iterable[Tensor], factor: Tensor | float) -> None:
    """Multiply each tensor by this rank's factor and sum over all ranks, in place and in buckets."""
    for bucket in _buckets(shards(tensors)):
        flat = torch.cat([tensor.flatten() for tensor in bucket])
        flat *= factor.to(flat.device) if isinstance(factor, Tensor) else factor
        sum_over_ranks(flat)
        parts = torch.split(flat, [tensor.numel() for tensor in bucket])
        torch_private.foreach_copy_(
            bucket, [part.view_as(tensor) for part, tensor in zip(parts, bucket, strict=True)]
        )


def _buckets(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Tensors of one device and dtype each, up to a number of bytes together."""
    buckets: dict[Any, list[Tensor]] = {}
    for tensor in tensors:
        kind = tensor.device, tensor.dtype
        bucket = buckets.setdefault(kind, [])
        if bucket and sum(held.nbytes for held in bucket) + tensor.nbytes > _BUCKET:
            yield buckets.pop(kind)
        buckets.setdefault(kind, []).append(tensor)
    yield from buckets.values()


def sum_over_ranks(values: Tensor) -> Tensor:
    """Elementwise sum over all ranks, in place. All ranks pass the same shape and dtype."""
    return _all_reduce(values, distributed.ReduceOp.SUM, group()) if is_distributed() else values


def _all_reduce(values: Tensor, op: Any, on: Any) -> Tensor:
    """All-reduce in place, watched on the CPU. On a device the host does not wait for it."""
    if values.device.type == "cpu":
        wait(distributed.all_reduce(values, op, host_group(on), async_op=True))
    else:
        distributed.all_reduce(values, op, on)
    return values


def total_over_ranks(value: Tensor | float) -> Tensor | float:
    """Sum of one number over all ranks, in float64 if possible: on its own device, or a number if it is one."""
    if not is_distributed():
        return value
    if not isinstance(value, Tensor):
        return Sums([value]).read()[0]
    wide = value.detach().reshape(()).to(wide_dtype(value.device), copy=True)
    return sum_over_ranks(wide)


class Sums:
    """Sums of a few numbers over all ranks, requested at once and waited for when they are read."""

    def __init__(self, values: Sequence[float]) -> None:
        self._values = torch.tensor(values, dtype=torch.float64, device="cpu")
        self._work: Any = distributed.all_reduce(self._values, group=host_group(), async_op=True)
        watch.begin(self._work)

    def read(self) -> list[float]:
        if self._work is not None:
            wait(self._work)
            self._work = None
        return cast(list[float], self._values.tolist())


def gather(value: Any) -> list[Any]:
    """Values of all ranks in order, on each rank. They are pickled, so pass plain values."""
    return exchange(value, host_group()) if is_distributed() else [value]


def exchange(value: Any, on: Any) -> list[Any]:
    """Values of all ranks of a group that reduces CPU tensors, in order, on each of them."""
    received: list[Any] = [None] * distributed.get_world_size(on)
    with reported():
        distributed.all_gather_object(received, value, on)
    return received


def is_sharded(leaf: Any) -> TypeGuard[Any]:
    """True for a DTensor, of which this process may hold only a part. Does not import DTensor."""
    # Looking up a missing attribute of a tensor takes ten times as long as the first question.
    return type(leaf) not in PLAIN and isinstance(leaf, Tensor) and hasattr(leaf, "to_local")


def any_sharded(tensors: Collection[Tensor]) -> bool:
    """True if there is a DTensor among these."""
    return not PLAIN.issuperset(map(type, tensors)) and any(map(is_sharded, tensors))


def shards(tensors: Iterable[Tensor]) -> list[Tensor]:
    """This rank's part of each DTensor, sharing its memory, and other tensors unchanged. Call it without grad mode."""
    tensors = list(tensors)
    if PLAIN.issuperset(map(type, tensors)):
        return tensors
    return [_shard(tensor) if is_sharded(tensor) else tensor for tensor in tensors]


def _shard(tensor: Any) -> Tensor:
    if any(placement.is_partial() for placement in tensor.placements):
        raise ValueError(
            f"a DTensor of shape {tuple(tensor.shape)} has placements {tensor.placements}: each rank holds a summand and "
            "not a part. If it is a gradient that you have computed yourself, place it as its parameter is: "
            "grad.redistribute(placements=param.placements)"
        )
    shard: Tensor = tensor.to_local()
    return shard


def local(leaf: Any) -> Tensor:
    """This process's shard of a DTensor, or a plain tensor unchanged, sharing its memory."""
    if not is_sharded(leaf):
        return leaf.detach()  # type: ignore[no-any-return]
    with torch.no_grad():
        shard = leaf.to_local()
        return shard.wait() if hasattr(shard, "wait") else shard.detach()  # type: ignore[no-any-return]


def whole(tensor: Tensor) -> Tensor:
    """Return the unsharded tensor. If it is sharded, all ranks gather it together."""
    if not is_sharded(tensor):
        return tensor
    meeting = tensor.device_mesh.device_type
    with torch.no_grad():
        shard = tensor if tensor.device.type == meeting else tensor.to(meeting)  # offloaded
        gathered = shard.full_tensor() if (split := _uneven_rows(shard)) is None else _gathered_rows(shard, split)
        return gathered.detach().to(tensor.device)


def _uneven_rows(tensor: Any) -> int | None:
    """The dimension of the mesh over which a tensor's rows are split unevenly, and the others copied, or None."""
    split = [(index, placement) for index, placement in enumerate(tensor.placements) if not placement.is_replicate()]
    if len(split) != 1 or not split[0][1].is_shard(0):
        return None
    index: int = split[0][0]
    return index if tensor.shape[0] % tensor.device_mesh.size(index) else None


def _gathered_rows(tensor: Any, split: int) -> Tensor:
    """The whole tensor in its own memory and no more: `full_tensor` pads uneven shards first, which copies them."""
    gathered = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    mesh = tensor.device_mesh
    length = -(-len(gathered) // mesh.size(split))  # of each shard but the last ones, as `torch.chunk` has it
    for rank, rows in enumerate(torch.split(gathered, length)):
        if rank == mesh.get_local_rank(split):
            rows.copy_(local(tensor))
        distributed.broadcast(rows, group=mesh.get_group(split), group_src=rank)
    return gathered


def placed_like(like: Tensor, tensor: Tensor) -> Tensor:
    """A DTensor with the placements of another. Gradients of sequence parallel norms, for example, come as partial sums."""
    if not (is_sharded(tensor) and is_sharded(like)) or tensor.placements == like.placements:
        return tensor
    placed: Tensor = tensor.redistribute(like.device_mesh, like.placements)
    return placed


# Waits for other ranks


@dataclass
class _Watch:
    """The watch of this process.

    Attributes:
        seconds: time after which a call that waits is reported; infinity for never.
        began: time at which the main thread made the last call; infinity if it waits for none.
        work: that call, if torch returned it.
        thread: the thread that looks at it now and then.
    """

    seconds: float = 30.0
    began: float = math.inf
    work: Any = None
    thread: threading.Thread | None = None

    def begin(self, work: Any = None) -> None:
        """Watch a call, if it is the main thread's."""
        if threading.current_thread() is threading.main_thread():
            self.began, self.work = time.monotonic(), work
            if self.thread is None:
                self.thread = threading.Thread(target=_look, name="looplib-watch", daemon=True)
                self.thread.start()

    def end(self) -> None:
        if threading.current_thread() is threading.main_thread():
            self.began = math.inf


watch = _Watch()


def _look() -> None:
    while True:
        time.sleep(min(watch.seconds / 10, 3600))
        is_late = time.monotonic() - watch.began > watch.seconds
        if is_late and not (watch.work is not None and watch.work.is_completed()):
            watch.began = math.inf
            here = call(sys._current_frames()[threading.main_thread().ident or 0])
            try:
                warnings.warn_explicit(_report(here), RuntimeWarning, here.file or __file__, here.line)
            except RuntimeWarning as error:  # by the user's filter, which this thread cannot raise
                print(f"RuntimeWarning: {error}", file=sys.stderr, flush=True)


class Call(NamedTuple):
    """A looplib function, and the line of the user's file that called it."""

    function: str
    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.function}, called at {self.file}:{self.line}" if self.file else self.function


_LOOPLIB = os.path.dirname(os.path.dirname(__file__)) + os.sep
_BETWEEN = tuple(os.path.dirname(path) + os.sep for path in (torch.__file__, os.__file__)) + ("<",)


def call(frame: FrameType | None = None) -> Call:
    """The call of looplib in which this thread is, or the one whose innermost frame is given.

    Frames are read for messages alone: only they know the user's line, and a wrong name in a message is all that a frame
    of another's could do.
    """
    frame = frame or sys._getframe(1)
    function: FrameType | None = None
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(_LOOPLIB):
            function = frame
        elif function is not None and not name.startswith(_BETWEEN):
            return Call(_name(function), name, frame.f_lineno)
        frame = frame.f_back
    return Call("a call" if function is None else _name(function), "", 1)


def _name(frame: FrameType) -> str:
    """Name of a function as the user knows it."""
    # What `predict` returns, for example, is a generator expression.
    name = frame.f_code.co_qualname.removesuffix(".<locals>.<genexpr>").rpartition(".")[2]
    owner = frame.f_locals.get("self")
    if owner is None:
        return name
    cls = type(owner).__name__
    if name in ("__call__", "fires"):
        return "a predicate" if cls.startswith("_") else cls  # such as several with `|` between them
    return f"{cls}.{name}"


_ADVICE = (
    "All ranks must make this call, and those that say nothing of it have not come: take it out of `if "
    "ll.distributed.is_rank_zero():` and of loops that differ between ranks; a function that one rank runs alone goes "
    "into ll.distributed.rank_zero_only. If a rank has ended, its own output says why."
)


def _report(here: Call) -> str:
    return f"rank {distributed.get_rank()} waits for other ranks in {here}. {_ADVICE}"


@contextmanager
def reported(work: Any = None) -> Iterator[None]:
    """Watch a call that is waited for in the block, and say the same if it fails."""
    watch.begin(work)
    try:
        yield
    except RuntimeError as error:
        raise RuntimeError(f"{_report(call())} torch says: {error}") from error
    finally:
        watch.end()


def wait(work: Any, limit: float = math.inf) -> None:
    """Wait for a call, and raise after `limit` seconds, if that is less than the time-out of its group."""
    with reported(work):
        work.wait(*[timedelta(seconds=limit)] if limit < math.inf else [])
