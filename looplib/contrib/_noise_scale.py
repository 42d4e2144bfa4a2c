"""Gradient noise scale."""

from __future__ import annotations

from typing import Any

from looplib._core.mappings import stacked
from looplib._core.records import Made, mark, with_repr
from looplib._wrapping import check_grad_fn
from looplib.contrib._per_sample import _examples, _together
from looplib.metrics._mean import Mean
from looplib.types import WHOLE, GradFn, Gradients, GradRequest, Grads, TrainState


def gradient_noise_scale(grad_fn: GradFn) -> GradFn:
    """Gradient noise scale: estimate the largest useful batch size, reported as `gradient_noise_scale`.

    >>> import looplib as ll, torch
    >>> model = torch.nn.Linear(2, 1)
    >>> per_sample = ll.contrib.make_per_sample_grad_fn(model, lambda model, x: model(x).square().mean())
    >>> out = ll.contrib.gradient_noise_scale(per_sample)(ll.init_state(model), torch.randn(16, 2))
    >>> sorted(out.metrics)
    ['gradient_noise_scale', 'loss']

    The gradient is the mean over the samples. The simple noise scale is `tr(S) / |G|**2`: the variance of the
    samples' gradients, summed over all parameters, divided by the squared norm of the true gradient. Steps with much
    smaller batches are mostly noise, and much larger batches gain little.

    Both estimates are unbiased, but their ratio is not, and from a single batch it may be far off, even negative. The
    metric is a `Mean` of the two, so merge it over many steps (`ll.merge`), which adds up both before dividing.
    Inside `accumulate`, each microbatch has its own estimates, which are merged likewise. A batch or microbatch of
    one sample has no estimate: it computes to NaN, and adds nothing when merged.

    Args:
        grad_fn: from `make_per_sample_grad_fn`.

    Raises:
        ValueError: the gradients are not per sample.

    Source: McCandlish, Kaplan, Amodei and the OpenAI Dota team, "An empirical model of large-batch training", 2018,
    appendix A.1, with batches of 1 and of all samples.
    """
    grad_fn = check_grad_fn(grad_fn, "gradient_noise_scale")

    def measured(state: TrainState, batch: Any, request: GradRequest = WHOLE) -> Gradients:
        out = _examples("gradient_noise_scale", grad_fn, state, batch, request)
        sums = {name: grad.sum(0) for name, grad in out.grads.items()}
        scale = _estimates(out.grads, sums, out.samples) if out.samples > 1 else Mean(0.0, 0.0)
        return _together(out, sums, request, {"gradient_noise_scale": scale})

    made = mark(measured, Made("grad_fn", "gradient_noise_scale", grad_fn, adds=True))
    return with_repr(made, gradient_noise_scale, grad_fn)


def _estimates(grads: Grads, sums: Grads, count: int) -> Mean:
    """Estimates of the trace of the covariance, and of the squared norm of the true gradient."""
    trace = stacked([grad.var(0).sum() for grad in grads.values()]).sum()
    squared = stacked([total.div(count).square().sum() for total in sums.values()]).sum()
    return Mean(trace, squared - trace / count)
