"""Unrolled training: many steps in a row, with recomputation in the backward pass.

Memory holds the operations of all steps, or with recomputation, those of one segment of steps: gradient checkpointing
over training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import compress, count, filterfalse
from typing import Any

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter
from torch.overrides import TorchFunctionMode

from looplib._core import tracing
from looplib._core.checks import check_optional_count
from looplib._core.cuts import refuse_strangers
from looplib._core.kinds import checked
from looplib.transforms._differentiable import detached
from looplib.transforms._expression import expression
from looplib.types import Metric, TrainState, TrainStep


def unroll(
    train_step: TrainStep, state: TrainState, batches: Sequence[Any], *, recompute_every: int | None = None
) -> tuple[TrainState, list[dict[str, Metric]]]:
    """Unroll a train step over several batches, and return the last state and the metrics of each step.

    >>> import looplib as ll, torch
    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = ll.optimizer(torch.optim.SGD, lr=0.1)
    >>> grad_fn = ll.make_grad_fn(model, lambda model, x: model(x).square().mean())
    >>> inner_step = ll.transforms.differentiable(ll.make_train_step(grad_fn, optimizer))
    >>> start, batches = ll.init_state(model, optimizer), [torch.ones(4, 2)] * 6
    >>> def loss(params):
    ...     state, metrics = ll.transforms.unroll(inner_step, start.replace(params=params), batches, recompute_every=3)
    ...     return metrics[-1]["loss"].compute()
    >>> params = {name: tensor.detach() for name, tensor in model.named_parameters()}
    >>> sorted(torch.func.grad(loss)(params))
    ['bias', 'weight']

    With `recompute_every`, the backward pass holds the states between segments and the operations of one segment,
    which it computes again. Memory is smallest for segments of about the square root of the number of steps, and the
    time is that of about one more forward pass. The gradient is bitwise the same, because the same operations run
    again. If `torch.func.grad` differentiates through `torch.vmap` of this function, its record of the backward pass
    keeps everything; `backward()`, as called by an outer train step, does not. The gradient reaches tensors in state
    and batches, not those that functions close over.

    Args:
        train_step: from `differentiable`, or any train step if no gradient is needed.
        state: the initial state.
        batches: one batch for each step.
        recompute_every: number of steps in a segment. None keeps the operations of all steps.

    Raises:
        ValueError: a segment has less than one step, or recomputation would lose the gradient of a tensor that a loss
            function or a schedule closes over.

    Source: Chen et al., "Training deep nets with sublinear memory cost", 2016.
    """
    train_step = checked(train_step, "unroll", "train_step")
    check_optional_count("recompute_every", recompute_every, advice="give at least 1 step, or None")
    batches = list(batches)
    if recompute_every is None:
        return _in_a_row(train_step, state, batches)
    metrics: list[dict[str, Metric]] = []
    for begin in range(0, len(batches), recompute_every):
        state, more = _recomputed(train_step, state, batches[begin : begin + recompute_every])
        metrics += more
    return state, metrics


def _in_a_row(
    train_step: TrainStep, state: TrainState, batches: list[Any]
) -> tuple[TrainState, list[dict[str, Metric]]]:
    metrics = []
    for batch in batches:
        state, one = train_step(state, batch)
        metrics.append(one)
    return state, metrics


def _recomputed(
    train_step: TrainStep, state: TrainState, batches: list[Any]
) -> tuple[TrainState, list[dict[str, Metric]]]:
    trees = expression(((state.params, state.buffers, state.opt_state), batches))
    build = trees.build()
    rebuild: list[Callable[[Sequence[Tensor]], Any]] = []

    def run(*flat: Tensor) -> tuple[Tensor, ...]:
        (params, buffers, opt_state), segment = build(flat)
        start = state.replace(params=params, buffers=buffers, opt_state=opt_state)
        out = expression(_in_a_row(train_step, start, segment))
        rebuild[:] = [out.build()]
        return tuple(out.tensors)

    flat = _Segment.apply(run, *trees.tensors)  # type: ignore[no-untyped-call]
    new, of_steps = rebuild[0](flat)
    return new.replace(buffers=detached(new.buffers)), of_steps


class _WithoutStrangers(TorchFunctionMode):
    """Refuse tensors that would lose their gradient, like `cuts_marked`, in schedules too."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not tracing.differentiated():
            refuse_strangers(args, kwargs)
        return func(*args, **(kwargs or {}))


class _Segment(torch.autograd.Function):
    """Several steps, of which the backward pass is given only the start."""

    generate_vmap_rule = True

    @staticmethod
    def forward(run: Callable[..., tuple[Tensor, ...]], *flat: Tensor) -> tuple[Tensor, ...]:
        with torch.enable_grad(), _WithoutStrangers():
            outputs = run(*map(Tensor.detach, flat))
        if any(tensor.requires_grad for tensor in outputs):
            raise ValueError(
                "a loss function or a schedule closes over a tensor that requires a gradient, which recompute_every "
                "would keep from it: give it in the batches, or as a hyperparameter in the state (ll.optim.injected), or "
                "leave out recompute_every"
            )
        return tuple(map(Tensor.clone, outputs))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.run = inputs[0]
        ctx.save_for_backward(*inputs[1:])
        ctx.mark_non_differentiable(*filterfalse(_is_smooth, output))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        indices = [*compress(count(), ctx.needs_input_grad[1:])]

        def run(*varied: Tensor) -> tuple[Tensor, ...]:
            inputs = {**dict(enumerate(flat)), **dict(zip(indices, varied, strict=True))}
            return tuple(filter(_is_smooth, ctx.run(*inputs.values())))

        with _beneath_gradient() as (down, up):
            flat = [*map(down, ctx.saved_tensors)]
            _, pull_back = torch.func.vjp(run, *map(flat.__getitem__, indices))[:2]
            grads_in = pull_back(tuple(map(down, filter(_is_smooth, grads))))
        grad_of = dict(zip(indices, map(up, grads_in), strict=True))
        return None, *map(grad_of.get, range(len(flat)))


@contextmanager
def _beneath_gradient() -> Iterator[tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]]:
    """Leave one level of torch.func if it is that of a gradient, and return functions that move a tensor out and back.

    torch.func.grad records its own backward pass, of which nothing is left when it returns, so it need not hold what
    a segment computes again. Transforms around it record what they need.
    """
    top = torch._C._functorch.peek_interpreter_stack()
    if top is None or top.key() != torch._C._functorch.TransformType.Grad:
        yield lambda tensor: tensor, lambda tensor: tensor
        return
    level = top.level()
    with retrieve_current_functorch_interpreter().lower():
        yield (
            lambda tensor: torch._C._functorch._unwrap_for_grad(tensor, level),
            lambda tensor: torch._C._functorch._wrap_for_grad(tensor, level),
        )


def _is_smooth(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()
