"""From a state to the outputs of whole sets, in the order of the data, in memory or on disk.

Neither side holds more than a batch, and what was stopped goes on where it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from looplib._core.ranks import gather, several
from looplib._core.torch_private import pytree
from looplib._core.trees import batch_size
from looplib.evaluation._evaluate import check_order, read
from looplib.evaluation._oom import end_to_end
from looplib.types import TrainState


def predict(
    predict_step: Callable[[TrainState, Any], Any],
    state: TrainState,
    batches: Any,
    *,
    start: int = 0,
    limit: int | None = None,
    progress: bool = False,
    divide: bool = True,
    device: torch.device | str | None = "cpu",
) -> Iterator[Any]:
    """The outputs of each batch, one after another, in the order of the data.

    >>> import looplib as ll, torch
    >>> model = torch.nn.Linear(1, 1)
    >>> predict_step = ll.make_predict_step(model, lambda model, x: model(x))
    >>> outputs = ll.predict(predict_step, ll.init_state(model), torch.zeros(7, 1).split(3))
    >>> torch.cat(list(outputs)).shape
    torch.Size([7, 1])

    Args:
        predict_step: from `make_predict_step`.
        state: what to predict with.
        batches: as for `evaluate`.
        start: the batch to begin with; a looplib loader reads nothing before it.
        limit: how many batches.
        progress: show a bar that goes away.
        divide: on several ranks, as for `evaluate`; with False the outputs are those of each rank's own batches.
        device: where to bring the outputs; None to leave them.

    On several ranks each predicts its part, and each is given all outputs, through the host.

    Raises ValueError for a loader that shuffles.
    """
    for _, output in _predicted(predict_step, state, batches, start, limit, progress, divide, device):
        yield output


def _predicted(
    predict_step: Callable[[TrainState, Any], Any],
    state: TrainState,
    batches: Any,
    start: int,
    limit: int | None,
    progress: bool,
    divide: bool,
    device: torch.device | str | None,
) -> Iterator[tuple[int | None, Any]]:
    """Of each batch: how many examples it has, if that can be told, and its outputs."""
    check_order("predict", predict_step, state)
    sampler = getattr(batches, "sampler", None)
    if getattr(batches, "shuffles", False) or isinstance(sampler, torch.utils.data.RandomSampler):
        raise ValueError(
            "predictions would come out in a shuffled order, and nothing says which is whose: give a loader made "
            "with shuffle=False"
        )

    def move(leaf: Any) -> Any:
        return leaf.to(device) if isinstance(leaf, Tensor) and device is not None else leaf

    by_rows = divide and getattr(batches, "divide", False)
    for batch, counts in read(batches, state, start, limit, "prediction" if progress else None, divide):
        output = predict_step(state, batch)
        if not (divide and several()):
            if counts:
                yield _examples(batch), pytree.tree_map(move, output)
            continue
        mine = (
            (batch_size(batch) if by_rows else _examples(batch), pytree.tree_map(_on_host, output))
            if counts
            else None
        )
        found = [part for part in gather(mine) if part is not None]
        if by_rows and len(found) > 1:
            sizes = [size for size, _ in found]
            found = [(sum(sizes), end_to_end(sizes, [part for _, part in found]))]
        for size, part in found:
            yield size, pytree.tree_map(move, part)


def _examples(batch: Any) -> int | None:
    try:
        return batch_size(batch)
    except TypeError:
        return None


def _on_host(leaf: Any) -> Any:
    return leaf.cpu() if isinstance(leaf, Tensor) else leaf
