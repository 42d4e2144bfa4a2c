"""Processes: setup, ranks, and work for one rank only.

A loop for one process runs on many if the model is wrapped in `DistributedDataParallel` or `fully_shard` and the
script is started by `torchrun`. Loaders then give each rank its part of each global batch, steps take the gradient of
the whole batch, and evaluation counts each sample once. This module has the rest: starting and ending, doing
something once, and merging what the ranks have measured.
"""

from __future__ import annotations

import functools
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch
from torch import distributed

from looplib._core import ranks as _ranks
from looplib._core.checks import check, check_number, named
from looplib._core.collective import finish_all, together

P = ParamSpec("P")
R = TypeVar("R")


_NEEDED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def launched() -> bool:
    """True if torchrun, or another launcher that sets its environment variables, started this process.

    >>> import looplib as ll
    >>> ll.distributed.launched()
    False
    """
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


@contextmanager
def setup(
    *,
    required: bool = True,
    backend: str | None = None,
    timeout: float | timedelta | None = None,
    output_dir: str | os.PathLike[str] | None = None,
) -> Iterator[torch.device]:
    """Set up distributed training: join the processes that torchrun started, and return this process's device.

    >>> import looplib as ll
    >>> with ll.distributed.setup(required=False) as device:  # as a script does that also runs alone
    ...     print(ll.distributed.rank(), ll.distributed.world_size())
    0 1

    Use it in a `with` block around the run. Each process gets the accelerator of its `LOCAL_RANK` (`torch.accelerator`),
    or the CPU if there is none. Its tensors are sent with torch's default backend for it (NCCL for GPUs of NVIDIA and
    AMD, XCCL for those of Intel), CPU tensors with gloo. Several processes on a Mac get the CPU, since they would share
    its one GPU.

    In a notebook, put the block into a function and start it with accelerate's `notebook_launcher`, which sets what
    torchrun sets:

        accelerate.notebook_launcher(main, num_processes=8)

    An error inside the block is written to torchrun's error file, so torchrun shows the traceback of the rank that
    failed first. The process then exits at once, which ends the others too, so no rank waits for a timeout.

    Args:
        required: if False, do nothing when the script was not started by torchrun, so that it also runs as a single
            process.
        backend: torch's name of a backend to use instead of the above.
        timeout: seconds, or a timedelta, that a collective call may take. Defaults to torch's own.
        output_dir: folder for the output of all ranks but the first, in `rank-1.log` and so on. By default they print
            to the console.

    Raises:
        RuntimeError: the script was not started by torchrun (the message names the missing environment variables), or
            there are more processes than accelerators on this host.
    """
    missing = [name for name in _NEEDED if name not in os.environ]
    if missing:
        if required or launched():
            raise RuntimeError(
                f"{', '.join(missing)} not in the environment: start the script by torchrun, such as "
                f"`torchrun --nproc-per-node 2 {Path(sys.argv[0]).name or 'train.py'}`, or by a launcher that sets "
                "what it sets; for one process give setup(required=False), and wrap the model in DDP or FSDP2 only if "
                "ll.distributed.launched()"
            )
        yield _device(0, launched=False)
        return
    from torch.distributed.rendezvous import rendezvous  # imported here, since torch may be built without it

    device = _device(int(os.environ["LOCAL_RANK"]), launched=True)
    if timeout is not None and not isinstance(timeout, timedelta):
        timeout = timedelta(seconds=timeout)
    options: dict[str, Any] = {} if timeout is None else {"timeout": timeout}
    store, rank, processes = next(iter(rendezvous("env://", **options)))
    # torchrun keeps one store over restarts, which would still hold the addresses of processes that have ended.
    attempt = f"attempt-{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}"
    store = distributed.distributed_c10d.PrefixStore(attempt, store)
    if device.type != "cpu":
        torch.accelerator.set_device_index(device)
        options["device_id"] = device
    backend = backend or _backend(device)
    distributed.init_process_group(backend, store=store, rank=rank, world_size=processes, **options)
    try:
        with _output_in(output_dir):
            yield device
    except Exception as error:
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        get_error_handler().record_exception(error)
        raise
    finish_all()
    together().barrier("setup")
    _ranks.use(None)
    distributed.destroy_process_group()
    # A thread of gloo may still hold a tensor, and aborts the process if Python exits first.
    time.sleep(0.1)


def _device(local_rank: int, launched: bool) -> torch.device:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or (launched and accelerator.type == "mps"):
        return torch.device("cpu")
    if local_rank >= (count := torch.accelerator.device_count()):
        raise RuntimeError(
            f"this process has LOCAL_RANK {local_rank}, and this host {count} GPUs: start at most one per GPU, "
            f"torchrun --nproc-per-node {count}"
        )
    return torch.device(accelerator.type, local_rank)


def _backend(device: torch.device) -> str:
    """Backends for CPU tensors and for those of the device."""
    backend_of_device = distributed.get_default_backend_for_device(device)
    return backend_of_device if device.type == "cpu" else f"cpu:gloo,{device.type}:{backend_of_device}"


@contextmanager
def _output_in(folder: str | os.PathLike[str] | None) -> Iterator[None]:
    """Redirect the output of this process and its children to a file, on all ranks but the first."""
    if folder is None or is_rank_zero():
        yield
        return
    Path(folder).mkdir(parents=True, exist_ok=True)
    kept = [os.dup(descriptor) for descriptor in (1, 2)]
    with open(Path(folder) / f"rank-{distributed.get_rank()}.log", "ab") as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
    try:
        yield
    except Exception:
        traceback.print_exc()
        raise
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for descriptor, before in zip((1, 2), kept, strict=True):
            os.dup2(before, descriptor)
            os.close(before)


def rank() -> int:
    """Index of this process among those that divide the data, from 0. A single process has rank 0.

    >>> import looplib as ll
    >>> ll.distributed.rank()
    0
    """
    return _ranks.rank()


def world_size() -> int:
    """Number of processes that divide the data.

    >>> import looplib as ll
    >>> ll.distributed.world_size()
    1
    """
    return _ranks.world_size()


def is_rank_zero() -> bool:
    """True on the one process that writes logs and checkpoints.

    >>> import looplib as ll
    >>> ll.distributed.is_rank_zero()
    True
    """
    return _ranks.is_first()


def rank_zero_only(function: Callable[P, R]) -> Callable[P, R | None]:
    """Decorator: run a function only on the first rank, and return None on the others.

    >>> import looplib as ll
    >>> say = ll.distributed.rank_zero_only(print)
    >>> say("once")
    once

    Wrap a logger of your own, or a validation that the first rank does alone, without the others:

        log = ll.distributed.rank_zero_only(lambda state, values: client.log(values, step=state.step))
        validate = ll.distributed.rank_zero_only(lambda state: ll.evaluate(eval_step, state, batches, "eval/"))

    During the call, looplib's functions act as in a single process and wait for no other rank: `evaluate` reads all
    batches, `save` writes the state of this rank, and `reduce` returns its metrics. A model in DDP runs without sending
    its buffers. looplib's own loggers write on the first rank alone without it. The rank is read at each call. This
    holds for the thread of the call, and not for threads that the function starts.

    Args:
        function: a function without collective calls of torch, which would wait for the other ranks.

    The function raises RuntimeError if it runs a model that is sharded by FSDP2, which needs all ranks.
    """

    check(
        callable(function),
        f"rank_zero_only got {named(function)}: give the function, rank_zero_only(print)('once')",
        TypeError,
    )

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> R | None:
        if not _ranks.is_first():
            return None
        with _ranks.alone():
            return function(*args, **kwargs)

    return called


def watch(seconds: float) -> None:
    """Set the time after which a call that waits for other ranks is reported. The default is 30 seconds.

    >>> import looplib as ll
    >>> ll.distributed.watch(seconds=30)

    Functions such as `evaluate`, `reduce`, `save` and a train step on several ranks wait until all ranks call them.
    If one does not, each rank that waits warns after this time: in which function it is, and at which line of your
    file. The ranks that say nothing, or name another call, are missing. The time-out of the process group
    (`setup(timeout=...)`, 30 minutes by default with gloo) then raises RuntimeError with the same words. If the ranks
    call different functions, all of them raise at once.

    Only looplib's own calls are watched. The calls that DDP and FSDP2 make in their forward and backward passes are
    not, and neither are background saves.

    Args:
        seconds: the time, above 0. `math.inf` turns the reports off.

    Raises:
        TypeError: `seconds` is not a number.
        ValueError: `seconds` is not above 0.
    """
    advice = "give a number of seconds above 0, or math.inf for no reports"
    check_number("seconds", seconds, lambda seconds: seconds > 0, advice)
    _ranks.watch.seconds = seconds


def barrier() -> None:
    """Wait until all processes have reached this call. Does nothing with a single process.

    >>> import looplib as ll
    >>> ll.distributed.barrier()
    """
    together().barrier("barrier")


def set_data_parallel_group(group: Any) -> None:
    """Set the processes that divide the data. With tensor parallelism, the processes of one model share their data.

    >>> import looplib as ll
    >>> ll.distributed.set_data_parallel_group(None)  # all processes, the default

    For a two-dimensional mesh:

        mesh = init_device_mesh(device.type, (4, 2), mesh_dim_names=("data", "tensor"))
        ll.distributed.set_data_parallel_group(mesh["data"])

    From then on, `rank()` and `world_size()` refer to the group. Loaders divide batches by them, random draws depend
    on them, and gradients and metrics are combined over them.

    Args:
        group: a ProcessGroup, a one-dimensional DeviceMesh, or None for all processes.
    """
    _ranks.use(group.get_group() if hasattr(group, "get_group") else group)
