"""Out-of-memory recovery for evaluation and prediction.

A batch that does not fit is split and the results are combined: records are merged and outputs concatenated. The
caller gets the result of the whole batch.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

import torch

from looplib._core.checks import check_optional_count, warn
from looplib._core.records import Made, check_kind, kind_of, with_record, with_repr
from looplib._core.samples import counter_of, split
from looplib.evaluation._outputs import end_to_end
from looplib.metrics import merge
from looplib.types import Metric, TrainState

Step = TypeVar("Step", bound=Callable[[TrainState, Any], Any])


def split_on_oom(step: Step, size: int | None = None, *, count_samples: Callable[[Any], int] | None = None) -> Step:
    """Out-of-memory recovery: evaluate or predict with microbatches of half the size, and keep that size from then on.

    >>> import looplib as ll, torch
    >>> model = torch.nn.Linear(2, 1)
    >>> state, batches = ll.init_state(model), torch.ones(10, 2).split(4)
    >>> eval_step = ll.evaluation.split_on_oom(ll.make_eval_step(model, lambda model, x: {"ones": ll.Mean(x.sum(), x.numel())}))
    >>> ll.evaluate(eval_step, state, batches)
    {'ones': 1.0}
    >>> predict_step = ll.evaluation.split_on_oom(ll.make_predict_step(model, lambda model, x: model(x)), size=3)
    >>> [len(out) for out in ll.predict(predict_step, state, batches)]
    [4, 4, 2]

    The metrics are those of the whole batch: the totals and weights of a `Mean` are added up, and a scalar is
    weighted by the number of samples in its microbatch. Outputs are in the order of the batch. A warning is given
    each time the size is halved. The returned function remembers the size that fits; training steps have their own.

    On several ranks each rank splits its batches independently. Models in FSDP2 are an exception, since their forward
    passes need all ranks together: use batches that fit.

    Args:
        step: from `make_eval_step` or `make_predict_step`. If it draws random numbers, it draws the same ones for
            each microbatch.
        size: number of samples per microbatch to start with. None starts with the whole batch.
        count_samples: function that counts the samples in a batch. Defaults to that of the step.

    Raises:
        torch.OutOfMemoryError, RuntimeError, MemoryError: the original error, if a single sample does not fit.
        ValueError: a batch cannot be split, or outputs do not have one row per sample.
        TypeError: the output of a batch that was split contains something other than tensors, or
            `count_samples` is not a function.
    """
    check_optional_count("size", size, advice="give a whole number of samples, at least 1")
    step = check_kind(step, "split_on_oom", "eval_step", "predict_step")
    counter, fitting = counter_of(step, count_samples), size

    def splitting(state: TrainState, batch: Any) -> Any:
        nonlocal fitting
        count = counter(batch)
        while True:
            largest = max(1, min(fitting or count, count))
            pieces = split(batch, count, largest, counter)
            if (outs := _attempt(step, state, pieces, largest)) is not None:
                return outs[0] if len(outs) == 1 else _together([*map(counter, pieces)], outs)
            fitting = _half(largest, count)

    recorded = with_record(cast(Step, splitting), Made(kind_of(step), "split_on_oom", step, count_samples=counter))
    remembered: Step = with_repr(recorded, split_on_oom, step, size=size, count_samples=count_samples)
    return remembered


_SIGNS = (
    "out of memory",
    "can't allocate memory",  # torch's CPU allocator
    "not enough memory",
    "CUDNN_STATUS_NOT_SUPPORTED",
    "CUBLAS_STATUS_ALLOC_FAILED",
)


def _out_of_memory(error: BaseException) -> bool:
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _SIGNS)


def _attempt(
    step: Callable[[TrainState, Any], Any], state: TrainState, pieces: Sequence[Any], largest: int
) -> list[Any] | None:
    """The step's result for each microbatch, or None if memory runs out and smaller ones may fit."""
    try:
        return [step(state, piece) for piece in pieces]
    except (RuntimeError, MemoryError) as error:
        if not _out_of_memory(error):
            raise
        if largest == 1:
            error.add_note("split_on_oom: this is one sample alone, which cannot be cut")
            raise
    return None


def _together(counts: list[int], outs: list[Any]) -> Any:
    """Combine the results of the microbatches."""
    if all(isinstance(out, Mapping) and all(isinstance(value, Metric) for value in out.values()) for out in outs):
        return merge(*outs)
    return end_to_end(counts, outs)


def _half(pieces: int, count: int) -> int:
    """The next size to try after a failed attempt."""
    # Only here, outside the handler, has the traceback released the attempt's memory.
    gc.collect()
    if torch.accelerator.is_available():
        torch.accelerator.memory.empty_cache()
    smaller = -(-pieces // 2)
    warn(f"out of memory on a batch of {count}: from now on in microbatches of {smaller}")
    return smaller
