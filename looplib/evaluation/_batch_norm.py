"""BatchNorm statistics for weights that no forward pass in training mode has seen, such as averaged ones."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from looplib._core.checks import check, few
from looplib._core.collective import together_with_data
from looplib._core.modules import is_parallel, named_modules
from looplib._core.random import restored
from looplib._core.records import check_kind
from looplib._core.torch_private import BatchNorm
from looplib.distributed.records import gather_tensors
from looplib.evaluation._batches import Reading, ranks_of, read
from looplib.state import fold_in
from looplib.steps import make_predict_step
from looplib.types import TrainState, check_state

_COUNT = "num_batches_tracked"
_STATISTICS = ("running_mean", "running_var", _COUNT)


def _first_input(model: Any, batch: Any) -> Any:
    return model(batch[0] if isinstance(batch, (list, tuple)) else batch)


def recompute_batch_norm(
    model: nn.Module,
    state: TrainState,
    batches: Any,
    *,
    forward: Callable[[Any, Any], Any] = _first_input,
    max_batches: int | None = None,
    divide: bool = True,
) -> TrainState:
    """Recompute BatchNorm's running statistics for a state's weights, such as averaged ones, by a pass over data.

    >>> import looplib as ll, torch
    >>> model = torch.nn.Sequential(torch.nn.BatchNorm1d(1), torch.nn.Linear(1, 1))
    >>> state = ll.evaluation.recompute_batch_norm(model, ll.init_state(model), torch.arange(8.0).view(8, 1).split(4))
    >>> state.buffers["0.running_mean"], model[0].running_mean
    (tensor([3.5000]), tensor([0.]))

    An average of weights (`ema`, `swa`) has activations that differ from those of the weights that were trained, and their
    statistics do not fit it. Evaluate and export the result:

        averaged = ll.evaluation.recompute_batch_norm(model, ll.eval_state(optimizer, state), loader)

    The running mean and variance become the equal average of those of all batches, whatever the layer's momentum, with
    dropout as in training. A smaller last batch counts as much as the others: give batches of one size, as of
    `make_loader(..., drop_last=True)`. Layers that were in eval mode when this was called, in a module that was not, keep
    their statistics. The module and the given state are left as they were; the new state shares its weights with the given one.

    Args:
        model: the `nn.Module`, with or without torch's wrappers.
        state: the state whose weights to use.
        batches: training data, as for `evaluate`.
        forward: `forward(model, batch)`, which runs the model; its result is not used, so a loss function does as well.
            Defaults to a call with the batch, or with the first entry of a tuple or list.
        max_batches: number of batches. Some hundred samples per layer are often enough.
        divide: as for `evaluate`. If False, this rank uses all batches it is given, and its result is its own.

    Raises:
        ValueError: the model has no BatchNorm layer with running statistics in training mode, the pass does not reach one of
            them, there are no batches, or the state belongs to a different model.

    **Several processes.** The ranks divide the batches as for `evaluate`, and each normalizes by the samples of its part, as in
    training. The result is the average over the parts of all ranks, and the same on each. Layers of SyncBatchNorm normalize by
    the parts of all ranks; batches that only some of the ranks have are left out then.

    Source: `torch.optim.swa_utils.update_bn`, whose bits the result has in one process.
    """
    check_kind(model, "recompute_batch_norm", "model", advice=": recompute_batch_norm(model, state, batches)")
    check_state(state, "ll.evaluation.recompute_batch_norm(model, state, batches)")
    check_kind(forward, "recompute_batch_norm", "loss_fn", advice=", as its forward")
    # Without DDP, which would send the first rank's buffers to all others in each pass.
    module: Any = model.module if is_parallel(model) else model
    step = make_predict_step(module, partial(_statistics_after, forward), training=True)
    synced = any(isinstance(layer, nn.SyncBatchNorm) for layer in module.modules())
    reading = Reading(batches, max_batches, None, divide)
    statistics: dict[str, Tensor] = {}
    with restored(torch.default_generator), ranks_of(reading, state, "recompute_batch_norm")():
        for index, (batch, counts) in enumerate(read(reading, state)):
            now = state.replace(buffers={**state.buffers, **statistics})
            moved = step(fold_in(now, index), (batch, not statistics))
            # What a rank repeats counts for no rank, and synchronized layers have it in the statistics of all.
            repeated = (
                together_with_data().barrier("recompute_batch_norm", not counts) if synced and divide else not counts
            )
            if not repeated:
                statistics = moved
    merged = _over_ranks(statistics) if divide else statistics
    check(merged, "recompute_batch_norm got no batches: the iterable is empty, or a generator that was used up")
    unreached = [name for name, tensor in merged.items() if name.endswith(_COUNT) and not tensor]
    check(
        not unreached,
        f"the forward pass does not reach {few([name.removesuffix(f'.{_COUNT}') for name in unreached])}, whose statistics "
        "would be lost: give forward=, a function of the model and a batch that runs all of the model, or put the layers that "
        "are not used into eval mode",
    )
    like = state.buffers
    return state.replace(buffers={**like, **{name: tensor.to(like[name]) for name, tensor in merged.items()}})


def _statistics_after(
    forward: Callable[[Any, Any], Any], model: nn.Module, batch_and_first: Any
) -> dict[str, Tensor]:
    """Statistics after one more batch. The module holds copies of a state's buffers during the call."""
    batch, first = batch_and_first
    layers = {
        name: module
        for name, module in named_modules(model)
        if isinstance(module, BatchNorm) and module.training and module.running_mean is not None
    }
    check(
        layers,
        f"this {type(model).__name__} has no BatchNorm layer in training mode that keeps running statistics, so there are none "
        "to recompute: leave out recompute_batch_norm",
    )
    momenta = [layer.momentum for layer in layers.values()]
    try:
        for layer in layers.values():
            layer.momentum = None  # the equal average of all batches
            if first:
                layer.reset_running_stats()
        forward(model, batch)
    finally:
        for layer, momentum in zip(layers.values(), momenta, strict=True):
            layer.momentum = momentum
    return {f"{name}.{key}".lstrip("."): getattr(layer, key) for name, layer in layers.items() for key in _STATISTICS}


def _over_ranks(statistics: dict[str, Tensor]) -> dict[str, Tensor]:
    """The average over the batches of all ranks."""
    ranks = [of_rank for of_rank in gather_tensors(statistics) if of_rank]
    if len(ranks) < 2:
        return ranks[0] if ranks else {}

    def average(name: str) -> Tensor:
        layer = name.rpartition(".")[0]
        counts = torch.stack([of_rank[f"{layer}.{_COUNT}".lstrip(".")] for of_rank in ranks])
        if name.endswith(_COUNT):
            return counts.sum()
        values = torch.stack([of_rank[name] for of_rank in ranks])
        total: Tensor = torch.tensordot(counts.double(), values.double(), 1)
        return (total / counts.sum()).to(values)

    return {name: average(name) for name in ranks[0]}
