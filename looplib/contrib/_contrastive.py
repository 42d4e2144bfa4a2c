"""Gradient caching: contrastive losses over batches that do not fit into memory.

A contrastive loss compares every sample with every other, so the gradient of a batch is not a sum over microbatches.
But it reaches the weights only through the embeddings, which are small. So there are three stages: compute the
embeddings of all microbatches without a graph; compute the loss and its gradient with respect to the embeddings; and
for each microbatch, compute the embeddings again with a graph, and propagate their gradient to the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from looplib._core import modules as _modules
from looplib._core import trees
from looplib._core.checks import check, check_count
from looplib._core.lease import trees_of
from looplib._core.passes import unwritten
from looplib._core.random import mix
from looplib._core.ranks import is_distributed, largest_over_ranks, rank
from looplib._core.records import Made, check_kind, with_record, with_repr
from looplib._core.samples import as_counter, even, split
from looplib._core.tracing import refuse_in_graph
from looplib._objective import aux_records, record, shape_or_type, split_loss
from looplib.contrib._per_sample import mean_of
from looplib.distributed.records import gather_tensors
from looplib.gradients import indices, make_grad_fn
from looplib.grads import accumulate, reduce_gradients
from looplib.grads.wrapping import check_whole_batch
from looplib.metrics import Mean
from looplib.types import BatchPart, GradFn, Gradients, TrainState


class _Microbatch(NamedTuple):
    batch: Any
    grads: list[Tensor]  # gradient of the loss with respect to each tensor of the embeddings
    share: float  # number of samples on all ranks


def make_contrastive_grad_fn(
    model: nn.Module,
    embed_fn: Callable[[Any, Any], Any],
    embedding_loss: Callable[[Any], Any],
    *,
    microbatches: int,
    trainable: Callable[[str, Tensor], bool] | None = None,
    count_samples: Callable[[Any], int] | None = None,
) -> GradFn:
    """Gradient caching: the gradient of a contrastive loss over a whole batch, in the memory of one microbatch.

    >>> import looplib as ll, torch
    >>> from torch.nn import functional as F
    >>> model = torch.nn.Linear(3, 2)
    >>> def embed_fn(model, batch):
    ...     return F.normalize(model(batch["query"])), F.normalize(model(batch["key"]))
    >>> def loss_fn(embeddings):
    ...     queries, keys = embeddings
    ...     return F.cross_entropy(queries @ keys.T / 0.1, torch.arange(len(keys)))
    >>> grad_fn = ll.contrib.make_contrastive_grad_fn(model, embed_fn, loss_fn, microbatches=4)
    >>> batch = {"query": torch.randn(16, 3), "key": torch.randn(16, 3)}
    >>> state = ll.init_state(model)
    >>> whole = ll.make_grad_fn(model, lambda model, batch: loss_fn(embed_fn(model, batch)))(state, batch)
    >>> torch.testing.assert_close(grad_fn(state, batch).grads, whole.grads)

    The gradient is that of the whole batch. A microbatch draws the same random numbers in both of its forward passes,
    so this holds with dropout too; the masks are those of `ll.accumulate` with the same number of microbatches.
    BatchNorm normalizes each microbatch separately and updates its statistics once per microbatch. Compared with the
    plain form, it takes one more forward pass. With torch's own optimizer, call it by `ll.grads.backward`.

    On several ranks the loss is that of the global batch: each rank gathers all embeddings, and the gradients are
    summed over the ranks, by DDP or FSDP2 if one of them wraps the model, otherwise as by
    `ll.grads.reduce_gradients`. The embeddings are sent through the CPU.

    Args:
        model: the `nn.Module`, with or without torch's wrappers.
        embed_fn: `embed_fn(model, batch)`, the embeddings of a batch: a tensor or any tree of tensors, each with one
            row per sample. Tensors that are not floating point, such as labels, are passed to the loss as well.
        embedding_loss: `embedding_loss(embeddings)`, where the tree has the rows of the whole batch (of all ranks, in
            order). Returns a scalar, or `(loss, aux)` with a dict of scalars and metrics.
        microbatches: number of microbatches, split as by `torch.tensor_split`; at most one per sample.
        trainable: `(name, tensor) -> bool`, selects the parameters to train, as for `make_grad_fn`.
        count_samples: function from a batch to its number of samples, as for `make_grad_fn`.

    Raises:
        ValueError: embeddings do not have one row per sample, or the loss does not depend on them; the function is
            used inside `accumulate`, whose microbatches would see fewer pairs; and see `make_grad_fn`.
        UntraceableError: inside a compiled step, whose graph cannot contain the second forward pass.

    Source: Gao, Zhang, Han and Callan, "Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup", 2021.
    """
    check_kind(model, "make_contrastive_grad_fn", "model")
    check_kind(embed_fn, "make_contrastive_grad_fn", "loss_fn")
    check_count("microbatches", microbatches)
    host, counter = _modules.FunctionalModule(model, training=True), as_counter(count_samples)

    def pull(model: Any, microbatch: _Microbatch) -> Mean:
        """Surrogate loss with the cached gradient: the product of the embeddings with it."""
        pairs = zip(_floating(embed_fn(model, microbatch.batch)), microbatch.grads, strict=True)
        return Mean(torch.stack([(tensor * grad).sum() for tensor, grad in pairs]).sum(), microbatch.share)

    def samples_of(microbatch: _Microbatch) -> int:
        return counter(microbatch.batch)

    inner = make_grad_fn(model, pull, trainable=trainable, count_samples=samples_of)
    pulls = accumulate(inner)
    if host.engine is None:
        pulls = reduce_gradients(pulls)

    def contrastive(
        state: TrainState, batch: Any, *, index: int = 0, part: BatchPart | None = None, **request: Any
    ) -> Gradients:
        _check_whole(part)
        params, buffers, _ = trees_of(state)
        host.check(params, buffers)
        count = counter(batch)
        check(count, "the batch has no samples, so its loss has no value: leave it out")
        sizes = even(count, microbatches)
        batches = split(batch, count, sizes, counter)
        # A donated step may write to parameters in each of its passes, as a raw loop does.
        with nullcontext(params) if request.get("donate") else unwritten(host.unwritten, state) as of_passes:
            embeddings = [*map(_checked, _embedded(host, embed_fn, state, of_passes, batches, index), sizes)]
        loss, aux, grads, total = _loss_and_grads(embedding_loss, _concatenated(embeddings), count)
        columns = zip(*(torch.split(grad, sizes) for grad in grads), strict=True)
        shares = [size / total for size in sizes]
        out = pulls(state, [*map(_Microbatch, batches, map(list, columns), shares)], index=index, **request)
        return out._replace(metrics={"loss": record("loss", loss, count), **aux_records(aux, count)})

    name = "make_contrastive_grad_fn"
    facts = Made("grad_fn", name, model=model, count_samples=counter)
    settings = {"microbatches": microbatches, "trainable": trainable, "count_samples": count_samples}
    return with_repr(
        with_record(contrastive, facts), make_contrastive_grad_fn, model, embed_fn, embedding_loss, **settings
    )


def _embedded(
    host: _modules.FunctionalModule,
    embed_fn: Callable[[Any, Any], Any],
    state: TrainState,
    params: dict[str, Tensor],
    batches: Sequence[Any],
    index: int,
) -> list[Any]:
    """Embeddings of each microbatch by these parameters without a graph, with the random numbers of the later pass."""
    seeds = [mix(state.seed, state.step, rank(), microbatch) for microbatch in indices(index, len(batches))]
    passes = largest_over_ranks(len(batches))
    embeddings: list[Any] = []

    def body() -> None:
        for number in range(passes):  # as many on all ranks, since an engine may wait for the others in each
            index = min(number, len(batches) - 1)
            host.seed(seeds[index])
            embeddings.append(embed_fn(host.model, batches[index]))

    with torch.no_grad():
        host.run(params, state.buffers, seeds[0], body)
    return embeddings[: len(batches)]


def _check_whole(part: BatchPart | None) -> None:
    """Raise inside a compiled step or `accumulate`, where the whole batch is not available."""
    refuse_in_graph(
        "make_contrastive_grad_fn runs each microbatch twice, and its graph would hold both at once: leave out "
        "ll.compile_step, and compile the blocks of the model instead, for block in model.blocks: block.compile()"
    )
    instead = "leave accumulate out, and give make_contrastive_grad_fn(..., microbatches=)"
    check_whole_batch(part, "make_contrastive_grad_fn", instead)


def _floating(embeddings: Any) -> list[Tensor]:
    tensors = [leaf for _, leaf in trees.leaves(embeddings) if isinstance(leaf, Tensor)]
    return [tensor for tensor in tensors if tensor.is_floating_point()]


def _checked(embeddings: Any, count: int) -> Any:
    for path, leaf in trees.leaves(embeddings):
        if not isinstance(leaf, Tensor) or leaf.shape[:1] != (count,):
            raise ValueError(
                f"{trees.python_path(path, 'embeddings')} of a microbatch of {count} samples has {shape_or_type(leaf)}: "
                "embed_fn must return tensors with one row for each sample"
            )
        check(
            not leaf.is_complex(),
            f"{trees.python_path(path, 'embeddings')} is complex; give torch.view_as_real of it",
            TypeError,
        )
    message = "embed_fn returned no tensor of floating point, so there is nothing to take a gradient of"
    check(_floating(embeddings), message)
    return embeddings


def _concatenated(parts: Iterable[Any]) -> Any:
    return trees.map_leaves(lambda *tensors: torch.cat(tensors), *parts)


def _loss_and_grads(
    embedding_loss: Callable[[Any], Any], embeddings: Any, count: int
) -> tuple[Any, dict[str, Any], list[Tensor], int]:
    """Loss of all ranks' embeddings, its gradient with respect to this rank's, and the number of samples of all."""
    leaves: list[Tensor] = []

    def leaf_of(value: Tensor) -> Tensor:
        if not value.is_floating_point():
            return value
        leaves.append(value.detach().requires_grad_())
        return leaves[-1]

    embedded, total = trees.map_leaves(leaf_of, embeddings), count
    with torch.enable_grad():
        if is_distributed():
            embedded, total = _of_all_ranks(embedded, embeddings, count, leaves[0].device)
        loss, aux = split_loss(embedding_loss(embedded))
        value = mean_of(loss)
    grads = torch.autograd.grad(value, leaves, allow_unused=True)
    message = "the loss does not depend on the embeddings: compute it from what embedding_loss is given"
    check(any(grad is not None for grad in grads), message)
    filled = [torch.zeros_like(leaf) if grad is None else grad for leaf, grad in zip(leaves, grads, strict=True)]
    return loss, dict(aux), filled, total


def _of_all_ranks(embedded: Any, embeddings: Any, count: int, device: torch.device) -> tuple[Any, int]:
    """The embeddings of all ranks in order, this rank's with their graph, and the number of samples."""
    everyone, counts = zip(*gather_tensors((trees.map_leaves(Tensor.cpu, embeddings), count)), strict=True)
    parts = [trees.map_leaves(lambda value: value.to(device), part) for part in everyone]
    parts[rank()] = embedded
    return _concatenated(parts), sum(counts)
