"""Gradient check for microbatches."""

from __future__ import annotations

import warnings
from typing import Any

from looplib._core.checks import check, few
from looplib._core.records import chain
from looplib._core.trees import batch_size
from looplib.grads._accumulation import accumulate
from looplib.grads._wrapper import check_grad_fn
from looplib.testing._compare import copied, differing
from looplib.testing._float64 import in_float64
from looplib.testing._report import fail
from looplib.testing._surroundings import streams_kept
from looplib.types import GradFn, TrainState


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
        grad_fn: the function that your script accumulates, without wrappers for the gradient of a whole step, such as
            `clip_by_global_norm`, which goes around `accumulate`.
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
    for record in chain(grad_fn):
        check(
            not record.whole_step or record.name == "retry_on_oom",
            f"this grad_fn ends in {record.name}, which acts on the gradient of a whole step, not on a microbatch's: give "
            f"the one that {record.name} is put around",
        )
    count = batch_size(batch)
    check(
        2 <= microbatches <= count,
        f"microbatches is {microbatches}, and the batch has {count} samples: give 2 or more, up to that",
    )
    with streams_kept(state), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="labels of -100")  # reported by the comparison if it matters
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
        "Usually a loss that is a mean over something else than the samples (tokens, pixels, what a mask leaves) "
        "returned as a plain scalar, which weighs by its samples: return ll.Mean(total, weight), the sum and the "
        "number of what counts. Or a sum over the samples: return a mean, or ll.Mean(total, number of samples). Or a "
        "term that looks across samples, such as a contrastive loss or a balance of experts, which microbatches cannot "
        "give."
    )
