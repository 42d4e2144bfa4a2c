"""Parameter partitioning: different optimizers for different parameters, and freezing."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import Tensor

from looplib._core.calls import remember
from looplib._core.checks import check
from looplib._core.mappings import mapped, pick
from looplib._core.tracing import on_host
from looplib._core.updates import Decision, any_of, flags_of, leaves_of, update_where, updated
from looplib.optim._recipe import chosen_by_kind
from looplib.optim._wrap import Updated, update_within, wrap
from looplib.optim._wrong_state import name_of, wrong_state
from looplib.types import Grads, Metrics, Optimizer, Params

_shape_of = operator.attrgetter("shape")
_dtype_of = operator.attrgetter("dtype")


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
    a GAN. All optimizers see the same `step`, so a schedule counts the updates of all of them.

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
    _check_optimizers(optimizers)
    labels = _remembered(label)

    def parts(grads: Grads, params: Params) -> dict[str, tuple[Grads, Params]]:
        """The gradients and parameters of each optimizer that has a gradient."""
        label_of = labels(params)
        _check_labels(optimizers, grads, label_of)
        members = _divided(optimizers, params, label_of)
        own = {key: {name: grads[name] for name in subset if name in grads} for key, subset in members.items()}
        return {key: (mine, members[key]) for key, mine in own.items() if mine}

    def decide(
        grads: Grads, opt_state: Any, metrics: Metrics, params: Params, step: int, **info: Any
    ) -> tuple[Any, Any]:
        if type(opt_state) is not dict or [*opt_state] != ["inner_states"] or not _same_keys(optimizers, opt_state):
            raise wrong_state(
                opt_state, name_of(description, "partition"), ["inner_states of " + ", ".join(optimizers)]
            )
        states, flags = dict(opt_state["inner_states"]), {}
        checks: list[Any] = []
        for key, (mine, subset) in parts(grads, params).items():
            decision, states[key] = optimizers[key].decide(mine, states[key], metrics, params=subset, step=step)
            flags[key] = flags_of(decision)
            checks += decision.checks if isinstance(decision, Decision) else ()
        if all(flag is True for flag in flags.values()):
            return True, opt_state if _unchanged(states, opt_state) else {"inner_states": states}
        return Decision(flags, checks), {"inner_states": states}

    def update_(grads: Grads, opt_state: Any, params: Params, step: int, applied: Any = True, **info: Any) -> Updated:
        states, metrics = opt_state["inner_states"], {}
        for key, (mine, subset) in parts(grads, params).items():
            flag = applied[key] if isinstance(applied, dict) else applied
            new, states[key], more = _update_part(flag, optimizers[key], mine, states[key], subset, step, info)
            params.update(new)
            metrics.update({_name_within(key, name): value for name, value in more.items()})
        return params, opt_state, metrics

    init, numbers = partial(_first_states, optimizers, label), partial(_hyperparameters, optimizers)
    evaluation = partial(_evaluated, optimizers, labels)
    description = mapped(operator.attrgetter("description"), optimizers)
    made = Optimizer(init, update_, decide, evaluation, numbers, description)
    return remember(made, partition, optimizers, label)


def _same_keys(optimizers: Mapping[str, Optimizer], opt_state: Any) -> bool:
    states = opt_state["inner_states"]
    return isinstance(states, dict) and states.keys() == optimizers.keys()


def _unchanged(states: Mapping[str, Any], opt_state: Any) -> bool:
    return all(map(operator.is_, states.values(), opt_state["inner_states"].values()))


def _update_part(
    flag: Any, optimizer: Optimizer, grads: Grads, opt_state: Any, params: Params, step: int, info: Mapping[str, Any]
) -> Updated:
    """Update a part if its flag is set, or where it is set in a graph."""
    if flag is not True and any(isinstance(one, Tensor) for one in leaves_of(flag)):
        return update_where(flag, optimizer, grads, opt_state, params, step, info)
    if not any_of(flag):
        return params, opt_state, {}
    return updated(optimizer, grads, opt_state, params, step, {**info, "applied": flag})


def _evaluated(
    optimizers: Mapping[str, Optimizer],
    labels: Callable[[Params], dict[str, str]],
    params: Params,
    buffers: dict[str, Tensor],
    opt_state: Any,
) -> tuple[Params, dict[str, Tensor]]:
    chosen = dict(params)
    for key, subset in _divided(optimizers, params, labels(params)).items():
        mine, buffers = optimizers[key].evaluation(subset, buffers, opt_state["inner_states"][key])
        chosen.update(mine)
    same = all(map(operator.is_, chosen.values(), params.values()))
    return (params if same else chosen), buffers


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


def _remembered(label: Callable[[str, Tensor], str]) -> Callable[[Params], dict[str, str]]:
    """Cache each parameter's label, so that the function is called once for the same names, shapes and dtypes."""
    known: list[tuple[Any, dict[str, str]]] = []  # names, shapes and dtypes, and their labels

    def labels(params: Params) -> dict[str, str]:
        key = [*params], [*map(_shape_of, params.values())], [*map(_dtype_of, params.values())]
        for seen, label_of in known:
            if seen == key:
                return label_of
        label_of = {name: label(name, tensor) for name, tensor in params.items()}
        known.insert(0, (key, label_of))
        del known[8:]
        return label_of

    return labels


def _first_states(
    optimizers: Mapping[str, Optimizer], label: Callable[[str, Tensor], str], params: Params, **extra: Any
) -> dict[str, Any]:
    label_of = chosen_by_kind(label, params, "label")
    _check_labels(optimizers, params, label_of)
    members = _divided(optimizers, params, label_of)
    empty = ", ".join(repr(key) for key, subset in members.items() if not subset)
    check(not empty, f"no parameter has the label {empty}: leave that optimizer out")
    return {"inner_states": {key: optimizers[key].init(subset, **extra) for key, subset in members.items()}}


def _divided(optimizers: Mapping[str, Optimizer], params: Params, label_of: Mapping[str, str]) -> dict[str, Params]:
    members: dict[str, Params] = {key: {} for key in optimizers}
    for name, tensor in params.items():
        members.get(label_of[name], {})[name] = tensor  # a parameter that is not trained needs no optimizer
    return members


def _check_optimizers(optimizers: Mapping[str, Optimizer]) -> None:
    for name, member in optimizers.items():
        message = f"partition got a {type(member).__name__} for {name!r}; give what ll.optimizer returns"
        check(isinstance(member, Optimizer), message, TypeError)


def _check_labels(optimizers: Mapping[str, Optimizer], names: Params, label_of: Mapping[str, str]) -> None:
    for name in names:
        if label_of[name] not in optimizers:
            raise ValueError(
                f"{name} has the label {label_of[name]!r}, and there are optimizers for {', '.join(optimizers)}"
            )


def freeze(optimizer: Optimizer, frozen: Callable[[str, int], bool]) -> Optimizer:
    """Parameter freezing for some of the steps, including optimizer state.

    >>> import looplib as ll, torch
    >>> def frozen(name, step):  # the first layer is thawed after 100 updates
    ...     return name.startswith("0.") and step < 100
    >>> optimizer = ll.optim.freeze(ll.optimizer(torch.optim.AdamW, lr=1e-3), frozen)

    Weight decay and momentum do not move a frozen parameter, as with a gradient of None in torch, and its optimizer
    state starts with its own first update. Steps are counted even if everything is frozen.

    The gradient of a frozen parameter is still computed and counts in `grad_norm`. To save that work when a layer is
    frozen for long, use a second step with `make_grad_fn(..., trainable=...)` for that time.

    Args:
        optimizer: the optimizer that updates the other parameters.
        frozen: `(name, step) -> bool`, where `step` is the number of updates completed.
    """

    def init(params: Params, **extra: Any) -> dict[str, Any]:
        return {"inner_state": optimizer.init(params, **extra)}

    def update_(grads: Grads, opt_state: Any, params: Params, step: int, **info: Any) -> tuple[Any, ...]:
        names = tuple(grads)
        chosen = on_host(lambda step: [name for name in names if not frozen(name, step)], step)
        if not chosen:
            return params, opt_state
        return update_within(optimizer, pick(grads, chosen), opt_state, params, step, info)

    return wrap(optimizer, freeze, {"frozen": frozen}, init, update_=update_)
