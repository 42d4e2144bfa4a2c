"""Optimizer state in the form of a `torch.optim` optimizer, and back.

A torch optimizer numbers its parameters by group; a state has them under the names of the innermost module.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from looplib._core.chain import contents
from looplib._core.checks import as_tensor, check, check_type, few
from looplib._core.mappings import mapped, pick, subset, without
from looplib._core.modules import TRANSPARENT, check_materialized
from looplib._core.trees import map_tensors
from looplib.checkpoint._shards import copied_like
from looplib.checkpoint._state_dict import check_fits, names_of
from looplib.optim.classes import Plan, Recipe, first_state, tiny_like, without_state
from looplib.types import TrainState


def optimizer_state_dict(
    model: nn.Module,
    state: TrainState,
    torch_optimizer: torch.optim.Optimizer,
) -> dict[str, Any]:
    """Export optimizer state as a `torch.optim` state_dict, with which a raw loop can continue training.

    >>> import looplib as ll, torch
    >>> model = torch.nn.Linear(2, 1)
    >>> state = ll.init_state(model, ll.optimizer(torch.optim.AdamW, lr=1e-3))
    >>> state = ll.bind(model, state)  # the weights
    >>> raw = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    >>> raw.load_state_dict(ll.checkpoint.optimizer_state_dict(model, state, raw))

    The tensors are copies, since torch's `load_state_dict` keeps the given tensors and writes to them. The
    hyperparameters, including the learning rate, are those of `torch_optimizer`: looplib's schedules are functions of
    `state.step`, while a raw loop or a torch scheduler sets the value. For bitwise equal updates, pass `fused=True`
    if looplib uses the fused kernel (see `repr(optimizer)`). Classes that keep values in their groups, as schedule-free
    optimizers do, are refused.

    Sharded tensors are copied as DTensors, which an optimizer over the same sharded parameters takes. If you need whole
    ones, gather each with `full_tensor()`, on all ranks.

    Args:
        model: the `nn.Module`, with or without torch's wrappers.
        state: a state of this module, with the state of one `ll.optimizer`, alone or in a chain, and not in a `partition`.
        torch_optimizer: an instance of the class passed to `ll.optimizer`, with the same kinds of hyperparameters,
            over the module's own parameters in any groups and any order. It is not changed.

    Raises:
        ValueError: `torch_optimizer` has different parameters or state entries, its `param_names` belong to different
            parameters, its class keeps values in its groups, or is LBFGS.
        TypeError: `torch_optimizer` is not a torch optimizer, or the state has no state of an `ll.optimizer`.
        DonatedStateError: the state was donated to a step.
    """
    opt_state, name_of = _matched(model, state, torch_optimizer)
    cls = type(torch_optimizer)

    def exported(value: Tensor, like: Tensor, _: str) -> Tensor:
        return value.detach().to(like.device, like.dtype, copy=True)

    packed: dict[str, Any] = torch_optimizer.state_dict()
    packed["state"] = {}
    numbers = {name_of[id(param)]: number for number, param in enumerate(_params_of(torch_optimizer))}
    for group in torch_optimizer.param_groups:
        trained = [name for param in group["params"] if (name := name_of[id(param)]) in opt_state["state"]]
        if not trained:
            continue
        kept, late = _state_of_class(cls, group, state.params, trained), without_state(opt_state)
        for name in trained:
            entry = opt_state["state"][name]
            entry = _converted(name, entry, kept[name], "the state", cls.__name__, exported)
            if entry and name not in late:  # a torch optimizer has no entry for a parameter without state
                packed["state"][numbers[name]] = entry
    return packed


def load_optimizer_state_dict(
    model: nn.Module, state: TrainState, torch_optimizer: torch.optim.Optimizer
) -> TrainState:
    """Import the state of a `torch.optim` optimizer, to continue a raw loop's training with looplib.

    >>> import looplib as ll, torch
    >>> model = torch.nn.Linear(2, 1)
    >>> raw = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    >>> model(torch.ones(1, 2)).sum().backward()
    >>> raw.step()
    >>> state = ll.init_state(model, ll.optimizer(torch.optim.AdamW, lr=1e-3)).replace(step=1)
    >>> state = ll.checkpoint.load_optimizer_state_dict(model, state, raw)

    The weights are those of the module, as `init_state` takes them. Set the counts yourself: schedules and randomness
    depend on `step`, loaders on `epoch` and `batch`. If you have a file with an optimizer's `state_dict()`, load it
    into `torch_optimizer` first.

    Args:
        model: the `nn.Module`, with or without torch's wrappers.
        state: a state of this module, with its counts set. Its `opt_state` has the expected structure.
        torch_optimizer: as for `optimizer_state_dict`. Its tensors are copied, converted to the dtypes and devices of
            the state's, and sharded if those are. A parameter that never had a gradient has no state there and keeps
            the one in `state`.

    Raises:
        ValueError: `torch_optimizer` has different parameters or state entries, its class keeps values in its groups,
            or is LBFGS, or it has made no step; its `param_names` belong to different parameters; or `state.step` is 0.
        TypeError: `torch_optimizer` is not a torch optimizer, or the state has no state of an `ll.optimizer`.
        DonatedStateError: the state was donated to a step.
    """
    opt_state, name_of = _matched(model, state, torch_optimizer)
    entries, cls = opt_state["state"], type(torch_optimizer).__name__

    def fitted(value: Tensor, like: Tensor, title: str) -> Tensor:
        shapes = f"has shape {tuple(value.shape)} in this {cls}, the state's has {tuple(like.shape)}"
        check(value.shape == like.shape, f"{title} {shapes}")
        check_materialized({title: like})
        return copied_like(value, like)

    loaded = {
        name: _converted(name, kept, entries[name], f"this {cls}", "the state", fitted)
        for param in _params_of(torch_optimizer)
        if (name := name_of[id(param)]) in entries and (kept := torch_optimizer.state.get(param))
    }
    check(
        bool(loaded) == bool(state.step) or not any(entries.values()),
        f"the state is at step {state.step}, and this {cls} keeps something for {len(loaded)} parameters: fill it by steps "
        "or load_state_dict, and give state.replace(step=..., epoch=..., batch=..., samples=...)",
    )
    new = {**opt_state, "state": {**entries, **loaded}}
    if "started" in new:
        new["started"] = {name: torch.tensor(name in loaded, device="cpu") for name in entries}
    return state.replace(opt_state=_with_innermost(state.opt_state, new))


def _params_of(torch_optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [param for group in torch_optimizer.param_groups for param in group["params"]]


def _matched(
    model: nn.Module, state: TrainState, torch_optimizer: torch.optim.Optimizer
) -> tuple[dict[str, Any], dict[int, str]]:
    """State of the innermost `ll.optimizer`, and the state's names of the torch optimizer's parameters, by their ids."""
    advice = "give an instance over the module's parameters, such as torch.optim.AdamW(model.parameters(), lr=1e-3)"
    check_type("torch_optimizer is", torch_optimizer, torch.optim.Optimizer, advice)
    check_fits(model, state)
    opt_state = _innermost(state.opt_state)
    title, params = f"this {type(torch_optimizer).__name__}", _params_of(torch_optimizer)
    check(
        not isinstance(torch_optimizer, torch.optim.LBFGS),
        "LBFGS keeps its history in lists that grow, and the state in lists of a fixed length, which are not converted: "
        "continue with the library that began the run, or load the weights alone",
    )
    check(
        "groups" not in opt_state,
        f"{title} keeps values in its groups or for all parameters together, which are not converted: continue with the "
        "library that began the run, or load the weights alone",
    )
    name_of = names_of(model)
    for param in params:
        name_of.setdefault(
            id(param), f"one of shape {tuple(param.shape)} that is not this {type(model).__name__}'s own"
        )
    in_state = opt_state["state"].keys()
    missing = in_state - {name_of[id(param)] for param in params}
    unexpected = {name_of[id(param)] for param in params if param.requires_grad} - in_state
    check(
        not missing | unexpected,
        f"{title} and the state's optimizer train different parameters: missing {few(sorted(missing))}, unexpected "
        f"{few(sorted(unexpected))}; make it over the parameters that required a gradient when the state was made",
    )
    _check_param_names(torch_optimizer, name_of)
    return opt_state, name_of


def _check_param_names(torch_optimizer: torch.optim.Optimizer, name_of: Mapping[int, str]) -> None:
    """Raise ValueError if the optimizer's `param_names` belong to other parameters, as after a load_state_dict by position.

    They may begin with the names of modules around this one.
    """

    def plain(name: str) -> str:
        return ".".join(part for part in name.split(".") if part not in {*TRANSPARENT, "module"})

    named = [
        (plain(name_of[id(param)]), plain(param_name))
        for group in torch_optimizer.param_groups
        for param, param_name in zip(group["params"], group.get("param_names", ()), strict=False)
    ]
    if len({param_name.removesuffix(name) for name, param_name in named}) < 2:
        return
    others = [f"{name} is called {param_name}" for name, param_name in named if param_name != name]
    check(
        not others,
        f"the param_names of this {type(torch_optimizer).__name__} are those of other parameters: {few(others, 4)}. torch's "
        "load_state_dict assigns values by position, whatever their names. Make the optimizer over the parameters in the "
        "order of the file's param_names, or over model.named_parameters() if it was saved so, and load the file again",
    )


def _innermost(opt_state: Any) -> dict[str, Any]:
    """State of the only `ll.optimizer` among the parts of an update."""
    states = [*_of_optimizers(opt_state)]
    check(
        len(states) == 1,
        f"the state's opt_state holds {contents(opt_state)}, and not what one ll.optimizer keeps: make the state with "
        "ll.init_state(model, ll.optimizer(...)), or a chain with it. (The optimizers of a partition are not converted.)",
        TypeError,
    )
    return states[0]


def _of_optimizers(opt_state: Any) -> Iterator[dict[str, Any]]:
    for part_state in opt_state.values() if isinstance(opt_state, Mapping) else ():
        match part_state:
            case {"inner": dict(inner)}:
                yield from _of_optimizers(inner)
            case {"state": dict()}:
                yield part_state


def _with_innermost(opt_state: Mapping[str, Any], innermost: Any) -> dict[str, Any]:
    """The state of an update, with another one of its `ll.optimizer`."""
    return mapped(partial(_replaced, innermost), opt_state)


def _replaced(innermost: Any, part_state: Any) -> Any:
    match part_state:
        case {"inner": dict(inner)}:
            return {**part_state, "inner": _with_innermost(inner, innermost)}
        case {"state": dict()}:
            return innermost
    return part_state


def _converted(
    name: str,
    entry: Mapping[str, Any],
    like: Mapping[str, Any],
    giver: str,
    taker: str,
    copied: Callable[[Tensor, Tensor, str], Tensor],
) -> dict[str, Any]:
    """Copy one parameter's entries, converting tensors with `copied(value, like, title)`."""
    check(
        entry.keys() == like.keys(),
        f"for {name}, {giver} keeps {sorted(entry) or 'nothing'}, and {taker} keeps {sorted(like) or 'nothing'}: "
        "both need the same class of optimizer, with the same hyperparameters",
    )
    return {
        key: copied(as_tensor(value), like[key], f"{name}'s {key}")
        if isinstance(like[key], Tensor)
        else map_tensors(lambda tensor: tensor.detach().clone(), value)
        for key, value in entry.items()
    }


def _state_of_class(
    cls: type, group: Mapping[str, Any], params: Mapping[str, Tensor], names: Iterable[str]
) -> dict[str, dict[str, Any]]:
    """Values with the keys and types of those that a class keeps for these parameters; `group` is one of its `param_groups`."""
    recipe = Recipe(cls, without(subset(group, inspect.signature(cls).parameters), {"params"}))
    tiny = mapped(tiny_like, pick(params, names))
    entries: dict[str, dict[str, Any]] = first_state(Plan(recipe, tiny), tiny)["state"]
    return entries
