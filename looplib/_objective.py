"""Loss averaging: how totals and weights combine over microbatches and ranks.

    gradient of the mean loss = (sum of the gradients of all totals) / (sum of all weights)

A *total* is the summed loss of one microbatch on one rank. Its *weight* is the number of samples or tokens in that
sum.

A whole batch on one rank differentiates `total / weight` at once. A microbatch does not know the weights of the
others, so it differentiates `total / normalizer`, adds the result to the gradients so far, and reports its weight.
After the last microbatch, the sum is multiplied by `normalizer / sum of weights`. The normalizer can be any number
that is the same for all microbatches of a step; it only keeps half-precision gradients as small as those of a mean.
Engines such as DDP average over ranks, so there the sum of weights is divided by the number of ranks.

If all weights add up to zero, the sum counts as 1. Nothing contributes to the loss then, so the gradient is zero
however the batch was split. The loss itself is 0 / 0, which metrics report as NaN.

It is shared by gradient functions, steps and the rooms above, and makes records of `metrics`. So it stands between these, in
a file of its own, and not in `_core`, which imports no room.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import compress
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from looplib._core import torch_private, trees
from looplib._core.checks import as_tensor, check, check_real, named
from looplib._core.contracts import BatchPart
from looplib._core.engines import Sync
from looplib._core.mappings import as_record, mapped, wide_dtype, without
from looplib._core.ranks import (
    Sums,
    add_up_over_ranks,
    is_distributed,
    is_sharded,
    shards,
    total_over_ranks,
)
from looplib.metrics import Mean
from looplib.types import Gradients, Metric


class Objective(NamedTuple):
    """Scalar that a backward pass differentiates.

    Attributes:
        value: the scalar.
        factor: by which its gradient is multiplied.
        weight, normalizer: see `Gradients`.
    """

    value: Tensor
    factor: Tensor | float
    weight: Tensor | float | None = None
    normalizer: Tensor | float | None = None


def objective_of(loss: Any, samples: int, part: BatchPart | None, sync: Sync | None) -> Objective:
    """Objective for a scalar loss or a `Mean`: the mean loss, or for a part of a batch, the summed loss.

    The first part chooses the normalizer of all. On several ranks, whose gradients are averaged afterwards, it is their
    mean number of samples, and the mean is over all of them.
    """
    value, ranks = value_of(loss), 1
    normalizer: Any = None if part is None else part.normalizer
    if sync is not None:
        ranks, normalizer = sync.ranks, sync.samples() / sync.ranks
    if isinstance(loss, Mean):
        weight = _detached(loss.weight)
        if loss.times != 1:
            weight = weight * loss.times
        if part is None:
            return Objective(value, _divided(loss.times * ranks, _weight_of_all(weight, ranks)))
        if normalizer is None:
            normalizer = _wide(weight).clamp(min=1) if isinstance(weight, Tensor) else max(weight, 1)
        return Objective(value, loss.times / normalizer, weight, normalizer)
    if part is None:
        return Objective(value, 1.0 if normalizer is None else samples / normalizer)
    if normalizer is None:  # the samples of the step are known in advance, so no division is left for the end
        normalizer = part.normalizer_for(samples)
    return Objective(value, samples / normalizer, samples if ranks == 1 else None, normalizer)


def _weight_of_all(weight: Tensor | float, ranks: int) -> Tensor | float:
    """A weight, summed over the ranks whose gradients are averaged."""
    return weight if ranks == 1 else total_over_ranks(weight)


def _divided(number: Tensor | float, weight: Tensor | float) -> Tensor | float:
    """`number / weight`, where a weight of zero counts as 1."""
    if not isinstance(weight, Tensor):
        return number / (weight or 1)
    weight = _wide(weight)
    return number / (weight + (weight == 0))


def _wide(weight: Tensor) -> Tensor:
    return weight.to(wide_dtype(weight.device))


def _detached(value: Any) -> Any:
    return _gathered(value).detach() if isinstance(value, Tensor) else value


def _gathered(value: Tensor) -> Tensor:
    """A tensor as each rank would have it alone: under `loss_parallel()`, the loss is a DTensor."""
    return value.full_tensor() if is_sharded(value) else value


def value_of(loss: Any) -> Tensor:
    """The scalar of a loss, before any division."""
    value = loss.total if isinstance(loss, Mean) else loss
    if not isinstance(value, Tensor):
        raise TypeError(
            f"loss_fn returned {named(value)}; return a scalar tensor, a Mean(total, weight), or (loss, aux){_cause(value)}"
        )
    if value.numel() != 1:
        raise ValueError(
            f"the loss has shape {tuple(value.shape)}; return a scalar: loss.mean(), for an exact average over what counts "
            "Mean(loss.sum(), weight), or if it is the model's output, a loss of it such as cross_entropy(output, labels)"
        )
    if value.is_complex():
        raise TypeError(
            "the loss is complex, and a gradient needs a real number: return its part that counts, such as loss.abs() or "
            "loss.real"
        )
    if not value.requires_grad:
        raise ValueError(
            "the loss does not depend on any trainable parameter: it was computed without them, detached, or "
            "under torch.no_grad() or torch.inference_mode()"
        )
    return value if type(value) is Tensor else _gathered(value)


def _cause(value: Any) -> str:
    """Likely cause of a loss that is no tensor."""
    if value is None:
        return ": is its last line `return loss`? (The loss of a transformers model is None without labels in the batch.)"
    if hasattr(value, "loss"):
        unlabeled = ", which is None here: without labels in the batch, a model computes no loss"
        return "; for a model's output, return output.loss" + unlabeled * (value.loss is None)
    return '; for values beside the loss, return loss, {"name": value}' if isinstance(value, Mapping) else ""


def split_loss(out: Any) -> tuple[Any, Mapping[str, Any]]:
    """The loss and the additional values of a loss function."""
    if isinstance(out, tuple) and not isinstance(out, Mean):
        if len(out) == 2 and isinstance(out[1], Mapping):
            if "loss" in out[1]:
                raise ValueError('the aux of loss_fn has a "loss"; that name is the loss itself: choose another')
            check_no_counts(out[1])
            return out
        raise TypeError(
            f"loss_fn returned a {type(out).__name__} of {', '.join(type(item).__name__ for item in out)}; "
            "return a scalar loss, a Mean(total, weight), or (loss, aux) with a dict aux"
        )
    return out, {}


def check_no_counts(values: Mapping[str, Any]) -> None:
    """Raise if a plain value is a count, which would be averaged over the samples as a mean is."""
    for name, value in values.items():
        if isinstance(value, Tensor):
            count = value.dtype in _COUNTS and value.numel() == 1
        else:
            count = isinstance(value, int) and not isinstance(value, bool)
        if count:
            found = f"an integer tensor ({value.dtype})" if isinstance(value, Tensor) else f"the integer {value}"
            raise TypeError(
                f"{name!r} is {found}, and a plain value is taken for a mean over the samples, so a count would be averaged "
                f"to a wrong number. For the share of what is counted, give ll.Mean(total, weight), such as ll.Mean({name}, "
                f'len(labels)); for the sum over all batches, ll.metrics.Reading(ll.Mean({name}), operator.attrgetter("total")); '
                f"for a mean over the samples that is an integer here, float({name})"
            )


_COUNTS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def with_own_weight(loss: Mean) -> Mean:
    """The loss, whose weight is a copy: it may be a buffer, to which the next forward pass writes."""
    weight = loss.weight
    if not isinstance(weight, Tensor):
        return loss
    if weight.numel() != 1:
        raise ValueError(
            f"the weight of the loss has shape {tuple(weight.shape)}; return one number, Mean(total, weight.sum())"
        )
    return loss._replace(weight=weight.clone())


def aux_records(aux: Mapping[str, Any], samples: int) -> dict[str, Metric]:
    """Metric records of values beside a loss. Tensors that later steps may overwrite are copied."""
    return {name: record(name, copied_if_leaf(value), samples) for name, value in aux.items()}


def record(name: str, value: Any, samples: int) -> Metric:
    """Wrap a value of the loss function in a metric record, detached from the graph."""
    if isinstance(value, Mean):
        check_real(repr(name), value.total, value.weight)
        return Mean(_detached(value.total), _detached(value.weight), value.times)
    if isinstance(value, Tensor) and value.numel() == 1:
        if value.is_complex():
            check_real(repr(name), value)  # raises
        value = value if type(value) is Tensor else _gathered(value)
        return as_record(Mean, (value.detach(), 1, samples))
    if isinstance(value, (int, float)):
        return Mean(value, 1, samples)
    if isinstance(value, Metric) and not isinstance(value, Tensor):
        return cast(Metric, trees.map_tensors(Tensor.detach, value))
    if type(value).__module__.startswith("torchmetrics."):
        raise ValueError(
            f"{name!r} is a {type(value).__name__} of torchmetrics, whose value, if it were averaged over batches, would be "
            "another one: make it once, outside of the function, metric = ll.metrics.torchmetric(...), and return "
            "metric.of(predictions, targets)"
        )
    raise ValueError(
        f"{name!r} has {shape_or_type(value)}; give a scalar, a Mean(total, weight), ll.metrics.Cat(tensor) for a tensor "
        "that is no number, or another metric"
    )


def loss_over_ranks(metrics: Mapping[str, Any]) -> Any:
    """Loss of the global batch, by which all ranks decide alike. In a single process, it keeps the bits of the loss."""
    loss = metrics["loss"]
    if not is_distributed():
        return loss.compute()
    return total_over_ranks(loss.total * loss.times) / total_over_ranks(loss.weight * loss.times)


def shape_or_type(value: Any) -> str:
    """The shape of a tensor or the type of another value, for messages."""
    return f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"type {type(value).__name__}"


def without_weight(loss: Mean) -> Mean:
    """The loss of a stand-in for no samples, which adds nothing."""
    return Mean(loss.total * 0, loss.weight * 0, loss.times)


def uncounted(metrics: Mapping[str, Metric]) -> dict[str, Metric]:
    """Metrics of no samples, with the names of those of a stand-in."""
    means = {name: metric for name, metric in metrics.items() if isinstance(metric, Mean)}
    check(
        len(means) == len(metrics),
        f"this rank has no sample of the batch, and {', '.join(without(metrics, means))} of the loss function's "
        "metrics would count the stand-in that it runs on: return Means alone, or give the loader drop_last=True",
    )
    return mapped(lambda mean: Mean(mean.total * 0, 0), means)


def without_skipped(report: Mapping[str, Any], applied: Any) -> dict[str, Any]:
    """The report of an update. A mean that is not finite, such as an infinite norm, has no weight if the update is skipped."""
    return {name: _if_finite(value, applied) if isinstance(value, Mean) else value for name, value in report.items()}


def _if_finite(mean: Mean, applied: Tensor | bool) -> Mean:
    total = as_tensor(mean.total)
    counts = total.isfinite() | (applied.to(total.device) if isinstance(applied, Tensor) else applied)
    return Mean(torch.where(counts, total, 0), counts * mean.weight, mean.times)


def copied_if_leaf(value: Any) -> Any:
    """The value, copied if it may be a parameter or a buffer, which later steps overwrite."""
    return trees.map_tensors(
        lambda tensor: tensor.clone() if tensor.grad_fn is None or torch_private.is_view(tensor) else tensor, value
    )


def mean_of_sums(out: Gradients, ranks: int = 1) -> Gradients:
    """Turn gradients of the summed loss into gradients of the mean loss."""
    if out.weight is not None:
        weight = _weight_of_all(out.weight, ranks)
        multiply(out.grads, _divided(_normalizer(out) * ranks, weight))
    return out._replace(weight=None, normalizer=None)


def mean_over_ranks(out: Gradients, params: Mapping[str, Tensor]) -> Gradients:
    """Gradient of the mean loss over all ranks, from each rank's gradient of its summed loss. A collective call.

    The weights are summed over ranks first, then the gradients. A gradient that a rank does not have counts as zero.
    """
    weight: Any = out.weight
    on_device = isinstance(weight, Tensor)
    sums = Sums([out.samples, 0 if on_device else weight, *(name in out.grads for name in params)])
    if on_device:
        weight = total_over_ranks(weight)
    samples, number, *counts = sums.read()
    reached = compress(params, counts)
    grads = {name: out.grads[name] if name in out.grads else torch.zeros_like(params[name]) for name in reached}
    add_up_over_ranks(grads.values(), _divided(_normalizer(out), weight if on_device else number))
    return out._replace(grads=grads, samples=round(samples), weight=None, normalizer=None)


def _normalizer(out: Gradients) -> Tensor | float:
    """The divisor of the summed losses: 1 if no gradient function has divided them."""
    return 1.0 if out.normalizer is None else out.normalizer


def multiply(grads: Mapping[str, Tensor], factor: Tensor | float) -> None:
    """Multiply all gradients by a factor, in place."""
    parts = shards(grads.values())
    if not isinstance(factor, Tensor):
        if factor != 1:
            torch_private.foreach_mul_(parts, factor)
        return
    for device in {part.device for part in parts}:
        torch_private.foreach_mul_([part for part in parts if part.device == device], factor.to(device))
