"""Hyperparameters in the state: inject, set and log them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from looplib._core.checks import check
from looplib._core.kinds import check_kind
from looplib.optim._recipe import Recipe
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

    Within a tuple such as `betas`, it is a number like any other and not kept in the state.

    Args:
        value: initial value, a number.

    Raises:
        TypeError: `value` is not a number.

    Source: `optax.inject_hyperparams`.
    """

    def __init__(self, value: float) -> None:
        real = isinstance(value, Real) and not isinstance(value, bool)
        check(real, f"injected got a {type(value).__name__}; give a number", TypeError)
        self.value = float(value)

    def __repr__(self) -> str:
        return f"injected({self.value})"

    def __call__(self, step: int) -> float:
        return self.value


def values_to_inject(moving: Mapping[str, Any]) -> dict[str, Tensor]:
    """The injected among a group's moving hyperparameters, as they are kept in the state."""
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

    The values are those of the next update, the one at `state.step`. After a step, `log(state, ll.compute(metrics) |
    ll.optim.hyperparameters(optimizer, state))` therefore logs what the next step will use, as torch's
    `scheduler.get_last_lr()` does after `scheduler.step()`. For what the step itself has used, as transformers' Trainer
    logs it, call this before the step: `rates = ll.optim.hyperparameters(optimizer, state)`.

    A plain name is the default group's value. `lr/0` is the value of the first entry of `groups` if it has its own,
    `lr/matrices` that of the optimizer with this label in a `partition`. Constants other than `lr`, and tuples such as
    `betas`, are left out. Schedules are evaluated on the host when you call this, so steps are not
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
    values = recipe.values_at(recipe.values, opt_state, step)
    for number in (-1, *range(len(recipe.groups))):  # defaults come first
        moving, given = recipe.moving[number], recipe.values[number]
        suffix, own = (f"/{number}", recipe.overrides[number]) if number >= 0 else ("", given)
        for key in dict.fromkeys(["lr", *moving]):
            if key in own or isinstance(moving.get(key), injected):
                value = values[number][key]
                numbers |= {key + suffix: float(value)} if isinstance(value, (Real, Tensor)) else {}
    return numbers


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

    A name sets the hyperparameter everywhere: in all groups, and in all optimizers of a `partition`; a function keeps
    their ratios. The given state is unchanged, and the two states share all other tensors.

    Args:
        state: a state with `ll.optim.injected` hyperparameters, with any wrappers around the optimizer, or a stack of
            such states.
        values: name -> a number, a tensor, or a function from the current value (a tensor) to the new one. In a
            stack, a number applies to all members and a tensor of shape (members,) gives each its own. Values are
            converted to the dtype and device of the current ones. A tensor keeps its graph, so that gradients can
            reach a learned rate (`ll.transforms.differentiable`); otherwise, pass `tensor.detach()`.

    Raises:
        ValueError: the hyperparameter is not injected, or the value is no number and no tensor of its shape.
    """
    unknown = set(values)

    def changed(record: Any) -> Any:
        match record:
            case {"inner_state": inner}:
                return {**record, "inner_state": changed(inner)}
            case {"inner_states": members}:
                return {"inner_states": {key: changed(member) for key, member in members.items()}}
            case {"hyperparameters": groups}:
                unknown.difference_update(*groups)
                return {**record, "hyperparameters": [_changed(group, values) for group in groups]}
        return record

    opt_state = changed(state.opt_state)
    if unknown:
        names = ", ".join(sorted(unknown))
        raise ValueError(
            f"this state has no injected {names}: make it with an optimizer that has {min(unknown)}=ll.optim.injected(...)"
        )
    return state.replace(opt_state=opt_state)


def _changed(numbers: Mapping[str, Tensor], values: Mapping[str, Value]) -> dict[str, Tensor]:
    return {key: _alike(key, values[key], old) if key in values else old for key, old in numbers.items()}


def _alike(name: str, value: Any, old: Tensor) -> Tensor:
    """Convert a value to a tensor like the one it replaces."""
    given = value(old) if callable(value) else value
    try:
        tensor: Tensor = torch.as_tensor(given, dtype=old.dtype, device=old.device).expand(old.shape).clone()
    except (TypeError, RuntimeError) as error:
        raise ValueError(
            f"{name} is {given!r}; give a number, or a tensor of shape {tuple(old.shape)} or ()"
        ) from error
    return tensor
