"""Per-sample gradients and their uses.

`make_per_sample_grad_fn` runs the ordinary loss function on batches of one sample, all at once with
`torch.func.vmap`. The functions around it combine the samples' gradients into one, and therefore into an ordinary
`GradFn`, as `clip_per_sample` does for differential privacy.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from looplib._core import modules as _modules
from looplib._core import torch_private, trees
from looplib._core.checks import as_tensor, check
from looplib._core.lease import trees_of
from looplib._core.mappings import mapped, pick, wide_dtype
from looplib._core.passes import Passes, passes, unwritten
from looplib._core.ranks import rank
from looplib._core.records import Made, check_kind, with_record, with_repr
from looplib._core.samples import as_counter, one_for_each
from looplib._objective import multiply, record, split_loss, value_of
from looplib.grads.wrapping import PER_SAMPLE_SCALED, check_samples_apart, check_whole_batch, joined
from looplib.metrics import Mean
from looplib.transforms.decompositions import RecurrentInParts
from looplib.types import BatchPart, GradFn, Gradients, Grads, LossFn, Metric, TrainState


def make_per_sample_grad_fn(
    model: nn.Module,
    loss_fn: LossFn,
    *,
    trainable: Callable[[str, Tensor], bool] | None = None,
    count_samples: Callable[[Any], int] | None = None,
) -> GradFn:
    """Per-sample gradients: the gradient of each sample's loss, as a pure function of state and batch.

    >>> import looplib as ll, torch
    >>> model = torch.nn.Linear(2, 1)
    >>> def loss_fn(model, batch):
    ...     x, y = batch
    ...     return torch.nn.functional.mse_loss(model(x), y)
    >>> grad_fn = ll.contrib.make_per_sample_grad_fn(model, loss_fn)
    >>> gradients = grad_fn(ll.init_state(model), (torch.zeros(4, 2), torch.ones(4, 1)))
    >>> gradients.grads["weight"].shape, gradients.samples
    (torch.Size([4, 1, 2]), 4)

    The returned `grads` have the shape (batch, *shape of the parameter), with zeros for parameters that the loss does
    not reach. To train, put `clip_per_sample` around it; with torch's own optimizer, call that by `ll.grads.backward`.
    It needs memory for one copy of the parameters per sample, so put `accumulate(..., size=)` around these to use less.

    `loss_fn` sees batches of one sample, with a first dimension of 1, inside `torch.func.vmap`, so it cannot read
    values (`.item()`, `if loss > 1`). Tensors of the batch are split along their first dimension; tensors without
    dimensions, and values that are not tensors, are passed whole to each sample. Dropout differs from sample to
    sample and depends only on `(seed, step, rank, microbatch)`. Buffers are only read. Metrics are merged as with
    `make_grad_fn`. A batch may be empty: the loss function then sees a sample of zeros, which does not count.

    Args:
        model: the `nn.Module`, not wrapped in DDP or FSDP2, and without BatchNorm in training mode.
        loss_fn: `loss_fn(model, batch)`, as for `make_grad_fn`. The loss of a sample is the scalar that is returned
            for it; for a `Mean`, total / weight, or zero if the weight is zero.
        trainable: `(name, tensor) -> bool`, selects the parameters to train, as for `make_grad_fn`.
        count_samples: function from a batch to its number of samples, as for `make_grad_fn`.

    Raises:
        ValueError: the model recomputes or offloads activations; BatchNorm would normalize over a batch; the module is
            wrapped in DDP or FSDP2; the forward pass writes a buffer; the loss is not a scalar or reaches no parameter;
            the function is used inside `accumulate` or for a scaled loss; the state belongs to a different model; or the
            batch has tensors of different lengths.
        TypeError: `loss_fn` returns anything else, or the batch contains a NumPy array.

    Source: `torch.func`'s tutorial on per-sample gradients.
    """
    check_kind(model, "make_per_sample_grad_fn", "model")
    check_kind(loss_fn, "make_per_sample_grad_fn", "loss_fn")
    host, counter = _modules.FunctionalModule(model, training=True), as_counter(count_samples)
    names = _modules.trainable_names(model, trainable)
    _check_model(host)
    host.warn_of_eval_mode(names)

    def per_sample_grad_fn(
        state: TrainState,
        batch: Any,
        *,
        index: int = 0,
        scale: Tensor | None = None,
        donate: bool = False,
        in_step: bool = False,
        part: BatchPart | None = None,
    ) -> Gradients:
        check_whole_batch(part, "make_per_sample_grad_fn", _SUMMED)
        check(scale is None, PER_SAMPLE_SCALED)
        params, buffers, _ = trees_of(state)
        host.check(params, buffers)
        lent = mapped(Tensor.clone, buffers)
        form = passes()
        (seed,) = form.seeds(state, rank(), (index,))
        samples = counter(batch)
        columns, layout = _columns_of(batch, samples)

        def grads_of_samples(of_passes: dict[str, Tensor]) -> tuple[Grads, _Sums]:
            def loss_of_sample(leaves: Grads, rows: list[Tensor]) -> tuple[Tensor, _Sums]:
                body = partial(_value_and_sums, host, form, loss_fn, _batch_of_one(layout, rows), lent)
                return host.run({**of_passes, **leaves}, lent, seed, body, in_place=True)

            grad_of_sample = torch.func.grad(loss_of_sample, has_aux=True)
            of_samples = torch.func.vmap(grad_of_sample, in_dims=(None, 0), randomness="different")
            out: tuple[Grads, _Sums] = of_samples(pick(of_passes, names), columns)
            return out

        # A donated step may write to parameters, as a raw loop does.
        guard = nullcontext(params) if donate else unwritten(form.guard or host.unwritten, state)
        try:
            # Use the plain form of attention and recurrent layers: vmap would run fused kernels one sample at a time.
            with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), RecurrentInParts(), guard as of_passes:
                grads, sums = grads_of_samples(of_passes)
        except RuntimeError as error:
            host.explain(params, buffers)
            if "mutate a captured Tensor" in str(error) or "updated in place" in str(error):
                raise ValueError(_written(", ".join(buffers))) from error
            if any(words in str(error) for words in ("saved tensor hooks", "setup_context", "generate_vmap_rule")):
                raise ValueError(_NOT_BY_FUNC) from error
            raise
        grads = {name: grad[:samples] for name, grad in grads.items()}
        metrics: dict[str, Metric] = {
            name: Mean(_sum(total[:samples]), _sum(weight[:samples])) for name, (total, weight) in sums.items()
        }
        return Gradients(grads, metrics, buffers, samples)

    facts = Made("grad_fn", "make_per_sample_grad_fn", per_sample=True, model=model, count_samples=counter)
    settings = {"trainable": trainable, "count_samples": count_samples}
    return with_repr(with_record(per_sample_grad_fn, facts), make_per_sample_grad_fn, model, loss_fn, **settings)


_Sums = dict[str, tuple[Tensor, Tensor]]  # name -> total and weight


def mean_of(loss: Any) -> Tensor:
    """The mean that a loss stands for, as one number, where values cannot be read, as inside `torch.func` transforms."""
    if not isinstance(loss, Mean):
        return value_of(loss).reshape(())
    detached: Any = record("loss", loss, 1)  # a Mean, whose weight has no graph
    mean: Tensor = value_of(loss) / (detached.weight + (detached.weight == 0))
    return mean.reshape(())


def _value_and_sums(
    host: _modules.FunctionalModule, form: Passes, loss_fn: LossFn, batch: Any, lent: dict[str, Tensor]
) -> tuple[Tensor, _Sums]:
    """The loss to differentiate and the metrics of a batch of one sample, with a state's tensors in the module."""
    with form.around_loss:
        loss, aux = split_loss(loss_fn(host.model, batch))
    value = mean_of(loss)
    sums = {name: _total_and_weight(name, value) for name, value in {"loss": loss, **aux}.items()}
    after = host.buffers()
    if written := [name for name, t in lent.items() if after[name] is not t or torch_private.version(t)]:
        raise ValueError(_written(", ".join(written)))
    return value, sums


@dataclasses.dataclass(frozen=True)
class _Column:
    """Placeholder in a batch for a tensor that vmap maps over: its index among these."""

    index: int


def _columns_of(batch: Any, samples: int) -> tuple[list[Tensor], Any]:
    """Tensors of a batch with one row per sample, and the batch with a `_Column` in place of each."""
    columns: list[Tensor] = []

    def listed(node: Any) -> bool:
        return samples > 1 and one_for_each(node, samples)

    def take(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return column(leaf) if leaf.dim() else leaf
        per_sample = " with one item for each sample" * listed(leaf)
        if per_sample or hasattr(leaf, "__array__"):
            raise TypeError(f"the batch has a {type(leaf).__name__}{per_sample}; per-sample gradients need tensors")
        return leaf

    def column(rows: Tensor) -> _Column:
        check(
            len(rows) == samples,
            f"a tensor of the batch has shape {tuple(rows.shape)}, and the batch {samples} samples: it cannot be cut "
            "along its first dimension",
        )
        columns.append(rows if samples else rows.new_zeros(1, *rows.shape[1:]))
        return _Column(len(columns) - 1)

    layout = trees.map_leaves(take, batch, is_leaf=listed)
    return columns, layout


def _batch_of_one(layout: Any, rows: list[Tensor]) -> Any:
    """Batch of one sample, from its row of each column."""
    return trees.map_leaves(
        lambda leaf: rows[leaf.index].unsqueeze(0) if type(leaf) is _Column else leaf,
        layout,
        is_leaf=lambda node: type(node) is _Column,
    )


def _check_model(host: _modules.FunctionalModule) -> None:
    """Raise for a model in which a sample's gradient depends on other samples."""
    engine = host.engine
    check(
        engine is None,
        f"{engine and engine.name} works on gradients of whole batches, which per-sample gradients pass by: give the module "
        "that it wraps",
    )
    check_samples_apart(host.batch_norms())


_SUMMED = (
    "bring the gradients of the samples together inside, "
    "accumulate(clip_per_sample(make_per_sample_grad_fn(...), max_norm), ...)"
)
_NOT_BY_FUNC = (
    "the model recomputes or offloads activations (ll.losses.recompute or offload, torch.utils.checkpoint, "
    "gradient_checkpointing_enable()), or has an autograd.Function without setup_context or generate_vmap_rule, which "
    "torch.func cannot differentiate for each sample, so there are no per-sample gradients: leave it out, and to need less "
    "memory, put accumulate(..., size=) around clip_per_sample"
)


def _written(names: str) -> str:
    return (
        f"the forward pass writes to a buffer (of {names or 'none'}) or to another tensor that it did not make, and "
        "per-sample gradients may only read it: put the module into eval mode before make_per_sample_grad_fn"
    )


def _total_and_weight(name: str, value: Any) -> tuple[Tensor, Tensor]:
    mean: Any = record(name, value, 1)
    kind = type(value).__name__
    message = f"{name!r} is a {kind}; with per-sample gradients give a scalar or a Mean(total, weight)"
    check(isinstance(mean, Mean), message, TypeError)
    total = as_tensor(mean.total).reshape(())
    weight = torch.as_tensor(mean.weight, device=total.device).reshape(())
    return (total, weight) if mean.times == 1 else (total * mean.times, weight * mean.times)


def _sum(values: Tensor) -> Tensor:
    """Sum over the samples, in float64 if available, as metrics are merged."""
    return values.to(wide_dtype(values.device)).sum()


def _examples(wrapper: str, grad_fn: GradFn, state: TrainState, batch: Any, request: Mapping[str, Any]) -> Gradients:
    """Gradients of each sample of this batch."""
    out = grad_fn(state, batch, **request)
    params = state.params
    for name, grad in out.grads.items():
        if grad.shape != (expected := (out.samples, *params[name].shape)):
            raise ValueError(
                f"{wrapper} got a gradient of shape {tuple(grad.shape)} for {name}, where those of {out.samples} "
                f"samples have {expected}: put it around make_per_sample_grad_fn"
            )
    return out


def _together(out: Gradients, grads: Grads, part: BatchPart | None, metrics: dict[str, Metric]) -> Gradients:
    """Gradients summed over the samples, as from an ordinary GradFn. `grads` may be overwritten."""
    samples, metrics = out.samples, joined(out.metrics, metrics)
    if part is None:
        multiply(grads, 1 / max(samples, 1))
        return Gradients(grads, metrics, out.buffers, samples)
    normalizer = part.normalizer_for(samples)
    multiply(grads, 1 / normalizer)
    return Gradients(grads, metrics, out.buffers, samples, samples, normalizer)
