"""Distributed training check."""

from __future__ import annotations

import math
import os
import pickle
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.spawn import spawn

from looplib._core.checks import check_count, check_number
from looplib._core.ranks import whole
from looplib.data import Loader
from looplib.distributed import _processes as distributed
from looplib.testing._compare import check_tolerance, differing, fail, largest
from looplib.testing._resume import run
from looplib.testing._surroundings import streams_kept
from looplib.types import TrainState, TrainStep

Params = dict[str, Tensor]


def assert_ranks_train_alike(
    begin: Callable[[], tuple[TrainStep, TrainState, Loader]],
    *,
    ranks: int = 2,
    steps: int = 3,
    tolerance: float = 1e-4,
    timeout: float = 60,
) -> None:
    """Check distributed training: n processes end with the same weights as a run in one process.

    `begin()` does what the script does before its loop. `assert_microbatches_equal_batch` is the quick check of the loss,
    without processes.
    In a file `tests/test_train.py`:

        def begin():  # at the top of the file, so that a new process can import it
            model = make_model().double()
            wrapped = DistributedDataParallel(model) if ll.distributed.launched() else model
            optimizer = ll.optimizer(torch.optim.AdamW, lr=1e-3)
            train_step = ll.make_train_step(ll.make_grad_fn(wrapped, loss_fn), optimizer, donate=True)
            loader = ll.make_loader(data.double(), batch_size=8)
            return train_step, ll.init_state(wrapped, optimizer, loader=loader), loader

        def test_ranks_train_alike():
            testing.assert_ranks_train_alike(begin, ranks=2)

    `begin` is called in this process, and in n new ones on this host's CPU, inside `ll.distributed.setup()` and with
    the environment variables that torchrun sets. This takes several seconds. Seed the initialization of the weights,
    turn dropout off (each rank draws its own masks), and use float64: Adam turns the rounding of a gradient near zero
    into a whole step.

    Args:
        begin: function that returns `(train_step, state, loader)`, at the top of a module that can be imported.
        ranks: number of processes.
        steps: number of batches.
        tolerance: largest difference of weights, relative to the largest change of any weight.
        timeout: seconds that ranks wait for each other.

    Raises:
        AssertionError: weights differ between ranks, or from those of one process.
        TypeError: a new process cannot import `begin`.
        torch.multiprocessing.ProcessRaisedException: one of the processes raised an error. The message has its
            traceback.
    """
    __tracebackhide__ = True
    check_tolerance(tolerance)
    check_count("ranks", ranks, 2)
    check_count("steps", steps)
    check_number("timeout", timeout, lambda seconds: 0 < seconds < math.inf, "give a number of seconds above 0")
    try:
        pickle.dumps(begin)
    except (AttributeError, pickle.PicklingError) as error:
        raise TypeError(
            f"begin is {begin!r}, which a new process cannot import: put it at the top of a module, as a def"
        ) from error
    step, state, loader = begin()
    with streams_kept(state), tempfile.TemporaryDirectory() as folder:
        before = _on_cpu(state)
        *_, (_, _, end) = run(step, state, loader, 0, steps)
        alone = _on_cpu(end)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        arguments = (begin, ranks, steps, port, folder, timeout)
        spawn(_train_on_rank, arguments, nprocs=ranks)  # type: ignore[no-untyped-call]
        trained = {f"rank {rank}": torch.load(Path(folder) / f"{rank}.pt") for rank in range(ranks)}
    together = trained["rank 0"]
    fail(
        f"after {steps} steps the ranks' weights differ from those of rank 0",
        differing(dict.fromkeys(trained, together), trained),
        "So each trains a model of its own: usually gradients that nothing reduces (wrap the model in "
        "DistributedDataParallel or fully_shard, or the grad_fn in ll.grads.reduce_gradients), "
        "weights that are initialized by another seed on each rank and not broadcast, or parameters that each rank "
        "updates by itself.",
    )
    change, others = ({name: new[name] - before[name] for name in before} for new in (alone, together))
    fail(
        f"after {steps} steps {ranks} ranks have other weights than one process, by these parts of a largest change of "
        f"{largest(change):.3g}",
        differing({"change": change}, {"change": others}, tolerance),
        "Usually a loss or gradient that is divided by the number of ranks once more or once less, a loss that is a "
        "mean over something else than the samples (return ll.Mean(total, weight); see assert_microbatches_equal_batch), "
        "BatchNorm, batches that are not divided or not the same (a loader of another kind), dropout or another draw, "
        "weights that depend on the rank or the time, or float32 with Adam: use float64 here.",
    )


def _on_cpu(state: TrainState) -> Params:
    return {name: whole(tensor).detach().cpu().clone() for name, tensor in state.params.items()}


def _train_on_rank(
    rank: int, begin: Callable[[], Any], ranks: int, steps: int, port: int, folder: str, timeout: float
) -> None:
    """One process of `assert_ranks_train_alike`."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "CUDA_VISIBLE_DEVICES": ""}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    with distributed.setup(timeout=timeout):
        step, state, loader = begin()
        *_, (_, _, end) = run(step, state, loader, 0, steps)
        torch.save(_on_cpu(end), Path(folder) / f"{rank}.pt")
