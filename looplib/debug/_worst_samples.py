"""Samples with the largest gradients."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from looplib._core.checks import check
from looplib._core.records import check_kind, records_of
from looplib._core.samples import counter_of, split
from looplib.grads.wrapping import check_samples_apart
from looplib.metrics import compute
from looplib.optim import global_norm
from looplib.types import GradFn, TrainState


@dataclass(frozen=True, slots=True)
class SampleScore:
    """Loss and gradient norm of a single sample.

    Attributes:
        row: index of the sample in the batch.
        index: index of the sample in the dataset, if known.
        loss: loss of this sample alone.
        grad_norm: norm of its gradient, over all parameters.
    """

    row: int
    index: Any
    loss: float
    grad_norm: float


def worst_samples(
    grad_fn: GradFn,
    state: TrainState,
    batch: Any,
    indices: Any = None,
    *,
    count_samples: Callable[[Any], int] | None = None,
) -> list[SampleScore]:
    """Rank the samples of a batch by the norm of their own gradients, to find the cause of a loss spike.

    >>> import looplib as ll, torch
    >>> model = torch.nn.Linear(1, 1, bias=False)
    >>> grad_fn = ll.make_grad_fn(model, lambda model, x: model(x).square().mean())
    >>> batch, indices = torch.tensor([[0.1], [50.0], [0.2]]), torch.tensor([31, 7, 12])
    >>> [row.index for row in worst_samples(grad_fn, ll.init_state(model), batch, indices)]
    [7, 12, 31]

    Infinite and NaN losses and norms come first, then the largest norms. Each sample goes through `grad_fn` as a
    batch of one, so dropout draws a different mask from the one in training. BatchNorm that was not in eval
    mode when the `grad_fn` was made is refused, since a sample then has no gradient of its own.

    After replaying the step of the spike: `worst_samples(grad_fn, found.state, found.batch, found.indices)`.

    Args:
        grad_fn: from `make_grad_fn` or `make_per_sample_grad_fn`, without clipping, which would make all norms equal.
        state: state before the step; of a module in a loop of your own, `ll.init_state(model)`.
        batch: any batch that `accumulate` can split.
        indices: (batch,) dataset indices of the samples.
        count_samples: function that counts the samples in a batch. Defaults to that of `grad_fn`.

    Raises:
        ValueError: the number of indices is not the number of samples, or BatchNorm would normalize over a batch.
    """
    grad_fn = check_kind(grad_fn, "worst_samples", "grad_fn")
    counter = counter_of(grad_fn, count_samples)
    count = counter(batch)
    known = indices.tolist() if hasattr(indices, "tolist") else indices
    positions = [None] * count if known is None else list(known)
    check(len(positions) == count, f"{len(positions)} indices for a batch of {count} samples; give one for each")
    for record in records_of(grad_fn):
        check_samples_apart(record.batch_norms)
    scores = []
    for row, sample in enumerate(split(batch, count, [1] * count, counter)):
        out = grad_fn(state, sample)
        norm = float(
            global_norm(grad.to(torch.promote_types(grad.dtype, torch.float64)) for grad in out.grads.values())
        )
        scores.append(SampleScore(row, positions[row], compute(out.metrics)["loss"], norm))
    return sorted(scores, key=_rank)


def _rank(score: SampleScore) -> tuple[bool, float]:
    finite = math.isfinite(score.loss) and math.isfinite(score.grad_norm)
    return finite, -score.grad_norm if finite else 0.0
