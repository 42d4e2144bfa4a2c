"""Differential privacy: per-sample clipping and noise."""

from __future__ import annotations

import math
from collections.abc import Collection
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from looplib._core.checks import check, check_number
from looplib._core.mappings import stacked
from looplib._core.records import Made, record_of, with_record, with_repr
from looplib._core.tracing import generator_at
from looplib._objective import multiply
from looplib.contrib._per_sample import _examples, _sum, _together
from looplib.grads.wrapping import as_wrapper, check_grad_fn, check_whole_batch, seen
from looplib.metrics import Mean
from looplib.types import BatchPart, GradFn, Gradients, Grads, Metric, TrainState


def clip_per_sample(grad_fn: GradFn, max_norm: float) -> GradFn:
    """Per-sample clipping: clip each sample's gradient to norm `max_norm`, and take the mean.

    >>> import looplib as ll, torch
    >>> model = torch.nn.Linear(2, 1)
    >>> per_sample = ll.contrib.make_per_sample_grad_fn(model, lambda model, x: model(x).square().mean())
    >>> grad_fn = ll.accumulate(ll.contrib.clip_per_sample(per_sample, max_norm=1.0), size=64)
    >>> out = grad_fn(ll.init_state(model), torch.full((256, 2), 100.0))
    >>> out.grads["weight"].shape, ll.compute(out.metrics)["clipped"]
    (torch.Size([1, 2]), 1.0)

    The norm is over all parameters together, and each sample counts the same. The sum therefore changes by at most
    `max_norm` when a sample is added or removed, which `add_noise` relies on, and a single unusual sample cannot
    spoil a batch.

    Metrics: `clipped`, the fraction of samples that were clipped, and `grad_norm_per_sample`, the mean of their norms
    before clipping. (These and the loss are not private: do not publish them if privacy matters.)

    An empty batch has a gradient of zero. A norm that is infinite or NaN makes the gradients NaN.

    Args:
        grad_fn: from `make_per_sample_grad_fn`.
        max_norm: largest norm of a sample's gradient, above 0. `math.inf` gives the plain mean gradient.

    Raises:
        TypeError: `max_norm` is not a number.
        ValueError: `max_norm` is not above 0, or the gradients are not per sample.

    Source: Abadi et al., "Deep learning with differential privacy", 2016; the factor is Opacus'.
    """
    check_number("max_norm", max_norm, lambda norm: norm > 0, "give a norm above 0")
    grad_fn = check_grad_fn(grad_fn, "clip_per_sample")

    def clipped(state: TrainState, batch: Any, *, part: BatchPart | None = None, **request: Any) -> Gradients:
        out = _examples("clip_per_sample", grad_fn, state, batch, request)
        norms = _norms(out.grads)
        factors = (max_norm / (norms + 1e-6)).clamp(max=1.0)
        sums = {name: torch.tensordot(factors.to(grad), grad, 1) for name, grad in out.grads.items()}
        metrics: dict[str, Metric] = {
            "clipped": Mean((norms > max_norm).sum(), out.samples),
            "grad_norm_per_sample": Mean(_sum(norms), out.samples),
        }
        return _together(out, sums, part, metrics)

    recorded = with_record(clipped, Made("grad_fn", "clip_per_sample", grad_fn, max_norm=max_norm))
    return with_repr(recorded, clip_per_sample, grad_fn, max_norm)


def _norms(grads: Grads) -> Tensor:
    """Norms of shape (batch,), over all parameters together."""
    norms = [torch.linalg.vector_norm(grad.unsqueeze(-1).flatten(1), dim=1) for grad in grads.values()]
    total: Tensor = torch.linalg.vector_norm(stacked(norms), dim=0)
    return total


_NOISE = 0x6E6F697365  # a random stream separate from those of dropout and evaluation


def add_noise(
    grad_fn: GradFn, max_norm: float, noise_multiplier: float, *, expected_batch_size: float | None = None
) -> GradFn:
    """Gaussian noise on the sum of clipped gradients: with `clip_per_sample`, the gradient of DP-SGD.

    >>> import looplib as ll, torch
    >>> model = torch.nn.Linear(2, 1)
    >>> grad_fn = ll.contrib.make_per_sample_grad_fn(model, lambda model, x: model(x).square().mean())
    >>> grad_fn = ll.accumulate(ll.contrib.clip_per_sample(grad_fn, max_norm=1.0), size=64)
    >>> grad_fn = ll.contrib.add_noise(grad_fn, max_norm=1.0, noise_multiplier=1.1, expected_batch_size=256)
    >>> gradients = grad_fn(ll.init_state(model), torch.randn(250, 2))

    The noise has a standard deviation of `noise_multiplier * max_norm` (of a complex parameter, in the real and in the
    imaginary part) and is added to the sum once per step; the sum is then divided by the batch's size. It depends only on
    the state's `(seed, step)`. A compiled step draws different numbers from a plain one.

    To compute the privacy of a run from the noise multiplier, the sampling rate and the number of steps, use a
    library such as Opacus (`RDPAccountant`) or Google's `dp_accounting`. Most of these assume Poisson sampling, in
    which each sample is included in a batch independently (`order=ll.data.batch_sampler(...)`). The size of a batch
    is then private, so pass `expected_batch_size`. A batch may be empty, in which case its gradient is only noise.

    It does not protect against adversaries: torch's generators are not cryptographically secure, and floating-point
    noise leaks information in ways that exact noise would not. Anyone who knows the seed can subtract the noise, and
    between two runs with the same seed on different data it cancels out. Keep the seed secret and use a different one
    for each run.

    It supports a single process: it does not sum over ranks, and all ranks would draw the same noise.

    Args:
        grad_fn: from `clip_per_sample`, or `accumulate` around it.
        max_norm: the norm to which it clips, above 0 and finite.
        noise_multiplier: standard deviation of the noise in units of `max_norm`, 0 or more.
        expected_batch_size: number to divide the sum by. Defaults to the number of samples in the batch.

    Raises:
        TypeError: an argument is not a number.
        ValueError: an argument is out of range, `clip_per_sample` is missing or has a different norm, a batch is
            empty and `expected_batch_size` is not given, or it is used inside `accumulate` or
            `reduce_gradients`.

    Source: Abadi et al., "Deep learning with differential privacy", 2016.
    """
    above, size = "give a finite number above 0", expected_batch_size
    check_number("max_norm", max_norm, lambda norm: 0 < norm < math.inf, above)
    advice = "give a finite number 0 or more"
    check_number("noise_multiplier", noise_multiplier, lambda noise: 0 <= noise < math.inf, advice)
    if size is not None:
        check_number("expected_batch_size", size, lambda size: size > 0, above)
    grad_fn = check_grad_fn(grad_fn, "add_noise")
    _check_norm(grad_fn, max_norm)

    def noisy(state: TrainState, batch: Any, *, part: BatchPart | None = None, **request: Any) -> Gradients:
        check_whole_batch(part, "add_noise")
        out = grad_fn(state, batch, part=BatchPart(), **request)
        size = expected_batch_size or out.samples
        check(size, "the batch is empty: with Poisson sampling, give add_noise(..., expected_batch_size=)")
        multiply(out.grads, (out.normalizer or 1) / size)
        _add_normal(out.grads.values(), noise_multiplier * max_norm / size, state)
        return out._replace(weight=None, normalizer=None)

    return with_repr(
        as_wrapper(noisy, "add_noise", grad_fn),
        add_noise,
        grad_fn,
        max_norm,
        noise_multiplier,
        expected_batch_size=expected_batch_size,
    )


def _add_normal(grads: Collection[Tensor], deviation: float, state: TrainState) -> None:
    """Add noise in place, drawn from one generator on each device."""
    devices = dict.fromkeys(map(attrgetter("device"), grads))
    generators = {device: generator_at(device, state.seed, state.step, _NOISE) for device in devices}
    for grad in grads:
        noise = torch.empty_like(grad)
        # Of complex numbers, both parts are coordinates of the norm; normal_ would halve the variance of each.
        parts = torch.view_as_real(noise) if noise.is_complex() else noise
        parts.normal_(generator=generators[grad.device])
        grad.add_(noise, alpha=deviation)


def _check_norm(grad_fn: GradFn, max_norm: float) -> None:
    record = record_of(grad_fn)
    norm = None if record is None else record.max_norm
    if norm is None:
        names = ", ".join(seen(grad_fn)) or getattr(grad_fn, "__name__", type(grad_fn).__name__)
        raise ValueError(
            f"add_noise got gradients that are not clipped sample by sample, as far as it can see ({names}), so it "
            "does not know how much noise hides a sample. Give it "
            "add_noise(clip_per_sample(make_per_sample_grad_fn(...), max_norm), max_norm, ...), or accumulate around "
            "the clipping, and put wrappers of your own around add_noise"
        )
    check(
        norm == max_norm, f"clip_per_sample has max_norm={norm} and add_noise max_norm={max_norm}: give both the same"
    )
