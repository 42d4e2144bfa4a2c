"""Processes: start them, number them, and do things on one of them.

A loop for one process runs on many when the model is wrapped, by `DistributedDataParallel` or `fully_shard`, and the
script is started by `torchrun`. Loaders then give each rank its part of each global batch, steps take the gradient of
the whole of it, and evaluations count each sample once. What is left is here: to begin and to end, to do a thing
once, and to merge what the ranks have measured.
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

from looplib._core import collective as _agreement
from looplib._core import ranks as _ranks

P = ParamSpec("P")
R = TypeVar("R")


_NEEDED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def launched() -> bool:
    """Whether torchrun, or another launcher that sets its environment, started this process.

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
    timeout: float | None = None,
    output_dir: str | os.PathLike[str] | None = None,
) -> Iterator[torch.device]:
    """Join the processes that torchrun started, for the time of a `with` block; gives this process's device.

    >>> import looplib as ll
    >>> with ll.distributed.setup(required=False) as device:  # as a script does that also runs alone
    ...     print(ll.distributed.rank(), ll.distributed.world_size())
    0 1

    Each process takes the GPU of its `LOCAL_RANK`, or the CPU where there is none. Messages between GPUs go by NCCL
    and those between hosts' memories by gloo. An error within the block is written where torchrun looks for it, so
    that it shows the traceback of the rank that failed first, and the process ends at once, which takes the others
    down; no rank waits for a timeout.

    Args:
        required: False for a script that runs in one process as well, where this does nothing.
        backend: torch's name of it, in place of the above.
        timeout: seconds that a collective may take; torch's own by default.
        output_dir: where what the ranks but the first print is kept, in `rank-1.log` and so on; without it they print
            to the console.

    Raises:
        RuntimeError: not started by torchrun, naming what is missing in the environment; more processes on this host
            than GPUs.
    """
    missing = [name for name in _NEEDED if name not in os.environ]
    if missing:
        if required or launched():
            raise RuntimeError(
                f"{', '.join(missing)} not in the environment: start the script by torchrun, such as "
                f"`torchrun --nproc-per-node 2 {Path(sys.argv[0]).name or 'train.py'}`, or by a launcher that sets "
                "what it sets; for one process give setup(required=False)"
            )
        yield _device(0)
        return
    from torch.distributed.rendezvous import rendezvous  # here, for torch may be built without it

    device = _device(int(os.environ["LOCAL_RANK"]))
    options: dict[str, Any] = {} if timeout is None else {"timeout": timedelta(seconds=timeout)}
    store, place, processes = next(iter(rendezvous("env://", **options)))
    # torchrun keeps one store over its restarts, in which the addresses of processes that are gone would be found.
    attempt = f"attempt-{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}"
    store = distributed.distributed_c10d.PrefixStore(attempt, store)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        options["device_id"] = device
    backend = backend or ("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    distributed.init_process_group(backend, store=store, rank=place, world_size=processes, **options)
    try:
        with _output_in(output_dir):
            yield device
    except Exception as error:
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        get_error_handler().record_exception(error)
        raise
    _agreement.finish()
    barrier()
    _ranks.use(None)
    distributed.destroy_process_group()
    # A thread of gloo may still have to let go of a tensor, and aborts the process if Python ends before it does.
    time.sleep(0.1)


def _device(local_rank: int) -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    if local_rank >= (count := torch.cuda.device_count()):
        raise RuntimeError(
            f"this process has LOCAL_RANK {local_rank}, and this host {count} GPUs: start at most one per GPU, "
            f"torchrun --nproc-per-node {count}"
        )
    return torch.device("cuda", local_rank)


@contextmanager
def _output_in(folder: str | os.PathLike[str] | None) -> Iterator[None]:
    """What this process and what it starts print goes to a file, on all ranks but the first."""
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
    """This process's number among those that divide the data, from 0; 0 where there is one process.

    >>> import looplib as ll
    >>> ll.distributed.rank()
    0
    """
    return _ranks.rank()


def world_size() -> int:
    """How many processes divide the data.

    >>> import looplib as ll
    >>> ll.distributed.world_size()
    1
    """
    return _ranks.world_size()


def is_rank_zero() -> bool:
    """Whether this is the one of all processes that writes logs and checkpoints.

    >>> import looplib as ll
    >>> ll.distributed.is_rank_zero()
    True
    """
    return _ranks.is_first()


def rank_zero_only(function: Callable[P, R]) -> Callable[P, R | None]:
    """A function that the first rank runs, and that gives None on the others.

    >>> import looplib as ll
    >>> say = ll.distributed.rank_zero_only(print)
    >>> say("once")
    once

    looplib's own sinks and checkpoints see to that themselves. The rank is asked for at each call.

    Args:
        function: what has no need of the other ranks; a collective in it would wait for them.
    """

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> R | None:
        return function(*args, **kwargs) if _ranks.is_first() else None

    return called


def barrier() -> None:
    """Wait until all processes are here; nothing where there is one.

    >>> import looplib as ll
    >>> ll.distributed.barrier()
    """
    _ranks.any_rank(False)


def set_data_parallel_group(group: Any) -> None:
    """Say which processes divide the data, where not all do: with tensor parallelism those of one model see the same.

    >>> import looplib as ll
    >>> ll.distributed.set_data_parallel_group(None)  # all of them, as without this

    For a mesh of two dimensions:

        mesh = init_device_mesh("cuda", (4, 2), mesh_dim_names=("data", "tensor"))
        ll.distributed.set_data_parallel_group(mesh["data"])

    From then on `rank()` and `world_size()` are those within the group: by them loaders divide batches, draws differ,
    and gradients and metrics add up.

    Args:
        group: a ProcessGroup, a DeviceMesh of one dimension, or None for all processes.
    """
    _ranks.use(group.get_group() if hasattr(group, "get_group") else group)
