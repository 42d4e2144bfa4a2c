"""Gradient averaging over ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from looplib._core import engines
from looplib._core import ranks as _ranks
from looplib._core.records import with_repr
from looplib._core.samples import counter_of, padding_batch
from looplib._objective import mean_over_ranks, uncounted
from looplib.grads.wrapping import DROPPED, as_wrapper, check_grad_fn, check_whole_batch
from looplib.types import BatchPart, GradFn, Gradients, TrainState


def reduce_gradients(grad_fn: GradFn) -> GradFn:
    """Data parallelism without a wrapper: average gradients over ranks after the backward pass.

    >>> import looplib as ll, torch
    >>> model = torch.nn.Linear(2, 1)
    >>> grad_fn = ll.make_grad_fn(model, lambda model, x: model(x).square().mean())
    >>> grad_fn = ll.grads.reduce_gradients(ll.accumulate(grad_fn, 2))
    >>> grad_fn(ll.init_state(model), torch.zeros(4, 2)).samples
    4

    DistributedDataParallel sends gradients while the backward pass is still running, which is faster.
    `reduce_gradients` sends them afterwards and is a function like any other: states need not be bound or donated, so
    you can keep and branch them, and it can go around functions that need a whole rank's batch, such as
    `clip_per_sample`.

    The result is the gradient of the global batch even if the ranks' batches differ in weight: the weights, in
    samples or of a loss `Mean(total, weight)`, are summed first, and then the gradients, in buckets of 25 MiB. A
    parameter that one rank's loss does not reach counts as zero there.

    Args:
        grad_fn: gradient function of one rank's batch. What has a meaning for the whole batch alone, such as `add_noise`,
            goes around `reduce_gradients`.

    Raises:
        ValueError: at the first step on several ranks, if `grad_fn` has a meaning for the whole batch alone.
        RuntimeError: at the first step on several ranks, if the model is in DDP or FSDP2, where gradients would be reduced
            twice.
    """
    grad_fn, compared = check_grad_fn(grad_fn, "reduce_gradients"), False
    counter = counter_of(grad_fn)

    def reduced(state: TrainState, batch: Any, *, part: BatchPart | None = None, **request: Any) -> Gradients:
        nonlocal compared
        if not _ranks.is_distributed():
            return grad_fn(state, batch, part=part, **request)
        check_whole_batch(part, "reduce_gradients")
        if not compared:
            engines.compare(state)
            compared = True
        of_rank = partial(_of_no_samples, grad_fn) if _is_empty(batch, counter) else grad_fn
        out = of_rank(state, batch, part=BatchPart(local=True), **request)
        if out.weight is None:
            what = "gradients without the weight of this rank's part"
            raise TypeError(DROPPED.format(who="reduce_gradients", what=what))
        return mean_over_ranks(out, state.params)

    made = as_wrapper(reduced, "reduce_gradients", grad_fn)
    return with_repr(made, reduce_gradients, grad_fn)


def _is_empty(batch: Any, count_samples: Callable[[Any], int]) -> bool:
    """True if this rank has no sample of the batch. One that cannot be counted is for the function of the user's to judge."""
    try:
        return count_samples(batch) == 0
    except (TypeError, ValueError):
        return False


def _of_no_samples(grad_fn: GradFn, state: TrainState, batch: Any, **request: Any) -> Gradients:
    """Contribution of a rank without samples: the names of its metrics, and zero for everything else."""
    out = grad_fn(state, padding_batch(batch), **{**request, "donate": False})
    weight = None if out.weight is None else out.weight * 0
    return out._replace(grads={}, metrics=uncounted(out.metrics), buffers=state.buffers, samples=0, weight=weight)
