"""Gradients of each example by itself, and what can be made of them.

`make_per_sample_grad_fn` runs the ordinary loss function on batches of one example, all at once by
`torch.func.vmap`. What stands around it brings the examples together again into one gradient, and so into an
ordinary `GradFn`: clipped one by one for differential privacy, or measured for the noise between them.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_map

from looplib import _modules
from looplib._random import mix
from looplib._ranks import rank
from looplib._tracing import tracing, users_own
from looplib.gradients import (
    WHOLE,
    GradFn,
    Gradients,
    Grads,
    LossFn,
    Part,
    check_parts,
    multiply,
    objective_of,
    of_this_model,
    of_whole,
    record,
    split_loss,
)
from looplib.metrics import Mean, Metric
from looplib.metrics import batch_size as count_examples
from looplib.state import TrainState


def make_per_sample_grad_fn(
    model: nn.Module,
    loss_fn: LossFn,
    *,
    trainable: Callable[[str, Tensor], bool] | None = None,
    batch_size: Callable[[Any], int] = count_examples,
) -> GradFn:
    """The gradient of each example's loss, as a pure function of state and batch.

    >>> import looplib as ll, torch
    >>> model = torch.nn.Linear(2, 1)
    >>> def loss_fn(model, batch):
    ...     x, y = batch
    ...     return torch.nn.functional.mse_loss(model(x), y)
    >>> grad_fn = ll.make_per_sample_grad_fn(model, loss_fn)
    >>> gradients = grad_fn(ll.init_state(model), (torch.zeros(4, 2), torch.ones(4, 1)))
    >>> gradients.grads["weight"].shape, gradients.samples
    (torch.Size([4, 1, 2]), 4)

    To train, put `clip_per_sample` or `gradient_noise_scale` around it, and `accumulate(..., size=)` around these for
    less memory: it needs that of the parameters once for each example.

    `loss_fn` sees batches of one example, with a first dimension of 1, in `torch.func.vmap`: it may not look at
    values (`.item()`, `if loss > 1`). Tensors of the batch are cut along their first dimension; those without
    dimensions, and what is no tensor, each example is given whole. Dropout differs from example to example; what is
    drawn depends on `(seed, step, rank, microbatch)` alone. Buffers are only read. Metrics merge as those of
    `make_grad_fn`. A batch may be empty: the loss function then sees an example of zeros, which does not count.

    Args:
        model: the module, not wrapped in DDP or FSDP2, without BatchNorm in training mode.
        loss_fn: `loss_fn(model, batch)`, as for `make_grad_fn`. The loss of an example is the scalar that it returns
            for it; total / weight of a `Mean`, and zero where the weight is.
        trainable: `(name, tensor) -> bool`; without it the parameters that require a gradient now.
        batch_size: counts the examples in a batch.

    Gives `grads` of shape (batch, *shape of the parameter), zeros for those that the loss does not reach.

    Raises:
        ValueError: BatchNorm that would normalise over a batch, a module wrapped in DDP or FSDP2, a buffer that the
            forward pass writes, a loss that is no scalar or reaches no parameter; within `accumulate` or
            `scale_loss`; a state of another model, a batch on another device or with tensors of different lengths.
        TypeError: something else than the above returned by `loss_fn`, a NumPy array in the batch.

    Source: `torch.func`'s tutorial on per-sample gradients.
    """
    host = _modules.Host(model, training=True)
    names = _modules.trainable_names(model, trainable)
    if host.engine:
        raise ValueError(
            f"{host.engine} works on gradients of whole batches, which per-sample gradients pass by: give the module "
            "that it wraps"
        )
    if mixing := _batch_norms(host):
        raise ValueError(
            f"{', '.join(mixing)} would normalise each example by the others, so that it has no gradient of its own: "
            "use GroupNorm in its place, or put it into eval mode, with running statistics, before this call"
        )

    def per_sample_grad_fn(state: TrainState, batch: Any, part: Part = WHOLE) -> Gradients:
        if part.sums:
            raise ValueError(
                "gradients of each example do not add up within accumulate: bring them together inside, "
                "accumulate(clip_per_sample(make_per_sample_grad_fn(...), max_norm), ...)"
            )
        if part.scale is not None:
            raise ValueError(
                "per-sample gradients within scale_loss are not supported: leave it out; autocast to "
                "torch.bfloat16, which needs no loss scale"
            )
        params, buffers = of_this_model(host, state)
        lent = {name: tensor.clone() for name, tensor in buffers.items()}
        samples, seed = (
            batch_size(batch),
            part.index if tracing() else mix(state.seed, state.step, rank(), part.index),
        )
        columns: list[Tensor] = []

        def take(leaf: Any) -> Any:
            if isinstance(leaf, Tensor) and leaf.dim():
                if leaf.size(0) != samples:
                    raise ValueError(
                        f"a tensor of the batch has shape {tuple(leaf.shape)}, and the batch {samples} examples: it "
                        "cannot be cut along its first dimension"
                    )
                columns.append(leaf if samples else leaf.new_zeros(1, *leaf.shape[1:]))
                return _Column(len(columns) - 1)
            if not isinstance(leaf, Tensor) and hasattr(leaf, "__array__"):
                raise TypeError(f"the batch has a {type(leaf).__name__}; per-sample gradients need tensors")
            return leaf

        layout = _map(take, batch)

        def one(leaves: Grads, rows: list[Tensor]) -> tuple[Tensor, dict[str, tuple[Tensor, Tensor]]]:
            example = _map(lambda leaf: rows[leaf.index].unsqueeze(0) if type(leaf) is _Column else leaf, layout)

            def body() -> tuple[Tensor, dict[str, tuple[Tensor, Tensor]]]:
                with users_own():
                    loss, aux = split_loss(loss_fn(model, example))
                counted = loss._replace(weight=loss.weight + (loss.weight == 0)) if isinstance(loss, Mean) else loss
                value, factor, _, _ = objective_of(counted, 1, sums=False, per=None)
                value = (value * factor).reshape(())
                sums = {name: _total_and_weight(name, value) for name, value in {"loss": loss, **aux}.items()}
                after = host.buffers()
                if written := [name for name, t in lent.items() if after[name] is not t or t._version]:
                    raise ValueError(_written(", ".join(written)))
                return value, sums

            return host.run({**params, **leaves}, lent, seed, body)

        each = torch.func.vmap(torch.func.grad(one, has_aux=True), in_dims=(None, 0), randomness="different")
        try:
            # Attention by its formula: vmap would run the fused kernels example by example.
            with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
                grads, sums = each({name: params[name] for name in names}, columns)
        except RuntimeError as error:
            host.explain(params, buffers, batch)
            if "mutate a captured Tensor" in str(error) or "updated in place" in str(error):
                raise ValueError(_written(", ".join(buffers))) from error
            raise
        grads = {name: grad[:samples] for name, grad in grads.items()}
        metrics: dict[str, Metric] = {
            name: Mean(_sum(total[:samples]), _sum(weight[:samples])) for name, (total, weight) in sums.items()
        }
        return Gradients(grads, metrics, buffers, samples)

    return per_sample_grad_fn


@dataclasses.dataclass(frozen=True)
class _Column:
    """The place of a tensor that is cut, among the others."""

    index: int


def _map(function: Callable[[Any], Any], node: Any) -> Any:
    """The batch with `function` of its leaves; mappings that pytrees do not know (of tokenizers) keep their type."""

    def strange(node: Any) -> bool:
        return isinstance(node, MutableMapping) and type(node) is not dict

    def leaf(node: Any) -> Any:
        if not strange(node):
            return function(node)
        new = copy.copy(node)
        for key, value in node.items():
            new[key] = _map(function, value)
        return new

    return tree_map(leaf, node, is_leaf=strange)


def _batch_norms(host: _modules.Host) -> list[str]:
    modes = dict(host.modes)
    return [
        f"{name or 'the model'} ({type(module).__name__})"
        for name, module in _modules.named_modules(host.model)
        if isinstance(module, _BatchNorm) and (modes[module] or module.running_mean is None)
    ]


def _written(names: str) -> str:
    return (
        f"the forward pass writes to a buffer (of {names or 'none'}) or to another tensor that it did not make, and "
        "per-sample gradients may only read it: put the module into eval mode before make_per_sample_grad_fn"
    )


def _total_and_weight(name: str, value: Any) -> tuple[Tensor, Tensor]:
    mean = record(name, value, 1)
    if not isinstance(mean, Mean):
        raise TypeError(
            f"{name!r} is a {type(value).__name__}; with per-sample gradients give a scalar or a Mean(total, weight)"
        )
    return torch.as_tensor(mean.total).reshape(()) * mean.times, torch.as_tensor(mean.weight).reshape(()) * mean.times


def _sum(values: Tensor) -> Tensor:
    """Over the examples, in float64 where there is one, as metrics merge."""
    return (values if values.device.type == "mps" else values.double()).sum()


def _examples(wrapper: str, grad_fn: GradFn, state: TrainState, batch: Any, part: Part) -> Gradients:
    """Gradients of each example of this part."""
    out = grad_fn(state, batch, dataclasses.replace(part, sums=False, per=None, into=None))
    params = state.params
    for name, grad in out.grads.items():
        if grad.shape != (expected := (out.samples, *params[name].shape)):
            raise ValueError(
                f"{wrapper} got a gradient of shape {tuple(grad.shape)} for {name}, where those of {out.samples} "
                f"examples have {expected}: put it around make_per_sample_grad_fn"
            )
    return out


def _together(out: Gradients, grads: Grads, part: Part, metrics: dict[str, Metric]) -> Gradients:
    """Gradients summed over the examples, as those of an ordinary GradFn; `grads` may be written."""
    per = part.per if part.sums and part.per is not None else max(out.samples, 1)
    multiply(grads, 1 / per)
    if part.into:
        for name, grad in grads.items():
            grads[name] = part.into[name].add_(grad)
    metrics = {**out.metrics, **metrics}
    if part.sums:
        return Gradients(grads, metrics, out.buffers, out.samples, out.samples, per)
    return Gradients(grads, metrics, out.buffers, out.samples)


def clip_per_sample(grad_fn: GradFn, max_norm: float) -> GradFn:
    """Scale each example's gradient down so that its norm is at most `max_norm`, and take the mean of them.

    >>> import looplib as ll, torch
    >>> model = torch.nn.Linear(2, 1)
    >>> per_sample = ll.make_per_sample_grad_fn(model, lambda model, x: model(x).square().mean())
    >>> grad_fn = ll.accumulate(ll.clip_per_sample(per_sample, max_norm=1.0), size=64)
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
    if not max_norm > 0:
        raise ValueError(f"max_norm is {max_norm}; give a norm above 0")

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

    clipped.max_norm = max_norm  # type: ignore[attr-defined]
    return clipped


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
    >>> grad_fn = ll.make_per_sample_grad_fn(model, lambda model, x: model(x).square().mean())
    >>> grad_fn = ll.accumulate(ll.clip_per_sample(grad_fn, max_norm=1.0), size=64)
    >>> grad_fn = ll.add_noise(grad_fn, max_norm=1.0, noise_multiplier=1.1, expected_batch_size=256)
    >>> gradients = grad_fn(ll.init_state(model), torch.randn(250, 2))

    The noise has a standard deviation of `noise_multiplier * max_norm` and goes onto the sum, once for a step; then
    the sum is divided by the batch's size. It depends on the state's `(seed, step)` alone.

    How much privacy a run gives is for a library to say (Opacus' `RDPAccountant`, Google's `dp_accounting`), from the
    noise multiplier, the sampling rate and the number of steps. Most of them assume Poisson sampling, in which
    each example is in a batch by its own coin (`make_loader(..., batch_sampler=)`): then the size of a batch
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
    check_parts(grad_fn, "add_noise")
    if (norm := getattr(grad_fn, "max_norm", max_norm)) != max_norm:
        raise ValueError(f"clip_per_sample has max_norm={norm} and add_noise max_norm={max_norm}: give both the same")

    def noisy(state: TrainState, batch: Any, part: Part = WHOLE) -> Gradients:
        out = grad_fn(state, batch, dataclasses.replace(part, sums=True))
        if "clipped" not in out.metrics:
            raise ValueError(
                "add_noise got gradients that are not clipped example by example, which no noise makes private: "
                "add_noise(clip_per_sample(make_per_sample_grad_fn(...), max_norm), max_norm, ...)"
            )
        size = expected_batch_size or out.samples
        if not size:
            raise ValueError("the batch is empty: with Poisson sampling, give add_noise(..., expected_batch_size=)")
        multiply(out.grads, out.per / size)
        generators = {  # in a trace of a step they are those of the step, which no two steps share either
            device: None if tracing() else torch.Generator(device).manual_seed(mix(state.seed, state.step, _NOISE))
            for device in {grad.device for grad in out.grads.values()}
        }
        for grad in out.grads.values():
            noise = torch.empty_like(grad).normal_(generator=generators[grad.device])
            grad.add_(noise, alpha=noise_multiplier * max_norm / size)
        return Gradients(out.grads, out.metrics, out.buffers, out.samples)

    return of_whole("add_noise", noisy)


def gradient_noise_scale(grad_fn: GradFn) -> GradFn:
    """The mean gradient, and how large a batch it would take to see through the noise, as `gradient_noise_scale`.

    >>> import looplib as ll, torch
    >>> model = torch.nn.Linear(2, 1)
    >>> per_sample = ll.make_per_sample_grad_fn(model, lambda model, x: model(x).square().mean())
    >>> out = ll.gradient_noise_scale(per_sample)(ll.init_state(model), torch.randn(16, 2))
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

    return measured
