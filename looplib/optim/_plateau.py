"""Reduce the learning rate on a plateau of a metric."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import repeat
from typing import Any

import torch
from torch import Tensor

from looplib._core.checks import check, check_number
from looplib.optim._optimizer import set_hyperparameters
from looplib.predicates import at_plateau, update_best
from looplib.types import TrainState, check_state


def reduce_on_plateau(
    state: TrainState,
    scores: Mapping[str, float],
    *,
    factor: float = 0.1,
    min_lr: float | Sequence[float] = 0.0,
    eps: float = 1e-8,
    key: str = "plateau",
) -> TrainState:
    """Reduce the learning rate on a plateau: record an evaluation, and lower the rate if the metric has stopped improving.

    >>> import looplib as ll, torch
    >>> model, optimizer = torch.nn.Linear(2, 1), ll.optimizer(torch.optim.SGD, lr=ll.optim.inject(0.1))
    >>> plateau = ll.predicates.Plateau("eval/loss", patience=1)
    >>> state = ll.init_state(model, optimizer, extra={"plateau": plateau})
    >>> for loss in [0.9, 0.5, 0.5, 0.5]:  # in a run, one evaluation each
    ...     state = ll.optim.reduce_on_plateau(state, {"eval/loss": loss}, factor=0.5)
    >>> ll.optim.hyperparameters(optimizer, state)
    {'lr': 0.05}

    The rate and the record are in the state, so a checkpoint holds both, and a resumed run lowers the rate where an
    uninterrupted one would. All injected rates are lowered by the same factor. Groups and parts of a partition whose rate is
    not injected keep it. `ll.predicates.at_plateau()` says afterwards whether this evaluation made a plateau.

    For a rate that also warms up or decays, multiply a schedule: call `ll.update_best(state, scores, key="plateau")`, and
    before each step set `schedule(state.step) * factor ** state.extra["plateau"].count`.

    Args:
        state: a state with `lr=ll.optim.inject(...)` and a `Plateau` in `extra`. Call this once per evaluation, before
            saving.
        scores: name -> value, as returned by `evaluate`; the same on all ranks.
        factor: factor for the learning rate, from 0 to below 1.
        min_lr: lower bound of the learning rate, in all groups; or a list of one for each of the optimizer's `groups`, in their
            order, and a last one for the other parameters. Those of a `partition` follow its labels.
        eps: changes of the learning rate that are not above this are left out.
        key: key of the record in `state.extra`.

    Raises:
        ValueError: there is no `Plateau` under `key`, its metric is not among the scores, an argument is out of range, no
            learning rate is injected, or `min_lr` is a list of another length than the groups.

    Source: `torch.optim.lr_scheduler.ReduceLROnPlateau`, whose bits the rates of torch's classes have.
    """
    check_number("factor", factor, lambda factor: 0 <= factor < 1, "give a number of at least 0 and below 1")
    floors = min_lr if isinstance(min_lr, Sequence) else None
    bounds: Iterator[Any] = repeat(min_lr) if floors is None else iter(floors)
    for name, value in (*(("min_lr", floor) for floor in ([min_lr] if floors is None else floors)), ("eps", eps)):
        check_number(name, value, lambda value: value >= 0, "give a number of at least 0")
    rates: list[Tensor] = []  # of the groups so far

    def reduced(lr: Tensor) -> Tensor:
        rates.append(lr)
        new = (lr * factor).clamp(min=next(bounds, 0.0))
        return torch.where(lr - new > eps, new, lr) if now(state) else lr

    check_state(state, "state = ll.optim.reduce_on_plateau(state, scores)")
    now = at_plateau(key=key)
    now(state)  # raises if there is no Plateau: `update_best` takes any record
    state = update_best(state, scores, key)
    # Set in any case, so that a rate that is not injected is refused now, and not at the first plateau.
    state = set_hyperparameters(state, lr=reduced)
    check(
        floors is None or len(floors) == len(rates),
        f"min_lr has {len(floors or ())} entries, and the optimizer has {len(rates)} groups with an injected lr, the parameters "
        "that are in none of groups= being the last: give one number for each, or a number for all",
    )
    return state
