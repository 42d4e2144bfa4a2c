"""Out-of-memory recovery: retry a batch with smaller microbatches."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from looplib._core.calls import remember
from looplib._core.checks import check_optional_count
from looplib._core.collective import named, raise_of
from looplib._core.engines import PassFailed
from looplib._core.mappings import mapped
from looplib._core.memory import half, out_of_memory
from looplib._core.ranks import gather, largest_over_ranks, rank, several
from looplib._core.tracing import UntraceableError, tracing
from looplib._core.trees import batch_size as count_examples
from looplib._core.trees import split
from looplib._objective import mean_of_sums
from looplib._wrapping import check_parts
from looplib.grads._accumulation import over, summands_of
from looplib.grads._wrapper import kept
from looplib.metrics._mean import Mean
from looplib.types import WHOLE, GradFn, Gradients, Part, TrainState


def retry_on_oom(
    grad_fn: GradFn, size: int | None = None, *, batch_size: Callable[[Any], int] = count_examples
) -> GradFn:
    """Out-of-memory recovery: retry the batch in microbatches of half the size, and keep that size from then on.

    >>> import looplib as ll, torch
    >>> model = torch.nn.Linear(2, 1)
    >>> grad_fn = ll.grads.retry_on_oom(ll.make_grad_fn(model, lambda model, x: model(x).square().mean()))
    >>> gradients = grad_fn(ll.init_state(model), torch.zeros(8, 2))
    >>> gradients.metrics["microbatch_size"].compute()
    8

    The gradient is that of the whole batch, as with `accumulate`. The metric `microbatch_size` reports the size in
    samples, and a warning is given each time it is halved.

    The size that fits depends on the machine and not on the run, so the returned function remembers it and the state
    does not. With dropout or BatchNorm, whose results depend on the microbatches, the results therefore depend on the
    machine as well.

    In DistributedDataParallel all ranks split alike: if one runs out of memory, all retry with microbatches of half
    the size, and `microbatch_size` is the largest of all ranks. During the passes DDP sends nothing, so that they can
    be abandoned. Afterwards the gradients are reduced in buckets, and the first rank's buffers are sent to all. This
    takes longer than DDP's own reduction, which overlaps with the backward pass. Inside `ll.grads.reduce_gradients`,
    around a model that is not wrapped, each rank splits its batch independently.

    Args:
        grad_fn: gradient function, called once per microbatch. It may be an `accumulate(...)`.
        size: number of samples per microbatch to start with. None starts with the whole batch.
        batch_size: function that counts the samples in a batch, as for `make_grad_fn`.

    Raises:
        torch.OutOfMemoryError, RuntimeError, MemoryError: the original error, if a single sample does not fit. With
            DDP, an error on one rank, of this or any other kind, is raised on all, with the rank in the message.
        RuntimeError: on several ranks, one rank cannot abandon the model's passes alone: FSDP2, tensor parallelism,
            SyncBatchNorm, or DDP with `static_graph=True` or a communication hook.
        ValueError: the wrapper is used inside `accumulate`, where a failed attempt would corrupt the gradients so
            far.
    """
    grad_fn = check_parts(grad_fn, "retry_on_oom")
    check_optional_count("size", size, advice="give a whole number of samples, at least 1")
    summands = summands_of(grad_fn)
    fitting = size or math.inf
    # Of an engine's passes, known after the first attempt.
    finish: Callable[[TrainState, Gradients], Gradients] | None = None

    def attempt(state: TrainState, batch: Any, count: int, part: Part) -> tuple[Any, float] | None:
        """Return the gradients and the microbatch size, or None if any rank ran out of memory and all take half."""
        nonlocal finish, fitting
        pieces = max(1, int(min(fitting, count)))
        saved = mapped(Tensor.clone, state.buffers) if part.donate else {}
        outcome = _outcome(
            lambda: over(summands, state, split(batch, count, pieces, batch_size), count, part), pieces
        )
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
                del outcome  # the error refers to this frame, and through it to everything the attempt allocated
        fitting = half(round(failed), count)
        return None

    def retrying(state: TrainState, batch: Any, part: Part = WHOLE) -> Gradients:
        _refuse_what_cannot_be_retried(part)
        reduces = several() and not part.context.local  # what an engine would average, or this rank's gradients
        asked = _retryable(part, reduces)
        count = batch_size(batch)
        while (result := attempt(state, batch, count, asked)) is None:
            pass
        out: Gradients
        out, size = result
        if reduces:
            out = _finished(out, finish, state, part)
        return out._replace(metrics={**out.metrics, "microbatch_size": Mean(round(size))})

    made = kept(retrying, "retry_on_oom", grad_fn, whole_step=True)
    return remember(made, retry_on_oom, grad_fn, size=size, batch_size=batch_size)


class _Outcome(NamedTuple):
    """Result of an attempt.

    Attributes:
        out: the gradients, if memory sufficed.
        finish: of an engine's passes, if there were any.
        failed: 0 for success; the microbatch size that ran out of memory; or inf for an error that smaller
            microbatches would not avoid.
        error: that error.
    """

    out: Gradients | None = None
    finish: Callable[[TrainState, Gradients], Gradients] | None = None
    failed: float = 0.0
    error: Exception | None = None


def _outcome(run: Callable[[], Gradients], pieces: int) -> _Outcome:
    """Result of `run()`. No local of this frame keeps the error, which would keep the attempt's memory alive."""
    try:
        out = run()
        return _Outcome(out, out.finish)
    except Exception as raised:
        finish = raised.finish if isinstance(raised, PassFailed) else None
        if pieces > 1 and out_of_memory(_original(raised)):
            return _Outcome(finish=finish, failed=pieces)
        return _Outcome(finish=finish, failed=math.inf, error=_original(raised))


def _put_back(state: TrainState, buffers: Mapping[str, Tensor]) -> None:
    """Restore buffers to their values before a failed attempt."""
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


def _retryable(part: Part, reduces: bool) -> Part:
    """The part to ask for in each attempt: a sum if the ranks' gradients are combined only at the end."""
    context = dataclasses.replace(part.context, retryable=True)
    return dataclasses.replace(part, reduction="sum" if reduces else part.reduction, context=context)


def _finished(
    out: Gradients,
    finish: Callable[[TrainState, Gradients], Gradients] | None,
    state: TrainState,
    part: Part,
) -> Gradients:
    """Convert the gradients of this rank's summed loss to the reduction that was requested."""
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
    """Raise this rank's error, or on all ranks the error of the first rank that has one."""
    failures = gather(None if error is None else named(rank(), error)) if together else []
    raise_of(dict(enumerate(failures)), rank(), error)
    assert error is not None
    raise error
