"""Prediction: outputs for whole datasets in order, with one batch in memory at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import Tensor

from looplib._core import random as draws
from looplib._core import trees
from looplib._core.checks import check, check_count
from looplib._core.ranks import is_distributed
from looplib._core.records import check_kind
from looplib._core.samples import counter_of
from looplib.distributed.records import gather_tensors
from looplib.evaluation._batches import Reading, divides_rows, ranks_of, read
from looplib.evaluation._evaluate import check_order
from looplib.evaluation._outputs import end_to_end
from looplib.types import TrainState

T = TypeVar("T")

_END = object()


def predict(
    predict_step: Callable[[TrainState, Any], Any],
    state: TrainState,
    batches: Any,
    *,
    start: int = 0,
    max_batches: int | None = None,
    progress: bool = False,
    divide: bool = True,
    device: torch.device | str | None = "cpu",
) -> Iterator[Any]:
    """Predict: yield the outputs of each batch, in the order of the data.

    >>> import looplib as ll, torch
    >>> model = torch.nn.Linear(1, 1)
    >>> predict_step = ll.make_predict_step(model, lambda model, x: model(x))
    >>> outputs = ll.predict(predict_step, ll.init_state(model), torch.zeros(7, 1).split(3))
    >>> torch.cat(list(outputs)).shape
    torch.Size([7, 1])

    On several ranks, each rank computes its part and all ranks get all outputs, which are sent through the CPU.

    Args:
        predict_step: from `make_predict_step`. A function of your own runs as it is, in the module's mode.
        state: the state to predict with; for a module in a loop of your own, `ll.init_state(model)`.
        batches: as for `evaluate`.
        start: index of the first batch. A looplib loader does not read the earlier ones.
        max_batches: number of batches.
        progress: if True, show a progress bar, removed when done.
        divide: as for `evaluate` on several ranks. With False, this rank gets the outputs of its own batches, and waits
            for no other rank.
        device: device to move the outputs to; None leaves them where they are.

    Raises:
        ValueError: the loader shuffles.
    """
    check_order("predict", predict_step, state)
    predict_step = check_kind(predict_step, "predict", "predict_step")
    check_unshuffled(batches)
    check_count("start", start, 0, "give the index of the first batch")
    reading = Reading(batches, max_batches, "prediction" if progress else None, divide, start)
    return (output for _, output in predicted(predict_step, state, reading, device))


def predicted(
    predict_step: Callable[[TrainState, Any], Any],
    state: TrainState,
    reading: Reading,
    device: torch.device | str | None,
) -> Iterator[tuple[int | None, Any]]:
    """For each batch, its number of samples (if known) and its outputs."""
    by_rows = divides_rows(reading)
    counter = counter_of(predict_step)
    size_of = counter if by_rows else partial(samples_of, counter)
    gathered, context = reading.divide and is_distributed(), ranks_of(reading, state, "predict")
    batches = _in_own_stream(lambda: read(reading, state))
    while True:
        with context():
            if (share := next(batches, None)) is None:
                return
            output = predict_step(state, share[0])
        parts = [(size_of(share[0]), output)] if share[1] else []
        if gathered:
            parts = _of_all_ranks(parts, by_rows)
        del share, output
        for size, part in parts:
            yield size, trees.map_tensors(lambda tensor: tensor.to(device), part)


def _in_own_stream(read: Callable[[], Iterator[T]]) -> Iterator[T]:
    """The batches, read with a copy of torch's random stream, so that the stream itself does not advance."""
    with draws.turn:  # between steps of other threads
        stream, batches = torch.get_rng_state(), None
    while True:
        with draws.turn, draws.restored(torch.default_generator):
            torch.set_rng_state(stream)
            batches = read() if batches is None else batches  # a DataLoader draws when it begins
            batch = next(batches, _END)
            stream = torch.get_rng_state()
        if batch is _END:
            return
        yield batch  # type: ignore[misc]


def check_unshuffled(batches: Any) -> None:
    sampler = getattr(batches, "sampler", None)
    check(
        not (getattr(batches, "shuffles", False) or isinstance(sampler, torch.utils.data.RandomSampler)),
        "predictions would come out in a shuffled order, and nothing says which is whose: give a loader made with "
        "order=ll.data.sequential()",
    )


def _of_all_ranks(parts: list[tuple[Any, Any]], by_rows: bool) -> list[tuple[Any, Any]]:
    """Outputs of all ranks in order. Those of parts of one batch are concatenated."""
    on_host = [(size, trees.map_tensors(Tensor.cpu, output)) for size, output in parts]
    gathered = [*chain.from_iterable(gather_tensors(on_host))]
    if by_rows and len(gathered) > 1:
        sizes, outputs = map(list, zip(*gathered, strict=True))
        return [(sum(sizes), end_to_end(sizes, outputs))]
    return gathered


def samples_of(count_samples: Callable[[Any], int], batch: Any) -> int | None:
    """Number of samples in a batch, or None if it cannot be determined."""
    try:
        return count_samples(batch)
    except (TypeError, ValueError):
        return None
