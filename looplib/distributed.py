"""What lies around torch's engines for many processes, and nothing that they do themselves.

A loop for one process runs on many when the model is wrapped, by `DistributedDataParallel` or `fully_shard`, and the
script is started by `torchrun`. Loaders then give each rank its part of each global batch, steps take the gradient of
the whole of it, and evaluations count each sample once. What is left is here: to begin and to end, to do a thing
once, and to merge what the ranks have measured.
"""

from __future__ import annotations

import functools
import io
import os
import pickle
import sys
import time
import traceback
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, distributed, nn

from looplib import _agreement, _ranks
from looplib.gradients import WHOLE, GradFn, Gradients, Part, check_parts, mean_over_ranks
from looplib.metrics import Metric, Metrics, merge
from looplib.state import TrainState

__all__ = [
    "barrier",
    "first_rank_only",
    "is_first_rank",
    "launched",
    "rank",
    "reduce",
    "reduce_gradients",
    "set_data_parallel_group",
    "setup",
    "world_size",
]

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
    if folder is None or is_first_rank():
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


def is_first_rank() -> bool:
    """Whether this is the one of all processes that writes logs and checkpoints.

    >>> import looplib as ll
    >>> ll.distributed.is_first_rank()
    True
    """
    return _ranks.is_first()


def first_rank_only(function: Callable[P, R]) -> Callable[P, R | None]:
    """A function that the first rank runs, and that gives None on the others.

    >>> import looplib as ll
    >>> say = ll.distributed.first_rank_only(print)
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


def reduce(metrics: Metrics) -> dict[str, Metric]:
    """The metrics of all ranks together, the same on each: what `compute` is to be given for a log.

    >>> import looplib as ll
    >>> ll.compute(ll.distributed.reduce({"loss": ll.Mean(6.0, 3)}))  # of one process: as they are
    {'loss': 2.0}

    A train step's metrics are those of this rank's part of the batch. All ranks must call this alike. The records
    merge in the order of ranks, so the result is exact, and the same for the same parts. They go through the host.

    Args:
        metrics: of a step, of a window, or of any other kind with `merge`.

    Raises ValueError when the ranks' metrics differ in their names.
    """
    return merged(metrics, metrics) or {}


def merged(metrics: Metrics | None, like: Metrics | None) -> dict[str, Metric] | None:
    """Those of all ranks that have any; one that has none gives what its metrics would be like, if it can."""
    if not _ranks.several():
        return None if metrics is None else dict(metrics)
    own: _Own = {}
    data = _pickled(None if metrics is None else dict(metrics), own)
    if metrics is None and like is not None:
        _pickled(dict(like), own)
    parts = [part for found in _ranks.gather(data) if (part := _unpickled(found, own)) is not None]
    return merge(*parts) if parts else None


_Own = dict[tuple[str, int], Any]


def _pickled(value: Any, own: _Own) -> bytes:
    """What can be sent of a record; its lambdas and modules are the same on each rank, and stay there."""

    class Pickler(pickle.Pickler):
        def persistent_id(self, thing: Any) -> tuple[str, int] | None:
            if isinstance(thing, types.FunctionType):
                if _importable(thing):
                    return None
                name = f"{thing.__module__}.{thing.__qualname__}"
            elif isinstance(thing, nn.Module):
                name = type(thing).__qualname__
            else:
                return None
            place = 0
            while own.setdefault((name, place), thing) is not thing:
                place += 1
            return name, place

        def reducer_override(self, thing: Any) -> Any:
            if isinstance(thing, Tensor) and thing.device.type != "cpu":
                return _as_it_is, (thing.cpu(),)
            return NotImplemented

    file = io.BytesIO()
    Pickler(file).dump(value)
    return file.getvalue()


def _importable(function: types.FunctionType) -> bool:
    found: Any = sys.modules.get(function.__module__)
    for name in function.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is function


def _as_it_is(value: Any) -> Any:
    return value


def _unpickled(data: bytes, own: _Own) -> Any:
    class Unpickler(pickle.Unpickler):
        def persistent_load(self, key: tuple[str, int]) -> Any:
            return own[key]

    return Unpickler(io.BytesIO(data)).load()


def reduce_gradients(grad_fn: GradFn) -> GradFn:
    """The gradient of the global batch from those of the ranks' parts, for a model that no engine wraps.

    >>> import looplib as ll, torch
    >>> model = torch.nn.Linear(2, 1)
    >>> grad_fn = ll.make_grad_fn(model, lambda model, x: model(x).square().mean())
    >>> grad_fn = ll.clip_by_global_norm(ll.distributed.reduce_gradients(ll.accumulate(grad_fn, 2)), 1.0)
    >>> grad_fn(ll.init_state(model), torch.zeros(4, 2)).samples
    4

    DistributedDataParallel sends gradients while the backward pass still runs; this sends them after it. For that it
    is a function like any other: states need not be bound nor donated, so runs can be kept and forked, and it stands
    around what has to be whole on one rank, such as `retry_on_oom` and `clip_per_sample`.

    `retry_on_oom` over a model in DistributedDataParallel does the same by itself, in pieces that all ranks agree on.

    What each rank's part weighs, in samples or in the weight of a loss `Mean(total, weight)`, is summed first, and
    the gradients after that, in buckets of 25 MiB. A parameter that a rank's loss does not reach has a zero there.

    Args:
        grad_fn: of a rank's part of the batch. What acts on the gradients of a whole step goes around.

    Raises:
        ValueError: a `grad_fn` that is to go around, such as `clip_by_global_norm`.
        RuntimeError: a model in DDP or FSDP2, at the first step: its gradients would be reduced twice.
    """
    if getattr(grad_fn, "of_whole", None) != "retry_on_oom":
        check_parts(grad_fn, "reduce_gradients")

    def reduced(state: TrainState, batch: Any, part: Part = WHOLE) -> Gradients:
        if not _ranks.several():
            return grad_fn(state, batch, part)
        if part.sums:
            raise ValueError(
                "reduce_gradients within accumulate would send each piece: put it around, "
                "reduce_gradients(accumulate(grad_fn, ...))"
            )
        return mean_over_ranks(grad_fn(state, batch, replace(part, sums=True, local=True)), state.params)

    return reduced
