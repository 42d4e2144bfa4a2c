"""Error messages of checks: what was done, what was found, and the usual cause."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from torch import Tensor

from looplib.types import TrainState

_SHOWN = 8


def fail(what: str, found: Iterable[str], why: str) -> NoReturn:
    __tracebackhide__ = True
    lines = list(found)
    more = [f"and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
    raise AssertionError("\n".join([f"{what}:", *(f"  {line}" for line in lines[:_SHOWN] + more), why]))


def listed(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")


def kind_of(leaf: Any) -> str:
    if isinstance(leaf, Tensor):
        return f"a tensor {tuple(leaf.shape)} of {str(leaf.dtype).removeprefix('torch.')} on {leaf.device}"
    return f"a {type(leaf).__name__}"


def about_kernels(state: TrainState) -> str:
    if all(tensor.device.type == "cpu" for tensor in state.params.values()):
        return ""
    return (
        " On an accelerator some kernels add up in another order each time: torch.use_deterministic_algorithms(True) "
        "names those, or takes others."
    )
