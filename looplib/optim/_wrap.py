"""Optimizer wrappers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from looplib._core.checks import check_type
from looplib._core.descriptions import described
from looplib._core.mappings import mapped
from looplib._core.records import with_repr
from looplib._core.tracing import on_host
from looplib._core.updates import updated
from looplib.optim._wrong_state import name_of, wrong_state
from looplib.types import Evaluation, Grads, Metrics, Optimizer, Params

Updated = tuple[Params, Any, Mapping[str, Any]]
First = Callable[..., Any]
Moment = Callable[[Tensor], tuple[dict[str, Tensor], Any]]


def wrap(
    optimizer: Optimizer,
    factory: Callable[..., Optimizer],
    settings: Mapping[str, Any],
    keeps: Mapping[str, First],
    *,
    update_: Callable[..., Any] | None = None,
    decide: Callable[..., Any] | None = None,
    evaluation: Evaluation | None = None,
    within: Callable[[Grads, Params, Any], tuple[Grads, Params]] | None = None,
) -> Optimizer:
    """Wrap an optimizer, whose state becomes `inner_state` of the wrapper's state, beside the entries that it `keeps`.

    `keeps` has a function for each entry that returns its first value, from the arguments of `init`.

    `factory(optimizer, **settings)` is the call that makes it, from which its repr and its description are made.
    `decide(flag, opt_state, grads, metrics, step)` is given what the inner optimizer has decided, and returns the same
    with its own part. By default, an update is that of the inner optimizer. `within(grads, params, opt_state)` returns the
    gradients and parameters that the inner optimizer decides about, if they are different ones.
    """
    advice = "give ll.optimizer(torch.optim.AdamW, lr=...), or that wrapped"
    check_type("this wraps what ll.optimizer returns, and got", optimizer, Optimizer, advice)
    expected = dict.fromkeys(("inner_state", *keeps))

    def init(params: Params, **extra: Any) -> dict[str, Any]:
        kept = {key: first(params, **extra) for key, first in keeps.items()}
        seen = params if within is None else within({}, params, kept)[1]
        return {"inner_state": optimizer.init(seen, **extra), **kept}

    def decide_both(
        grads: Grads, opt_state: Any, metrics: Metrics, params: Params, step: int, **info: Any
    ) -> tuple[Any, Any]:
        if type(opt_state) is not dict or opt_state.keys() != expected.keys():
            raise wrong_state(opt_state, name_of(description, name), expected)
        seen, of = (grads, params) if within is None else within(grads, params, opt_state)
        flag, inner = optimizer.decide(seen, opt_state["inner_state"], metrics, params=of, step=step)
        if inner is not opt_state["inner_state"]:
            opt_state = {**opt_state, "inner_state": inner}
        return (flag, opt_state) if decide is None else decide(flag, opt_state, grads, metrics, step)

    name = factory.__name__
    description = {**optimizer.description, name: {"wraps": True, **mapped(described, settings)}}
    made = Optimizer(
        init,
        update_ or partial(update_within, optimizer),
        decide_both,
        evaluation or (lambda params, buffers, own: optimizer.evaluation(params, buffers, own["inner_state"])),
        lambda own, step: optimizer.hyperparameters(own["inner_state"], step),
        description,
        optimizer.kernel,
    )
    return with_repr(made, factory, optimizer, **settings)


def update_within(
    optimizer: Optimizer, grads: Grads, opt_state: Any, params: Params, step: int, **info: Any
) -> Updated:
    """Update by the inner optimizer, whose new state takes its place in the wrapper's. Its metrics are passed on."""
    new, opt_state["inner_state"], more = updated(optimizer, grads, opt_state["inner_state"], params, step, info)
    return new, opt_state, more


def act_after_updates(
    optimizer: Optimizer,
    factory: Callable[..., Optimizer],
    settings: Mapping[str, Any],
    keeps: Mapping[str, First],
    moment: Moment,
    act: Callable[..., Any],
    evaluation: Evaluation,
) -> Optimizer:
    """Wrap an optimizer so that it acts on the weights after some of its updates, for example to average them.

    The number of updates is kept in `opt_state["updates"]`. `moment` runs on the host and returns the new counters
    and the plan for this update: None, or a value that is passed to `act(plan, params, opt_state, grads, **info)`, which
    may overwrite the parameters and the state, and returns both.
    """

    def update_(grads: Grads, opt_state: Any, params: Params, step: int, **info: Any) -> Updated:
        params, opt_state, more = update_within(optimizer, grads, opt_state, params, step, **info)
        counters, plan = on_host(moment, opt_state["updates"])
        opt_state.update(counters)
        if plan is not None:
            params, opt_state = act(plan, params, opt_state, grads, **info)
        return params, opt_state, more

    counted = {**keeps, "updates": lambda params, **extra: torch.tensor(0)}
    return wrap(optimizer, factory, settings, counted, update_=update_, evaluation=evaluation)


def zero_count(params: Params, **extra: Any) -> Tensor:
    """A count from 0 on, on the device of the parameters, so that nothing waits for it."""
    return torch.zeros((), dtype=torch.int64, device=next(iter(params.values())).device)


def kept_by_wrappers(opt_state: Any, name: str) -> Any:
    """The entry `name` that a wrapper, or one inside it, keeps next to `inner_state`; None if there is none."""
    while isinstance(opt_state, dict):
        if name in opt_state:
            return opt_state[name]
        opt_state = opt_state.get("inner_state")
    return None
