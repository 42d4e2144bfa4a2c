"""Peak memory."""

from __future__ import annotations

import sys
from contextlib import suppress

import torch


def memory(*, reset: bool = False, prefix: str = "") -> dict[str, float]:
    """Peak memory of this process in bytes, on the CPU and on the accelerator if there is one.

    >>> import looplib as ll
    >>> ll.log.memory()["host_peak_bytes"] > 1e6
    True

    `host_peak_bytes` is resident memory; it is missing on Windows. `device_peak_bytes` is the memory given out by
    torch's allocator on the current device. Reading them does not wait for the device.

    Args:
        reset: if True, reset the peaks after reading them, so that each log entry covers its own window. The peaks
            are shared by the process, so everything else that reads them is affected too. The CPU's peak can be reset
            only on Linux, where `/proc/self/clear_refs` is writable; elsewhere it is the peak since the process
            started.
        prefix: string put before each name.
    """
    peak = host_peak()
    peaks = {} if peak is None else {"host_peak_bytes": peak}
    if torch.accelerator.is_available():
        peaks["device_peak_bytes"] = float(torch.accelerator.memory.max_memory_allocated())
        if reset:
            torch.accelerator.memory.reset_peak_memory_stats()
    if reset:
        forget_host_peak()
    return {prefix + name: peak for name, peak in peaks.items()}


def host_peak() -> float | None:
    """Peak of the resident memory, in bytes, since the start of the process or since it was last forgotten."""
    if (peak := proc_status("VmHWM")) is not None:
        return peak
    try:
        import resource
    except ImportError:
        return None
    unit = 1 if sys.platform == "darwin" else 1024
    return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)


def forget_host_peak() -> bool:
    """Reset the peak to the present memory. False on a different system, or in a container without permission."""
    with suppress(OSError), open("/proc/self/clear_refs", "w") as file:
        file.write("5")
        file.flush()
        return True
    return False


def proc_status(field: str) -> float | None:
    """A size in bytes that Linux reports for this process."""
    with suppress(OSError), open("/proc/self/status") as file:
        for line in filter(lambda line: line.startswith(f"{field}:"), file):
            return float(line.split()[1]) * 1024
    return None
