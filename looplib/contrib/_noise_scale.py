"""The gradient noise scale."""

from __future__ import annotations

from typing import Any

import torch

from looplib._core.kinds import Made, mark
from looplib.contrib._per_sample import _examples, _together
from looplib.gradients import check_grad_fn
from looplib.metrics._mean import Mean
from looplib.types import WHOLE, GradFn, Gradients, Part, TrainState


def gradient_noise_scale(grad_fn: GradFn) -> GradFn:
    """The mean gradient, and how large a batch it would take to see through the noise, as `gradient_noise_scale`.

    >>> import looplib as ll, torch
    >>> model = torch.nn.Linear(2, 1)
    >>> per_sample = ll.contrib.make_per_sample_grad_fn(model, lambda model, x: model(x).square().mean())
    >>> out = ll.contrib.gradient_noise_scale(per_sample)(ll.init_state(model), torch.randn(16, 2))
    >>> sorted(out.metrics)
    ['gradient_noise_scale', 'loss']

    The simple noise scale is `tr(S) / |G|**2`: the variance of the examples' gradients, summed over all parameters,
    by the squared norm of the true gradient. Steps of much smaller batches are mostly noise, and much larger ones
    gain little. Both estimates are unbiased, but a ratio of them is not, and from one batch it may be far off, even
    negative. The metric is a `Mean` of the one by the other: merge it over many steps (`ll.merge`), which adds both
    before it divides. Within `accumulate`, each piece gives estimates of its own, and they merge so.

    Args:
        grad_fn: from `make_per_sample_grad_fn`.

    A batch, or piece, of one example has no estimate: it computes to NaN, and adds nothing to a merge. Raises
    ValueError when the gradients are not those of each example.

    Source: McCandlish, Kaplan, Amodei and the OpenAI Dota team, "An empirical model of large-batch training", 2018,
    appendix A.1, with batches of 1 and of all examples.
    """
    grad_fn = check_grad_fn(grad_fn, "gradient_noise_scale")

    def measured(state: TrainState, batch: Any, part: Part = WHOLE) -> Gradients:
        out = _examples("gradient_noise_scale", grad_fn, state, batch, part)
        sums = {name: grad.sum(0) for name, grad in out.grads.items()}
        scale = Mean(0.0, 0.0)
        if (count := out.samples) > 1:
            device = next(iter(sums.values())).device
            trace = torch.stack([grad.var(0).sum().to(device) for grad in out.grads.values()]).sum()
            squared = torch.stack([total.div(count).square().sum().to(device) for total in sums.values()]).sum()
            scale = Mean(trace, squared - trace / count)
        return _together(out, sums, part, {"gradient_noise_scale": scale})

    return mark(measured, Made("grad_fn", "gradient_noise_scale", grad_fn, adds=True))
