"""The first compilation of kernels for the CPU: in few files, and without a check of the CPU's vector instructions.

Inductor compiles each kernel of a graph as a file of its own. Most of the C++ compiler's time is spent on starting and
on reading the same header, so here the kernels of one graph share as many files as there are compilers at work. Each
kernel keeps its code and its flags, and with them its results. If kernels do not compile together, each is compiled as
Inductor does it. For a small network, this takes the C++ compiler about half of its processor time.

Before its first kernel, Inductor builds and loads a small C++ file for each set of vector instructions that the CPU
has, which takes the C++ compiler 6 s in a new cache, and then uses the first set that works. That is nearly always the
first, so here it is used at once, by Inductor's own setting. If the kernels do not compile or load then, they are
compiled again with the check.
"""

from __future__ import annotations

import importlib.util
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any, NamedTuple, TypeVar

R = TypeVar("R")

_OPTION = "cpp.vec_isa_ok"
_INCLUDES = re.compile(r"^[ \t]*#[ \t]*include\b.*$", re.MULTILINE)
_MACROS = re.compile(r"^[ \t]*#[ \t]*(?!include\b|pragma\b)\w", re.MULTILINE)


_patching = threading.RLock()  # the two functions belong to the process


class Kernel(NamedTuple):
    """A function `kernel` in C++, and the types of its arguments."""

    argtypes: list[str]
    source: str


@contextmanager
def compiled_together() -> Iterator[None]:
    """Compile the kernels of each graph that this thread compiles, or finds in Inductor's cache, in few files.

    Another thread of looplib's that compiles waits, since otherwise the two would restore each other's functions.
    """
    from torch._inductor.async_compile import AsyncCompile

    with _patching:
        plain, plain_wait, thread = AsyncCompile.cpp_pybinding, AsyncCompile.wait, threading.get_ident()

        def cpp_pybinding(compiler: Any, argtypes: list[str], source: str) -> Any:
            if threading.get_ident() != thread or _MACROS.search(source):
                return plain(compiler, argtypes, source)
            return Kernel(argtypes, source)

        def wait(compiler: Any, scope: dict[str, Any]) -> None:
            kernels = {name: value for name, value in scope.items() if isinstance(value, Kernel)}
            try:
                scope.update(zip(kernels, load(list(kernels.values())), strict=True))
            except Exception:  # of any compiler: what is wrong with one kernel is said when it is compiled alone
                scope.update({name: plain(compiler, *kernel) for name, kernel in kernels.items()})
            plain_wait(compiler, scope)

        patched: Any = AsyncCompile
        patched.cpp_pybinding, patched.wait = cpp_pybinding, wait
        try:
            yield
        finally:
            patched.cpp_pybinding, patched.wait = plain, plain_wait


def load(kernels: Sequence[Kernel]) -> list[Any]:
    """Compile kernels, and return Python functions that call them."""
    from torch._inductor.async_compile import AsyncCompile, get_compile_threads
    from torch._inductor.codecache import CppPythonBindingsCodeCache

    files = min(len(kernels), max(1, get_compile_threads()))
    submit = AsyncCompile.submit if files > 1 else None
    longest_first = sorted(range(len(kernels)), key=lambda index: -len(kernels[index].source))
    compiled = []
    for number in range(files):
        indices = longest_first[number::files]
        source, argtypes = one_file([kernels[index] for index in indices]), kernels[indices[-1]].argtypes
        compiled.append(
            (indices, CppPythonBindingsCodeCache.load_pybinding_async(argtypes, source, submit_fn=submit))
        )
    functions: dict[int, Any] = {}
    for indices, result in compiled:
        functions.update(zip(indices, functions_of(result(), len(indices)), strict=True))
    return [functions[index] for index in range(len(kernels))]


def one_file(kernels: Sequence[Kernel]) -> str:
    """The code of several kernels. Each but the last stands in a namespace, with a module of its own around it."""
    includes = list(dict.fromkeys(line for kernel in kernels for line in _INCLUDES.findall(kernel.source)))
    parts = [*includes, *(_INCLUDES.findall(_module("")) if len(kernels) > 1 else ())]
    for number, (argtypes, source) in enumerate(kernels[:-1]):
        name = f"kernel_{number}"
        code = re.sub(r"\bkernel\(", f"{name}(", source) + _module(name, argtypes)
        parts += [f"namespace in_{name} {{", _INCLUDES.sub("", code), "}"]
    return "\n".join(["#define PY_SSIZE_T_CLEAN", *parts, _INCLUDES.sub("", kernels[-1].source), ""])


def _module(name: str, argtypes: Sequence[str] = ()) -> str:
    """Inductor's code of a Python module with one function."""
    from torch._inductor.codecache import CppPythonBindingsCodeCache as Bindings

    values = [
        f"parse_arg<{argtype.replace('const ', '')}>(args, {number})" for number, argtype in enumerate(argtypes)
    ]
    return Bindings.suffix_template.format(
        arg_len=len(argtypes),
        call_entry_func=f"{name}({', '.join(values)}); Py_RETURN_NONE;",
        entry_func=name,
        extra_parse_arg="",
    )


def functions_of(last: Any, count: int) -> list[Any]:
    """The functions in the file of `one_file`, of which the last is loaded."""
    path = last.__self__.__file__
    return [*(getattr(_loaded(f"kernel_{number}", path), f"kernel_{number}") for number in range(count - 1)), last]


def _loaded(name: str, path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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
