"""Lookahead optimizer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from looplib._core import torch_private
from looplib._core.checks import check, is_count
from looplib._core.kinds import check_kind
from looplib._core.mappings import detached_copies, pick
from looplib._core.ranks import shards
from looplib._core.tracing import on_host
from looplib.optim._averaging import Tensors
from looplib.optim._wrap import Updated, update_within, wrap
from looplib.types import Grads, Optimizer, Params


def lookahead(optimizer: Optimizer, sync_period: int = 6, slow_step_size: float = 0.5) -> Optimizer:
    """Lookahead: after several fast updates, move the slow weights part of the way and restart from there.

    >>> import looplib as ll, torch
    >>> optimizer = ll.contrib.lookahead(ll.optimizer(torch.optim.SGD, lr=0.1), sync_period=6, slow_step_size=0.5)

    The slow weights are in `opt_state["slow"]`, and `eval_state` evaluates with them. A parameter without a gradient
    at a slow update waits for the next one.

    Args:
        optimizer: the optimizer that makes the fast updates. Its moments are not reset.
        sync_period: number of fast updates between two slow ones, at least 1.
        slow_step_size: fraction of the way, above 0 and at most 1.

    Raises:
        ValueError: an argument is out of range.

    Source: Zhang, Lucas, Hinton and Ba, "Lookahead optimizer: k steps forward, 1 step back", 2019;
    `optax.lookahead`.
    """
    check(
        is_count(sync_period) and 0 < slow_step_size <= 1,
        f"sync_period is {sync_period} and slow_step_size {slow_step_size}; give at least 1 update, and a part "
        "above 0 and at most 1",
    )

    check_kind(optimizer, "lookahead", "optimizer")

    def first_weights(params: Params, **extra: Any) -> Params:
        return detached_copies(params)

    def moment(before: Tensor) -> tuple[Tensor, bool]:
        updates = int(before) + 1
        return torch.tensor(updates), updates % sync_period == 0

    def update_(grads: Grads, opt_state: Any, params: Params, step: int, **info: Any) -> Updated:
        params, opt_state, more = update_within(optimizer, grads, opt_state, params, step, **info)
        opt_state["updates"], due = on_host(moment, opt_state["updates"])
        if due:
            with torch.no_grad():
                slow, fast = [*pick(opt_state["slow"], grads).values()], [*pick(params, grads).values()]
                slow, fast = shards(slow), shards(fast)
                torch_private.foreach_lerp_(slow, fast, slow_step_size)
                torch_private.foreach_copy_(fast, slow)
        return params, opt_state, more

    keeps = {"slow": first_weights, "updates": lambda params, **extra: torch.tensor(0)}
    settings = {"sync_period": sync_period, "slow_step_size": slow_step_size}
    return wrap(optimizer, lookahead, settings, keeps, update_=update_, evaluation=_slow_weights)


def _slow_weights(params: Params, buffers: Tensors, opt_state: Any) -> tuple[Params, Tensors]:
    return {**params, **opt_state["slow"]}, buffers
