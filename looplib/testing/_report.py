"""Error messages of checks: what was done, what was found, and the usual cause."""

from __future__ import annotations

from collections.abc import Collection

from looplib._core.checks import few
from looplib.types import TrainState


def fail(what: str, found: Collection[str], why: str) -> None:
    """Raise an AssertionError that lists what was found. If nothing was found, the check has passed."""
    __tracebackhide__ = True
    if found:
        raise AssertionError("\n".join([f"{what}:", "  " + few(found, between="\n  "), why]))


def about_kernels(state: TrainState) -> str:
    if all(tensor.device.type == "cpu" for tensor in state.params.values()):
        return ""
    return (
        " On an accelerator some kernels add up in another order each time: torch.use_deterministic_algorithms(True) "
        "names those, or takes others."
    )
