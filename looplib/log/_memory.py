"""Peak memory."""

from __future__ import annotations

from contextlib import suppress

import torch


def memory(*, reset: bool = False, prefix: str = "") -> dict[str, float]:
    """Peak memory of this process in bytes, on the CPU and on the accelerator if there is one.

    >>> import looplib as ll
    >>> ll.log.memory()["host_peak_bytes"] > 1e6
    True

    `host_peak_bytes` is resident memory; it is missing where there is no
    `/proc`. `device_peak_bytes` is the memory given out by
    torch's allocator on the current device. Reading them does not wait for the device.

    Args:
        reset: if True, reset the peaks after reading them, so that each log entry covers its own window. The peaks
            are shared by the process, so everything else that reads them is affected too. The CPU's peak can be reset
            where `/proc/self/clear_refs` is writable; elsewhere it is the peak since the process started.
        prefix: string put before each name.
    """
    peak = _host_peak()
    peaks = {} if peak is None else {"host_peak_bytes": peak}
    if torch.accelerator.is_available():
        peaks["device_peak_bytes"] = float(torch.accelerator.memory.max_memory_allocated())
        if reset:
            torch.accelerator.memory.reset_peak_memory_stats()
    if reset:
        with suppress(OSError), open("/proc/self/clear_refs", "w") as file:
            file.write("5")
    return {prefix + name: peak for name, peak in peaks.items()}


def _host_peak() -> float | None:
    with suppress(OSError), open("/proc/self/status") as file:
        for line in file:
            if line.startswith("VmHWM:"):
                return float(line.split()[1]) * 1024
    return None
