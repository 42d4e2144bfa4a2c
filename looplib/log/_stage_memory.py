"""Memory of each stage of a run: what it kept and its peak, as transformers' memory tracker reports them."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from looplib._core.checks import check
from looplib.log._memory import forget_host_peak, host_peak, proc_status


class stage_memory:
    """Memory by stage: how much each stage of a run kept, and its peak, on the CPU and on the accelerator.

    >>> import looplib as ll, torch
    >>> memory = ll.log.stage_memory()
    >>> with memory("init"):
    ...     model = torch.nn.Linear(500, 500)
    >>> with memory("train"):
    ...     model(torch.ones(1, 500)).sum().backward()
    >>> with memory("eval"):
    ...     loss = model(torch.ones(1, 500)).sum().item()
    >>> sorted(memory.read())[:4]
    ['before_eval_mem_cpu', 'before_init_mem_cpu', 'before_train_mem_cpu', 'eval_mem_cpu_alloc_delta']

    `log(state, memory.read())` writes all stages so far. The names are those of transformers' Trainer, whose stages are
    `init`, `train`, `eval` and `test`; `gpu` stands for any accelerator:

        before_init_mem_cpu        bytes in use when the stage began
        init_mem_cpu_alloc_delta   bytes in use at its end, minus those
        init_mem_cpu_peaked_delta  peak during the stage, minus the bytes in use at its end

    The CPU's bytes are the resident memory of the process, the accelerator's those that torch's allocator has given out
    on the current device. A stage within another, such as an evaluation while training, counts in both; a stage that
    runs again replaces its numbers. A stage collects garbage when it begins and ends. In between nothing runs: the
    system and the allocator keep the peaks, where the Trainer reads the memory in a thread of its own.

    A peak is kept since it was last reset, so `ll.log.memory(reset=True)` or torch's `reset_peak_memory_stats` inside a
    stage make it forget its earlier peak. Where the system does not reset the CPU's peak (not Linux, or
    `/proc/self/clear_refs` is not writable), `peaked_delta` is given only for stages that set a new peak of the process.
    Outside Linux, the CPU's bytes need psutil.
    """

    def __init__(self) -> None:
        self._under_way: dict[str, dict[str, float]] = {}  # name of a stage -> peaks noted so far
        self._bytes: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Measure a stage, in a `with` block.

        Args:
            name: name of the stage, such as `"train"`.

        Raises:
            ValueError: this stage is under way.
        """
        check(name not in self._under_way, f"the stage {name!r} is under way; give the stage within it another name")
        gc.collect()
        self._note_peaks()
        host_peak_is_reset = _forget_peaks()
        begin, first = _in_use(), host_peak()
        peaks = self._under_way[name] = dict(begin)
        try:
            yield
        finally:
            self._note_peaks()
            del self._under_way[name]
            gc.collect()
            for device, now in _in_use().items():
                self._bytes[f"before_{name}_mem_{device}"] = begin[device]
                self._bytes[f"{name}_mem_{device}_alloc_delta"] = now - begin[device]
                if device == "gpu" or host_peak_is_reset or host_peak() != first:
                    self._bytes[f"{name}_mem_{device}_peaked_delta"] = max(0.0, peaks[device] - now)

    def _note_peaks(self) -> None:
        """Keep the peaks for the stages under way, since a stage within them resets those of the system."""
        for peaks in self._under_way.values():
            for device, peak in _peaks().items():
                peaks[device] = max(peaks.get(device, 0.0), peak)

    def read(self) -> dict[str, float]:
        """Bytes of all stages that have ended."""
        return dict(self._bytes)


def _in_use() -> dict[str, float]:
    host = _host_in_use()
    return ({} if host is None else {"cpu": host}) | _of_accelerator("memory_allocated")


def _peaks() -> dict[str, float]:
    return {"cpu": host_peak() or 0.0} | _of_accelerator("max_memory_allocated")


def _forget_peaks() -> bool:
    """Reset the peaks; False if the CPU's stays. The accelerator's is always reset."""
    if torch.accelerator.is_available():
        torch.accelerator.memory.reset_peak_memory_stats()
    return forget_host_peak()


def _of_accelerator(reading: str) -> dict[str, float]:
    return {"gpu": float(getattr(torch.accelerator.memory, reading)())} if torch.accelerator.is_available() else {}


def _host_in_use() -> float | None:
    if (size := proc_status("VmRSS")) is not None:
        return size
    try:
        import psutil  # type: ignore[import-untyped]
    except ImportError:
        return None
    return float(psutil.Process().memory_info().rss)
