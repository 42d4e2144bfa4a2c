"""Steps that several benchmarks compare: a raw loop with fused AdamW, and looplib's loop that does the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from harness import Step
from torch import Tensor, nn

import looplib as ll

LossFn = Callable[..., Tensor]


def raw_step(
    model: nn.Module,
    loss_fn: LossFn,
    batch: Any,
    *,
    cls: Any = torch.optim.AdamW,
    options: Mapping[str, Any] = MappingProxyType({"lr": 1e-3, "fused": True}),
    clip: Callable[[nn.Module], object] | None = None,
    decay: Callable[[int], float] | None = None,
    copies: bool = False,
) -> Step:
    """A step of a raw loop.

    Args:
        cls, options: of the optimizer; fused AdamW unless given.
        clip: takes the model before the update.
        decay: factor of the learning rate, for `LambdaLR`.
        copies: copy weights and moments before the update as well: the least that a pure step can take.
    """
    optimizer = cls(model.parameters(), **options)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, decay) if decay else None
    copy = copying(optimizer) if copies else None

    def step() -> None:
        optimizer.zero_grad()
        loss_fn(model, batch).backward()  # type: ignore[no-untyped-call]
        if clip:
            clip(model)
        if copy:
            copy()
        optimizer.step()
        if scheduler:
            scheduler.step()

    return step


def copying(optimizer: torch.optim.Optimizer) -> Step:
    """A copy of all weights and moments by one call, kept until the next: a loop holds one old state at a time."""
    held: list[Tensor] = []
    kept: list[Tensor] = []

    def copy() -> None:
        nonlocal held, kept
        if optimizer.state and not held:  # the first update makes the moments
            held = list(optimizer.state)
            held += [entry[key] for entry in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]
        kept = []
        with torch.no_grad():
            kept = torch._foreach_clone(held) if held else kept  # type: ignore[assignment]

    return copy


def in_order(steps: Sequence[Step]) -> Step:
    """A step of each, one after the other."""

    def step() -> None:
        for one in steps:
            one()

    return step


def looplib_step(
    model: nn.Module,
    loss_fn: LossFn,
    batch: Any,
    donate: bool,
    *,
    wrap: Callable[[ll.types.GradFn], ll.types.GradFn] | None = None,
    optimizer: ll.types.Optimizer | None = None,
    compile: Mapping[str, Any] | None = None,
) -> Callable[[], ll.TrainState]:
    """A step of looplib, donated or pure, that returns the new state.

    Args:
        wrap: wraps the gradient function.
        optimizer: AdamW unless given.
        compile: compile the step whole, with these arguments.
    """
    optimizer = optimizer or ll.optimizer(torch.optim.AdamW, lr=1e-3)
    grad_fn = ll.make_grad_fn(model, loss_fn)
    train_step = ll.make_train_step(wrap(grad_fn) if wrap else grad_fn, optimizer, donate=donate)
    train_step = train_step if compile is None else ll.compile_step(train_step, **compile)
    return stepping(train_step, ll.init_state(model, optimizer), batch)


def stepping(train_step: ll.types.TrainStep, state: ll.TrainState, batch: Any) -> Callable[[], ll.TrainState]:
    """A step on the same batch each time, which returns the new state."""

    def step() -> ll.TrainState:
        nonlocal state
        state, _ = train_step(state, batch)
        return state

    return step
