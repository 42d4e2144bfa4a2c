"""Floating-point operations of a step, counted while it runs once."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint, flop_counter

from looplib._core.checks import check, few, warn
from looplib._core.engines import engine_of
from looplib._core.forward_writes import put_back, with_copies
from looplib._core.ranks import is_sharded
from looplib._core.records import check_kind, records_of
from looplib._core.torch_private import TorchDispatchMode, in_backward, pytree
from looplib.types import TrainState, check_state

_Formula = Callable[..., int]


def count_flops(function: Callable[..., Any], state: TrainState, batch: Any) -> int:
    """Count FLOPs: the floating-point operations of the matrix products, convolutions and attention in one call.

    >>> import looplib as ll, torch
    >>> model = torch.nn.Linear(64, 32)
    >>> grad_fn = ll.make_grad_fn(model, lambda model, x: model(x).square().mean())
    >>> ll.log.count_flops(grad_fn, ll.init_state(model), torch.ones(10, 64))  # forward, and the gradient of the weight
    81920

    It calls the function once and leaves the state, the module and the random streams as they were. A multiplication and
    an addition are two operations. The count is that of the model, as for model FLOPs utilization: activations that are
    recomputed in the backward pass (`ll.losses.recompute`, gradient checkpointing, fused attention) count once. Attention
    counts as if no position were masked, with any kernel and on any device. torch's transformer layers, which have one
    kernel for all of their parts in eval mode, run part by part for it. Elementwise operations, sums and Fourier transforms
    are left out. So is the update, if you give a gradient function; a train step has the matrix products of its update too
    (Muon).

    `ll.log.step_timer(flops=...)` takes the count of a gradient function, for compiled steps and stacks too. It holds for
    batches of this size. For batches of different lengths, give a function of the batch, such as the formula of PaLM for a
    transformer of N parameters, L layers, H heads of width Q and T tokens in a row:

        step_timer = ll.log.step_timer(flops=lambda batch: batch.numel() * (6 * N + 12 * L * H * Q * batch.shape[1]))

    Args:
        function: a gradient function with all its wrappers (`accumulate`), or a pure step, not compiled and not of a stack.
            Modules that are compiled run as they were written.
        state, batch: what to call it with. On several ranks, all ranks call this, each with its part of the batch, and get the
            count of their own device.

    Raises:
        TypeError: `function` is neither a gradient function nor a step.
        ValueError: it is a step that donates, which would spend the state, or a compiled one; or layers are split over
            ranks (tensor parallelism), whose part on one device is not known.

    Warns of operations without a formula, which the count leaves out: kernels of other packages, LSTMs on a GPU, products
    with integers or sparse matrices, factorizations (`torch.linalg`), and transformer layers in TorchScript.
    `torch.utils.flop_counter.register_flop_formula` gives them one.

    Source: `torch.utils.flop_counter.FlopCounterMode`; Chowdhery et al., "PaLM", 2022, appendix B.
    """
    who = "count_flops"
    check_kind(function, who, "grad_fn", "train_step", "eval_step", "predict_step")
    check_state(state, "ll.log.count_flops(grad_fn, state, batch)")
    for spec in (record.spec for record in records_of(function) if record.spec is not None):
        advice = "give the gradient function that it is made of: count_flops(grad_fn, state, batch)"
        check(not spec.donate, f"{who} got a step with donate=True, which would spend the state: {advice}")
        check(
            spec.compiler is None,
            f"{who} got a compiled step or one of a stack, whose kernels have no names: {advice}, with one state of a stack",
        )
    # A module in DDP or FSDP2 runs on its own tensors, which get their values back.
    model = next((link.model for link in records_of(function) if link.model is not None), None)
    in_place = model is not None and engine_of(model) is not None
    copies = with_copies([*state.params.values(), *state.buffers.values()]) if in_place else []
    request = {"donate": True} if in_place else {}
    counter, seen = flop_counter.FlopCounterMode(display=False), _Seen()
    counter.mod_tracker = _AllModules()  # type: ignore[assignment]
    counter.flop_registry = {
        op: _once(op, formula) for op, formula in {**counter.flop_registry, **_ATTENTION}.items()
    }
    try:
        with torch.compiler.set_stance("force_eager"), _WithoutFusedLayers(), seen, counter:
            function(state, batch, **request)
    finally:
        put_back(copies)
    if unknown := [str(op) for op in seen.ops if op not in counter.flop_registry]:
        warn(
            f"{who} has no formula for {few(unknown)} and leaves out what they compute, so the utilization would be too low: "
            "register one with torch.utils.flop_counter.register_flop_formula, or give step_timer a number of your own"
        )
    return int(counter.get_total_flops())


def _attention(query: Any, key: Any, value: Any, *args: Any, **named: Any) -> int:
    """Scores, and their product with the values."""
    *batch, length, width = query.shape
    return int(2 * math.prod(batch) * length * key.shape[-2] * (width + value.shape[-1]))


def _attention_backward(grad: Any, query: Any, key: Any, value: Any, *args: Any, **named: Any) -> int:
    """Twice the forward pass: each product has two gradients. That the kernel computes the scores again does not count."""
    return 2 * _attention(query, key, value)


def _without_scores(formula: _Formula) -> _Formula:
    """torch's formula for a backward pass, of five products of one size, without that of the scores, which comes again."""
    return lambda *args, **named: formula(*args, **named) * 4 // 5


def _attention_formulas() -> dict[Any, _Formula]:
    """Formulas of attention that are the same for all kernels. torch has none on a CPU."""
    kernels = ("flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu")
    names = [f"_scaled_dot_product_{kernel}" for kernel in (*kernels, "fused_attention_overrideable")]
    formulas: dict[Any, _Formula] = {}
    for name in (name for name in names if hasattr(torch.ops.aten, name)):
        formulas[getattr(torch.ops.aten, name)] = _attention
        formulas[getattr(torch.ops.aten, f"{name}_backward")] = _attention_backward
    for op, formula in flop_counter.flop_registry.items():
        if op not in formulas and str(op).endswith("attention_backward"):  # ragged and flexible ones
            formulas[op] = _without_scores(formula)
    return formulas


_ATTENTION = _attention_formulas()


def _once(op: Any, formula: _Formula) -> _Formula:
    """The formula of an operation, or 0 if it is computed again in the backward pass."""

    def counted(*args: Any, **named: Any) -> int:
        check(
            not any(map(is_sharded, pytree.tree_leaves((args, named)))),
            f"{op} has a DTensor, whose layer is split over ranks, so count_flops does not know what this device computes: "
            "count a model without tensor parallelism, and divide the number by that of the ranks which share it",
        )
        return 0 if _is_recomputed() else formula(*args, **named)

    return counted


def _is_recomputed() -> bool:
    """True for a forward pass that torch's checkpoint repeats within a backward pass.

    torch tells nobody of it, so the files of the frames above are read. A function that repeats a pass from another file is
    counted as what the model computes.
    """
    if not (in_backward() and torch.is_grad_enabled()):
        return False
    frame = sys._getframe()
    while frame is not None and frame.f_code.co_filename != checkpoint.__file__:
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None


class _AllModules(nullcontext[None]):
    """The place of torch's tracker of modules, whose hooks on all modules would show to the model."""

    parents = ("Global",)


class _WithoutFusedLayers(TorchFunctionMode):
    """Keeps torch's transformer layers from their kernels for a whole layer, for which there are no formulas.

    They take them only where no mode sees the calls. In contrast to `torch.backends.mha.set_fastpath_enabled`, this
    leaves the layers of other threads alone.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **kwargs or {})


# Words in the names of operations that multiply or factorize matrices; how the names of those begin that have such a word
# and do not; and the namespaces of torch's own operations.
_PRODUCTS = {
    *("mv", "addmv", "matmul", "linear", "trilinear", "convolution", "conv", "conv2d", "conv3d", "cdist", "pdist"),
    *("attention", "transformer", "rnn", "lstm", "gru", "linalg", "cholesky", "solve", "spsolve", "geqrf", "ormqr"),
    "generator",  # of affine grids
}
_OTHERS = ("linalg_vector_norm", "linalg__powsum", "linalg_cross", "_linalg_check_errors", "_thnn_fused")
_TORCHS = {"aten", "prim", "prims", "c10d", "_c10d_functional", "c10d_functional", "fsdp", "profiler"}


class _Seen(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Collects operations that may multiply matrices: by their names, or because nothing is known of them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ops: dict[Any, None] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.partition(".")[0]
        has_word = any(word in _PRODUCTS or word.endswith("mm") for word in name.split("_"))
        known = func.namespace in _TORCHS and (name.startswith(_OTHERS) or not has_word)
        if not known:
            self.ops[getattr(func, "overloadpacket", func)] = None
        return func(*args, **kwargs or {})
