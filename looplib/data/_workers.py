"""Reading jobs, in this process or in the workers of torch DataLoaders, each used by one iteration at a time."""

from __future__ import annotations

import copy
import os
import signal
import threading
import weakref
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader, get_worker_info

from looplib._core import torch_private
from looplib._core.random import mix
from looplib.data.random_streams import STREAM


class Jobs:
    """Sampler of a DataLoader: its jobs are set before each iteration."""

    jobs: Iterator[Any] = iter(())

    def __iter__(self) -> Iterator[Any]:
        return self.jobs


class Engines:
    """Pool of readers: copies of one, or DataLoaders over it. No two iterations share one.

    Attributes:
        workers: number of processes that take turns with the jobs.
        in_process: True if no DataLoader is needed.
        idle: DataLoaders whose persistent workers wait for the next iteration.
    """

    def __init__(self, reader: Any, seed: int, options: dict[str, Any]) -> None:
        self.reader, self.seed = reader, seed
        start = partial(_start_worker, options.get("worker_init_fn"))
        self.options = options | {"worker_init_fn": start, "collate_fn": unchanged, "batch_size": None}
        checked = self._dataloader()  # DataLoader checks its options
        self.workers = checked.num_workers or 1
        self.in_process = not checked.num_workers and not checked.pin_memory
        self.idle: list[DataLoader[Any]] = []

    def read(self, epoch: int, jobs: Iterator[Any]) -> Generator[Any, None, None]:
        """Results of the reader for each job, in order. Workers end with the iteration unless they persist."""
        if self.in_process:
            yield from map(copy.copy(self.reader).__getitem__, jobs)
            return
        is_new = not self.idle
        engine: Any = self._dataloader() if is_new else self.idle.pop()
        engine.sampler.jobs = jobs
        engine.generator.manual_seed(mix(STREAM, self.seed, epoch))
        with _on_cpu():
            source = iter(engine)
        if is_new and engine.persistent_workers:
            # Not by __del__ here either: the iterator outlives the engine, and refers to nothing that refers to it.
            end = weakref.finalize(engine, torch_private.shutdown_workers, torch_private.without_dataset(source))
            end.atexit = False
        persist = False
        try:
            yield from source
            persist = engine.persistent_workers
        except GeneratorExit:  # the loop was left early; the workers are fine
            persist = engine.persistent_workers
            raise
        finally:
            if persist:
                self.idle.append(engine)
            elif engine.num_workers:
                # With __del__ they would live as long as a traceback that refers to them, and the garbage
                # collector would stop them in an order that makes it wait for 5 seconds.
                torch_private.shutdown_workers(source)

    def _dataloader(self) -> DataLoader[Any]:
        return DataLoader(copy.copy(self.reader), sampler=Jobs(), generator=torch.Generator(), **self.options)


def _on_cpu() -> AbstractContextManager[Any]:
    """A context in which DataLoader may draw its seed by a generator of the CPU, whatever the default device is."""
    return nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu")


def unchanged(batch: Any) -> Any:
    """Return the batch itself."""
    return batch


def _start_worker(worker_init_fn: Callable[[int], None] | None, worker_id: int) -> None:
    """`worker_init_fn` of every DataLoader."""
    # Signals reach the whole process group or job. Only the main process decides what they mean.
    for signum in signal.Signals:
        if signum.name in ("SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2"):  # Windows has the first alone
            signal.signal(signum, signal.SIG_IGN)
    if hasattr(signal, "sigwaitinfo"):
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=_end_when_told, daemon=True).start()
    info: Any = get_worker_info()
    object.__setattr__(info, "dataset", info.dataset.dataset)  # the user's dataset, as with a plain DataLoader
    if worker_init_fn is not None:
        worker_init_fn(worker_id)


def _end_when_told() -> None:
    """Obey SIGTERM only if the main process sends it, which it does to end workers that hang."""
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != os.getppid():
        pass
    os._exit(0)
