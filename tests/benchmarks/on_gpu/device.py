"""Functions of a device: waiting, memory, reads by the host, kernels and synchronisations of a step."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from typing import Any

import torch


def name_of(device: torch.device) -> str:
    if device.type == "cpu":
        return "CPU"
    module: Any = torch.get_device_module(device)
    return str(module.get_device_name(device))


def wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def allocated(device: torch.device) -> int:
    return 0 if device.type == "cpu" else torch.accelerator.memory_allocated(device)


def free(device: torch.device) -> None:
    gc.collect()
    if device.type != "cpu":
        torch.accelerator.empty_cache()


def peak_memory(device: torch.device, run: Callable[[], object], before: int) -> int | None:
    """Bytes allocated at most during `run`, above `before`; None on a CPU, whose allocator does not count."""
    if device.type == "cpu":
        run()
        return None
    wait(device)
    torch.accelerator.reset_peak_memory_stats(device)
    run()
    wait(device)
    return torch.accelerator.max_memory_allocated(device) - before


def host_reads(device: torch.device, run: Callable[[], object]) -> int | None:
    """Number of times that `run` waits for the device, as torch counts it; None where torch does not."""
    if device.type != "cuda":
        run()
        return None
    wait(device)
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            run()
        finally:
            torch.cuda.set_sync_debug_mode(before)
    return sum("synchronizing" in str(warning.message) for warning in caught)
