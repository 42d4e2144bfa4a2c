"""Steps that several benchmarks compare: a raw loop with fused AdamW, and looplib's loop that does the same."""

from __future__ import annotations

from collections.abc import Callable
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
    clip: Callable[[nn.Module], object] | None = None,
    decay: Callable[[int], float] | None = None,
    copies: bool = False,
) -> Step:
    """A step of a raw loop.

    Args:
        clip: takes the model before the update.
        decay: factor of the learning rate, for `LambdaLR`.
        copies: copy weights and moments before the update as well: the least that a pure step can take.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
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


def looplib_step(
    model: nn.Module,
    loss_fn: LossFn,
    batch: Any,
    donate: bool,
    *,
    clip: Callable[[ll.types.GradFn], ll.types.GradFn] | None = None,
    lr: float | Callable[[int], float] = 1e-3,
) -> Callable[[], ll.TrainState]:
    """A step of looplib, donated or pure, that returns the new state.

    Args:
        clip: wraps the gradient function.
    """
    optimizer = ll.optimizer(torch.optim.AdamW, lr=lr)
    grad_fn = ll.make_grad_fn(model, loss_fn)
    train_step = ll.make_train_step(clip(grad_fn) if clip else grad_fn, optimizer, donate=donate)
    state = ll.init_state(model, optimizer)

    def step() -> ll.TrainState:
        nonlocal state
        state, _ = train_step(state, batch)
        return state

    return step
