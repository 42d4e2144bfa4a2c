"""Differential privacy: per-sample clipping and noise."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor

from looplib._core.checks import check_argument
from looplib._core.kinds import Made, mark
from looplib._core.random import mix
from looplib._core.tracing import tracing
from looplib._objective import multiply
from looplib.contrib._per_sample import _examples, _sum, _together
from looplib.gradients import check_grad_fn, check_parts, of_whole_step
from looplib.grads._wrapper import max_norm_of, seen
from looplib.metrics._mean import Mean
from looplib.types import WHOLE, GradFn, Gradients, Grads, Metric, Part, TrainState


def clip_per_sample(grad_fn: GradFn, max_norm: float) -> GradFn:
    """Scale each example's gradient down so that its norm is at most `max_norm`, and take the mean of them.

    >>> import looplib as ll, torch
    >>> model = torch.nn.Linear(2, 1)
    >>> per_sample = ll.contrib.make_per_sample_grad_fn(model, lambda model, x: model(x).square().mean())
    >>> grad_fn = ll.accumulate(ll.contrib.clip_per_sample(per_sample, max_norm=1.0), size=64)
    >>> out = grad_fn(ll.init_state(model), torch.full((256, 2), 100.0))
    >>> out.grads["weight"].shape, ll.compute(out.metrics)["clipped"]
    (torch.Size([1, 2]), 1.0)

    The norm is over all parameters together, and each example counts the same. So the sum moves by at most `max_norm`
    when an example comes or goes, which `add_noise` stands on, and one strange example cannot spoil a batch.
    Metrics: `clipped`, the part of the examples that were scaled down, and `grad_norm_per_sample`, the mean of
    their norms before. (With privacy in mind, these and the loss are not private: keep them to yourself.)

    Args:
        grad_fn: from `make_per_sample_grad_fn`.
        max_norm: the largest norm of an example's gradient, above 0; `math.inf` for the mean gradient as it is.

    An empty batch has a gradient of zero. A norm that is infinite or NaN makes the gradients NaN.

    Raises ValueError when `max_norm` is not above 0, or the gradients are not those of each example.

    Source: Abadi et al., "Deep learning with differential privacy", 2016; the factor is Opacus'.
    """
    check_argument(max_norm > 0, "max_norm", max_norm, "give a norm above 0")
    grad_fn = check_grad_fn(grad_fn, "clip_per_sample")

    def clipped(state: TrainState, batch: Any, part: Part = WHOLE) -> Gradients:
        out = _examples("clip_per_sample", grad_fn, state, batch, part)
        norms = _norms(out.grads)
        factors = (max_norm / (norms + 1e-6)).clamp(max=1.0)
        sums = {name: torch.tensordot(factors.to(grad), grad, 1) for name, grad in out.grads.items()}
        metrics: dict[str, Metric] = {
            "clipped": Mean((norms > max_norm).sum(), out.samples),
            "grad_norm_per_sample": Mean(_sum(norms), out.samples),
        }
        return _together(out, sums, part, metrics)

    return mark(clipped, Made("grad_fn", "clip_per_sample", grad_fn, max_norm=max_norm, adds=True))


def _norms(grads: Grads) -> Tensor:
    """(batch,), of all parameters together."""
    norms = [torch.linalg.vector_norm(grad.unsqueeze(-1).flatten(1), dim=1) for grad in grads.values()]
    total: Tensor = torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]), dim=0)
    return total


_NOISE = 0x6E6F697365  # a stream of its own, apart from those of dropout and evaluation


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

    The noise has a standard deviation of `noise_multiplier * max_norm` and goes onto the sum, once for a step; then
    the sum is divided by the batch's size. It depends on the state's `(seed, step)` alone.

    How much privacy a run gives is for a library to say (Opacus' `RDPAccountant`, Google's `dp_accounting`), from the
    noise multiplier, the sampling rate and the number of steps. Most of them assume Poisson sampling, in which
    each example is in a batch by its own coin (`order=ll.data.batch_sampler(...)`): then the size of a batch
    is private, and `expected_batch_size` belongs here. A batch may then be empty, and its gradient is noise alone.

    Not for adversaries: torch's generators are not cryptographically secure, and floating-point noise leaks in ways
    that exact noise would not. Who knows the seed can take the noise away, and who sees two runs of the same
    seed on different data sees it cancel: keep the seed secret, and give each run its own.

    All of this is for one process: ranks are not summed over, and would all draw the same noise.

    Args:
        grad_fn: from `clip_per_sample`, or `accumulate` around it.
        max_norm: the norm to which it clips, above 0 and finite.
        noise_multiplier: standard deviation of the noise in units of `max_norm`, 0 or more.
        expected_batch_size: what the sum is divided by; without it, the number of examples in the batch.

    Raises:
        ValueError: an argument out of its range, `clip_per_sample` missing or with another norm, an empty batch
            without `expected_batch_size`; within `accumulate`.

    Source: Abadi et al., "Deep learning with differential privacy", 2016.
    """
    for name, value, fine in (
        ("max_norm", max_norm, 0 < max_norm < math.inf),
        ("noise_multiplier", noise_multiplier, 0 <= noise_multiplier < math.inf),
        ("expected_batch_size", expected_batch_size, expected_batch_size is None or expected_batch_size > 0),
    ):
        if not fine:
            least = "0 or more" if name == "noise_multiplier" else "above 0"
            raise ValueError(f"{name} is {value}; give a finite number {least}")
    grad_fn = check_parts(grad_fn, "add_noise")
    _check_norm(grad_fn, max_norm)

    def noisy(state: TrainState, batch: Any, part: Part = WHOLE) -> Gradients:
        out = grad_fn(state, batch, dataclasses.replace(part, reduction="sum"))
        if "clipped" not in out.metrics:
            raise ValueError(
                "add_noise got gradients that are not clipped example by example, which no noise makes private: "
                "add_noise(clip_per_sample(make_per_sample_grad_fn(...), max_norm), max_norm, ...)"
            )
        size = expected_batch_size or out.samples
        if not size:
            raise ValueError("the batch is empty: with Poisson sampling, give add_noise(..., expected_batch_size=)")
        multiply(out.grads, out.normalizer / size)
        generators = {  # in a trace of a step they are those of the step, which no two steps share either
            device: None if tracing() else torch.Generator(device).manual_seed(mix(state.seed, state.step, _NOISE))
            for device in {grad.device for grad in out.grads.values()}
        }
        for grad in out.grads.values():
            noise = torch.empty_like(grad).normal_(generator=generators[grad.device])
            grad.add_(noise, alpha=noise_multiplier * max_norm / size)
        return Gradients(out.grads, out.metrics, out.buffers, out.samples)

    return of_whole_step("add_noise", noisy, grad_fn)


def _check_norm(grad_fn: GradFn, max_norm: float) -> None:
    norm = max_norm_of(grad_fn)
    if norm is None:
        found = ", ".join(seen(grad_fn)) or getattr(grad_fn, "__name__", type(grad_fn).__name__)
        raise ValueError(
            f"add_noise got gradients that are not clipped example by example, as far as it can see ({found}), so it "
            "does not know how much noise hides a sample. Give it "
            "add_noise(clip_per_sample(make_per_sample_grad_fn(...), max_norm), max_norm, ...), or accumulate around "
            "the clipping. A wrapper of your own in between that makes no sample's gradient larger says so: "
            "@ll.grads.wrapper(grad_fn, keeps_max_norm=True); one that clips says @ll.grads.wrapper(grad_fn, "
            "max_norm=max_norm)"
        )
    if norm != max_norm:
        raise ValueError(f"clip_per_sample has max_norm={norm} and add_noise max_norm={max_norm}: give both the same")
