"""Hyperparameters in the state: inject, set and log them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from looplib._core.checks import check
from looplib._core.kinds import check_kind
from looplib._core.trees import map_leaves
from looplib.optim._recipe import Recipe, value_at
from looplib.optim._wrap import of_another
from looplib.types import Optimizer, TrainState


class injected:
    """Injected hyperparameter: stored in the state as `opt_state["hyperparameters"]`, where training can change it.

    >>> import looplib as ll, torch
    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = ll.optimizer(torch.optim.SGD, lr=ll.optim.injected(0.1))
    >>> state = ll.init_state(model, optimizer)
    >>> state.opt_state["hyperparameters"]
    [{'lr': tensor(0.1000, dtype=torch.float64)}]

    Each state can then have its own value: members of a stack, trials of a population, or an inner loop whose
    learning rate is learned (`ll.transforms.differentiable`). `ll.optim.set_hyperparameters` returns a state with new
    values. There is one dict for each entry of `groups`, and one for the defaults, which comes last.

    Args:
        value: initial value, a number.

    Raises:
        TypeError: `value` is not a number. `init_state` raises it for a member of a tuple, such as one of `betas`.

    Source: `optax.inject_hyperparams`.
    """

    def __init__(self, value: float) -> None:
        check(_is_real(value), f"injected got a {type(value).__name__}; give a number", TypeError)
        self.value = float(value)

    def __repr__(self) -> str:
        return f"injected({self.value})"

    def __call__(self, step: int) -> float:
        return self.value


def values_to_inject(moving: Mapping[str, Any]) -> dict[str, Tensor]:
    """The injected among a group's moving hyperparameters, as they are kept in the state."""
    for key, value in moving.items():
        check(
            callable(value) or injected not in map(type, value),
            f"{key} has an injected member: injected stands for a hyperparameter as a whole, so give a number or a "
            "schedule there",
            TypeError,
        )
    values = {key: value.value for key, value in moving.items() if isinstance(value, injected)}
    return {key: torch.tensor(value, dtype=torch.float64) for key, value in values.items()}


def hyperparameters(optimizer: Optimizer, state: TrainState, prefix: str = "") -> dict[str, float]:
    """Current learning rate, and every other hyperparameter that changes, as numbers to log.

    >>> import looplib as ll, torch
    >>> model = torch.nn.Linear(2, 1)
    >>> groups = [(lambda name, tensor: tensor.ndim < 2, {"lr": 0.5})]
    >>> lr = ll.schedules.warmup_linear(0.1, warmup=10, total=100)
    >>> optimizer = ll.ema(ll.optimizer(torch.optim.AdamW, lr=lr, weight_decay=ll.optim.injected(0.01), groups=groups))
    >>> state = ll.init_state(model, optimizer).replace(step=5)
    >>> ll.optim.hyperparameters(optimizer, state)
    {'lr': 0.05, 'weight_decay': 0.01, 'lr/0': 0.5, 'weight_decay/0': 0.01}

    The values are those of the next update, the one at `state.step`. To log the values that a step has used, call
    this with the state before the step. To log them in one row with the metrics, write `log(state,
    ll.compute(metrics) | ll.optim.hyperparameters(optimizer, state))`.

    A plain name is the default group's value. `lr/0` is the value of the first entry of `groups` if it has its own,
    `lr/matrices` that of the optimizer with this label in a `partition`, and `betas[0]` a member of a tuple.
    Constants other than `lr` are left out. Schedules are evaluated on the host when you call this, so steps are not
    slowed down.

    Args:
        optimizer: the optimizer that created `state.opt_state`, with its wrappers. For a custom `Optimizer`, the
            values are those of its `hyperparameters` field.
        state: a training state.
        prefix: string put before each name.

    Raises:
        ValueError: the state was created by a different optimizer, or is a stack, whose members have their own
            values.

    Source: Lightning's `LearningRateMonitor`.
    """
    check_kind(optimizer, "hyperparameters", "optimizer")
    if isinstance(state.seed, tuple):
        raise ValueError(
            f"this is a stack of {len(state.seed)} members, which may differ in their hyperparameters: ask for one "
            "of ll.transforms.unstack_states(stack); what ll.transforms.per_member was given is known without asking"
        )
    try:
        numbers = optimizer.hyperparameters(state.opt_state, state.step)
    except (LookupError, TypeError, AttributeError) as error:
        raise of_another(optimizer, state, error) from error
    return {prefix + name: value for name, value in numbers.items()}


def numbers_of(recipe: Recipe, opt_state: Any, step: int) -> dict[str, float]:
    """Learning rate and changing hyperparameters at a step, by name and group."""
    numbers: dict[str, float] = {}
    nothing: list[dict[str, Any]] = [{} for _ in recipe.values]
    for number in (-1, *range(len(recipe.groups))):  # defaults come first
        given, injected_values = recipe.values[number], opt_state.get("hyperparameters", nothing)[number]
        values = {**given, **opt_state.get("groups", nothing)[number], **injected_values}
        suffix, own = (f"/{number}", {*recipe.overrides[number], *injected_values}) if number >= 0 else ("", given)
        for key in dict.fromkeys(["lr", *recipe.moving[number]]):
            if key in own:
                numbers |= _named(key, suffix, value_at(values[key], step), given[key])
    return numbers


def _named(key: str, suffix: str, value: Any, given: Any) -> dict[str, float]:
    """A hyperparameter as numbers: its value, or those members of a tuple that are schedules."""
    if isinstance(value, (Real, Tensor)):
        return {key + suffix: _number(value)}
    if isinstance(value, tuple):
        return {f"{key}[{i}]{suffix}": _number(value[i]) for i, member in enumerate(given) if callable(member)}
    return {}


def _number(value: Any) -> float:
    return float(value.detach().item() if isinstance(value, Tensor) else value)


Value = float | Tensor | Callable[[Tensor], float | Tensor]


def set_hyperparameters(state: TrainState, **values: Value) -> TrainState:
    """Return a state with new values for its injected hyperparameters.

    >>> import looplib as ll, torch
    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = ll.ema(ll.optimizer(torch.optim.SGD, lr=ll.optim.injected(0.1)))
    >>> state = ll.init_state(model, optimizer)
    >>> state = ll.optim.set_hyperparameters(state, lr=0.02)
    >>> state = ll.optim.set_hyperparameters(state, lr=lambda lr: lr / 2)
    >>> ll.optim.hyperparameters(optimizer, state)
    {'lr': 0.01}

    A name sets the hyperparameter everywhere: in all groups, and in all optimizers of a `partition`. A longer name,
    as given by `ll.optim.hyperparameters`, sets it only there and below: `lr=1e-3, **{"lr/0": 1e-4}`. The given state
    is unchanged, and the two states share all other tensors.

    Args:
        state: a state with `ll.optim.injected` hyperparameters, with any wrappers around the optimizer, or a stack of
            such states.
        values: name -> a number, a tensor, or a function from the current value (a tensor) to the new one. In a
            stack, a number applies to all members and a tensor of shape (members,) gives each its own. Values are
            converted to the dtype and device of the current ones. A tensor keeps its graph, so that gradients can
            reach a learned rate (`ll.transforms.differentiable`); otherwise, pass `tensor.detach()`.

    Raises:
        ValueError: the hyperparameter is not injected, or the tensor has a different shape.
        TypeError: the value is neither a number nor a tensor.
    """
    opt_state = map_leaves(lambda leaf: leaf, state.opt_state)  # new containers of the same tensors
    present = _present(opt_state)
    used: set[str] = set()
    for name, (numbers, key) in present.items():
        if given := [given for given in values if f"{name}/".startswith(f"{given}/")]:
            numbers[key] = _alike(name, values[max(given, key=len)], numbers[key])
            used.update(given)
    if unknown := sorted(values.keys() - used):
        raise ValueError(
            f"{', '.join(unknown)} does not stand in this state, of which {', '.join(sorted(present)) or 'nothing'} "
            f"is injected: make the state by an optimizer with {unknown[0].partition('/')[0]}=ll.optim.injected(...)"
        )
    return state.replace(opt_state=opt_state)


def _present(record: Any, label: str = "") -> dict[str, tuple[dict[str, Tensor], str]]:
    """Injected hyperparameters by name, within wrappers and partitions: the dict that holds each, and its key there."""
    present: dict[str, tuple[dict[str, Tensor], str]] = {}
    if not isinstance(record, dict):
        return present
    groups = record.get("hyperparameters", [])
    for number, numbers in enumerate(groups):
        ending = label if number == len(groups) - 1 else f"{label}/{number}"  # the defaults come last
        present |= {key + ending: (numbers, key) for key in numbers}
    present |= _present(record.get("inner_state"), label)
    for key, member in record.get("inner_states", {}).items():
        present |= _present(member, f"{label}/{key}")
    return present


def _alike(name: str, value: Any, old: Tensor) -> Tensor:
    """Convert a value to a tensor like the one it replaces."""
    if callable(value):
        value = value(old)
    if _is_real(value):
        return torch.full_like(old, float(value))
    kind = type(value).__name__
    message = f"{name} is a {kind}; give a number, a tensor, or a function that gives one"
    check(isinstance(value, Tensor), message, TypeError)
    check(
        value.shape in (old.shape, ()),
        f"{name} has shape {tuple(value.shape)}, and in this state {tuple(old.shape)}: give one number, or in a "
        "stack one for each member",
    )
    tensor: Tensor = value.to(old.device, old.dtype).expand(old.shape).clone()
    return tensor


def _is_real(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)
