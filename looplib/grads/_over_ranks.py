"""The mean of gradients over ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from looplib._core import ranks as _ranks
from looplib._objective import mean_over_ranks
from looplib.gradients import check_parts
from looplib.grads._wrapper import kept
from looplib.types import WHOLE, GradFn, Gradients, Part, TrainState


def reduce_gradients(grad_fn: GradFn) -> GradFn:
    """The gradient of the global batch from those of the ranks' parts, for a model that no engine wraps.

    >>> import looplib as ll, torch
    >>> model = torch.nn.Linear(2, 1)
    >>> grad_fn = ll.make_grad_fn(model, lambda model, x: model(x).square().mean())
    >>> grad_fn = ll.clip_by_global_norm(ll.grads.reduce_gradients(ll.accumulate(grad_fn, 2)), 1.0)
    >>> grad_fn(ll.init_state(model), torch.zeros(4, 2)).samples
    4

    DistributedDataParallel sends gradients while the backward pass still runs; this sends them after it. For that it
    is a function like any other: states need not be bound nor donated, so runs can be kept and forked, and it stands
    around what has to be whole on one rank, such as `retry_on_oom` and `clip_per_sample`.

    `retry_on_oom` over a model in DistributedDataParallel does the same by itself, in pieces that all ranks agree on.

    What each rank's part weighs, in samples or in the weight of a loss `Mean(total, weight)`, is summed first, and
    the gradients after that, in buckets of 25 MiB. A parameter that a rank's loss does not reach has a zero there.

    Args:
        grad_fn: of a rank's part of the batch. What acts on the gradients of a whole step goes around.

    Raises:
        ValueError: a `grad_fn` that is to go around, such as `clip_by_global_norm`.
        RuntimeError: a model in DDP or FSDP2, at the first step: its gradients would be reduced twice.
    """
    check_parts(grad_fn, "reduce_gradients", but="retry_on_oom")

    def reduced(state: TrainState, batch: Any, part: Part = WHOLE) -> Gradients:
        if not _ranks.several():
            return grad_fn(state, batch, part)
        if part.summed:
            raise ValueError(
                "reduce_gradients within accumulate would send each piece: put it around, "
                "reduce_gradients(accumulate(grad_fn, ...))"
            )
        own = replace(part, reduction="sum", context=replace(part.context, local=True))
        return mean_over_ranks(grad_fn(state, batch, own), state.params)

    return kept(reduced, "reduce_gradients", grad_fn)
