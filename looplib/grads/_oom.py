"""Retry with smaller microbatches when memory runs out."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from looplib._core.checks import check_optional_count
from looplib._core.collective import named, raise_of
from looplib._core.engines import PassFailed
from looplib._core.memory import half, out_of_memory
from looplib._core.ranks import gather, largest_over_ranks, rank, several
from looplib._core.tracing import UntraceableError, tracing
from looplib._core.trees import batch_size as count_examples
from looplib._core.trees import split
from looplib._objective import mean_of_sums
from looplib.gradients import check_parts
from looplib.grads._accumulation import over
from looplib.grads._wrapper import kept
from looplib.metrics._mean import Mean
from looplib.types import WHOLE, GradFn, Gradients, Part, TrainState


def retry_on_oom(
    grad_fn: GradFn, size: int | None = None, *, batch_size: Callable[[Any], int] = count_examples
) -> GradFn:
    """When memory runs out, take the gradient of the same batch in pieces of half the size, and so from then on.

    >>> import looplib as ll, torch
    >>> model = torch.nn.Linear(2, 1)
    >>> grad_fn = ll.grads.retry_on_oom(ll.make_grad_fn(model, lambda model, x: model(x).square().mean()))
    >>> gradients = grad_fn(ll.init_state(model), torch.zeros(8, 2))
    >>> gradients.metrics["microbatch_size"].compute()
    8

    The gradient is the whole batch's, as by `accumulate`; the metric `microbatch_size` says how large the pieces
    were, and a warning when they become smaller. What is remembered is the size that fits, which belongs to
    the machine and not to the run, so it is no part of the state: it stands in this function, and with dropout or
    BatchNorm, whose results depend on the pieces, so do the results.

    Args:
        grad_fn: of a piece; `accumulate(...)` too.
        size: the size of pieces to begin with; None for the whole batch.
        batch_size: counts the examples in a batch, as for `make_grad_fn`.

    A model in DistributedDataParallel is cut alike on all ranks: when memory runs out on one, all begin again with
    pieces that are half as large, and `microbatch_size` is that of the rank with the largest. The engine then sends
    nothing while the passes run, so that they can be given up; the gradients are reduced after them, in buckets, and
    the buffers of the first rank are sent to all. That takes longer than DDP's own reduction, which is hidden
    behind the backward pass. Within `ll.grads.reduce_gradients`, around a model that is not wrapped, each rank
    cuts its own part by itself.

    Raises:
        torch.OutOfMemoryError, RuntimeError, MemoryError: the original, when one example alone does not fit. With DDP
            this or any other error of one rank's is raised on all, with the rank in the message.
        RuntimeError: a model whose passes no rank can give up alone, on several ranks: in FSDP2 or tensor parallel,
            with SyncBatchNorm, in DDP with `static_graph=True` or a communication hook.
        ValueError: within `accumulate`, whose gradients so far a failed attempt would have spoiled.
    """
    check_parts(grad_fn, "retry_on_oom")
    check_optional_count("size", size, advice="give a whole number of examples, at least 1")
    fitting = size
    finish: Callable[[TrainState, Gradients], Gradients] | None = None  # of an engine's passes, once one was made

    def attempt(state: TrainState, batch: Any, pieces: int, count: int, part: Part) -> tuple[Gradients | None, float]:
        """The gradients, or None where memory ran out on any rank; and the size of the microbatches there."""
        nonlocal finish
        saved = {name: tensor.clone() for name, tensor in state.buffers.items()} if part.donate else {}
        outcome = _outcome(lambda: over(grad_fn, state, split(batch, count, pieces, batch_size), count, part), pieces)
        finish = outcome.finish or finish
        failed, largest = outcome.failed, float(pieces)
        if together := finish is not None and several():
            failed, largest = largest_over_ranks([failed, largest])
        if not failed:
            return outcome.out, largest
        _put_back(state, saved)
        if failed == math.inf:
            try:
                _raise(outcome.error, together)
            finally:
                del outcome  # its error knows this frame, and all that the attempt had allocated
        return None, failed

    def retrying(state: TrainState, batch: Any, part: Part = WHOLE) -> Gradients:
        nonlocal fitting
        _refuse_what_cannot_be_retried(part)
        own = several() and not part.context.local  # what an engine would average, or this rank's alone
        asked = dataclasses.replace(
            part,
            reduction="sum" if own else part.reduction,
            context=dataclasses.replace(part.context, retryable=True),
        )
        count = batch_size(batch)
        while True:
            pieces = max(1, count if fitting is None else min(fitting, count))
            out, size = attempt(state, batch, pieces, count, asked)
            if out is not None:
                break
            fitting = half(round(size), count)
        if own:
            out = _finished(out, finish, state, part)
        return out._replace(metrics={**out.metrics, "microbatch_size": Mean(round(size))})

    return kept(retrying, "retry_on_oom", grad_fn, whole_step=True)


class _Outcome(NamedTuple):
    """What came of an attempt.

    Attributes:
        out: the gradients, where there was memory for them.
        finish: of an engine's passes, where it made any.
        failed: 0; the size of the microbatches for which memory ran out; or inf for an error that smaller ones keep.
        error: that error.
    """

    out: Gradients | None = None
    finish: Callable[[TrainState, Gradients], Gradients] | None = None
    failed: float = 0.0
    error: Exception | None = None


def _outcome(run: Callable[[], Gradients], pieces: int) -> _Outcome:
    """`run()`, or how it failed. No local of this frame is an error, which would keep the memory of the attempt."""
    try:
        out = run()
        return _Outcome(out, out.finish)
    except Exception as raised:
        finish = raised.finish if isinstance(raised, PassFailed) else None
        if pieces > 1 and out_of_memory(_original(raised)):
            return _Outcome(finish=finish, failed=pieces)
        return _Outcome(finish=finish, failed=math.inf, error=_original(raised))


def _put_back(state: TrainState, buffers: Mapping[str, Tensor]) -> None:
    """Buffers as they were before an attempt that wrote to them."""
    with torch.no_grad():
        for name, tensor in buffers.items():
            state.buffers[name].copy_(tensor)


def _refuse_what_cannot_be_retried(part: Part) -> None:
    if tracing():
        raise UntraceableError(
            "retry_on_oom cannot try again within a compiled step: leave it out and give ll.accumulate(grad_fn, "
            "size=...), or leave out ll.compile_step"
        )
    if part.context.into is not None or not part.context.last:
        raise ValueError(
            "retry_on_oom within accumulate would add to gradients that a failed attempt has spoiled: put it "
            "around, retry_on_oom(accumulate(grad_fn, ...))"
        )


def _finished(
    out: Gradients,
    finish: Callable[[TrainState, Gradients], Gradients] | None,
    state: TrainState,
    part: Part,
) -> Gradients:
    """The gradients as they were asked for, from those of this rank's summed loss."""
    if finish is None:
        return out if part.summed else mean_of_sums(out)
    if part.summed:
        raise ValueError(
            "retry_on_oom of a model in DistributedDataParallel gives the gradient of a whole step, and was "
            "asked for a part of one: put it around what asks"
        )
    return finish(state, out)


def _original(raised: Exception) -> Exception:
    return raised.error if isinstance(raised, PassFailed) else raised


def _raise(error: Exception | None, together: bool) -> NoReturn:
    """Raise this rank's error, or on all ranks that of the first that has one."""
    failures = gather(None if error is None else named(rank(), error)) if together else []
    raise_of({place: one for place, one in enumerate(failures) if one is not None}, rank(), error)
    assert error is not None
    raise error
