"""Gradient accumulation: one optimizer step over several microbatches.

Each microbatch gives the gradient of its summed loss, added to those before it, and its weight. The sum of gradients
is divided by the sum of weights once, at the end. The result is therefore the gradient of the whole batch however it
was split, and the update does not need to know about microbatches.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from looplib._core import torch_private
from looplib._core.calls import with_repr
from looplib._core.checks import check, check_optional_count
from looplib._core.engines import NO_CONTEXT, Context
from looplib._core.kinds import made
from looplib._core.mappings import pick, subset, without
from looplib._core.ranks import is_distributed
from looplib._core.trees import batch_size as count_examples
from looplib._core.trees import split
from looplib._objective import mean_of_sums, sum_of_weights
from looplib._wrapping import check_parts
from looplib.gradients import indices
from looplib.grads._wrapper import kept, name_of
from looplib.metrics._mean import merge
from looplib.types import WHOLE, GradFn, Gradients, GradRequest, TrainState


def accumulate(
    grad_fn: GradFn,
    microbatches: int | None = None,
    *,
    size: int | None = None,
    dtype: torch.dtype | None = None,
    batch_size: Callable[[Any], int] = count_examples,
) -> GradFn:
    """Gradient accumulation: split each batch into microbatches and add up their gradients.

    >>> import looplib as ll, torch
    >>> model = torch.nn.Linear(2, 1)
    >>> grad_fn = ll.make_grad_fn(model, lambda model, x: model(x).square().mean())
    >>> state, batch = ll.init_state(model), torch.randn(10, 2)
    >>> full, split = grad_fn(state, batch), ll.accumulate(grad_fn, microbatches=4)(state, batch)
    >>> torch.testing.assert_close(split.grads, full.grads)
    >>> ragged = ll.accumulate(grad_fn)(state, [batch[:7], batch[7:]])  # your own microbatches
    >>> torch.testing.assert_close(ragged.grads, full.grads)

    The result is the gradient of the whole batch, even if the microbatches differ in size or in their number of
    tokens: a loss `Mean(total, weight)` is averaged over the weight of the whole batch, such as its tokens, and a
    scalar loss over its samples. A microbatch may have zero weight. Metrics are merged from their totals and weights.
    Peak memory is that of one microbatch.

    Dropout draws different masks for each microbatch, as a function of the state's seed and step and the microbatch's
    index, so with dropout the result depends on how the batch is split. BatchNorm normalizes each microbatch
    separately and updates its running statistics once per microbatch, as in a raw loop.

    Args:
        grad_fn: gradient function, called once per microbatch.
        microbatches: number of microbatches, split along the first dimension as by `torch.tensor_split` (the first
            ones may have one sample more). Batches with fewer samples are split into single samples.
        size: number of samples per microbatch, instead of `microbatches`. The last one may be smaller. If neither is
            given, each batch must be a list of microbatches.
        dtype: dtype to accumulate in and to return. Defaults to the dtype of the parameters; pass `torch.float32` for
            bfloat16 models, where many small gradients would otherwise be rounded away.
        batch_size: function that counts the samples in a batch, as for `make_grad_fn`.

    Raises:
        ValueError: `microbatches` or `size` is below 1, or both are given; a batch is empty, has tensors of different
            lengths, or is of a type that cannot be split; or `grad_fn` has a wrapper that belongs around `accumulate`
            (clipping, `scale_loss`).
        TypeError: neither `microbatches` nor `size` is given and the batch is not a list.
    """
    check(microbatches is None or size is None, f"give microbatches={microbatches} or size={size}, not both")
    check_optional_count("microbatches", microbatches)
    check_optional_count("size", size)
    grad_fn = check_parts(grad_fn, "accumulate")
    summands = summands_of(grad_fn, dtype)

    def accumulated(state: TrainState, batch: Any, request: GradRequest = WHOLE) -> Gradients:
        if microbatches is None and size is None:
            pieces = _given(batch)
            count = sum(map(batch_size, pieces))
        else:
            count = batch_size(batch)
            sizes = size if size is not None else _even(count, microbatches or 1)
            pieces = split(batch, count, sizes, batch_size)
        return over(summands, state, pieces, count, request)

    made = kept(accumulated, "accumulate", grad_fn)
    return with_repr(
        made, accumulate, grad_fn, microbatches=microbatches, size=size, dtype=dtype, batch_size=batch_size
    )


class Summands(NamedTuple):
    """A gradient function of microbatches, whose gradients are to be added up.

    Attributes:
        grad_fn: the function.
        dtype: dtype to add up in; None for the gradients' own.
        adds: True if the function accumulates into the gradients so far itself.
        microbatches: gradients of several microbatches, the last one's with the sum.
    """

    grad_fn: GradFn
    dtype: torch.dtype | None
    adds: bool
    microbatches: Callable[[TrainState, Sequence[Any], GradRequest], list[Gradients]] | None

    def added_by(self, request: GradRequest) -> bool:
        """True if the function, or the engine in it, accumulates into the gradients so far.

        A user's wrapper may change the gradients it receives, which would be wrong for those of earlier microbatches.
        An engine, though, must find the accumulated gradients in `.grad`, where it reduces them over the ranks.
        """
        return self.dtype is None and (self.adds or request.context.ranks > 1)


def summands_of(grad_fn: GradFn, dtype: torch.dtype | None = None) -> Summands:
    record = made(grad_fn)
    if record is None:
        return Summands(grad_fn, dtype, False, None)
    return Summands(grad_fn, dtype, record.adds, record.microbatches if dtype is None else None)


def over(summands: Summands, state: TrainState, pieces: Sequence[Any], count: int, request: GradRequest) -> Gradients:
    """Accumulate the gradients of all microbatches, which hold `count` samples together."""
    context, summed = request.context, request.reduction == "sum"
    alone = len(pieces) == 1 and summands.dtype is None and (context.into is None or summands.added_by(request))
    # Other ranks may have more microbatches, and collective calls must come in the same order on all.
    if alone and (summed or not is_distributed()):
        return summands.grad_fn(state, pieces[0], request)
    whole = dataclasses.replace(request, reduction="sum", context=_counted(context, count))
    if summands.microbatches is not None:
        out = _joined(summands.microbatches(state, pieces, whole))
    else:
        out = _joined(_one_by_one(summands, state, pieces, whole))
    return out if summed else mean_of_sums(out)


def _counted(context: Context, count: int) -> Context:
    if context is NO_CONTEXT and type(count) is int:
        return _of_samples(count)
    return context if context.samples is not None else dataclasses.replace(context, samples=count)


@functools.lru_cache(maxsize=64)
def _of_samples(count: int) -> Context:
    """Context passed to the microbatches of a step with this many samples, cached so that each step reuses it."""
    return Context(samples=count)


def _joined(outs: Sequence[Gradients]) -> Gradients:
    """The last microbatch's result, which holds the accumulated gradients, with everyone's metrics, samples and weights."""
    weights = [out.weight for out in outs if out.weight is not None]
    return outs[-1]._replace(
        metrics=merge(*map(_metrics_of, outs)),
        samples=sum(map(_samples_of, outs)),
        weight=sum_of_weights(weights) if weights else None,
    )


_metrics_of, _samples_of = map(operator.attrgetter, ("metrics", "samples"))


def _one_by_one(
    summands: Summands, state: TrainState, pieces: Sequence[Any], request: GradRequest
) -> list[Gradients]:
    """Call the gradient function once per microbatch and add up the gradients."""
    grad_fn, dtype = summands.grad_fn, summands.dtype
    normalizer, ranks, adds = request.normalizer, request.context.ranks, summands.added_by(request)
    grads: dict[str, Tensor] = {}
    _add(grads, request.context.into or {}, dtype)
    outs: list[Gradients] = []
    for index, piece in zip(indices(request, len(pieces)), pieces, strict=True):
        last = request.context.last and len(outs) == len(pieces) - 1
        context = dataclasses.replace(request.context, into=grads if adds else None, last=last, ranks=ranks)
        out = grad_fn(state, piece, dataclasses.replace(request, index=index, normalizer=normalizer, context=context))
        _check_summed(grad_fn, out, dtype)
        normalizer, ranks = out.normalizer, out.ranks
        adds = adds or ranks > 1
        if adds:
            grads = out.grads
        else:
            _add(grads, out.grads, dtype)
        outs.append(out._replace(grads={}, added_up=None))
        state = _moved_on(state, out)
    outs[-1] = outs[-1]._replace(grads=grads, added_up=out.added_up)
    return outs


def _check_summed(grad_fn: GradFn, out: Gradients, dtype: torch.dtype | None) -> None:
    """Raise if a microbatch's gradients cannot be added to those of others."""
    if out.ranks == 1:
        if out.weight is None:
            raise TypeError(
                f"{getattr(grad_fn, '__name__', grad_fn)} gave no weight for a piece of a batch: a GradFn that is "
                "accumulated hands its `request` on to the one that it wraps (see ll.types.GradRequest)"
            )
        return
    if dtype is not None:
        raise RuntimeError(
            f"accumulate(dtype={dtype}) adds up in memory of its own, which DDP and FSDP2 do not reduce over the "
            "ranks: leave it out, and give fully_shard a MixedPrecisionPolicy(reduce_dtype=...), or leave the "
            "model unwrapped and use ll.grads.reduce_gradients"
        )
    if not _untouched(out):
        raise RuntimeError(
            f"{name_of(grad_fn)} changes gradients within accumulate, and DDP and FSDP2 add up those of all "
            "microbatches in one place, so those of earlier microbatches would be changed again: put it around, "
            f"{name_of(grad_fn)}(accumulate(grad_fn, ...)), or leave the model unwrapped and use "
            "ll.grads.reduce_gradients(accumulate(...))"
        )


def _untouched(out: Gradients) -> bool:
    """True if these are the gradients that an engine has accumulated, unwritten since."""
    if out.added_up is None or out.added_up.keys() != out.grads.keys():
        return False
    added = out.added_up.items()
    return all(out.grads[name] is grad and torch_private.version(grad) == writes for name, (grad, writes) in added)


def _moved_on(state: TrainState, out: Gradients) -> TrainState:
    """The state for the next microbatch: with the buffers and renormed embeddings that this one produced."""
    if any(tensor is not state.buffers[name] for name, tensor in out.buffers.items()):
        state = state.replace(buffers=out.buffers)
    if out.params is not None:
        state = state.replace(params={**state.params, **out.params})
    return state


def _given(batch: Any) -> Sequence[Any]:
    if not isinstance(batch, (list, tuple)):
        raise TypeError(
            f"accumulate without microbatches= or size= takes a list of pieces; this batch is a "
            f"{type(batch).__name__}: say how to cut it, or let the loader's collate_fn make a list"
        )
    if not batch:
        raise ValueError("the batch is an empty list: accumulate needs at least one piece")
    return batch


def _even(count: int, pieces: int) -> list[int]:
    pieces = max(1, min(pieces, count))
    return [count // pieces + (index < count % pieces) for index in range(pieces)]


def _add(wide: dict[str, Tensor], grads: Mapping[str, Tensor], dtype: torch.dtype | None) -> None:
    if old := subset(wide, grads):
        torch_private.foreach_add_([*old.values()], [*pick(grads, old).values()])
    new = without(grads, wide)
    wide |= new if dtype is None else {name: grad.to(dtype) for name, grad in new.items()}
