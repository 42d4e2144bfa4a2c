"""Functional optimizers: any `torch.optim` class as a part of an update.

torch's optimizers do the arithmetic. Their internal state, parameters in groups and moments by parameter, is passed
in and taken out at each update. An instance of the class, empty between updates, does the work, in place.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from numbers import Real
from typing import Any, NoReturn, SupportsFloat

import torch
from torch import Tensor

from looplib._core.checks import check, separated
from looplib._core.mappings import mapped, subset
from looplib._core.records import check_kind, described, with_repr
from looplib.optim._kernels import kernel_name
from looplib.optim._recipe import Groups, Recipe, check_class, check_groups, check_lr, inject
from looplib.optim._third_party import check_against_raw_loop
from looplib.optim._update import (
    Plan,
    evaluated,
    first_state,
    plan_for,
    transform,
    transform_in_graph,
    update_,
    update_in_graph,
)
from looplib.optim.chains import of_another
from looplib.types import Optimizer, Params, Part, TrainState, check_state


def optimizer(
    cls: type,
    *parameters: NoReturn,
    lr: SupportsFloat | Callable[[int], Any] | inject | None = None,
    groups: Groups = (),
    **hyperparameters: Any,
) -> Optimizer:
    """Make a functional optimizer from a `torch.optim` class, or a third-party class with the same interface.

    >>> import looplib as ll, torch
    >>> adamw = ll.optimizer(
    ...     torch.optim.AdamW,
    ...     lr=ll.warmup_cosine(3e-4, warmup=100, total=2000),
    ...     weight_decay=0.1,
    ...     groups=[(lambda name, tensor: tensor.ndim < 2, {"weight_decay": 0.0})],  # norms and biases
    ... )
    >>> params = dict(torch.nn.Linear(2, 1).named_parameters())
    >>> opt_state = adamw.init(params)
    >>> grads = {name: torch.ones_like(tensor) for name, tensor in params.items()}
    >>> new_params, opt_state, applied = adamw.update(grads, opt_state, params, 0)

    An update has the bits of the class's own `step()` in a raw loop with the same arguments and the same kernel,
    because it runs that step, or the fused kernel that the step would call. Learning rate, betas and every other
    hyperparameter can be a schedule.

    Args:
        cls: the class, not an instance.
        parameters: do not pass any; they are in the state. Passing them raises a TypeError that says so.
        lr: learning rate, a number or a schedule `(step) -> float`. Required.
        groups: list of `(predicate(name, tensor), {hyperparameter: value or schedule})`. The first match wins; the
            other parameters use the defaults. A third-party class may read group keys that its constructor does not
            accept, such as GaLore's `rank`; those are passed to it in the group.
        hyperparameters: further arguments of the class. Each of them, and each member of a tuple such as `betas`, may
            be a schedule. `fused`, `foreach`, `capturable` and `differentiable` are used as given, for all parameters
            or in a group. If none of these is given, looplib uses the fused kernels of Adam, AdamW, Adagrad and SGD for
            dense tensors of the dtypes and devices that torch supports, and torch's default otherwise, as for SGD with
            dampening and for sparse gradients. Gradients are brought to the strides of their parameters, as fused kernels
            need them. `repr(optimizer)` says which kernel is used.

    Raises:
        TypeError: `cls` is not an optimizer class; `lr` is missing; a hyperparameter is unknown, or, in a group of a
            third-party class, almost spelled like a known one; or the class's `step` needs a closure and it is not LBFGS
            itself. From `init`: the class keeps state outside `state` and `param_groups`, for all parameters together, or
            in types other than tensors, numbers, lists and dicts (a deque, for example), or keeps more of it after a few
            updates than after one; or it changes a number, a text or a tensor in its own attributes, or draws from
            Python's or NumPy's random streams. This is found by three steps on the smallest parameters, which are compared
            with a raw loop.
        ValueError: the class refuses a value; a schedule moves what a schedule-free class reads to evaluate, its momentum
            or betas; `fused=True` is given for parameters with gaps in memory; a predicate depends on the identity of the
            tensor it is given; `opt_state` belongs to a different optimizer; gradients are sparse where dense ones are
            needed, or the reverse; or a gradient belongs to a parameter that `init` did not see.

    **What the state holds.** `state.opt_state["AdamW"]["state"][name]`, under the name of the class, is what torch keeps
    for a parameter, under torch's names; below, `opt_state` is the entry of the class.
    Values that a class changes in its groups, as schedule-free optimizers do, are in `opt_state["groups"]`. The
    attributes of an object that it keeps for a parameter, such as GaLore's `projector`, are stored as a dict. A
    parameter whose first gradient comes late starts at its own first update, as in torch; if a class creates state
    only then, `opt_state["started"]` records by name which parameters have had an update. Random numbers that a class draws
    from torch are derived from the state's seed and step.

    **LBFGS.** `torch.optim.LBFGS` evaluates the loss several times per update. For models without randomness, the result
    has the bits of a raw loop; BatchNorm's statistics are those of the first evaluation. LBFGS's history is allocated in
    full, `history_size` times twice the size of the parameters.

    **Not the same bits.** SGD with momentum may differ from torch by a rounding in two cases: with `foreach=True` in
    half precision, in an update in which a further parameter gets its first gradient; and without dampening, for
    sparse gradients, because its momentum is dense.

    **Patches and hooks.** Of a class of torch's, a `step` that somebody has put in place of torch's before the call is run as
    a third party's; one put there later is not. Hooks for all optimizers (`register_optimizer_step_pre_hook` and the like) and
    hooks of an instance do not run for torch's classes: write a part of a chain.

    **Classes of third parties.** The comparison of `init` shows differences that three steps on sample gradients show. A class
    whose step fails on them is taken, with a warning from `init`: compare it by hand, in a few steps on your own batches.
    One with methods `train()` and `eval()` is taken for a schedule-free one: it gets `train()` before each step, and
    `ll.eval_state` gives the weights that its `eval()` leaves.

    **Parameters without a gradient.** The class is given the parameters that have a gradient in this step. A class of a third
    party that also decays or counts the others, as none of torch's does, leaves them alone here.
    """
    check_class(cls, *parameters, *subset(hyperparameters, ["params"]).values())
    check_lr(lr)
    check_groups(groups)
    recipe = Recipe(cls, {"lr": lr, **hyperparameters}, groups)
    recipe.check()
    plans: list[Plan] = []

    def begin(params: Params) -> dict[str, Any]:
        check(params, f"{cls.__name__} got no parameters to optimize")
        return first_state(plan_for(plans, recipe, params, params), params)

    def init(params: Params, **extra: Any) -> dict[str, Any]:
        opt_state = begin(params)
        if not recipe.is_torch_optim:
            check_against_raw_loop(recipe, params, lambda tensors: {cls.__name__: begin(tensors)}, single.update)
        return opt_state

    def evaluation(params: Params, buffers: Params, opt_state: Any) -> tuple[Params, Params]:
        states = opt_state["state"]  # KeyError for the state of another optimizer, which `eval_state` explains
        return evaluated(plan_for(plans, recipe, params, states), params, opt_state), buffers

    description = {"class": described(cls), **described(recipe.defaults)}
    for number, (predicate, values) in enumerate(groups):
        description[f"group {number}"] = {"members": described(predicate), **described(values)}
    part = Part(
        role="weights",
        init=init,
        transform=partial(transform, plans, recipe),
        update_=partial(update_, plans, recipe),
        evaluation=evaluation if recipe.is_schedule_free else None,
        hyperparameters=partial(numbers_of, recipe),
        description=description,
        kernel=partial(kernel_name, recipe, plans),
        evaluates=cls is torch.optim.LBFGS,
        by_parameter=recipe.has_plain_entries,
        for_graphs=Part(
            role="weights", transform=partial(transform_in_graph, recipe), update_=partial(update_in_graph, recipe)
        ),
    )
    single = Optimizer({cls.__name__: part})
    return with_repr(single, optimizer, cls, lr=lr, groups=groups, **hyperparameters)


# Hyperparameters of a state


def hyperparameters(optimizer: Optimizer, state: TrainState, prefix: str = "") -> dict[str, float]:
    """Current learning rate, and every other hyperparameter that changes, as numbers to log.

    >>> import looplib as ll, torch
    >>> model = torch.nn.Linear(2, 1)
    >>> groups = [(lambda name, tensor: tensor.ndim < 2, {"lr": 0.5})]
    >>> lr = ll.schedules.warmup_linear(0.1, warmup=10, total=100)
    >>> optimizer = ll.optimizer(torch.optim.AdamW, lr=lr, weight_decay=ll.optim.inject(0.01), groups=groups)
    >>> state = ll.init_state(model, optimizer).replace(step=5)
    >>> ll.optim.hyperparameters(optimizer, state)
    {'lr': 0.05, 'weight_decay': 0.01, 'lr/0': 0.5, 'weight_decay/0': 0.01}

    The values are those of the next update, the one at `state.step`. After a step, `log(state, ll.compute(metrics) |
    ll.optim.hyperparameters(optimizer, state))` therefore logs what the next step will use, as torch's
    `scheduler.get_last_lr()` gives it after `scheduler.step()`. For what the step itself has used, as transformers' Trainer
    logs it, call this before the step: `rates = ll.optim.hyperparameters(optimizer, state)`.

    A plain name is the default group's value. `lr/0` is the value of the first entry of `groups` if it has its own,
    `lr/matrices` that of the optimizer with this label in a `partition`. A member of a tuple that changes has its index,
    such as `betas[0]`. Constants other than `lr` are left out. Schedules are evaluated on the host when you call this, so
    steps are not slowed down.

    Args:
        optimizer: the optimizer that created `state.opt_state`, with all of its parts. Those of a part of your own are
            what its `hyperparameters=` returns.
        state: a training state.
        prefix: string put before each name, as for `ll.compute`.

    Raises:
        ValueError: the state was created by a different optimizer, or is a stack, whose members have their own
            values.

    Source: Lightning's `LearningRateMonitor`.
    """
    check_kind(optimizer, "hyperparameters", "optimizer")
    check_state(state, "ll.optim.hyperparameters(optimizer, state)")
    if isinstance(state.seed, tuple):
        raise ValueError(
            f"this is a stack of {len(state.seed)} members, which may differ in their hyperparameters: ask for one "
            "of ll.transforms.unstack_states(stack); what ll.transforms.per_member was given is known without asking"
        )
    if not optimizer.fits(state.opt_state):
        raise of_another(optimizer, state)
    try:
        numbers = optimizer.hyperparameters(state.opt_state, state.step)
    except KeyError as error:
        raise of_another(optimizer, state) from error
    prefix = separated(prefix)
    return {prefix + name: value for name, value in numbers.items()}


def numbers_of(recipe: Recipe, opt_state: Any, step: int) -> dict[str, float]:
    """Learning rate and changing hyperparameters at a step, by name and group."""
    numbers: dict[str, float] = {}
    _ = opt_state["state"]  # KeyError for the state of another optimizer, which `hyperparameters` explains
    values = recipe.values_at(recipe.values, opt_state, step)
    for number, settings in [(-1, recipe.defaults), *enumerate(recipe.overrides[:-1])]:  # defaults come first
        for key in dict.fromkeys(["lr", *recipe.moving[number]]):
            value, moving = values[number][key], recipe.moving[number].get(key)
            if key not in settings and not isinstance(moving, inject):
                continue
            for name, member in _members(key, value, moving):
                if isinstance(member, (Real, Tensor)):
                    numbers[name if number < 0 else f"{name}/{number}"] = float(member)
    return numbers


def _members(key: str, value: Any, moving: Any) -> list[tuple[str, Any]]:
    """A hyperparameter by name, or of a tuple such as `betas`, its members that change."""
    if not isinstance(value, (tuple, list)):
        return [(key, value)]
    schedules = (
        moving if isinstance(moving, (tuple, list)) else [moving] * len(value)
    )  # or a schedule of the whole tuple
    return [(f"{key}[{index}]", value[index]) for index, member in enumerate(schedules) if callable(member)]


Value = float | Tensor | Callable[[Tensor], float | Tensor]


def set_hyperparameters(state: TrainState, **values: Value) -> TrainState:
    """Return a state with new values for its injected hyperparameters.

    >>> import looplib as ll, torch
    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = ll.optimizer(torch.optim.SGD, lr=ll.optim.inject(0.1))
    >>> state = ll.init_state(model, optimizer)
    >>> state = ll.optim.set_hyperparameters(state, lr=0.02)
    >>> state = ll.optim.set_hyperparameters(state, lr=lambda lr: lr / 2)
    >>> ll.optim.hyperparameters(optimizer, state)
    {'lr': 0.01}

    A name sets the hyperparameter everywhere: in all groups, and in all optimizers of a `partition`; a function keeps
    their ratios. The given state is unchanged, and the two states share all other tensors.

    Args:
        state: a state with `ll.optim.inject` hyperparameters, in any part of a chain, or a stack of
            such states.
        values: name -> a number, a tensor, or a function from the current value (a tensor) to the new one. In a
            stack, a number applies to all members and a tensor of shape (members,) gives each its own. Values are
            converted to the dtype and device of the current ones. A tensor keeps its graph, so that gradients can
            reach a learned rate (`ll.transforms.differentiable`); otherwise, pass `tensor.detach()`.

    Raises:
        ValueError: the hyperparameter is not injected, or the value is no number and no tensor of its shape.
    """
    check_state(state, "ll.optim.set_hyperparameters(state, lr=...)")
    unknown = set(values)

    def changed(record: Any) -> Any:
        if not isinstance(record, dict):
            return record
        groups = record.get("hyperparameters")
        if not isinstance(groups, list):  # a dict of parts, or of labels
            return mapped(changed, record)
        unknown.difference_update(*groups)
        new = [
            {key: _alike(key, values[key], old) if key in values else old for key, old in group.items()}
            for group in groups
        ]
        return {**record, "hyperparameters": new}

    opt_state = changed(state.opt_state)
    if unknown:
        names = ", ".join(sorted(unknown))
        raise ValueError(
            f"this state has no injected {names}: make it with an optimizer that has {min(unknown)}=ll.optim.inject(...)"
        )
    return state.replace(opt_state=opt_state)


def _alike(name: str, value: Any, old: Tensor) -> Tensor:
    """Convert a value to a tensor like the one it replaces."""
    number = value(old) if callable(value) else value
    message = f"{name} is {number!r}; give a number, or a tensor of shape () or {tuple(old.shape)}"
    check(not isinstance(number, bool), message)
    try:
        tensor: Tensor = torch.as_tensor(number, dtype=old.dtype, device=old.device).expand(old.shape).clone()
    except (TypeError, RuntimeError) as error:
        raise ValueError(message) from error
    return tensor
