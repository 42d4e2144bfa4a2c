"""Vector instructions of the CPU, checked while the step is traced.

Before its first kernel, Inductor builds and loads a small C++ file for each set of vector instructions that the CPU
has, which takes the C++ compiler 6 s in a new cache, and then uses the first set that works. Here a thread starts on
that before the step is traced, and stops at the first set that works: the compiler runs in a process of its own, so
that tracing loses no time to it. Inductor's choice stays the same.
"""

from __future__ import annotations

import contextvars
import itertools
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any


@contextmanager
def vector_isa_checked(
    backend: str = "inductor", options: Mapping[str, Any] | None = None, **_: Any
) -> Iterator[None]:
    """Check in a thread which vector instructions Inductor is to use. It has ended when the block ends.

    Options for C++ may change the check or the choice, so with any of them Inductor checks by itself.
    """
    if backend != "inductor" or any(name.startswith("cpp") for name in options or ()):
        yield
        return
    # Two threads that import parts of Inductor at once may find modules half initialized, so import all of it here.
    from torch._inductor import compile_fx, config, cpu_vec_isa

    del compile_fx
    plain: Callable[[], list[Any]] = cpu_vec_isa.valid_vec_isa_list
    if not hasattr(plain, "cache_info"):  # a step that is compiled within another, which checks
        yield
        return
    candidates, stopped = _candidates(cpu_vec_isa), threading.Event()
    first: list[Any] = []

    def check() -> None:
        # The truth value of a set of instructions is its check. If it raises, Inductor checks again and says why.
        working = (isa for isa in candidates if not stopped.is_set() and isa)
        with suppress(Exception):
            first.extend(itertools.islice(working, 1))

    def valid() -> list[Any]:
        thread.join()
        by_default = config.cpp.simdlen is None and not os.getenv("ATEN_CPU_CAPABILITY")
        return list(first) if first and by_default else plain()

    # Inductor's settings belong to the context.
    thread = threading.Thread(target=contextvars.copy_context().run, args=(check,), name="vector isa", daemon=True)
    thread.start()
    module: Any = cpu_vec_isa
    module.valid_vec_isa_list = valid
    try:
        yield
    except BaseException:
        stopped.set()
        thread.join()
        for isa in candidates:  # Ctrl-C also ends a C++ compiler at work, so what was found then may be wrong
            _forget(isa)
        raise
    finally:
        module.valid_vec_isa_list = plain
        thread.join()


def _candidates(cpu_vec_isa: Any) -> list[Any]:
    """The sets of instructions that Inductor checks on this CPU, in its order. On some there is nothing to check."""
    flags = cpu_vec_isa.x86_isa_checker()
    return [isa for isa in cpu_vec_isa.supported_vec_isa_list if flags and set(str(isa).split()) <= set(flags)]


def _forget(isa: Any) -> None:
    """Forget the results of checks."""
    for kind in type(isa).__mro__:
        for value in vars(kind).values():
            if hasattr(value, "cache_clear"):
                value.cache_clear()
