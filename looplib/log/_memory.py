"""Peak memory."""

from __future__ import annotations

import sys

import torch


def memory(*, reset: bool = False, prefix: str = "") -> dict[str, float]:
    """Peak memory of this process, on the host and on the accelerator if there is one, in bytes.

    >>> import looplib as ll
    >>> ll.log.memory()["host_peak_bytes"] > 1e6
    True

    `host_peak_bytes` is resident memory; `device_peak_bytes` is what torch's allocator had given out on the current
    device. Nothing is waited for.

    Args:
        reset: forget the peaks after reading them, so that each log has that of its own window, and a program's other
            readers of these peaks see the same. The host's can be forgotten on Linux, where `/proc/self/clear_refs`
            may be written; elsewhere it stays that of the process so far.
        prefix: put before each name.

    `host_peak_bytes` is left out on Windows, which tells neither.
    """
    peaks = {}
    host = _host_peak()
    if host is not None:
        peaks[prefix + "host_peak_bytes"] = float(host)
    if torch.accelerator.is_available():
        peaks[prefix + "device_peak_bytes"] = float(torch.accelerator.memory.max_memory_allocated())
        if reset:
            torch.accelerator.memory.reset_peak_memory_stats()
    if reset:
        _forget_host_peak()
    return peaks


def _host_peak() -> int | None:
    try:
        with open("/proc/self/status") as file:
            for line in file:
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    try:
        import resource
    except ImportError:
        return None
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _forget_host_peak() -> None:
    try:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
    except OSError:  # another system, or a container that may not
        pass
