"""Compilation: a whole step as one graph, or the repeated blocks of a model."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar, cast

import torch
from torch import nn

from looplib._core import interrupts as _interrupts
from looplib._core.checks import check
from looplib._core.kinds import check_kind
from looplib._core.lease import check_unwritten, give_up
from looplib._core.misuse import Watch, warn_of_stale
from looplib._core.records import with_repr
from looplib.gradients import EVALUATED, check_history
from looplib.losses._activations import Classes, choice, outermost
from looplib.steps import StepSpec, advanced, spec_of, with_spec
from looplib.transforms._compiler import Compiler
from looplib.types import Metric, TrainState, TrainStep, trees_of

S = TypeVar("S", bound=Callable[..., Any])


def compile_step(
    step: S, *, mode: str | None = None, options: Mapping[str, Any] | None = None, backend: str = "inductor"
) -> S:
    """Compile a whole step into one graph, at the first batch of each shape.

    >>> import looplib as ll, torch
    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = ll.optimizer(torch.optim.AdamW, lr=ll.warmup_cosine(1e-3, warmup=10, total=100))
    >>> grad_fn = ll.clip_by_global_norm(ll.make_grad_fn(model, lambda model, x: model(x).square().mean()), 1.0)
    >>> train_step = ll.make_train_step(grad_fn, optimizer, donate=True)
    >>> compiled_step = ll.compile_step(train_step, backend="eager")  # a graph without machine code
    >>> state, metrics = compiled_step(ll.init_state(model, optimizer), torch.ones(4, 2))
    >>> state.step
    1

    The graph of a train step contains forward pass, backward pass, clipping, loss scaling, schedule and update; that
    of an eval or predict step contains the forward pass. The step keeps its `donate=True`. To compile the step of a
    stack, write `compile_step(vmap_step(train_step))`.

    Args:
        step: a step from `make_train_step`, `make_eval_step`, `make_predict_step` or `vmap_step`.
        mode: of `torch.compile`: "default", "reduce-overhead", "max-autotune" or "max-autotune-no-cudagraphs".
            "reduce-overhead" records a pure step as a CUDA graph, so that its kernels are launched at once.
        options: Inductor's options, by name.
        backend: name of a `torch.compile` backend. "eager" generates no machine code: see below.

    Raises:
        TypeError: `step` is a different function, is already compiled, or is differentiable; or torch does not know
            an option; or a donated step is to be a CUDA graph.
        UntraceableError: from the step, if it reads the value of a tensor, changes Python values, or runs on several
            ranks (use `compile_blocks` for the model there).

    **The limits of graphs.** The graph is what the step's Python did when it was traced:

    - Tensor values cannot be read (`if loss > 1`, `.item()`). The error names the line.
    - Python that only observes (hooks, prints) runs once, during tracing.
    - The learning rate and other hyperparameters are inputs of the graph, so changing them does not recompile.
      Numbers that the loss function reads from elsewhere (an attribute, a global, a closure) are watched; if one
      changes, the step is recompiled with a warning. Numbers and strings in a batch belong to its shape.
    - Inductor draws different random numbers than eager torch, though still as a function of the state's seed and
      step. `options={"fallback_random": True}` draws the same ones, except for microbatches after the first.

    **Kernels.** On a CPU, an update of 64 parameters or more calls the optimizer's fused kernel, if there is one
    (SGD, Adam, AdamW, Adagrad), and has its bits. Fewer parameters are updated by generated code, which is faster but
    takes long to compile for many. `foreach=` of the optimizer asks for generated code with any number.

    **Time to compile.** On a terminal or in a notebook, a line before and one after show that the step compiles with
    Inductor and how long that took. `backend="eager"` takes about a second: it runs the graph's operations one after
    the other, without autograd and `torch.func`, and calls the optimizer's fused kernel for any number of parameters.
    It suits tests, and small models whose steps autograd and `torch.func` slow down, such as those with per-sample
    gradients.
    """
    parts = spec_of(step, "compile_step")
    check(
        not (parts.donate and mode == "reduce-overhead"),
        'mode="reduce-overhead" records a CUDA graph, which torch does not let write to a donated state: leave out '
        "donate=True or mode=",
        TypeError,
    )
    chosen = {"mode": mode, "options": options, "backend": backend}
    if parts.compiler is not None:
        compiler = parts.compiler.compiled(chosen)
    else:
        compiler = Compiler(parts.core, parts.donate, chosen, parts.watched)
    made = step_of_graphs(step, parts, compiler)
    remembered: S = with_repr(made, compile_step, step, mode=mode, options=options, backend=backend)
    return remembered


def spec_without_graphs(step: object, transform: str) -> StepSpec:
    """Components of a step that runs eagerly."""
    parts = spec_of(step, transform)
    message = (
        f"{transform} got a step that is compiled, of a stack or differentiable already: give the one that "
        "ll.make_train_step returned (and compile the step of a stack, ll.compile_step(ll.vmap_step(step)))"
    )
    check(parts.compiler is None, message, TypeError)
    return parts


def step_of_graphs(step: S, parts: StepSpec, compiler: Compiler) -> S:
    """The same step, run by the graphs that a compiler makes of it."""
    made = _train_step(parts, compiler) if parts.kind == "train" else _step_without_training(compiler)
    return cast(S, with_spec(made, replace(parts, donate=compiler.donate, compiler=compiler)))


def _train_step(parts: StepSpec, compiler: Compiler) -> TrainStep:
    donate, same_batch = compiler.donate, parts.same_batch
    watch = None if donate else Watch(parts.watched[0], inner=not compiler.no_grad)

    def compiled(state: TrainState, batch: Any) -> tuple[TrainState, dict[str, Metric]]:
        params, _, _ = trees_of(state)
        if watch is not None:
            watch.see(state, batch)
        if compiler.no_grad and (compiler.known is None or compiler.known[0]() is not state):
            check_history(params)
        ready = compiler.prepare(state, batch)
        if watch is not None and compiler.no_grad:
            warn_of_stale(ready.machine.modules)
        lease = None
        _hold_signals = True  # until the caller has the result
        _interrupts.install()
        if donate:
            check_unwritten(state)  # the loss may have run other steps while it was traced
            lease, spent = give_up(state, ready.machine.program.written)
        out, checks = compiler.run(ready, state)
        applied = bool(out.applied)
        try:
            for check in checks:
                check()
        except BaseException:
            if lease is not None and not applied:
                lease.written = spent  # the graph has put the state's own values into its tensors
            raise
        new = advanced(state, out.params, out.buffers, out.opt_state, out.samples, applied, same_batch, lease)
        if lease is not None:
            lease.step = new.step
            _interrupts.returns_to(sys._getframe(1))
        compiler.remember(ready, new)
        return new, out.metrics

    return compiled


def _step_without_training(compiler: Compiler) -> Callable[[TrainState, Any], Any]:
    def compiled(state: TrainState, batch: Any) -> Any:
        _interrupts.install()
        if torch.is_grad_enabled() and (compiler.known is None or compiler.known[0]() is not state):
            check_history(state.params, EVALUATED)
        ready = compiler.prepare(state, batch)
        out, _ = compiler.run(ready, state)
        compiler.remember(ready, state)
        return out.metrics

    return compiled


def compile_blocks(model: nn.Module, blocks: Classes | Callable[[str, nn.Module], bool], **options: Any) -> nn.Module:
    """Regional compilation: compile each of a model's blocks in place, and leave the rest of the step eager.

    >>> import looplib as ll, torch
    >>> model = torch.nn.Sequential(*[torch.nn.TransformerEncoderLayer(8, 2, 16) for _ in range(4)])
    >>> model = ll.transforms.compile_blocks(model, torch.nn.TransformerEncoderLayer, backend="eager")
    >>> list(dict(model.named_parameters()))[0]
    '0.self_attn.in_proj_weight'

    Use it for large models whose whole step would take long to compile: blocks of one class share their code, so only
    the first is compiled. It works with DDP (call it before wrapping), FSDP2, hooks, and models that cannot be traced
    completely. Parameter names do not change.

    Args:
        model: the module, changed in place and returned.
        blocks: a module class, a tuple of classes, or `(name, module) -> bool`. The outermost matching modules are
            compiled.
        options: arguments of `torch.compile`.

    Raises:
        ValueError: the model has no such module.
        TypeError: `blocks` is of a different type.

    Source: "regional compilation" in PyTorch's tutorials; `torch.nn.Module.compile`.
    """
    check_kind(model, "compile_blocks", "model")
    # Imported here because it takes a second.
    from torch._dynamo.external_utils import wrap_inline

    for module in outermost(model, choice(blocks), "compile_blocks"):
        # As `module.compile()` does, which leaves torch's own classes eager: dynamo skips them as the outermost frame.
        block: Any = module
        block._compiled_call_impl = torch.compile(wrap_inline(block._call_impl), **options)
    return model
