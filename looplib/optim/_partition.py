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
from looplib.optim._recipe import chosen_by_kind
from looplib.optim._wrap import Flag, Updated, wrap
from looplib.types import Grads, Optimizer, Params

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

    If one optimizer skips an update, the others still make theirs; if all do, the step counts as skipped. Put
    wrappers that may raise, such as `apply_if_finite`, around `partition` in donated steps: inside it, another
    optimizer may already have written when the error is raised, and the state is lost. Classes that create their
    state in their first update (SGD with dampening, schedule-free ones) do so in the first update of each parameter.

    Args:
        optimizers: label -> optimizer, with or without wrappers.
        label: `(name, tensor) -> label`.

    Raises:
        ValueError: a label has no optimizer, or an optimizer has no parameters.

    Source: `optax.partition`.
    """
    _check_optimizers(optimizers)
    labels = _remembered(label)

    def update(
        grads: Grads, opt_state: Any, params: Params, step: int, *, donate: bool = False, **extra: Any
    ) -> tuple[Params, Any, bool | Tensor]:
        states, new = dict(opt_state["inner_states"]), dict(params)
        applied: bool | Tensor = False
        label_of = labels(params)
        members = _divided(optimizers, params, label_of)
        _check_labels(optimizers, grads, label_of)
        for key, subset in members.items():
            mine = {name: grads[name] for name in subset if name in grads}
            if mine:
                changed, states[key], acted = optimizers[key].update(
                    mine, states[key], subset, step, donate=donate, **extra
                )
                new.update(changed)
                applied = acted is True or applied is True or acted | applied
        return (params if applied is False else new), {"inner_states": states}, applied

    init, numbers = partial(_first_states, optimizers, label), partial(_hyperparameters, optimizers)
    evaluation = partial(_evaluated, optimizers, labels)
    description = mapped(operator.attrgetter("description"), optimizers)
    return remember(Optimizer(init, update, evaluation, numbers, description), partition, optimizers, label)


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
    """Name of a hyperparameter with the label of its optimizer: `lr/0` of `rest` is `lr/rest/0`."""
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

    def update(
        grads: Grads, opt_state: Any, params: Params, step: int, *, when: Flag = True, **extra: Any
    ) -> Updated:
        if len(opt_state) != 1:
            raise KeyError("inner_state alone")  # `Optimizer` says whose state it is
        names = tuple(grads)
        chosen = on_host(lambda step: [name for name in names if not frozen(name, step)], step)
        if not chosen:
            return params, opt_state, when
        active = pick(grads, chosen)
        new, inner, applied = optimizer.update(active, opt_state["inner_state"], params, step, when=when, **extra)
        return new, {"inner_state": inner}, applied

    return remember(wrap(optimizer, init, update), freeze, optimizer, frozen)
