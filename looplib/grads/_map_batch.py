"""Batches that depend on the state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from looplib._core.checks import check
from looplib._core.records import check_call, kind_of, with_repr
from looplib._core.samples import count_samples
from looplib.grads.wrapping import as_wrapper, check_grad_fn
from looplib.types import GradFn, Gradients, TrainState


def map_batch(grad_fn: GradFn, batch_fn: Callable[[TrainState, Any], Any]) -> GradFn:
    """Give the loss what it has to know of the state: compute the batch that it gets from the state and the batch.

    >>> import looplib as ll, torch
    >>> model, optimizer = torch.nn.Linear(2, 1), ll.optimizer(torch.optim.SGD, lr=0.1)
    >>> def loss_fn(model, batch):
    ...     x, weight = batch
    ...     return weight * model(x).square().mean()
    >>> def with_warmup(state, x):
    ...     return x, ll.transforms.on_host(lambda step: min(1.0, step / 1000), state.step)
    >>> grad_fn = ll.grads.map_batch(ll.make_grad_fn(model, loss_fn), with_warmup)
    >>> train_step = ll.make_train_step(grad_fn, optimizer)
    >>> state, metrics = train_step(ll.init_state(model, optimizer), torch.ones(4, 2))
    >>> ll.compute(metrics)
    {'loss': 0.0}

    Use it for a loss that depends on the step (KL annealing, a teacher's temperature), on the epoch, or on what you
    keep in `state.extra`. It works inside `accumulate` and around it, for models in DDP and FSDP2 around it only:
    numbers and other leaves without samples belong to each microbatch. In steps that run as graphs (`compile_step`,
    `vmap_step`, `differentiable`), the counts of the state have no value while the graph is traced. Compute what depends
    on them with `ll.transforms.on_host`, which elsewhere only calls the function. The same holds for `extra`,
    `on_host(function, state.extra)`; in an ensemble, the function gets that of the whole stack.

    Args:
        grad_fn: the gradient function that gets the new batch.
        batch_fn: `batch_fn(state, batch) -> batch`. It draws no random numbers: those of a step belong to the loss.

    Raises:
        TypeError: `grad_fn` or `batch_fn` is something different.
    """
    grad_fn = check_grad_fn(grad_fn, "map_batch")
    is_function = callable(batch_fn) and kind_of(batch_fn) is None
    check(is_function, f"map_batch got {batch_fn!r}; give a function (state, batch) -> batch", TypeError)
    check_call("map_batch", batch_fn, "state", "batch")

    def mapped(state: TrainState, batch: Any, **request: Any) -> Gradients:
        return grad_fn(state, batch_fn(state, batch), **request)

    # The function of `grad_fn` counts the samples of what `batch_fn` returns.
    return with_repr(as_wrapper(mapped, "map_batch", grad_fn, count_samples), map_batch, grad_fn, batch_fn)
