"""First states and eager updates: a class's own step, or the fused kernel that it would call, on tensors of the caller's.

Everything is written in place. Nothing of a run stays behind: a `Plan` holds only what follows from the names, shapes,
dtypes and devices of the parameters.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from contextlib import nullcontext
from copy import deepcopy
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from looplib._core import torch_private
from looplib._core.chain import wrong_state
from looplib._core.checks import PLAIN, check, few, warn
from looplib._core.copies import copy_tree
from looplib._core.mappings import as_record, mapped, pick, without
from looplib._core.random import mix
from looplib._core.torch_private import pytree
from looplib.optim._kernels import (
    check_entries,
    columns_of,
    is_sparse,
    kinds_of,
    laid_out_like,
    parts_of,
)
from looplib.optim._lbfgs import first_state_of_lbfgs, lbfgs_update
from looplib.optim._recipe import Recipe, check_by_kind, inject, restored_grads
from looplib.optim._third_party import (
    STREAM,
    KeepsMoreError,
    Probe,
    check_same_makers,
    check_sparse,
    packed,
    probe,
    streams_at,
)
from looplib.types import Grads, Metrics, Params, Transformed

States = dict[str, dict[str, Any]]
Members = Sequence[Sequence[str]]  # names of the parameters of each group
Values = Sequence[Mapping[str, Any]]  # hyperparameters of each group

_CONTAINERS = (list, dict, set)
_NOTHING: dict[str, Any] = {}


class Plan:
    """Facts that follow from the parameters' names, shapes, dtypes and devices, and do not change during a run.

    Attributes:
        members: parameter names in each group.
        values: for each group, its hyperparameters as completed by the class.
        parts: parameters that are updated together, each with its kernel.
        probe: what the class keeps; of torch's, for the first parameter of each group, as a tensor of one element.
        keys: for the first parameter of each group, a dict with the keys under which the class keeps its state.
        step: the class's step, for torch's classes without its hooks.
        sparse: parameters whose sparse gradients a third party's class has been found to take.
        attributes: those that the constructor of torch's classes gives an instance beside its state and its groups; None
            for others, which may change theirs.
    """

    def __init__(self, recipe: Recipe, params: Params, key: Any = None) -> None:
        self.recipe, self.key = recipe, key
        self.sparse: set[str] = set()
        self.members = recipe.members(params)
        instance = recipe.build(params, self.members)
        self.values = [without(group, {"params"}) for group in instance.param_groups]
        self.parts = parts_of(recipe, params, self.members)
        if recipe.is_torch_optim:
            firsts = [names[:1] for names in self.members]
            tiny = mapped(tiny_like, pick(params, chain.from_iterable(firsts)))
            # Where torch updates lists of tensors, it adds Nesterov's momentum to the gradients themselves.
            nesterov = recipe.cls is torch.optim.SGD and any(values.get("nesterov") for values in recipe.values)
            self.probe = Probe(states_of_torch(recipe, tiny, firsts), {}, [], nesterov)
            self.step = inspect.unwrap(recipe.cls.step)
        else:
            self.probe, self.step = probe(recipe, params, self.members), recipe.cls.step
        self.keys = {names[0]: dict.fromkeys(self.probe.state[names[0]]) for names in self.members if names}
        not_kept = {"state", "param_groups", "_params"}  # the last are LBFGS's parameters
        self.attributes = without(vars(instance), not_kept) if recipe.is_torch_optim else None


def tiny_like(tensor: Tensor) -> Tensor:
    """A tensor of as many dimensions, with one element."""
    return torch.zeros((1,) * tensor.ndim, dtype=tensor.dtype, device=tensor.device)


def plan_for(plans: list[Plan], recipe: Recipe, params: Params, names: Iterable[str]) -> Plan:
    """The plan for these parameters, created if none of the most recent ones fits."""
    names = [*names]
    tensors = [*map(params.__getitem__, names)]
    # Predicates of groups may depend on shapes, and so may the entries that a class keeps. Models with the same names may
    # be sharded or not, in different ways, and their kernels differ.
    plain = PLAIN.issuperset(map(type, tensors))
    special = [] if plain else [getattr(tensor, "placements", type(tensor)) for tensor in tensors]
    key = names, kinds_of(tensors), special
    for plan in plans:
        if plan.key == key:
            return plan
    plan = Plan(recipe, dict(zip(names, tensors, strict=True)), key)
    plans.insert(0, plan)
    del plans[8:]
    return plan


def first_state(plan: Plan, params: Params) -> dict[str, Any]:
    """State before the first update, with the structure that it keeps for the whole run.

    `state` holds what the class keeps for each parameter, by name. If the class creates those values only in a
    parameter's own first update, they are zeros until then, and `started` records by name which parameters have had an
    update. `groups` holds what the class keeps for a group, and `hyperparameters` the injected ones.
    """
    recipe = plan.recipe
    check_by_kind(recipe.group_of, params, "group")
    state: dict[str, Any] = {}
    if recipe.is_torch_optim:
        fused = {part.group for part in plan.parts if part.kernel}
        state["state"] = states_of_torch(recipe, mapped(Tensor.detach, params), plan.members, fused)
    else:
        state["state"] = pytree.tree_map_only(Tensor, torch.zeros_like, plan.probe.state)
        if any(plan.probe.groups):
            state["groups"] = plan.probe.groups
    if recipe.makes_state_late:
        state["started"] = {name: torch.tensor(False, device="cpu") for name in params}
    numbers = [
        {
            key: torch.tensor(value.value, dtype=torch.float64, device="cpu")
            for key, value in moving.items()
            if isinstance(value, inject)
        }
        for moving in recipe.moving
    ]
    return {**state, "hyperparameters": numbers} if any(numbers) else state


def states_of_torch(recipe: Recipe, params: Params, members: Members, fused: Set[int] = frozenset()) -> States:
    """State that one of torch's classes keeps for each parameter. `fused` has the groups that take a fused kernel."""
    if recipe.cls is torch.optim.LBFGS:
        return first_state_of_lbfgs(recipe, params, members)
    if recipe.cls is torch.optim.SGD:
        return _of_sgd(recipe, params, members)
    if recipe.cls is torch.optim.SparseAdam:
        return {
            name: {"step": 0, "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
            for name, p in params.items()
        }
    # The others create state at a parameter's first gradient, of which only the presence matters.
    instance = recipe.build(params, members, fused)
    for tensor in params.values():
        tensor.grad = tensor.new_zeros(()).expand_as(tensor)  # only its presence is checked, so it takes no memory
    init_group = torch_private.init_group(instance)
    lists = len(inspect.signature(init_group).parameters) - 1
    for group in instance.param_groups:
        init_group(group, *([] for _ in range(lists)))
    return {name: dict(instance.state[tensor]) for name, tensor in params.items()}


def _of_sgd(recipe: Recipe, params: Params, members: Members) -> States:
    """Momentum buffers for SGD, if there is momentum or a schedule may introduce it.

    A buffer starts as -0.0: applying momentum and adding the first gradient then gives the gradient's own bits, for
    0.0 and -0.0 as well. So the first update is not a special case, at whatever step a parameter has it.
    """
    states: States = {name: {} for name in params}
    for values, names in zip(recipe.values, members, strict=True):
        for name in names if values.get("momentum") else ():
            states[name] = {"momentum_buffer": torch.full_like(params[name], -0.0)}
    return states


def transform(
    plans: list[Plan], recipe: Recipe, grads: Grads, opt_state: Any, params: Params, step: int, **info: Any
) -> Transformed:
    """Let gradients pass as they are. Raise for a state of another optimizer, and for gradients that the class cannot take.

    Warn at the end of a learning rate that is 0 from there on. Hand the plan to `update_`.
    """
    states = opt_state.get("state") if isinstance(opt_state, dict) else None
    if states is None or not grads.keys() <= states.keys():
        raise _unfit(recipe, grads, opt_state)
    if step == recipe.end:
        lr = recipe.defaults["lr"]
        warn(
            f"the learning rate, {lr!r}, is {lr(step):.3g} from step {step} on, so this update and later ones change nothing, or "
            "next to nothing: give total= all steps of the run, such as epochs * len(loader), or a final= rate to continue with"
        )
    plan = plan_for(plans, recipe, params, states)
    for name, expected in plan.keys.items():
        if (present := states[name].keys()) != expected.keys() and not _continues(recipe, present, expected.keys()):
            raise wrong_state(opt_state, recipe.cls.__name__, expected)
    for part in plan.parts if recipe.has_plain_entries else ():
        check_entries(part, params, states, part.kernel and plan.values[part.group].get("fused"))
    names, kinds, _ = plan.key
    known = [*grads] == names and kinds_of(grads.values()) == kinds
    if not known or any(map(is_sparse, grads.values())) or recipe.cls is torch.optim.SparseAdam:
        _check_grads(recipe, grads, params)
        if not recipe.is_torch_optim:
            _check_sparse(plan, grads, params)
    return as_record(Transformed, (grads, opt_state, True, plan, _NOTHING, ()))


def transform_in_graph(
    recipe: Recipe, grads: Grads, opt_state: Any, params: Params, step: Any, **info: Any
) -> Transformed:
    """The same in a trace, where the step is no number and the kernels are chosen by the update itself."""
    if not isinstance(opt_state, dict) or not grads.keys() <= opt_state.get("state", {}).keys():
        raise _unfit(recipe, grads, opt_state)
    return Transformed(grads, opt_state)


def _unfit(recipe: Recipe, grads: Grads, opt_state: Any) -> ValueError:
    """Error for an `opt_state` that has nothing for some of these gradients."""
    if not isinstance(opt_state, dict) or "state" not in opt_state:
        return wrong_state(opt_state, recipe.cls.__name__, ["state"])
    return ValueError(
        f"the optimizer's state has nothing for {few(sorted(grads.keys() - opt_state['state'].keys()))}, which were frozen, "
        "or not in the model, when it was made. Make the state while everything that you will train requires a gradient"
    )


def _continues(recipe: Recipe, keys: Any, expected: Any) -> bool:
    """True if a class can continue a state with other keys than those that it would create."""
    if not recipe.is_torch_optim:  # it may keep further keys later, or for some parameters
        return not expected or bool(keys & expected)
    # A term may be 0 here and not where the state was made, as for a member of a stack without momentum.
    return bool(keys > expected and keys - expected <= {"momentum_buffer", "grad_avg", "max_exp_avg_sq"})


def _check_sparse(plan: Plan, grads: Grads, params: Params) -> None:
    """Check once for each parameter with a sparse gradient what a third party's class keeps for it."""
    for name, grad in grads.items():
        if grad.is_sparse and name not in plan.sparse:
            only = [[name] if name in names else [] for names in plan.members]
            check_sparse(plan.recipe, name, tiny_like(params[name]), only)
            plan.sparse.add(name)


def _check_grads(recipe: Recipe, grads: Grads, params: Params) -> None:
    for name, grad in grads.items():
        param = params[name]
        if (grad.shape, grad.dtype) != (param.shape, param.dtype):
            raise ValueError(
                f"the gradient of {name} is {grad.dtype} of shape {tuple(grad.shape)}, the parameter {param.dtype} of shape "
                f"{tuple(param.shape)}: wrappers and parts that change gradients change values alone. To compute in half precision, "
                "keep the weights in float32, and write ll.autocast(loss_fn, dtype)"
            )
    if unfit := [name for name, grad in grads.items() if not recipe.takes(grad.is_sparse)]:
        raise ValueError(
            f"{recipe.cls.__name__} cannot take the {'sparse' if grads[unfit[0]].is_sparse else 'dense'} gradient of "
            f"{few(unfit)}. Sparse ones come from Embedding(sparse=True): SparseAdam takes nothing else (choose those parameters "
            "with trainable=, or by ll.optim.partition), SGD and Adagrad take both kinds without nesterov=True and fused=True"
        )


def update_(
    plans: list[Plan],
    recipe: Recipe,
    grads: Grads,
    opt_state: Any,
    params: Params,
    step: int,
    *,
    seed: int = 0,
    metrics: Metrics | None = None,
    evaluate: Any = None,
    carry: Plan | None = None,
    **info: Any,
) -> tuple[Params, Any]:
    """Update these parameters and this state by the class's own arithmetic, in place. `carry` is the plan of `transform`."""
    if recipe.cls is torch.optim.LBFGS:
        return lbfgs_update(recipe, grads, opt_state, params, step, metrics, evaluate)
    states: States = opt_state["state"]
    plan = carry or plan_for(plans, recipe, params, states)
    constant = "groups" not in opt_state and not any(recipe.moving)
    values = plan.values if constant else recipe.values_at(plan.values, opt_state, step)
    by_kernel: set[str] = set()
    grad_mode = torch.is_grad_enabled()
    try:
        torch_private.set_grad_enabled(bool(recipe.defaults.get("differentiable")))
        for number, names, kernel in plan.parts:
            if len(grads) < len(states):
                names = [name for name in names if name in grads]
            columns = columns_of(names, params, grads, states) if kernel and names else None
            if columns and kernel:
                kernel(values[number], *columns)
                by_kernel.update(names)
        if len(by_kernel) < len(grads):  # the class's own step takes the others, in their order
            left = [[name for name in names if name in grads and name not in by_kernel] for names in plan.members]
            opt_state = _by_class(plan, values, left, grads, opt_state, params, seed, step)
        return params, opt_state
    finally:
        torch_private.set_grad_enabled(grad_mode)


def update_in_graph(
    recipe: Recipe, grads: Grads, opt_state: Any, params: Params, step: Any, **info: Any
) -> tuple[Params, Any]:
    """The same update as operations of a graph, of which few classes are capable."""
    # Imported here because it defines an operation, which takes 1.4 ms.
    from looplib.optim.traced_update import traced_update

    return traced_update(recipe, grads, opt_state, params, step)


def _by_class(
    plan: Plan,
    values: Values,
    members: Members,
    grads: Grads,
    opt_state: Any,
    params: Params,
    seed: int,
    step: int,
) -> Any:
    """Update these parameters of each group by the class's step, and return a state with what it keeps."""
    first = without_state(opt_state) & grads.keys()
    of_torch = plan.recipe.is_torch_optim
    streams: Any = nullcontext if of_torch else partial(streams_at, mix(seed, step, STREAM), params.values())
    with streams():  # from which a constructor may draw, too
        instance = _instance(plan, values, members, opt_state, params, first)
    if plan.probe.writes_grads:
        grads = copy_tree(grads)
    groups = instance.param_groups
    with restored_grads([tensor for group in groups for tensor in group["params"]]), streams():
        for group, names in zip(groups, members, strict=True):
            tensors = group["params"]
            gradients: Sequence[Tensor] = [grads[name] for name in names]
            if group.get("fused"):
                gradients = laid_out_like(tensors, gradients)
            for tensor, grad in zip(tensors, gradients, strict=True):
                tensor.grad = grad
        plan.step(instance)
    if of_torch and not first:
        return opt_state
    return _kept_by(instance, plan, opt_state, {name: params[name] for names in members for name in names}, first)


def _instance(plan: Plan, values: Values, members: Members, opt_state: Any, params: Params, first: Set[str]) -> Any:
    """An instance over these tensors, with what the state keeps for them, or for a first update, its constructor.

    Each update has an instance of its own, so that updates in several threads share none.
    """
    if first or plan.attributes is None:  # the constructor may make state, and attributes that the class changes
        instance = plan.recipe.build(params, plan.members)
    else:  # without calling the class, which takes longer
        instance = object.__new__(plan.recipe.cls)
        vars(instance).update(plan.attributes, state={}, param_groups=[{} for _ in members])
    of_constructor, instance.state = instance.state, defaultdict(dict)
    makers = plan.probe.makers
    for group, names, numbers in zip(instance.param_groups, members, values, strict=True):
        group.update(numbers)
        if not plan.recipe.is_torch_optim:  # a third party's class may change its containers
            group.update({key: deepcopy(value) for key, value in numbers.items() if isinstance(value, _CONTAINERS)})
        group["params"] = [params[name] for name in names]
        for name, tensor in zip(names, group["params"], strict=True):
            entries = of_constructor[tensor] if name in first else opt_state["state"][name]
            if name in makers and name not in first:
                make = makers[name]
                entries = {key: make[key](value) if key in make else value for key, value in entries.items()}
            instance.state[tensor] = entries
    return instance


def _kept_by(instance: Any, plan: Plan, opt_state: Any, tensors: Params, first: Set[str]) -> dict[str, Any]:
    """A new record with what an instance keeps after its step. Where it has created no state yet, the old values stay."""
    old, makers = opt_state["state"], plan.probe.makers
    states: States = dict(old)
    for name, tensor in tensors.items():
        entries = instance.state[tensor]
        if name in first or makers.get(name):
            entries, now = packed(plan.recipe, name, entries)
            if name not in first or entries:  # a first update may leave the state for a later one
                check_same_makers(plan.recipe, name, makers.get(name, {}), now)
        if entries or not old[name]:
            if not plan.recipe.is_torch_optim and entries.keys() != old[name].keys():
                raise KeepsMoreError(plan.recipe, name, entries, old[name])
            states[name] = entries
    if first:
        begun = {name: torch.tensor(True, device="cpu") for name in first if states[name] is not old[name]}
        opt_state = {**opt_state, "started": {**opt_state["started"], **begun}}
    new = {**opt_state, "state": states}
    if "groups" in opt_state:
        groups = zip(instance.param_groups, opt_state["groups"], strict=True)
        new["groups"] = [{key: group.get(key) for key in keys} for group, keys in groups]
    return new


def evaluated(plan: Plan, params: Params, opt_state: Any) -> Params:
    """Weights to evaluate with.

    Schedule-free optimizers train at one point and evaluate at another, which their `eval` computes.
    """
    copies, opt_state = copy_tree(pick(params, opt_state["state"])), copy_tree(opt_state)
    values = plan.recipe.values_at(plan.values, opt_state, 0)
    _instance(plan, values, plan.members, opt_state, copies, without_state(opt_state)).eval()
    return {**params, **copies}


# Parameters whose state the class creates in their own first update


def without_state(opt_state: Mapping[str, Any]) -> frozenset[str]:
    """Parameters that have had no update, for classes that create state in the first one."""
    started: Mapping[str, Tensor] = opt_state.get("started", _NOTHING)
    return frozenset(name for name, flag in started.items() if not (_in_all_members(flag) if flag.ndim else flag))


def _in_all_members(flags: Tensor) -> bool:
    """A flag of a stack, whose members must have the same one."""
    check(
        bool(flags.all()) or not flags.any(),
        "a parameter has had an update in only some members of this stack: ask for one of unstack_states(stack)",
    )
    return bool(flags.all())
