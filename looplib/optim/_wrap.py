"""Optimizer wrappers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from looplib._core.calls import remember
from looplib._core.checks import check_type
from looplib._core.descriptions import described
from looplib._core.mappings import mapped
from looplib._core.tracing import on_host
from looplib._core.updates import updated
from looplib.optim._wrong_state import name_of, wrong_state
from looplib.types import Evaluation, Grads, Init, Metrics, Optimizer, Params

Flag = bool | Tensor
Updated = tuple[Params, Any, Mapping[str, Any]]
Moment = Callable[[Tensor], tuple[dict[str, Tensor], Any]]


def wrap(
    optimizer: Optimizer,
    factory: Callable[..., Optimizer],
    settings: Mapping[str, Any],
    init: Init,
    *,
    keeps: Sequence[str] = (),
    update_: Callable[..., Any] | None = None,
    decide: Callable[..., Any] | None = None,
    evaluation: Evaluation | None = None,
    within: Callable[[Grads, Params, Any], tuple[Grads, Params]] | None = None,
) -> Optimizer:
    """Wrap an optimizer, whose state becomes `inner_state` of the wrapper's state, beside the entries that it `keeps`.

    `factory(optimizer, **settings)` is the call that makes it, from which its repr and its description are made.
    `decide(flag, opt_state, grads, metrics, step)` is given what the inner optimizer has decided, and returns the same
    with its own part. By default, an update is that of the inner optimizer. `within(grads, params, opt_state)` returns the
    gradients and parameters that the inner optimizer decides about, if they are different ones.
    """
    advice = "give ll.optimizer(torch.optim.AdamW, lr=...), or that wrapped"
    check_type("this wraps what ll.optimizer returns, and got", optimizer, Optimizer, advice)
    expected = dict.fromkeys(("inner_state", *keeps))

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

    def update_inner(grads: Grads, opt_state: Any, params: Params, step: int, **info: Any) -> Updated:
        return update_within(optimizer, grads, opt_state, params, step, info)

    def evaluation_of_inner(
        params: Params, buffers: dict[str, Tensor], opt_state: Any
    ) -> tuple[Params, dict[str, Tensor]]:
        return optimizer.evaluation(params, buffers, opt_state["inner_state"])

    def numbers(opt_state: Any, step: int) -> dict[str, float]:
        return optimizer.hyperparameters(opt_state["inner_state"], step)

    name = factory.__name__
    description = {**optimizer.description, name: {"wraps": True, **mapped(described, settings)}}
    made = Optimizer(
        init,
        update_ or update_inner,
        decide_both,
        evaluation or evaluation_of_inner,
        numbers,
        description,
        optimizer.kernel,
    )
    return remember(made, factory, optimizer, **settings)


def update_within(
    optimizer: Optimizer, grads: Grads, opt_state: Any, params: Params, step: int, info: dict[str, Any]
) -> Updated:
    """Update by the inner optimizer, whose new state takes its place in the wrapper's. Its metrics are passed on."""
    new, opt_state["inner_state"], more = updated(optimizer, grads, opt_state["inner_state"], params, step, info)
    return new, opt_state, more


def act_after_updates(
    optimizer: Optimizer,
    factory: Callable[..., Optimizer],
    settings: Mapping[str, Any],
    init: Init,
    moment: Moment,
    act: Callable[..., Any],
    evaluation: Evaluation,
    keeps: Sequence[str],
) -> Optimizer:
    """Wrap an optimizer so that it acts on the weights after some of its updates, for example to average them.

    The number of updates is kept in `opt_state["updates"]`. `moment` runs on the host and returns the new counters
    and the plan for this update: None, or a value that is passed to `act(plan, params, opt_state, grads, **info)`, which
    may overwrite the parameters and the state, and returns both.
    """

    def update_(grads: Grads, opt_state: Any, params: Params, step: int, **info: Any) -> Updated:
        params, opt_state, more = update_within(optimizer, grads, opt_state, params, step, info)
        counters, plan = on_host(moment, opt_state["updates"])
        opt_state.update(counters)
        if plan is not None:
            params, opt_state = act(plan, params, opt_state, grads, **info)
        return params, opt_state, more

    own = ("updates", *keeps)
    return wrap(optimizer, factory, settings, init, keeps=own, update_=update_, evaluation=evaluation)


def kept_by_wrappers(opt_state: Any, name: str) -> Any:
    """The entry `name` that a wrapper, or one inside it, keeps next to `inner_state`; None if there is none."""
    while isinstance(opt_state, dict):
        if name in opt_state:
            return opt_state[name]
        opt_state = opt_state.get("inner_state")
    return None
