"""Gradient accumulation: one optimizer step over several microbatches.

Each microbatch gives the gradient of its summed loss, added to those before it, and its weight. The sum of gradients
is divided by the sum of weights once, at the end. The result is therefore the gradient of the whole batch however it
was split, and the update does not need to know about microbatches.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from looplib._core import torch_private
from looplib._core.checks import check, check_optional_count
from looplib._core.mappings import in_dtypes_of, pick, subset, without
from looplib._core.records import record_of, with_repr
from looplib._core.samples import counter_of, even, split
from looplib._objective import mean_of_sums
from looplib.gradients import indices
from looplib.grads.wrapping import DROPPED, as_wrapper, check_grad_fn, name_of
from looplib.metrics import merge
from looplib.types import BatchPart, GradFn, Gradients, TrainState


def accumulate(
    grad_fn: GradFn,
    microbatches: int | None = None,
    *,
    size: int | None = None,
    dtype: torch.dtype | None = None,
    count_samples: Callable[[Any], int] | None = None,
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
    tokens. A scalar loss is taken for the mean over the samples of its microbatch and counts by their number, as in a raw
    loop that calls `(loss * (len(microbatch) / len(batch))).backward()`. So a sum (`reduction="sum"`), a mean over tokens and
    a mean by class weights (`cross_entropy(weight=...)`) are wrong as plain scalars: return `Mean(total, weight)`, which is
    averaged over the weight of the whole batch: its samples, tokens, or `weight[labels].sum()`.
    `ll.testing.assert_microbatches_equal_batch` finds such a loss.

    A warning says so where torch's graph of the loss shows it. It shows the sums of `cross_entropy` and `nll_loss` of class
    indices, `mse_loss`, `smooth_l1_loss`, `huber_loss`, `soft_margin_loss`, `multi_margin_loss`, `multilabel_margin_loss` and
    the binary cross-entropies; class weights; and labels that are left out (of -100, or by `ignore_index=`). It does not show
    the sums of other losses (`l1_loss`, `kl_div`, `cross_entropy` of class probabilities or with label smoothing), which look
    like any other sum, nor of what you write yourself. While a step is traced (`compile_step`, `vmap_step`, `differentiable`),
    labels have no values, so those that are left out are not noticed.

    A microbatch may have zero weight. Metrics are merged from their totals and weights. Peak memory is that of one
    microbatch.

    Dropout draws different masks for each microbatch, as a function of the state's seed and step and the microbatch's
    index, so with dropout the result depends on how the batch is split. BatchNorm normalizes each microbatch
    separately and updates its running statistics once per microbatch, as in a raw loop.

    In a loop with torch's own optimizer, `ll.grads.backward` puts the result into `.grad`, and moves buffers.

    `accumulate` goes directly around `make_grad_fn` if the model is in DDP or FSDP2, which add up the gradients of all
    microbatches in one place. Wrappers go around it.

    Gradients are added in the dtype of the parameters. In bfloat16, many small ones are rounded away: the sum of 64
    microbatches is off by about 1%. Keep the weights in float32 and use `autocast`, or give `dtype=torch.float32`: the sum is
    then a float32 copy of the gradients, and is rounded once, at the end.

    Args:
        grad_fn: gradient function, called once per microbatch.
        microbatches: number of microbatches, split between samples as by `torch.tensor_split` (the first
            ones may have one sample more). Batches with fewer samples are split into single samples.
        size: number of samples per microbatch, instead of `microbatches`. The last one may be smaller. If neither is
            given, each batch must be a list of microbatches.
        dtype: dtype in which gradients are added up, such as `torch.float32` for a model in bfloat16. Not for models in DDP
            or FSDP2, which add them up themselves.
        count_samples: function that counts the samples in a batch, if `grad_fn` is a function of yours or changes the batch.
            Otherwise that of `make_grad_fn` is used.

    Raises:
        ValueError: `microbatches` or `size` is below 1, or both are given; a batch is empty, is of a type that cannot be
            split, or is counted differently by `grad_fn` (see `ll.data.count_samples`); or `grad_fn` has a meaning
            for the whole batch alone, such as `sam` and `add_noise`.
        RuntimeError: at the first step, if the model is in DDP or FSDP2 on several ranks and `grad_fn` has a wrapper, or
            `dtype` is given.
        TypeError: neither `microbatches` nor `size` is given and the batch is not a list, or the samples of the batch cannot
            be counted.
    """
    check(microbatches is None or size is None, f"give microbatches={microbatches} or size={size}, not both")
    check_optional_count("microbatches", microbatches)
    check_optional_count("size", size)
    check(
        dtype is None or (isinstance(dtype, torch.dtype) and dtype.is_floating_point),
        f"dtype is {dtype!r}; give a floating-point dtype, such as torch.float32",
        TypeError,
    )
    grad_fn = check_grad_fn(grad_fn, "accumulate")
    record, name = record_of(grad_fn), name_of(grad_fn)
    all_at_once = None if record is None or dtype is not None else record.microbatches
    check(
        record is None or record.microbatches is None or count_samples is None,
        "accumulate counts samples as the grad_fn that it is put around: give count_samples= to make_grad_fn alone",
    )
    counter = counter_of(grad_fn, count_samples)

    def counter_of_pieces(batch: Any) -> int:
        return sum(map(counter, _given(batch)))

    def accumulated(
        state: TrainState, batch: Any, *, index: int = 0, part: BatchPart | None = None, **request: Any
    ) -> Gradients:
        if microbatches is None and size is None:
            pieces = _given(batch)
            count = sum(map(counter, pieces))
        else:
            count = counter(batch)
            sizes = size if size is not None else even(count, microbatches or 1)
            pieces = split(batch, count, sizes, counter)
        whole = part or BatchPart()
        if whole.samples is None and type(count) is int:
            whole = dataclasses.replace(whole, samples=count)
        if all_at_once is not None:
            outs, ranks = all_at_once(state, pieces, index=index, part=whole, **request)
            out = _joined(outs)
        else:
            indexes, ranks = indices(index, len(pieces)), 1
            out = _joined(_one_by_one(grad_fn, state, pieces, indexes, whole, name, dtype, request))
            if out.samples != count:
                raise ValueError(
                    f"accumulate counts {count} samples in a batch, and the grad_fn that it is put around {out.samples}: "
                    "give both the same count_samples="
                )
        if part is None:
            out = mean_of_sums(out, ranks)
        return out if dtype is None else out._replace(grads=in_dtypes_of(out.grads, state.params))

    by_pieces = microbatches is None and size is None
    marked = as_wrapper(accumulated, "accumulate", grad_fn, counter_of_pieces if by_pieces else counter)
    settings = {"microbatches": microbatches, "size": size, "dtype": dtype, "count_samples": count_samples}
    return with_repr(marked, accumulate, grad_fn, **settings)


def _joined(outs: Sequence[Gradients]) -> Gradients:
    """The last microbatch's result, which holds the accumulated gradients, with everyone's metrics, samples and weights."""
    weights = [out.weight for out in outs if out.weight is not None]
    return outs[-1]._replace(
        metrics=merge(*[out.metrics for out in outs]),
        samples=sum([out.samples for out in outs]),
        weight=sum(weights) if weights else None,
        copies=next((out.copies for out in outs if out.copies is not None), None),  # from before the first call
    )


def _one_by_one(
    grad_fn: GradFn,
    state: TrainState,
    pieces: Sequence[Any],
    indexes: Sequence[int],
    part: BatchPart,
    name: str,
    dtype: torch.dtype | None,
    request: Mapping[str, Any],
) -> list[Gradients]:
    """Call a gradient function of this name once per microbatch, and add up what it returns."""
    outs: list[Gradients] = []
    grads: dict[str, Tensor] = {}
    part = dataclasses.replace(part, wrapper=name)
    for index, piece in zip(indexes, pieces, strict=True):
        out = grad_fn(state, piece, index=index, part=part, **request)
        if out.weight is None:
            what = "gradients without the weight of a part of a batch"
            shown = getattr(grad_fn, "__name__", name)
            raise TypeError(DROPPED.format(who=f"accumulate around {shown}", what=what))
        _add(grads, out.grads, dtype)
        outs.append(out._replace(grads=grads))
        part = dataclasses.replace(part, normalizer=out.normalizer)
        state = state.replace(buffers=out.buffers)
    return outs


def _given(batch: Any) -> Sequence[Any]:
    if not isinstance(batch, (list, tuple)):
        raise TypeError(
            f"accumulate without microbatches= or size= takes a list of pieces; this batch is a "
            f"{type(batch).__name__}: say how to cut it, or let the loader's collate_fn make a list"
        )
    if not batch:
        raise ValueError("the batch is an empty list: accumulate needs at least one piece")
    return batch


def _add(total: dict[str, Tensor], grads: Mapping[str, Tensor], dtype: torch.dtype | None) -> None:
    """Add gradients to their sum, which is in this dtype, or in their own."""
    if old := subset(total, grads):
        torch_private.foreach_add_([*old.values()], [*pick(grads, old).values()])
    for name, grad in without(grads, total).items():
        total[name] = grad if dtype is None else grad.to(dtype.to_complex() if grad.is_complex() else dtype)
