"""Gradient checks: every parameter has one, and microbatches add up to the whole batch."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from torch import Tensor

from looplib._core.checks import check, check_count, few
from looplib._core.samples import counter_of
from looplib.grads import accumulate
from looplib.grads.wrapping import check_grad_fn
from looplib.state import copy_state
from looplib.testing._compare import check_tolerance, copied, differing, fail, in_float64
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
    grad_fn = check_grad_fn(grad_fn, "assert_all_gradients")
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


def assert_microbatches_equal_batch(
    grad_fn: GradFn, state: TrainState, batch: Any, *, microbatches: int = 3, tolerance: float = 1e-4
) -> None:
    """Check gradient accumulation: the microbatches of `ll.accumulate` give the gradient of the whole batch.

    >>> import looplib as ll, torch
    >>> from looplib import testing
    >>> model = torch.nn.Linear(2, 1)
    >>> grad_fn = ll.make_grad_fn(model, lambda model, x: model(x).square().mean())
    >>> testing.assert_microbatches_equal_batch(grad_fn, ll.init_state(model), torch.randn(8, 2))

    Ranks add up the gradients of their parts of a batch by the same weights, so this finds losses that would be averaged
    wrongly over ranks too. `assert_ranks_train_alike` also runs them.

    The computation is in float64 if the loss function supports it. Build the model without dropout, since microbatches
    draw different random numbers from the whole batch.

    Args:
        grad_fn: the function that your script accumulates, without functions around `accumulate`, such as
            `sam`.
        state: the state at which to take the gradient.
        batch: a batch as irregular as your real ones. If every sample has the same number of tokens, a wrong average
            goes unnoticed.
        microbatches: number of microbatches, preferably one that does not divide the batch evenly.
        tolerance: largest difference of gradients, relative to the largest gradient. Mistakes usually cause 1e-2 or
            more.

    Raises:
        AssertionError: gradients differ. The message has the parameters and the differences.
        ValueError: there are fewer samples than microbatches, the loss draws its own random numbers, or `grad_fn` is
            for a whole step.
    """
    __tracebackhide__ = True
    grad_fn = check_grad_fn(grad_fn, "assert_microbatches_equal_batch")
    check_tolerance(tolerance)
    check_count("microbatches", microbatches, 2)
    count = counter_of(grad_fn)(batch)
    check(
        microbatches <= count,
        f"microbatches is {microbatches}, and the batch has {count} samples: give 2 or more, up to that",
    )
    with streams_kept(state), warnings.catch_warnings():
        # Reported by the comparison if it matters.
        warnings.filterwarnings(
            "ignore", message="the (batch has labels of -100|loss (is a (sum|plain scalar)|leaves out labels))"
        )
        wide, rows, whole = in_float64(grad_fn, state, batch)
        reseeded = grad_fn(wide.replace(seed=wide.seed + 1), copied(rows))
        drawn = differing({"grads": whole.grads}, {"grads": reseeded.grads}, tolerance)
        check(
            not drawn,
            f"the gradient of {few(drawn)} differs from one state.seed to another: the loss draws random numbers, and "
            "microbatches draw others than the batch, so there is nothing to compare. Build the model without dropout, or "
            "turn off what draws by eval() on that layer before ll.make_grad_fn",
        )
        accumulated = accumulate(grad_fn, microbatches)(wide, rows)
    fail(
        f"{microbatches} microbatches of {count} samples do not give the gradient of the whole batch",
        differing({"grads": whole.grads}, {"grads": accumulated.grads}, tolerance),
        _usual_cause(differing(wide.buffers, whole.buffers)),
    )


def _usual_cause(written: list[str]) -> str:
    if written:
        return (
            f"The forward pass moved {few(written)}: BatchNorm, or another layer in training mode that takes its "
            "statistics over the batch, sees only a microbatch at a time, so that its result depends on their size. "
            "GroupNorm or LayerNorm does not; on ranks, torch.nn.SyncBatchNorm sees all; or put the layer in eval mode."
        )
    return (
        "Usually a loss that is a mean over something else than the samples (tokens, pixels, what a mask leaves, class weights) "
        "returned as a plain scalar, which weighs by its samples: return ll.Mean(total, weight), the sum and the "
        "number of what counts. Or a sum over the samples: return a mean, or ll.Mean(total, number of samples). Or a "
        "term that looks across samples, such as a contrastive loss or a balance of experts, which microbatches cannot "
        "give."
    )
