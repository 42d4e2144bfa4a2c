"""Vector instructions of the CPU, used without a check beforehand.

Before its first kernel, Inductor builds and loads a small C++ file for each set of vector instructions that the CPU
has, which takes the C++ compiler 6 s in a new cache, and then uses the first set that works. That is nearly always the
first, so here it is used at once, by Inductor's own setting. If the kernels do not compile or load then, they are
compiled again with the check.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

R = TypeVar("R")

_OPTION = "cpp.vec_isa_ok"


def without_isa_check(compile: Callable[[dict[str, Any]], R], options: Mapping[str, Any]) -> R:
    """`compile(settings)` with the setting that leaves out the check, and without it if that fails.

    If the user has decided about the check, in the options or for the process, that holds.
    """
    from torch._inductor import config, cpu_vec_isa

    if _OPTION in options or config.cpp.vec_isa_ok is not None:
        return compile({})
    try:
        return compile({_OPTION: True})
    except Exception:  # of any kind: what is wrong with the graph is said again
        _forget(cpu_vec_isa)
        return compile({})
    finally:
        _forget(cpu_vec_isa)


def _forget(cpu_vec_isa: Any) -> None:
    """Forget which instructions work, which Inductor keeps whatever the setting was."""
    cpu_vec_isa.valid_vec_isa_list.cache_clear()
    for isa in cpu_vec_isa.supported_vec_isa_list:
        for kind in type(isa).__mro__:
            for value in vars(kind).values():
                if hasattr(value, "cache_clear"):
                    value.cache_clear()
