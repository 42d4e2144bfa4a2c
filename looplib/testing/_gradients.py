"""Gradient checks for every parameter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from looplib._core.checks import check, few
from looplib.state import copy_state
from looplib.testing._compare import copied
from looplib.testing._report import fail
from looplib.testing._surroundings import streams_kept
from looplib.types import GradFn, TrainState


def assert_all_gradients(
    grad_fn: GradFn, state: TrainState, batch: Any, *, frozen: Callable[[str, Tensor], bool] | None = None
) -> None:
    """Check that every parameter gets a gradient that is finite and not all zero.

    >>> import looplib as ll, torch
    >>> from looplib import testing
    >>> model = torch.nn.Linear(2, 1)
    >>> grad_fn = ll.make_grad_fn(model, lambda model, x: model(x).square().mean())
    >>> testing.assert_all_gradients(grad_fn, ll.init_state(model), torch.randn(8, 2))

    Parameters that are not trained must be selected by `frozen`, so that none is left out by mistake, and must not
    get a gradient. A branch that is initialized to zero (LoRA, ReZero) hides the parameters behind it until the first
    update, so pass a state after a few steps.

    Args:
        grad_fn: gradient function, with or without wrappers.
        state: the state at which to take the gradient.
        batch: a batch that uses the whole model.
        frozen: `(name, tensor) -> bool`, selects the parameters that are deliberately not trained.

    Raises:
        AssertionError: a parameter fails. The message has the names and the reason for each.
        ValueError: from `grad_fn`, as in training. One of `make_grad_fn` names the parameters that the loss does not
            reach, unless it has `allow_unused=True`.
    """
    __tracebackhide__ = True
    with streams_kept(state):
        out = grad_fn(copy_state(state), copied(batch))
    kept = {name for name, tensor in state.params.items() if frozen is not None and frozen(name, tensor)}
    check(kept or frozen is None, f"frozen chose none of the parameters, which are {few(state.params)}")
    faults = {name: _fault(tensor, out.grads.get(name), name in kept) for name, tensor in state.params.items()}
    lines = [f"{name}: {fault}" for name, fault in faults.items() if fault]
    fail(
        f"{len(lines)} of {len(state.params)} parameters do not get the gradient that they should",
        lines,
        "No gradient: usually a layer that forward() does not call, requires_grad_(False) or trainable= that leaves out "
        "too much, or a .detach(), .item(), .data, argmax or no_grad on the way. Zero: a dead ReLU, a softmax or sigmoid "
        "that is saturated, a mask that hides all, weights at zero in the layer after it. NaN: a log, square root or "
        "division at zero, also where torch.where throws the value away. What is not trained on purpose: "
        "frozen=lambda name, tensor: ...",
    )


def _fault(param: Tensor, grad: Tensor | None, frozen: bool) -> str:
    """Problem with the gradient of a parameter, or an empty string."""
    if frozen:
        return "" if grad is None else "has a gradient, and is to be frozen"
    if grad is None:
        return (
            f"has no gradient, {'the loss does not reach it' if param.requires_grad else 'it does not require one'}"
        )
    if not grad.isfinite().all():
        return f"{int((~grad.isfinite()).sum())} of {grad.numel()} numbers are NaN or infinite"
    return f"all of its {grad.numel()} numbers are zero" if grad.numel() and not grad.any() else ""
