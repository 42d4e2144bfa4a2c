"""Wrappers of optimizers: how they are made, and the refusal of states that belong to another optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from looplib._core.checks import check_type
from looplib._core.descriptions import described
from looplib._core.mappings import mapped
from looplib._core.records import with_repr
from looplib._core.updates import call_decide, call_update
from looplib.types import Evaluation, Grads, Metrics, Optimizer, Params, TrainState

Updated = tuple[Params, Any, Mapping[str, Any]]
First = Callable[..., Any]


def wrap(
    optimizer: Optimizer,
    factory: Callable[..., Optimizer],
    settings: Mapping[str, Any],
    keeps: Mapping[str, First],
    *,
    update_: Callable[..., Any] | None = None,
    decide: Callable[..., Any] | None = None,
    evaluation: Evaluation | None = None,
    step_of: Callable[[Any, int], Any] = lambda opt_state, step: step,
) -> Optimizer:
    """Wrap an optimizer, whose state becomes `inner_state` of the wrapper's state, beside the entries that it `keeps`.

    `keeps` has a function for each entry that returns its first value, from the arguments of `init`.

    `factory(optimizer, **settings)` is the call that makes it, from which its repr and its description are made.
    `decide(flag, opt_state, grads, metrics, step)` is given what the inner optimizer has decided, and returns the same
    with its own part. By default, an update is that of the inner optimizer. `step_of(opt_state, step)` returns the step that
    the inner optimizer decides at.
    """
    advice = "give ll.optimizer(torch.optim.AdamW, lr=...), or that wrapped"
    check_type("this wraps what ll.optimizer returns, and got", optimizer, Optimizer, advice)
    expected = dict.fromkeys(("inner_state", *keeps))

    def init(params: Params, **extra: Any) -> dict[str, Any]:
        kept = {key: first(params, **extra) for key, first in keeps.items()}
        return {"inner_state": optimizer.init(params, **extra), **kept}

    def decide_both(
        grads: Grads, opt_state: Any, metrics: Metrics, params: Params, step: int, **info: Any
    ) -> tuple[Any, Any]:
        if type(opt_state) is not dict or opt_state.keys() != expected.keys():
            raise wrong_state(opt_state, repr(made), expected)
        inner = opt_state["inner_state"]
        flag, inner = call_decide(optimizer, grads, inner, metrics, params, step_of(opt_state, step))
        opt_state = {**opt_state, "inner_state": inner}
        return (flag, opt_state) if decide is None else decide(flag, opt_state, grads, metrics, step)

    name = factory.__name__
    description = {**optimizer.description, name: {"wraps": True, **mapped(described, settings)}}
    made = Optimizer(
        init,
        update_ or partial(update_within, optimizer),
        decide_both,
        evaluation or (lambda params, buffers, own: optimizer.evaluation(params, buffers, own["inner_state"])),
        lambda own, step: optimizer.hyperparameters(own["inner_state"], step_of(own, step)),
        description,
        optimizer.kernel,
    )
    return with_repr(made, factory, optimizer, **settings)


def update_within(
    optimizer: Optimizer, grads: Grads, opt_state: Any, params: Params, step: int, **info: Any
) -> Updated:
    """Update by the inner optimizer, whose new state takes its place in the wrapper's. Its metrics are passed on."""
    new, opt_state["inner_state"], more = call_update(optimizer, grads, opt_state["inner_state"], params, step, info)
    return new, opt_state, more


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


# States of another optimizer


def contents(opt_state: Any) -> str:
    """Contents of an `opt_state`, for messages: the keys of a parameter's state, and the entries of wrappers.

    >>> contents({"inner_state": {"state": {"weight": {"step": 0, "sum": 0}}}, "updates": 0})
    'updates around (step, sum for a parameter)'
    """
    match opt_state:
        case {"inner_state": inner, **own}:
            return f"{_listed(own)} around ({contents(inner)})"
        case {"inner_states": dict(members)}:
            return "; ".join(f"{label}: {contents(member)}" for label, member in members.items())
        case {"state": dict(entries)}:
            return f"{_listed(next(filter(None, entries.values()), ()))} for a parameter"
        case Mapping():
            return _listed(opt_state)
    return "nothing" if opt_state is None else f"a {type(opt_state).__name__}"


def _listed(keys: Iterable[Any]) -> str:
    return ", ".join(map(str, keys)) or "nothing"


def wrong_state(opt_state: Any, who: str, keeps: Iterable[Any]) -> ValueError:
    """Error for an `opt_state` that an optimizer cannot continue, since it keeps something else."""
    found = (
        "the state was made without an optimizer" if opt_state is None else f"opt_state holds {contents(opt_state)}"
    )
    return ValueError(
        f"{found}, and {who.partition('  # kernel')[0]} is to update it, which keeps {_listed(keeps)}. Make the state with this optimizer, "
        "ll.init_state(model, optimizer), or a new opt_state by optimizer.init(params)"
    )


def of_another(optimizer: Optimizer, state: TrainState) -> ValueError:
    """Error for a state that an optimizer cannot read."""
    return ValueError(
        f"state.opt_state holds {contents(state.opt_state)}, and is not that of {optimizer.call or optimizer}: give the "
        "optimizer that made it, with its wrappers"
    )
