"""Optimizer wrappers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from looplib._core.checks import check_type
from looplib._core.tracing import on_host, where
from looplib.optim._description import description_of_wrapper
from looplib.types import Evaluation, Grads, Init, Optimizer, Params, Update

Flag = bool | Tensor
Moment = Callable[[Tensor], tuple[dict[str, Tensor], Any]]
Updated = tuple[Params, Any, Flag]


def wrap(optimizer: Optimizer, init: Init, update: Update, evaluation: Evaluation | None = None) -> Optimizer:
    """Wrap an optimizer, whose state becomes `inner_state` of the wrapper's state."""
    advice = "give ll.optimizer(torch.optim.AdamW, lr=...), or that wrapped"
    check_type("this wraps what ll.optimizer returns, and got", optimizer, Optimizer, advice)

    def evaluation_of_inner(
        params: Params, buffers: dict[str, Tensor], opt_state: Any
    ) -> tuple[Params, dict[str, Tensor]]:
        return optimizer.evaluation(params, buffers, opt_state["inner_state"])

    def numbers(opt_state: Any, step: int) -> dict[str, float]:
        return optimizer.hyperparameters(opt_state["inner_state"], step)

    description = description_of_wrapper(optimizer, update)
    return Optimizer(init, update, evaluation or evaluation_of_inner, numbers, description, optimizer.kernel)


def act_after_updates(
    optimizer: Optimizer, init: Init, moment: Moment, act: Callable[..., Any], evaluation: Evaluation
) -> Optimizer:
    """Wrap an optimizer so that it acts on the weights after some of its updates, for example to average them.

    The number of updates is kept in `opt_state["updates"]`. `moment` runs on the host and returns the new counters
    and the plan for this update: None, or a value that is passed to `act`.
    `act(plan, new, opt_state, grads, in_place, **extra)` returns the parameters and the changed entries of the state.
    It may overwrite both if `in_place`.
    """

    def update(
        grads: Grads,
        opt_state: Any,
        params: Params,
        step: int,
        *,
        donate: bool = False,
        when: Flag = True,
        **extra: Any,
    ) -> Updated:
        new, inner, applied = optimizer.update(
            grads, opt_state["inner_state"], params, step, donate=donate, when=when, **extra
        )
        skipped = {**opt_state, "inner_state": inner}
        if applied is False:
            return params, skipped, False
        counters, plan = on_host(moment, opt_state["updates"])
        record = {**skipped, **counters}
        if plan is None:
            return new, where(applied, record, skipped), applied
        in_place = donate and applied is True
        acted, changed = act(plan, new, opt_state, grads, in_place, old=params, **extra)
        return where(applied, acted, new), where(applied, {**record, **changed}, skipped), applied

    update.__qualname__ = act.__qualname__  # descriptions and messages take the wrapper's name and settings from here
    return wrap(optimizer, init, update, evaluation)


def kept_by_wrappers(opt_state: Any, name: str) -> Any:
    """The entry `name` that a wrapper, or one inside it, keeps next to `inner_state`; None if there is none."""
    while isinstance(opt_state, dict):
        if name in opt_state:
            return opt_state[name]
        opt_state = opt_state.get("inner_state")
    return None
