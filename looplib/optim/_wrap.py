"""Optimizers around optimizers: wrappers, several in one (`partition`), and the refusal of states of another optimizer."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from looplib._core.checks import check, check_type
from looplib._core.mappings import mapped
from looplib._core.records import described, with_repr
from looplib._core.tracing import tracing
from looplib._core.updates import any_of, call_decide, call_update, of_parts, update_where
from looplib.optim._recipe import check_by_kind
from looplib.types import Evaluation, Grads, Metrics, Optimizer, Params, TrainState

Updated = tuple[Params, Any]
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

    def inner_of(opt_state: Any) -> Any:
        if type(opt_state) is not dict or opt_state.keys() != expected.keys():
            raise wrong_state(opt_state, repr(made), expected)
        return opt_state["inner_state"]

    def decide_both(
        grads: Grads, opt_state: Any, metrics: Metrics, params: Params, step: int, **info: Any
    ) -> tuple[Any, Any]:
        inner = inner_of(opt_state)
        flag, inner = call_decide(optimizer, grads, inner, metrics, params, step_of(opt_state, step))
        opt_state = {**opt_state, "inner_state": inner}
        return (flag, opt_state) if decide is None else decide(flag, opt_state, grads, metrics, step)

    name = factory.__name__
    description = {**optimizer.description, name: {"wraps": True, **mapped(described, settings)}}
    made = Optimizer(
        init,
        update_ or partial(update_within, optimizer),
        decide_both,
        evaluation or (lambda params, buffers, own: optimizer.evaluation(params, buffers, inner_of(own))),
        lambda own, step: optimizer.hyperparameters(inner_of(own), step_of(own, step)),
        description,
        optimizer.kernel,
    )
    return with_repr(made, factory, optimizer, **settings)


def update_within(
    optimizer: Optimizer, grads: Grads, opt_state: Any, params: Params, step: int, **info: Any
) -> Updated:
    """Update by the inner optimizer, whose new state takes its place in the wrapper's.

    The wrapper's dict is written: the decision has made it (`wrap`).
    """
    new, opt_state["inner_state"] = call_update(optimizer, grads, opt_state["inner_state"], params, step, info)
    return new, opt_state


def zero_count(params: Params, **extra: Any) -> Tensor:
    """A count from 0 on, on the device of the parameters, so that nothing waits for it."""
    return torch.zeros((), dtype=torch.int64, device=next(iter(params.values())).device)


def partition(optimizers: Mapping[str, Optimizer], label: Callable[[str, Tensor], str]) -> Optimizer:
    """Parameter groups with different optimizers, chosen by a label.

    >>> import looplib as ll, torch
    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Linear(4, 1))
    >>> optimizer = ll.optim.partition(
    ...     {"matrices": ll.optimizer(torch.optim.SGD, lr=0.1), "rest": ll.optimizer(torch.optim.AdamW, lr=1e-3)},
    ...     lambda name, tensor: "matrices" if tensor.ndim == 2 else "rest",
    ... )
    >>> state = ll.init_state(model, optimizer)
    >>> list(state.opt_state["inner_states"])
    ['matrices', 'rest']

    An optimizer acts only if one of its parameters has a gradient. Two networks in one module, with two gradient
    functions (`trainable=`), can therefore be trained by two steps over one state, each with its own optimizer, as in
    a GAN. All optimizers see the same `step`, so a schedule counts the updates of all of them (see `own_steps`).

    If one optimizer skips an update, the others still make theirs; if all do, the step counts as skipped. Classes that
    create their state in their first update (SGD with dampening, schedule-free ones) do so in the first update of each
    parameter.

    Args:
        optimizers: label -> optimizer, with or without wrappers.
        label: `(name, tensor) -> label`.

    Raises:
        ValueError: a label has no optimizer, or an optimizer has no parameters.

    Source: `optax.partition`.
    """
    for key, member in optimizers.items():
        check_type(f"{key!r} in a partition is", member, Optimizer, "give what ll.optimizer returns")

    parts_of = partial(_parts, optimizers, label)

    def init(params: Params, **extra: Any) -> dict[str, Any]:
        check_by_kind(label, params, "label")
        members = {key: subset for key, _, subset in parts_of(params, params)}
        empty = [key for key in optimizers if key not in members]
        check(not empty, f"no parameter has the label {', '.join(map(repr, empty))}: leave that optimizer out")
        return {"inner_states": {key: one.init(members[key], **extra) for key, one in optimizers.items()}}

    def decide(
        grads: Grads, opt_state: Any, metrics: Metrics, params: Params, step: int, **info: Any
    ) -> tuple[Any, Any]:
        match opt_state:
            case {"inner_states": dict(before), **more} if before.keys() == optimizers.keys() and not more:
                states, decisions = dict(before), {}
            case _:
                own = ["inner_states of " + ", ".join(optimizers)]
                raise wrong_state(opt_state, repr(made), own)
        for key, mine, members in parts_of(grads, params):
            decisions[key], states[key] = call_decide(optimizers[key], mine, states[key], metrics, members, step)
        return of_parts(decisions), {"inner_states": states}

    def update_(grads: Grads, opt_state: Any, params: Params, step: int, applied: Any = True, **info: Any) -> Updated:
        states, reports = opt_state["inner_states"], info.pop("report", {})
        for key, mine, members in parts_of(grads, params):
            flag = applied[key] if isinstance(applied, dict) else applied
            report: dict[str, Any] = {}
            own = {**info, "report": report, "applied": flag}
            # In a graph a tensor may be the flag, which chooses between copies.
            update = call_update if flag is True or not tracing() else partial(update_where, flag)
            if any_of(flag) is not False:
                new, states[key] = update(optimizers[key], mine, states[key], members, step, own)
                params.update(new)
            reports.update({_name_within(key, name): value for name, value in report.items()})
        return params, opt_state

    def evaluation(params: Params, buffers: Params, opt_state: Any) -> tuple[Params, Params]:
        members = _labelled(label, params)
        for key, state in opt_state["inner_states"].items():
            averaged, buffers = optimizers[key].evaluation(members[key], buffers, state)
            params = params if averaged is members[key] else {**params, **averaged}
        return params, buffers

    description = mapped(operator.attrgetter("description"), optimizers)
    made = Optimizer(init, update_, decide, evaluation, partial(_hyperparameters, optimizers), description)
    return with_repr(made, partition, optimizers, label)


def _labelled(label: Callable[[str, Tensor], str], params: Params) -> dict[str, Params]:
    """The parameters with each label."""
    members: dict[str, Params] = {}
    for name, tensor in params.items():
        members.setdefault(label(name, tensor), {})[name] = tensor
    return members


def _parts(
    optimizers: Mapping[str, Optimizer], label: Callable[[str, Tensor], str], grads: Grads, params: Params
) -> Iterator[tuple[str, Grads, Params]]:
    """Label, gradients and parameters of each optimizer that has a gradient."""
    for key, members in _labelled(label, params).items():
        if mine := {name: grads[name] for name in members if name in grads}:  # those not trained need no optimizer
            if key not in optimizers:
                raise ValueError(
                    f"{next(iter(mine))} has the label {key!r}, and there are optimizers for {', '.join(optimizers)}"
                )
            yield key, mine, members


def _hyperparameters(optimizers: Mapping[str, Optimizer], opt_state: Any, step: int) -> dict[str, float]:
    states = opt_state["inner_states"]
    return {
        _name_within(key, name): value
        for key, member in optimizers.items()
        for name, value in member.hyperparameters(states[key], step).items()
    }


def _name_within(key: str, name: str) -> str:
    """Name of a hyperparameter or a metric with the label of its optimizer: `lr/0` of `rest` is `lr/rest/0`."""
    first, slash, rest = name.partition("/")
    return f"{first}/{key}{slash}{rest}"


def own_steps(optimizer: Optimizer) -> Optimizer:
    """Step count of its own: schedules of this optimizer follow its own updates instead of `state.step`.

    >>> import looplib as ll, torch
    >>> def adam(total):
    ...     return ll.optimizer(torch.optim.Adam, lr=ll.schedules.cosine(1e-3, total=total))
    >>> networks = {"critic": ll.optim.own_steps(adam(5000)), "generator": ll.optim.own_steps(adam(1000))}
    >>> optimizer = ll.optim.partition(networks, lambda name, tensor: name.split(".")[0])

    Use it for the parts of a `partition` that are updated by steps of their own, such as a critic with five updates for
    each of the generator's: `state.step` counts the updates of both. The count is kept in `opt_state["updates"]`, and is
    not moved by updates that are skipped or go to other parts.

    Args:
        optimizer: the optimizer whose schedules, and wrappers that depend on the step, are to follow its own updates.
    """

    def count(opt_state: Any, step: Any) -> Any:
        return opt_state["updates"] if tracing() else int(opt_state["updates"])

    def update_(grads: Grads, opt_state: Any, params: Params, step: int, **info: Any) -> Updated:
        out = update_within(optimizer, grads, opt_state, params, count(opt_state, step), **info)
        opt_state["updates"] += 1
        return out

    keeps = {"updates": lambda params, **extra: torch.tensor(0, device="cpu")}
    return wrap(optimizer, own_steps, {}, keeps, update_=update_, step_of=count)


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
