"""Optimizer state in the form of a `torch.optim` optimizer, and back.

A torch optimizer numbers its parameters by group; a state has them under the names of the innermost module.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from looplib._core import modules as _modules
from looplib._core import ranks as _ranks
from looplib._core.checks import check, check_type, few
from looplib._core.mappings import pick
from looplib._core.trees import map_tensors
from looplib.checkpoint.interop._names import check_state
from looplib.checkpoint.interop._whole import copied_like, shape_of, whole
from looplib.optim._update import kept_by_class
from looplib.types import TrainState


def optimizer_state_dict(
    model: nn.Module,
    state: TrainState,
    torch_optimizer: torch.optim.Optimizer,
    *,
    full_state_dict: bool = True,
    cpu_offload: bool = False,
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
    if looplib uses the fused kernel (see `repr(optimizer)`).

    Sharded tensors are gathered, as with `state_dict`, so all ranks call this. An optimizer over sharded parameters
    needs shards: `raw.load_state_dict(ll.checkpoint.optimizer_state_dict(model, state, raw, full_state_dict=False))`.

    Args:
        model: the `nn.Module`, with or without torch's wrappers.
        state: a state of this module, with the state of an `ll.optimizer`. The optimizer may be wrapped in
            `apply_if_finite`.
        torch_optimizer: an instance of the class passed to `ll.optimizer`, with the same kinds of hyperparameters,
            over the module's own parameters in any groups and any order. It is not changed. If the class keeps values
            in its groups, as schedule-free optimizers do, the groups must be in the order of `ll.optimizer`'s, with
            the defaults last.
        full_state_dict: if True, gather sharded tensors; if False, return this rank's shards as DTensors.
        cpu_offload: if True, return tensors on the CPU. If they are gathered, only the first rank gets them, and the
            others an empty dict. Both options are those of torch's `StateDictOptions`.

    Raises:
        ValueError: `torch_optimizer` has different parameters, state entries or groups.
        TypeError: `torch_optimizer` is not a torch optimizer, or the state has no state of an `ll.optimizer`.
        DonatedStateError: the state was donated to a step.
    """
    matched = _matched(model, state, torch_optimizer)
    keeps = _ranks.is_first() or not (cpu_offload and full_state_dict)
    exported = partial(_exported, full_state_dict, cpu_offload, keeps)
    packed: dict[str, Any] = torch_optimizer.state_dict()
    packed["state"] = {}
    groups = zip(torch_optimizer.param_groups, packed["param_groups"], matched.names, matched.groups, strict=True)
    for group, described, names, values in groups:
        entries = _entries_of_group(type(torch_optimizer), group, state, matched.opt_state, names, exported)
        packed["state"] |= {
            id: entries[name]
            for name, id in zip(names, described["params"], strict=True)
            if entries.get(name)  # a torch optimizer has no entry for a parameter without state
        }
        described |= _copied(values) if state.step else {}
    return packed if keeps else {}


def _exported(full: bool, cpu_offload: bool, keeps: bool, value: Tensor, like: Tensor, _: str) -> Tensor | None:
    value = whole(value) if full else value
    return value.detach().to("cpu" if cpu_offload else like.device, like.dtype, copy=True) if keeps else None


def _entries_of_group(
    cls: type,
    group: Mapping[str, Any],
    state: TrainState,
    opt_state: Mapping[str, Any],
    names: list[str],
    exported: Callable[[Tensor, Tensor, str], Tensor | None],
) -> dict[str, dict[str, Any]]:
    """Entries of a torch optimizer for the parameters of a group, by their names in the state."""
    in_state = opt_state["state"]
    trained = [name for name in names if name in in_state]
    if not trained:
        return {}
    kept = kept_by_class(cls, group, state.params, trained, opt_state, state.step)
    entries = {
        name: _converted(name, in_state[name], kept.entries[name], "the state", cls.__name__, exported)
        for name in trained
        if name not in kept.late
    }
    return {} if kept.empty else entries


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
            the one in `state`. Schedule-free optimizers must be in training mode.

    Raises:
        ValueError: `torch_optimizer` has different parameters, state entries or groups, or has made no step; or
            `state.step` is 0.
        TypeError: `torch_optimizer` is not a torch optimizer, or the state has no state of an `ll.optimizer`.
        DonatedStateError: the state was donated to a step.
    """
    matched = _matched(model, state, torch_optimizer)
    cls = type(torch_optimizer).__name__
    entries = matched.opt_state["state"]
    fitted = partial(_fitted, cls)
    loaded = {
        name: _converted(name, kept, entries[name], f"this {cls}", "the state", fitted)
        for name, param in matched.params.items()
        if name in entries and (kept := torch_optimizer.state.get(param))
    }
    check(
        loaded or not any(entries.values()),
        f"this {cls} keeps nothing for any parameter: it has made no step, and no load_state_dict has filled it",
    )
    check(
        state.step or not loaded,
        f"the state is at step 0, where an optimizer starts from nothing, and this {cls} has made steps: give "
        "state.replace(step=..., epoch=..., batch=..., samples=...)",
    )
    groups = [
        _copied(pick(group, values))
        for group, values in zip(torch_optimizer.param_groups, matched.groups, strict=True)
    ]
    started = torch.tensor([name in loaded for name in entries])
    new = {"state": {**entries, **loaded}, "started": started, "groups": groups}
    known = {key: new.get(key, value) for key, value in matched.opt_state.items()}
    return state.replace(opt_state=_with_innermost(state.opt_state, known))


def _fitted(cls: str, value: Tensor, like: Tensor, title: str) -> Tensor:
    shapes = f"has shape {tuple(value.shape)} in this {cls}, the state's has {shape_of(like)}"
    check(value.shape == like.shape, f"{title} {shapes}")
    return copied_like(value, like)


class _Matched(NamedTuple):
    """Correspondence of a torch optimizer's parameters with a state's.

    Attributes:
        names: the state's names of the parameters in each of the optimizer's groups.
        params: the optimizer's parameters by these names.
        groups: values that the class keeps in each of its groups, by name.
        opt_state: state of the innermost `ll.optimizer`, without its wrappers.
    """

    names: list[list[str]]
    params: dict[str, Tensor]
    groups: list[dict[str, Any]]
    opt_state: dict[str, Any]


def _matched(model: nn.Module, state: TrainState, torch_optimizer: torch.optim.Optimizer) -> _Matched:
    advice = "give an instance over the module's parameters, such as torch.optim.AdamW(model.parameters(), lr=1e-3)"
    check_type("torch_optimizer is", torch_optimizer, torch.optim.Optimizer, advice)
    check_state(model, state)
    opt_state = _innermost(state.opt_state)
    title = f"this {type(torch_optimizer).__name__}"
    members = [_by_name(model, group["params"], title) for group in torch_optimizer.param_groups]
    params = dict(chain.from_iterable(map(dict.items, members)))
    in_state = opt_state["state"].keys()
    missing, unexpected = in_state - params.keys(), {name for name in params if params[name].requires_grad} - in_state
    check(
        not missing | unexpected,
        f"{title} and the state's optimizer train different parameters: missing {few(sorted(missing))}, unexpected "
        f"{few(sorted(unexpected))}; make it over the others, or the state with the same trainable=",
    )
    groups = opt_state.get("groups", [{}] * len(members))
    check(
        len(groups) == len(members),
        f"{title} has {len(members)} groups, and the state's optimizer {len(groups)}: make the groups of ll.optimizer "
        "in its order, those of the defaults last",
    )
    return _Matched([*map(list, members)], params, groups, opt_state)


def _by_name(model: nn.Module, params: Sequence[Tensor], title: str) -> dict[str, Tensor]:
    """The parameters of a torch optimizer's group by their names in a state."""
    name_of = {id(param): name for name, param in _modules.tensors(_modules.members(model).params).items()}
    strange = [tuple(param.shape) for param in params if id(param) not in name_of]
    check(
        not strange,
        f"{title} has parameters that are not this {type(model).__name__}'s own, of shapes {few(strange)}: make it "
        "over model.parameters(), after all that gives the module new ones",
    )
    return {name_of[id(param)]: param for param in params}


def _innermost(opt_state: Any) -> dict[str, Any]:
    """State of the `ll.optimizer` inside wrappers such as apply_if_finite."""
    while isinstance(opt_state, Mapping) and "inner_state" in opt_state:
        opt_state = opt_state["inner_state"]
    check(
        isinstance(opt_state, dict) and "state" in opt_state,
        f"the state's opt_state is a {type(opt_state).__name__}, not what an ll.optimizer keeps: make the state with "
        "ll.init_state(model, ll.optimizer(...))",
        TypeError,
    )
    return opt_state  # type: ignore[no-any-return]


def _with_innermost(opt_state: Any, innermost: Any) -> Any:
    """Replace the innermost state in the state of wrapped optimizers."""
    if "inner_state" not in opt_state:
        return innermost
    return {**opt_state, "inner_state": _with_innermost(opt_state["inner_state"], innermost)}


def _converted(
    name: str,
    entry: Mapping[str, Any],
    like: Mapping[str, Any],
    giver: str,
    taker: str,
    copied: Callable[[Tensor, Tensor, str], Tensor | None],
) -> dict[str, Any]:
    """Copy one parameter's entries, converting tensors with `copied(value, like, what)`."""
    check(
        entry.keys() == like.keys(),
        f"for {name}, {giver} keeps {sorted(entry) or 'nothing'}, and {taker} keeps {sorted(like) or 'nothing'}: "
        "both need the same class of optimizer, with the same hyperparameters",
    )
    return {
        key: copied(torch.as_tensor(value), like[key], f"{name}'s {key}")
        if isinstance(like[key], Tensor)
        else _copied(value)
        for key, value in entry.items()
    }


def _copied(values: Any) -> Any:
    return map_tensors(lambda tensor: tensor.detach().clone(), values)
