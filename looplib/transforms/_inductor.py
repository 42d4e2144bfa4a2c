"""Compiler backends: machine code for a graph, by Inductor or another backend of `torch.compile`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from looplib.transforms._passes import powers_once, stacked_where_it_goes, without_alpha
from looplib.transforms._program import Program, fakes

Compiled = Callable[[list[Tensor]], Any]

_ALIGNMENT = 16  # bytes, of the widest loads
_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")


def backend(
    backend: str = "inductor", mode: str | None = None, options: Mapping[str, Any] | None = None
) -> Callable[[Program], Compiled]:
    """Function that compiles programs with torch.compile's options."""
    if not isinstance(backend, str) or mode not in (None, *_MODES):
        raise TypeError(
            f"compile_step got backend={backend!r} and mode={mode!r}: give torch.compile's backend=, mode= "
            f"(one of {', '.join(_MODES)}) or options="
        )
    if backend == "inductor":
        compile_graph = _inductor(mode, options)
    elif mode or options:
        raise TypeError(f"compile_step got mode= or options=, which are Inductor's, and the backend {backend!r}")
    else:
        compile_graph = _by_name(backend)

    def build(program: Program) -> Compiled:
        without_alpha(program.graph)
        stacked_where_it_goes(program.graph)
        powers_once(program.graph)
        with torch.no_grad():
            return compile_graph(program.graph, fakes(program.graph), program.in_place())

    return build


def _inductor(mode: str | None, options: Mapping[str, Any] | None) -> Callable[..., Compiled]:
    chosen = {name.replace("-", "_"): value for name, value in (options or {}).items()}
    if chosen and (strange := chosen.keys() - torch._inductor.list_options()):
        raise TypeError(f"Inductor has no option {', '.join(sorted(strange))}; see torch._inductor.list_options()")
    cuda_graphs = mode in ("reduce-overhead", "max-autotune") or chosen.get("triton.cudagraphs")

    def compile_graph(graph: Any, examples: list[Tensor], in_place: list[int]) -> Compiled:
        from torch._inductor import compile_fx as inductor

        def at_fixed_addresses(lowered: Any, inputs: Any, **settings: Any) -> Any:
            # Inductor runs no CUDA graph that writes to its inputs, unless it knows that they stay where they are. It
            # then records the graph again for a state at other addresses. Tensors of the graph itself come first.
            own = len(inputs) - len(examples)
            fixed = [*range(own), *(own + index for index in in_place)]
            return inductor.compile_fx_inner(lowered, inputs, **{**settings, "static_input_idxs": fixed})

        inner: dict[str, Any] = {"inner_compile": at_fixed_addresses} if cuda_graphs and in_place else {}
        patches = {**torch._inductor.list_mode_options(mode or "default"), **chosen}
        compiled: Any = inductor.compile_fx(graph, examples, config_patches=patches, **inner)
        if cuda_graphs and any(example.is_cuda for example in examples):
            return partial(_run_apart, compiled, in_place)
        return lambda values: compiled(*values)

    return compile_graph


def _by_name(name: str) -> Callable[..., Compiled]:
    if name not in (known := torch._dynamo.list_backends(exclude_tags=())):
        raise TypeError(f"torch has no backend {name!r}: give inductor, or one of {', '.join(known)}")
    compiled_by: Any = torch._dynamo.lookup_backend(name)

    def compile_graph(graph: Any, examples: list[Tensor], in_place: list[int]) -> Compiled:
        compiled = compiled_by(graph, examples)
        return lambda values: compiled(*values)

    return compile_graph


def _run_apart(compiled: Callable[..., Any], in_place: Sequence[int], values: list[Tensor]) -> list[Tensor]:
    """Copy the outputs of what may be a CUDA graph, since its next run would overwrite them."""
    torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
    # Inductor does not check the alignment of inputs at fixed addresses, and its kernels rely on it.
    shifted = {index: values[index] for index in in_place if values[index].data_ptr() % _ALIGNMENT}
    for index, tensor in shifted.items():  # such as the weights of a GRU, views of one buffer
        values[index] = tensor.clone()
    outputs = [tensor.clone() for tensor in compiled(*values)]
    for index, tensor in shifted.items():
        tensor.copy_(values[index])
    return outputs
