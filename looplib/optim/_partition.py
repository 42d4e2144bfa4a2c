"""Several optimizers in one."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import Tensor

from looplib._core.checks import check, check_type
from looplib._core.mappings import mapped
from looplib._core.records import with_repr
from looplib._core.tracing import tracing
from looplib._core.updates import Decision, any_of, call_decide, call_update, flags_of, update_where
from looplib.optim._recipe import chosen_by_kind
from looplib.optim._wrap import Updated, wrong_state
from looplib.types import Grads, Metrics, Optimizer, Params


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
    a GAN. All optimizers see the same `step`, so a schedule counts the updates of all of them: if a critic has five for
    each of the generator's, the `total` of both their schedules is six times the number of batches.

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

    parts, numbers = partial(_parts, optimizers, label), partial(_hyperparameters, optimizers)

    def init(params: Params, **extra: Any) -> dict[str, Any]:
        chosen_by_kind(label, params, "label")
        members = parts(params, params)
        empty = [key for key in optimizers if key not in members]
        check(not empty, f"no parameter has the label {', '.join(map(repr, empty))}: leave that optimizer out")
        return {"inner_states": {key: one.init(members[key][1], **extra) for key, one in optimizers.items()}}

    def decide(
        grads: Grads, opt_state: Any, metrics: Metrics, params: Params, step: int, **info: Any
    ) -> tuple[Any, Any]:
        match opt_state:
            case {"inner_states": dict(before), **more} if before.keys() == optimizers.keys() and not more:
                states, flags = dict(before), {}
            case _:
                own = ["inner_states of " + ", ".join(optimizers)]
                raise wrong_state(opt_state, repr(made), own)
        checks: list[Any] = []
        for key, (mine, subset) in parts(grads, params).items():
            decision, states[key] = call_decide(optimizers[key], mine, states[key], metrics, subset, step)
            flags[key] = flags_of(decision)
            checks += decision.checks if isinstance(decision, Decision) else ()
        return all(flag is True for flag in flags.values()) or Decision(flags, checks), {"inner_states": states}

    def update_(grads: Grads, opt_state: Any, params: Params, step: int, applied: Any = True, **info: Any) -> Updated:
        states, metrics = opt_state["inner_states"], {}
        for key, (mine, subset) in parts(grads, params).items():
            flag = applied[key] if isinstance(applied, dict) else applied
            new, states[key], more = _update_part(flag, optimizers[key], mine, states[key], subset, step, info)
            params.update(new)
            metrics.update({_name_within(key, name): value for name, value in more.items()})
        return params, opt_state, metrics

    description = mapped(operator.attrgetter("description"), optimizers)
    evaluation = partial(_evaluated_parts, optimizers, label)
    made = Optimizer(init, update_, decide, evaluation, numbers, description)
    return with_repr(made, partition, optimizers, label)


def _update_part(
    flag: Any, optimizer: Optimizer, grads: Grads, opt_state: Any, params: Params, step: int, info: Mapping[str, Any]
) -> Updated:
    """Update a part if its flag is set, or where it is set in a graph."""
    if flag is not True and tracing():
        return update_where(flag, optimizer, grads, opt_state, params, step, info)
    if not any_of(flag):
        return params, opt_state, {}
    return call_update(optimizer, grads, opt_state, params, step, {**info, "applied": flag})


def _parts(
    optimizers: Mapping[str, Optimizer], label: Callable[[str, Tensor], str], grads: Grads, params: Params
) -> dict[str, tuple[Grads, Params]]:
    """The gradients and parameters of each optimizer that has a gradient."""
    members: dict[str, Params] = {}
    for name, tensor in params.items():
        members.setdefault(label(name, tensor), {})[name] = tensor
    parts = {}
    for key, subset in members.items():
        mine = {name: grads[name] for name in subset if name in grads}
        if mine and key not in optimizers:
            raise ValueError(
                f"{next(iter(mine))} has the label {key!r}, and there are optimizers for {', '.join(optimizers)}"
            )
        if mine:  # a parameter that is not trained needs no optimizer
            parts[key] = mine, subset
    return parts


def _evaluated_parts(
    optimizers: Mapping[str, Optimizer],
    label: Callable[[str, Tensor], str],
    params: Params,
    buffers: dict[str, Tensor],
    opt_state: Any,
) -> tuple[Params, dict[str, Tensor]]:
    chosen = params
    for key, state in opt_state["inner_states"].items():
        subset = {name: tensor for name, tensor in params.items() if label(name, tensor) == key}
        mine, buffers = optimizers[key].evaluation(subset, buffers, state)
        chosen = chosen if mine is subset else {**chosen, **mine}
    return chosen, buffers


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
