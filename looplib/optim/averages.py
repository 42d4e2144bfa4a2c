"""Averages of weights in the state of an optimizer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


def averages_in(
    opt_state: Any, description: Any, path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], tuple[Any, int]]]:
    """The averages in the state of an optimizer with this description, each with the names of its parts, and its `start`.

    >>> import looplib as ll, torch
    >>> optimizer = ll.chain(ll.optimizer(torch.optim.SGD, lr=0.1), ll.ema(0.9))
    >>> state = ll.init_state(torch.nn.Linear(2, 1), optimizer)
    >>> [(path, start) for path, (entry, start) in averages_in(state.opt_state, optimizer.description)]
    [(('ema',), 0)]
    """
    if not (isinstance(opt_state, dict) and isinstance(description, Mapping)):
        return
    if opt_state.keys() == {"average", "updates"} and "start" in description:
        yield path, (opt_state, description["start"])
        return
    for key, part in opt_state.items():
        if key == "inner":  # of a part around an optimizer, which is described in its place
            yield from averages_in(part, description, path)
        else:
            yield from averages_in(part, description.get(key), (*path, key))
