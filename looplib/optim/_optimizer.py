"""Functional optimizers: any `torch.optim` class as two pure functions, and wrappers around them.

torch's optimizers do the arithmetic. Their internal state, parameters in groups and moments by parameter, is passed
in and taken out at each update. An instance of the class, empty between updates, does the work, in place.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from looplib._core.checks import check
from looplib._core.errors import explain_arguments
from looplib._core.records import described, with_repr
from looplib._core.tracing import entered, tracing
from looplib.optim._hyperparameters import numbers_of
from looplib.optim._kernels import kernel_name
from looplib.optim._lbfgs import lbfgs_update
from looplib.optim._recipe import Groups, Recipe, check_class, check_groups, check_lr
from looplib.optim._third_party import check_against_raw_loop, evaluated
from looplib.optim._update import Plan, check_update, eager_update, first_state, plan_for
from looplib.types import Grads, Metrics, Optimizer, Params


@explain_arguments(check_class)
def optimizer(cls: type, *, lr: Any, groups: Groups = (), **hyperparameters: Any) -> Optimizer:
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
            or in a group. If none of these is given, looplib uses the fused kernel for tensors that torch supports
            and that are dense and share their strides, and torch's default otherwise, as for SGD with dampening.
            `repr(optimizer)` says which.

    Raises:
        TypeError: `cls` is not an optimizer class, or needs a closure and is not LBFGS; `lr` is missing; a
            hyperparameter is unknown, or, in a group of a third-party class, almost spelled like a known one. From
            `init`: the class keeps state outside `state` and `param_groups`, for all parameters together, or in types
            other than tensors, numbers, lists and dicts (a deque, for example), or keeps more of it after a few updates
            than after one; or it draws from Python's or NumPy's random streams. This is found by three steps on the
            smallest parameters, which are compared with a raw loop.
        ValueError: the class refuses a value; `fused=True` is given for parameters with gaps in memory; a predicate
            depends on the identity of the tensor it is given; `opt_state` belongs to a different optimizer; gradients
            are sparse where dense ones are needed, or the reverse; or a gradient belongs to a parameter that `init`
            did not see.

    **What the state holds.** `opt_state["state"][name]` is what torch keeps for a parameter, under torch's names.
    Values that a class changes in its groups, as schedule-free optimizers do, are in `opt_state["groups"]`. The
    attributes of an object that it keeps for a parameter, such as GaLore's `projector`, are stored as a dict. A
    parameter whose first gradient comes late starts at its own first update, as in torch; if a class creates state
    only then, `opt_state["started"]` records which parameters have had an update. Random numbers that a class draws
    from torch are derived from the state's seed and step.

    **LBFGS.** A class whose `step` has a `closure` without a default evaluates the loss several times per update. For
    models without randomness, the result has the bits of a raw loop; BatchNorm's statistics are those of the first
    evaluation. LBFGS's history is allocated in full, `history_size` times twice the size of the parameters.

    **Not the same bits.** SGD with momentum may differ from torch by a rounding in two cases: with `foreach=True` in
    half precision, in an update in which a further parameter gets its first gradient; and without dampening, for
    sparse gradients that contain an index twice, because its momentum is dense.
    """
    check_class(cls)
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
            check_against_raw_loop(recipe, params, begin, made.update)
        return opt_state

    def decide(
        grads: Grads, opt_state: Any, metrics: Metrics, params: Params, step: int, **info: Any
    ) -> tuple[bool, Any]:
        check_update(plans, recipe, grads, opt_state, params, step)
        return True, opt_state

    def update_(
        grads: Grads,
        opt_state: Any,
        params: Params,
        step: int,
        *,
        seed: int = 0,
        metrics: Metrics | None = None,
        evaluate: Any = None,
        **info: Any,
    ) -> tuple[Params, Any]:
        if entered and tracing():
            # Imported here because it defines an operation, which takes 1.4 ms.
            from looplib.optim._traced_update import traced_update

            return traced_update(recipe, grads, opt_state, params, step)
        if cls is torch.optim.LBFGS:
            return lbfgs_update(recipe, grads, opt_state, params, step, metrics, evaluate)
        return eager_update(plans, recipe, grads, opt_state, params, step, seed)

    def evaluation(params: Params, buffers: Params, opt_state: Any) -> tuple[Params, Params]:
        if recipe.is_torch_optim or not callable(getattr(cls, "eval", None)):
            return params, buffers
        return evaluated(plan_for(plans, recipe, params, opt_state["state"]), params, opt_state), buffers

    description = {"class": described(cls), **described(recipe.defaults)}
    for number, (predicate, values) in enumerate(groups):
        description[f"group {number}"] = {"members": described(predicate), **described(values)}
    made = Optimizer(
        init,
        update_,
        decide,
        evaluation,
        partial(numbers_of, recipe),
        description,
        partial(kernel_name, recipe, plans),
    )
    return with_repr(made, optimizer, cls, lr=lr, groups=groups, **hyperparameters)
