"""Any `torch.optim` class as two pure functions.

torch's optimizers do the arithmetic; what they keep inside, parameters in groups and moments by parameter,
is handed in and taken out again at each update. One instance of the class, empty between updates, serves as
the engine. An update writes in place: into the given tensors when they are donated, else into copies.
"""

from __future__ import annotations

from typing import Any, NoReturn

from torch import Tensor

from looplib._core.tracing import entered, tracing
from looplib.optim._arguments import NotGiven, check_class, check_groups, check_lr
from looplib.optim._closure import lbfgs_update
from looplib.optim._comparison import check_against_raw_loop
from looplib.optim._description import description_of
from looplib.optim._first_state import first_state
from looplib.optim._hyperparameters import numbers_of
from looplib.optim._kernels import check_fused, told
from looplib.optim._lbfgs_state import is_lbfgs
from looplib.optim._recipe import Groups, Recipe, copied
from looplib.optim._traced_update import traced_update
from looplib.optim._update import Plan, check_state, eager_update, not_started
from looplib.types import Grads, Optimizer, Params


def optimizer(
    cls: type, *parameters: NoReturn, lr: Any = NotGiven.LR, groups: Groups = (), **hyperparameters: Any
) -> Optimizer:
    """Make a `torch.optim` class, or a third party's with the same interface, an `Optimizer`.

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

    Args:
        cls: the class, not an instance.
        parameters: none; they are in the state.
        lr: learning rate, a number or a schedule `(step) -> float`.
        groups: `(predicate(name, tensor), {hyperparameter: value or schedule})`; the first match wins, the
            rest take the defaults. A third party's class may read more from a group than it takes for all, such
            as GaLore's `rank`: a key that is no parameter of such a class is handed to it in the group.
        hyperparameters: as the class takes them. Any of them, and any member of a tuple such as `betas`, may be
            a schedule. `fused`, `foreach`, `capturable` and `differentiable` are honoured as given, for all or in a
            group. Where none is given, the fused kernel is taken for tensors that torch has one for and that are
            dense and share their strides, else what torch takes by default; `repr` of the optimizer says which.

    A class whose `step` needs a closure (LBFGS) evaluates the loss several times within one update: a train step
    gives `update` what it needs for that. It has the bits of a raw loop for models without randomness; BatchNorm's
    statistics are those of the first evaluation. LBFGS's history is allocated as a whole, `history_size` times twice
    the size of the parameters.

    An update has the bits of the class's own `step()` in a raw loop with the same arguments and the same kernel. A
    parameter whose first gradient comes late begins as in torch, at its own first update; for classes that make
    their state only then, `opt_state["started"]` says which parameters have had one. Random numbers that a class
    draws from torch in its step are a function of the state's seed and step.

    `opt_state["state"][name]` holds what torch keeps for a parameter, under torch's names. An optimizer that
    changes values in its groups (schedule-free ones do) has these in `opt_state["groups"]`. Where a class keeps an
    object for a parameter (GaLore's `projector`), its attributes stand there as a dict.

    Raises:
        TypeError: no optimizer class; no learning rate; an unknown hyperparameter, or in a
            group of a third party's class one that is spelt nearly as a parameter of it. From `init`: a class that
            keeps state elsewhere than in `state` and `param_groups`, in something other than tensors, numbers, lists
            and dicts (a deque), more of it after a few updates than after one, or that draws from the random streams
            of Python or NumPy. A few steps on the smallest parameters are compared with a raw loop to find this out.
        ValueError: a value that the class refuses; `fused=True` for parameters with gaps in their memory; a predicate
            that goes by which tensor it is given; the `opt_state` of another optimizer; gradients sparse where it
            needs dense ones, or dense where it needs sparse ones; a gradient of a parameter that `init` did not see.
    """
    check_class(cls, parameters)
    check_lr(lr)
    check_groups(groups)
    recipe = Recipe(cls, {"lr": lr, **hyperparameters}, groups)
    recipe.check()
    plans: list[Plan] = []
    lbfgs = is_lbfgs(recipe)

    def init(params: Params, **extra: Any) -> dict[str, Any]:
        opt_state = first_state(recipe, params)
        check_fused(recipe, params, recipe.members(params))
        if not recipe.ours:
            check_against_raw_loop(recipe, params)
        return opt_state

    def update(
        grads: Grads, opt_state: Any, params: Params, step: int, *, donate: bool = False, **extra: Any
    ) -> tuple[Params, Any, bool]:
        check_state(recipe, opt_state, grads)
        if entered and tracing():
            return *traced_update(recipe, grads, opt_state, params, step), True
        if lbfgs:
            return *lbfgs_update(recipe, grads, opt_state, params, step, donate, extra), True
        return *eager_update(plans, recipe, grads, opt_state, params, step, donate, extra), True

    def evaluation(params: Params, buffers: dict[str, Tensor], opt_state: Any) -> tuple[Params, dict[str, Tensor]]:
        return evaluated(recipe, params, opt_state), buffers

    def hyperparameters_at(opt_state: Any, step: int) -> dict[str, float]:
        return numbers_of(recipe, opt_state, step)

    def kernel() -> str:
        return told(recipe, plans)

    return Optimizer(
        init, update, evaluation, hyperparameters_at, description_of(cls, recipe.defaults, groups), kernel
    )


def evaluated(recipe: Recipe, params: Params, opt_state: Any) -> Params:
    """The weights to evaluate with: schedule-free optimizers train at one point, and go to another by their `eval`."""
    if recipe.ours or not callable(getattr(recipe.cls, "eval", None)):
        return params
    states = opt_state["state"]
    copies = {name: params[name].detach().clone() for name in states}
    made = recipe.build(copies, recipe.members(copies))
    late = not_started(recipe, opt_state, 1)
    for name in states.keys() - late:
        made.state[copies[name]] = copied(states[name])
    for group, values in zip(made.param_groups, opt_state.get("groups", ()), strict=False):
        group.update({key: copied(value) for key, value in values.items() if value is not None})
    made.eval()
    return {**params, **copies}
