"""Machine code for a graph, by torch's Inductor.

Before that, a graph is rewritten so that Inductor generates correct and fast code.

A first compilation for the CPU would spend most of its time on two things, which are left out here (measured on two
cores: 1.3 to 1.8 times and 1.6 to 3.9 times the time of a small network's or a transformer's first step):

- Inductor compiles each kernel of a graph as a file of its own, and the C++ compiler spends most of its time on starting
  and on reading the same header. Here the kernels of one graph share as many files as there are compilers at work. Each
  kernel keeps its code and its flags, and with them its results. If kernels do not compile together, each is compiled
  as Inductor does it.
- Before its first kernel, Inductor builds and loads a small C++ file for each set of vector instructions that the CPU
  has, and then uses the first set that works. That is nearly always the first, so here it is used at once, by Inductor's
  own setting. If the kernels do not compile or load then, they are compiled again with the check.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.machinery import ExtensionFileLoader, ModuleSpec
from importlib.util import module_from_spec
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from looplib._core.checks import check
from looplib.transforms._eager import eager
from looplib.transforms._program import Program, examples_of

R = TypeVar("R")
Compiled = Callable[[list[Tensor]], Any]

_SCALED = {getattr(torch.ops.aten, name).Tensor for name in ("add", "add_", "sub", "sub_")}
_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")


def backend(
    backend: str = "inductor", mode: str | None = None, options: Mapping[str, Any] | None = None
) -> Callable[[Program], Compiled]:
    """Function that compiles programs, with the arguments of `compile_step`."""
    check(
        backend in ("inductor", "eager") and mode in (None, *_MODES),
        f'compile_step got backend={backend!r} and mode={mode!r}: give "inductor" or "eager", and one of Inductor\'s '
        f"modes, {', '.join(_MODES)}",
        TypeError,
    )
    check(
        backend == "inductor" or not (mode or options),
        f"compile_step got mode= or options=, which are Inductor's, and the backend {backend!r}",
        TypeError,
    )
    if backend == "eager":
        return lambda program: eager(program.graph)
    chosen = {name.replace("-", "_"): value for name, value in (options or {}).items()}
    strange = chosen and chosen.keys() - torch._inductor.list_options()
    names = ", ".join(sorted(strange))
    check(not strange, f"Inductor has no option {names}; see torch._inductor.list_options()", TypeError)
    return partial(_by_inductor, mode or "default", chosen)


def _by_inductor(mode: str, chosen: dict[str, Any], program: Program) -> Compiled:
    from torch._inductor import compile_fx as inductor

    graph: Any = program.graph
    without_alpha(graph)
    powers_once(graph)
    examples = examples_of(graph)
    patches = {**torch._inductor.list_mode_options(mode), **chosen}

    def compiled_with(settings: dict[str, Any]) -> Any:
        return inductor.compile_fx(graph, examples, config_patches={**patches, **settings})

    with torch.no_grad(), compiled_together():
        compiled = without_isa_check(compiled_with, chosen)
    if not patches.get("triton.cudagraphs"):
        return lambda values: compiled(*values)

    def run(values: list[Tensor]) -> list[Tensor]:
        """Copies of the outputs of what may be a CUDA graph, since its next run would overwrite them."""
        torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
        return [tensor.clone() for tensor in compiled(*values)]

    return run


def without_alpha(graph: GraphModule) -> None:
    """Rewrite `x + alpha * y` as two operations: Inductor fuses x + alpha * (a @ b) and drops alpha."""
    for node in graph.graph.nodes:
        if node.target in _SCALED and node.kwargs.get("alpha", 1) != 1 and isinstance(node.args[1], Node):
            x, y = node.args
            wide = torch.result_type(x.meta["val"], y.meta["val"])  # the dtype in which torch multiplies
            with graph.graph.inserting_before(node):
                y = _as_dtype(graph, y, wide)
                product = graph.graph.call_function(torch.ops.aten.mul.Tensor, (y, node.kwargs["alpha"]))
            product.meta["val"] = y.meta["val"]
            node.args, node.kwargs = (x, product), {}
    graph.recompile()


def _as_dtype(graph: GraphModule, node: Node, dtype: torch.dtype) -> Node:
    """A node for the same value in a dtype."""
    value = node.meta["val"]
    if value.dtype is dtype:
        return node
    converted = graph.graph.call_function(torch.ops.aten._to_copy.default, (node,), {"dtype": dtype})
    converted.meta["val"] = value.to(dtype)
    return converted


def powers_once(graph: GraphModule) -> None:
    """Compute a power, and values that follow from it, once instead of for each element that it scales.

    Inductor computes `1 - beta**step` inside the loop over a weight's elements, where two double-precision powers
    take as long as everything else. A value whose strides are requested is written to memory first.
    """
    aten = torch.ops.aten
    powers = {aten.pow.Scalar, aten.pow.Tensor_Scalar, aten.pow.Tensor_Tensor}
    sizes: dict[Node, int] = {}  # powers, and values of the same size computed from one
    for node in list(graph.graph.nodes):
        if node.op != "call_function" or not isinstance(value := node.meta.get("val"), Tensor):
            continue
        for power in node.all_input_nodes:
            if sizes.get(power, value.numel()) < value.numel():
                _write_first(graph, power, node)
        if node.target in powers or any(sizes.get(power) == value.numel() for power in node.all_input_nodes):
            sizes[node] = value.numel()
    graph.recompile()


def _write_first(graph: GraphModule, value: Node, user: Node) -> None:
    """Write a value to memory before it is used."""
    like = value.meta["val"]
    with graph.graph.inserting_before(user):
        arguments = (value, list(like.size()), list(like.stride()), like.storage_offset())
        written = graph.graph.call_function(torch.ops.aten.as_strided.default, arguments)
    user.replace_input_with(value, written)


# The first compilation of kernels for the CPU

_ISA_CHECK = "cpp.vec_isa_ok"
_INCLUDES = re.compile(r"^[ \t]*#[ \t]*include\b.*$", re.MULTILINE)
_MACROS = re.compile(r"^[ \t]*#[ \t]*(?!include\b|pragma\b)\w", re.MULTILINE)


class Kernel(NamedTuple):
    """A function `kernel` in C++, and the types of its arguments."""

    argtypes: list[str]
    source: str


@contextmanager
def compiled_together() -> Iterator[None]:
    """Compile the kernels of each graph that this thread compiles, or finds in Inductor's cache, in few files.

    Another thread of looplib's that compiles waits (`tracing.one_at_a_time`), since the functions belong to the process.
    """
    from torch._inductor.async_compile import AsyncCompile

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
    """Compile kernels in as many files as there are compilers at work, and return Python functions that call them."""
    from torch._inductor.async_compile import AsyncCompile, get_compile_threads
    from torch._inductor.codecache import CppPythonBindingsCodeCache

    files = min(len(kernels), max(1, get_compile_threads()))
    submit = AsyncCompile.submit if files > 1 else None
    shares = [kernels[number::files] for number in range(files)]
    compiled = [
        CppPythonBindingsCodeCache.load_pybinding_async(share[-1].argtypes, one_file(share), submit_fn=submit)
        for share in shares
    ]
    functions: list[Any] = [None] * len(kernels)
    for number, (share, result) in enumerate(zip(shares, compiled, strict=True)):
        functions[number::files] = functions_of(result(), len(share))
    return functions


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
    path, functions = last.__self__.__file__, []
    for number in range(count - 1):
        name = f"kernel_{number}"
        loader = ExtensionFileLoader(name, path)
        module = module_from_spec(ModuleSpec(name, loader, origin=path))
        loader.exec_module(module)
        functions.append(getattr(module, name))
    return [*functions, last]


def without_isa_check(compile: Callable[[dict[str, Any]], R], options: Mapping[str, Any]) -> R:
    """`compile(settings)` with the setting that leaves out the check, and without it if that fails.

    If the user has decided about the check, in the options or for the process, that holds.
    """
    from torch._inductor import config, cpu_vec_isa

    if _ISA_CHECK in options or config.cpp.vec_isa_ok is not None:
        return compile({})
    try:
        return compile({_ISA_CHECK: True})
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
