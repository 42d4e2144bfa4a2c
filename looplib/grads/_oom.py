"""Out-of-memory recovery: retry a batch with smaller microbatches."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch import nn

from looplib._core.checks import check_optional_count
from looplib._core.engines import engine_of
from looplib._core.errors import half, out_of_memory
from looplib._core.lease import put_back, with_copies
from looplib._core.ranks import is_sharded
from looplib._core.records import chain, with_repr
from looplib._core.tracing import UntraceableError, tracing
from looplib._core.trees import batch_size as count_examples
from looplib._core.trees import split
from looplib.grads._accumulation import added_up
from looplib.grads._wrapper import check_parts, joined, kept
from looplib.metrics._mean import Mean
from looplib.types import WHOLE, GradFn, Gradients, GradRequest, TrainState


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

    On several ranks, use it inside `ll.grads.reduce_gradients`, around a model that is not wrapped: each rank then splits
    its own batch. DistributedDataParallel and FSDP2 cannot abandon a pass on one rank while the others wait for it.

    Args:
        grad_fn: gradient function, called once per microbatch. It may be an `accumulate(...)`.
        size: number of samples per microbatch to start with. None starts with the whole batch.
        batch_size: function that counts the samples in a batch, as for `make_grad_fn`.

    Raises:
        torch.OutOfMemoryError, RuntimeError, MemoryError: the original error, if a single sample does not fit.
        RuntimeError: the model is in DistributedDataParallel, has DTensors (FSDP2, tensor parallelism) or SyncBatchNorm.
        ValueError: the wrapper is used inside `accumulate`, where a failed attempt would corrupt the gradients so
            far.
    """
    grad_fn = check_parts(grad_fn, "retry_on_oom")
    check_optional_count("size", size, advice="give a whole number of samples, at least 1")
    _refuse_what_waits(grad_fn)
    add_up = added_up(grad_fn)
    fitting = size or math.inf

    def size_in(count: int) -> int:
        """Microbatch size for a batch of `count` samples."""
        return max(1, int(min(fitting, count)))

    def attempt(state: TrainState, batch: Any, count: int, request: GradRequest) -> Gradients | None:
        """Return the gradients, or None if memory did not suffice and the next attempt takes half."""
        nonlocal fitting
        samples = size_in(count)
        saved = with_copies(state.buffers.values()) if request.donate else []
        try:
            return add_up(state, split(batch, count, samples, batch_size), count, request)
        except Exception as error:
            put_back(saved)
            if samples == 1 or not out_of_memory(error):
                raise
        # Outside of `except`: the error would keep everything alive that the attempt has allocated.
        fitting = half(samples, count)
        return None

    def retrying(state: TrainState, batch: Any, request: GradRequest = WHOLE) -> Gradients:
        _refuse_what_cannot_be_retried(request)
        count = batch_size(batch)
        while (out := attempt(state, batch, count, request)) is None:
            pass
        return out._replace(metrics=joined(out.metrics, {"microbatch_size": Mean(size_in(count))}))

    made = kept(retrying, "retry_on_oom", grad_fn, whole_step=True)
    return with_repr(made, retry_on_oom, grad_fn, size=size, batch_size=batch_size)


def _refuse_what_waits(grad_fn: GradFn) -> None:
    for record in chain(grad_fn):
        if record.model is not None and (what := _waits_for_ranks(record.model)):
            raise RuntimeError(
                f"retry_on_oom gives up a pass on one rank alone, and {what} waits for the other ranks in each pass: "
                "leave the model unwrapped, ll.grads.reduce_gradients(ll.grads.retry_on_oom(grad_fn)), or choose "
                "microbatches that fit, ll.accumulate(grad_fn, size=...)"
            )


def _waits_for_ranks(model: nn.Module) -> str | None:
    """Name of the part of a module that needs all ranks in each pass, or None."""
    if any(map(is_sharded, model.parameters())):
        return "a model with DTensors"
    if any(isinstance(module, nn.SyncBatchNorm) for module in model.modules()):
        return "SyncBatchNorm"
    engine = engine_of(model)
    return None if engine is None else engine.name


def _refuse_what_cannot_be_retried(request: GradRequest) -> None:
    if tracing():
        raise UntraceableError(
            "retry_on_oom cannot try again within a compiled step: leave it out and give ll.accumulate(grad_fn, "
            "size=...), or leave out ll.compile_step"
        )
    if request.sum is not None and not request.sum.local:
        raise ValueError(
            "retry_on_oom within accumulate would add to gradients that a failed attempt has spoiled: put it "
            "around, retry_on_oom(accumulate(grad_fn, ...))"
        )
