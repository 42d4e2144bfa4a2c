"""Influence of training samples: gradients of a final loss with respect to their weights, through the whole run."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from looplib._core import trees
from looplib._core.checks import check, check_count
from looplib._core.ranks import world_size
from looplib._core.records import check_kind
from looplib._core.torch_private import TorchDispatchMode, pytree
from looplib.data import Loader
from looplib.state import end_epoch
from looplib.transforms import differentiable
from looplib.types import TrainState, TrainStep, check_state


def sample_influence(
    train_step: TrainStep,
    state: TrainState,
    loader: Loader,
    loss_of_state: Callable[[TrainState], Tensor],
    steps: int,
) -> tuple[Tensor, TrainState]:
    """Influence of training samples (data attribution): which of them have made a loss small or large.

    >>> import looplib as ll, torch
    >>> data, model = torch.utils.data.TensorDataset(torch.eye(3), torch.ones(3, 1)), torch.nn.Linear(3, 1, bias=False)
    >>> def weighted_loss(model, batch):
    ...     (x, y), weights = batch
    ...     return (weights[:, None] * (model(x) - y).square()).mean()
    >>> optimizer = ll.optimizer(torch.optim.SGD, lr=0.1)
    >>> train_step = ll.make_train_step(ll.make_grad_fn(model, weighted_loss), optimizer)
    >>> loader = ll.make_loader(data, batch_size=3)
    >>> state = ll.init_state(model, optimizer, loader=loader).replace(params={"weight": torch.zeros(1, 3)})
    >>> error_of_first = lambda state: (state.params["weight"][0, 0] - 1).square()
    >>> gradients, last = sample_influence(train_step, state, loader, error_of_first, steps=5)
    >>> gradients  # -2/3 * (14/15) ** 9, 0, 0
    tensor([-0.3583,  0.0000,  0.0000])

    Each sample has a weight, which is 1 in the run. The result is the derivative of the loss after the run by these weights,
    through all updates, momenta and dropout masks. Without sample i, the loss changes by about `-gradients[i]`, less exactly
    in small batches and at high learning rates (the cookbook has figures). Returned are the (samples of the dataset,)
    gradients, and the last state of the run, which is replayed in segments: memory grows with `sqrt(steps)`.

    Args:
        train_step: the run's step, for batches `(batch, weights)`: what the loader yields, and (samples,) weights, by which
            the loss function multiplies its samples' losses. In `(weights * losses).mean()`, a sample of weight 0 leaves a gap
            in its batch; in `ll.Mean((weights * losses).sum(), weights.sum())`, the others fill it.
        state: first state of the run, or a later one, from which on samples then count. It stays as it is.
        loader: loader of the run, over a dataset with indices, whose `collate_fn` keeps the order of the samples.
        loss_of_state: `state -> scalar` with a graph, as of `torch.func.functional_call(model, state.params, x)`.
        steps: number of batches to train on.

    Raises:
        ValueError: the state is in half precision, or an operation of a step or of `loss_of_state` rounds to it, which drowns
            the gradient of many steps; a step moves a buffer, through which no gradient passes (BatchNorm in training mode);
            a loss does not use the weights or its state, or is no scalar with a graph; or there are several ranks.
        TypeError: the samples have no indices, as in a stream, or an argument is of a different kind.
        UntraceableError: from the step, as in `ll.transforms.differentiable`.

    Source: "Data cleansing for models trained with SGD" (Hara et al., 2019), and "MAGIC" (Ilyas and Engstrom, 2025).
    """
    check_kind(train_step, "sample_influence", "train_step")
    check_state(state, "ll.contrib.sample_influence(train_step, state, ...)")
    check_count("steps", steps)
    check(world_size() == 1, "sample_influence needs one process: a rank has the gradients of its samples alone")
    indexed = isinstance(loader, Loader) and isinstance(loader.indices(state.replace(batch=0)), Tensor)
    check(indexed, "sample_influence needs a loader of ll.make_loader over a dataset with indices", TypeError)
    halves = [trees.python_path(path, "state") for path, leaf in trees.leaves(state) if 0 < _bits(leaf) <= 16]
    check(not halves, f"{', '.join(halves[:5])} is in half precision; give float32 or float64")
    step, start = differentiable(train_step), _copied(Tensor.detach, state)
    weights = next(iter(start.params.values())).new_ones(len(loader.dataset)).requires_grad_()
    length, starts, gradients = math.isqrt(steps - 1) + 1, [], torch.zeros_like(weights)
    for done in range(0, steps, length):
        starts.append((start, min(length, steps - done)))
        start = _copied(Tensor.detach, _replayed(step, *starts[-1], loader, weights.detach()))
    last = _copied(_leaf, start)
    with _WithoutHalves():  # type: ignore[no-untyped-call]
        loss = loss_of_state(last)
    scalar = isinstance(loss, Tensor) and loss.dim() == 0 and loss.requires_grad
    grads = torch.autograd.grad(loss, _tensors(last), allow_unused=True) if scalar else ()
    graph = "a scalar with a graph to its state, as of torch.func.functional_call(model, state.params, x)"
    check(any(grad is not None for grad in grads), f"loss_of_state must return {graph}")
    while starts:  # what is popped, and its graph, is gone before the next segment takes its memory
        grads, of_weights = _through(step, *starts.pop(), loader, weights, grads)
        gradients += of_weights
    return gradients, _copied(Tensor.detach, last)


def _through(step: TrainStep, state: TrainState, count: int, loader: Loader, weights: Tensor, grads: Any) -> Any:
    """Gradients of a segment's first state and of the weights, from those of its last state."""
    first = _copied(_leaf, state)
    after = _tensors(_replayed(step, first, count, loader, weights))
    pairs = [(x, grad) for x, grad in zip(after, grads, strict=True) if grad is not None and x.requires_grad]
    outputs, of_outputs = zip(*pairs, strict=True)
    *grads, of_weights = torch.autograd.grad(outputs, [*_tensors(first), weights], of_outputs, allow_unused=True)
    check(of_weights is not None, "the train step's loss does not use the weights of its batch, (batch, weights)")
    return grads, of_weights


def _replayed(step: TrainStep, state: TrainState, count: int, loader: Loader, weights: Tensor) -> TrainState:
    while True:
        for batch in loader(state):
            old, count = state.buffers.items(), count - 1
            with _WithoutHalves():  # type: ignore[no-untyped-call]
                state, _ = step(state, (batch, weights[loader.indices(state).to(weights.device)]))  # type: ignore[union-attr]
            moved = [name for name, buffer in old if _bits(buffer) and not trees.same(buffer, state.buffers[name])]
            check(
                not moved, f"update {state.step} moves buffers without gradients (BatchNorm needs eval mode): {moved}"
            )
            if not count:
                return state
        state = end_epoch(state) if state.epoch_length is None else state


class _WithoutHalves(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuse operations that round to half precision. Data that begin in it have no gradient, and may stay."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = function(*args, **(kwargs or {}))
        halves = [leaf.dtype for leaf in pytree.tree_leaves(outputs) if 0 < _bits(leaf) <= 16]
        if halves and any(_bits(leaf) > 16 for leaf in pytree.tree_leaves((args, kwargs))):
            use = "no autocast or .bfloat16() in model and losses, and no optimizer that computes in it, as Muon does"
            raise ValueError(f"the operation {function} rounds to half precision ({halves[0]}): use {use}")
        return outputs


def _bits(x: Any) -> int:
    """Bits of a floating point number, and 0 for a leaf that has no gradient."""
    return torch.finfo(x.dtype).bits if isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex()) else 0


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(_bits(tensor) > 0)


def _tensors(state: TrainState) -> list[Tensor]:
    return [leaf for _, leaf in trees.leaves((state.params, state.opt_state, state.extra)) if _bits(leaf)]


def _copied(function: Callable[[Tensor], Tensor], state: TrainState) -> TrainState:
    copied: TrainState = trees.map_tensors(function, state)  # which has no record of the run, and no lease
    return copied.replace(buffers={name: buffer.detach() for name, buffer in state.buffers.items()})
