"""Worker processes: torch DataLoaders, each used by one iteration at a time."""

from __future__ import annotations

import os
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils.data import DataLoader, get_worker_info

from looplib._core import torch_private
from looplib._core.random import mix
from looplib.data._random_streams import STREAM
from looplib.data._sending import collate_of_worker

Start = Callable[[DataLoader[Any]], Iterator[Any]]


class Engines:
    """Pool of DataLoaders: no two iterations share one, and persistent workers wait here."""

    def __init__(self, build: Callable[[], DataLoader[Any]], seed: int) -> None:
        self.build, self.seed = build, seed
        self.idle = [build()]  # built now, so that DataLoader checks its options
        self.persist: weakref.WeakSet[DataLoader[Any]] = (
            weakref.WeakSet()
        )  # whose workers wait for the next iteration

    @contextmanager
    def run(self, epoch: int, start: Start) -> Iterator[Iterator[Any]]:
        """Lend a DataLoader's iterator to the block, and stop its workers afterwards unless they persist."""
        engine = self.idle.pop() if self.idle else self.build()
        assert engine.generator is not None
        engine.generator.manual_seed(mix(STREAM, self.seed, epoch))
        source: Any = start(engine)
        if engine.persistent_workers and engine not in self.persist:
            # Not by __del__ here either: the iterator outlives the engine, and refers to nothing that refers to it.
            self.persist.add(engine)
            weakref.finalize(
                engine, torch_private.shutdown_workers, torch_private.without_dataset(source)
            ).atexit = False
        sound = False
        try:
            yield source
            sound = True
        except GeneratorExit:  # the loop was left early; the workers are fine
            sound = True
            raise
        finally:
            if sound:
                self.idle.append(engine)
            if not (sound and engine.persistent_workers) and engine.num_workers:
                # With __del__ they would live as long as a traceback that refers to them, and the garbage
                # collector would stop them in an order that makes it wait for 5 seconds.
                torch_private.shutdown_workers(source)


def start_worker(worker_init_fn: Callable[[int], None] | None, worker_id: int) -> None:
    """`worker_init_fn` of every engine."""
    # Signals reach the whole process group or job. Only the main process decides what they mean.
    for name in ("SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    if hasattr(signal, "sigwaitinfo"):
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=_end_when_told, daemon=True).start()
    info: Any = get_worker_info()
    info.dataset.in_worker = True
    if hasattr(info.dataset, "collate"):
        info.dataset.collate = collate_of_worker(info.dataset.collate)
    object.__setattr__(info, "dataset", info.dataset.dataset)  # the user's dataset, as with a plain DataLoader
    if worker_init_fn is not None:
        worker_init_fn(worker_id)


def _end_when_told() -> None:
    """Obey SIGTERM only if the main process sends it, which it does to end workers that hang."""
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != os.getppid():
        pass
    os._exit(0)


def ended_early(what: str) -> RuntimeError:
    """Error for a StopIteration from the user's code, which a DataLoader would mistake for the end of the data."""
    return RuntimeError(
        f"{what} raised StopIteration, which would end the epoch early and silently. It usually comes from next() on "
        "an iterator that has ended: give next() a default, or raise another error"
    )
