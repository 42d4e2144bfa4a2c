"""Errors for an `opt_state` that was created by a different optimizer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from looplib.types import Optimizer, TrainState


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
        f"{found}, and {who} is to update it, which keeps {_listed(keeps)}. Make the state with this optimizer, "
        "ll.init_state(model, optimizer), or a new opt_state by optimizer.init(params)"
    )


def of_another(optimizer: Optimizer, state: TrainState, error: Exception) -> ValueError:
    """Error for a state that an optimizer cannot read."""
    return ValueError(
        f"state.opt_state holds {contents(state.opt_state)}, and is not that of {name_of(optimizer.description)} "
        f"({error!r}): give the optimizer that made it, with its wrappers"
    )


def name_of(description: Mapping[str, Any], wrapper: str = "") -> str:
    """Name of an optimizer from its description: the class or classes, and the outermost wrapper.

    >>> name_of({"class": "torch.optim.sgd.SGD", "lr": 0.1, "ema": {"wraps": True}})
    'ema around SGD'
    """
    wrappers = [key for key, value in description.items() if isinstance(value, Mapping) and value.get("wraps")]
    classes = " and ".join(dict.fromkeys(_classes(description)))
    return " around ".join(filter(None, (wrapper or next(reversed(wrappers), ""), classes))) or "this optimizer"


def _classes(description: Mapping[str, Any]) -> list[str]:
    if isinstance(cls := description.get("class"), str):
        return [cls.rpartition(".")[2]]
    return [name for member in description.values() if isinstance(member, Mapping) for name in _classes(member)]
