"""Chains: the two halves of an update, run part by part.

The first halves read: each may change the gradients, report, refuse, or decide against the update. What they decide is a
flag, a bool or a 0-dim bool tensor, and for a partition one for each label. The host reads all flags at once. Only then do
the second halves write, on tensors that belong to the update.

The methods of `types.Optimizer` are these functions. They stand here because `types` imports `_core` alone.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from looplib._core import torch_private
from looplib._core.checks import check
from looplib._core.contracts import Check, Transformed
from looplib._core.copies import copy_tree, leaves_of, own_copies
from looplib._core.mappings import as_record, stacked
from looplib._core.tracing import afterwards, entered, tracing, where


def for_graphs(parts: Sequence[tuple[str, Any]]) -> Sequence[tuple[str, Any]]:
    """These parts; in a trace in their form for graphs, if they have one.

    It is asked where parts run, and not where a step is traced: a chain may be inside a part or a gradient function of the
    user's own, which nothing that traces a step can look into.
    """
    return [(name, part.for_graphs or part) for name, part in parts] if tracing() else parts


# First halves


def transform(
    firsts: Sequence[tuple[str, Any]], grads: Any, opt_state: Any, params: Any, step: Any, info: Mapping[str, Any]
) -> Transformed:
    """The first halves of these parts, in order: the gradients that reach the weights, all flags, all reports.

    `info["owned"]` is True if the gradients may be written; otherwise, the first part that changes them gets copies.
    """
    if entered:
        firsts = for_graphs(firsts)
    states = opt_state  # whose dicts and tensors are those of the state, which a part leaves alone
    flag: Any = True
    carries: dict[str, Any] | None = None
    reports: dict[str, Mapping[str, Any]] | None = None
    on_skip: Sequence[Check] = ()
    for name, part in firsts:
        if part.role == "gradients" and not info.get("owned", False):
            grads, info = copy_tree(grads), {**info, "owned": True}
        out = part.transform(grads, states.get(name), params, step, **info)
        if type(out) is not Transformed:
            raise TypeError(
                f"the transform of {name} returned {kind(out)}; it returns ll.types.Transformed(grads, state, ...)"
            )
        changed, state, apply, carry, metrics, checks = out
        if part.role != "judge":
            grads = changed
        elif changed is not grads:
            raise ValueError(
                f"the transform of {name}, whose role is 'judge', returned other gradients than it was given, which no part "
                "would see: give it role='gradients', or return Transformed(grads, state, apply=...)"
            )
        if state is not states.get(name):
            if name not in states:
                raise ValueError(f"{name} returned a state, and has no init= that makes the first one")
            if state is None:
                raise ValueError(f"the transform of {name} returned no state: give Transformed(grads, state)")
            states = {**states, name: state}
        if apply is not True:
            for flag_of_part in leaves_of(apply):
                _check_flag(name, flag_of_part)
            flag = _both(flag, apply)
        if carry is not None:
            carries = {**(carries or {}), name: carry}
        if metrics:
            reports = {**(reports or {}), name: metrics}
        if checks:
            on_skip = [*on_skip, *checks]
    return as_record(Transformed, (grads, states, flag, carries, named_reports(reports) if reports else {}, on_skip))


def unscaled(scaler: tuple[str, Any] | None, scale: Any, grads: Any, owned: bool) -> Any:
    """Gradients divided by the scale of their loss; copies of them, unless they may be written."""
    if scaler is None:
        raise ValueError(
            "these are gradients of a scaled loss, and no part of the update divides them by the scale: put "
            "ll.optim.dynamic_loss_scale() into its chain"
        )
    name, part = scaler
    check(
        scale is not None,
        f"{name} adapts a scale by which the loss of these gradients was not multiplied, as far as they say: let a gradient "
        "function of your own hand on what it is given by name, or give ll.apply_gradients(..., "
        "scale=optimizer.loss_scale(state.opt_state)), or scale=1.0 for a loss that was not scaled",
    )
    if not owned:
        grads = copy_tree(grads)
    if not isinstance(scale, Tensor):
        scale = torch.tensor(float(scale), device=next(iter(grads.values())).device)
    part.unscale(grads, scale)
    return grads


def _check_flag(name: str, flag: Any) -> None:
    """Raise unless this is a flag: a bool, or a 0-dim bool tensor."""
    if isinstance(flag, bool) or (isinstance(flag, Tensor) and flag.dtype is torch.bool and flag.dim() == 0):
        return
    shown = f"a {flag.dtype} tensor of shape {tuple(flag.shape)}" if isinstance(flag, Tensor) else repr(flag)
    raise TypeError(f"the transform of {name} returned apply={shown}: give True, False, or a 0-dim bool tensor")


def named_reports(reports: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Reports of several parts together. Those under one name get that of their part: `grad_norm/<part>`."""
    names = [key for report in reports.values() for key in report]
    return {
        key if names.count(key) == 1 else f"{key}/{name}": value
        for name, report in reports.items()
        for key, value in report.items()
    }


def _both(flags: Any, others: Any) -> Any:
    if isinstance(flags, dict):
        return {label: _both(flag, others) for label, flag in flags.items()}
    if isinstance(others, dict):
        return _both(others, flags)
    if isinstance(flags, Tensor) and isinstance(others, Tensor):
        others = others.to(flags.device)
    return flags & others


# Flags


def any_of(flags: Any) -> Any:
    """True if a flag is set, for all labels of a partition together."""
    if not isinstance(flags, dict):
        return flags
    leaves = leaves_of(flags)
    if any(flag is True for flag in leaves):
        return True
    tensors = [flag for flag in leaves if isinstance(flag, Tensor)]
    return stacked(tensors).any() if tensors else False


def read(out: Transformed) -> Any:
    """The flags as bools, for which the host waits here. Raises what `on_skip` says if one is not set."""
    if out.apply is True:
        return True
    flags, structure = torch_private.pytree.tree_flatten(out.apply)
    tensors = [flag for flag in flags if isinstance(flag, Tensor)]
    values = iter(stacked(tensors).tolist() if tensors else [])
    bools = [next(values) if isinstance(flag, Tensor) else flag for flag in flags]
    if not all(bools):
        for function, arguments in out.on_skip:
            function(*arguments)
    return structure.unflatten(bools)


def flags_in_graph(out: Transformed) -> Any:
    """The flags of a graph, whose checks are made after it has run."""
    for function, arguments in out.on_skip:
        afterwards(function, *arguments)
    return out.apply


# Second halves


def update_(
    seconds: Sequence[tuple[str, Any]], grads: Any, opt_state: Any, params: Any, step: Any, info: dict[str, Any]
) -> tuple[Any, Any, dict[str, Any]]:
    """The second halves of these parts, in order: parameters, state, and reports."""
    if entered:
        seconds = for_graphs(seconds)
    carries = info.get("carry") or {}
    reports: dict[str, Mapping[str, Any]] | None = None
    for name, part in seconds:
        info["carry"] = carries.get(name)
        out = part.update_(grads, opt_state.get(name), params, step, **info)
        if type(out) is not tuple or len(out) not in (2, 3):
            raise TypeError(
                f"the update_ of {name} returned {kind(out)}; it returns (params, state), or (params, state, metrics)"
            )
        params = out[0]
        if out[1] is not opt_state.get(name):
            if name not in opt_state:
                raise ValueError(f"the update_ of {name} returned a state, and has no init= that makes the first one")
            opt_state = {**opt_state, name: out[1]}
        if len(out) == 3 and out[2]:
            reports = {**(reports or {}), name: out[2]}
    return params, opt_state, named_reports(reports) if reports else {}


def new_tensors(new: Any, params: Mapping[str, Tensor], grads: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors that an update has returned in place of its parameters. Raises if they do not fit these."""
    if type(new) is not dict and not isinstance(new, Mapping):
        raise TypeError(f"an optimizer's update_ returned {kind(new)} as its parameters; it returns name -> tensor")
    replaced = {name: tensor for name, tensor in new.items() if tensor is not params.get(name)}
    for name, tensor in replaced.items():
        param = params.get(name)
        if param is None:
            raise ValueError(f"the optimizer's update_ returned {name!r}, and was given no parameter of that name")
        if name not in grads:
            raise ValueError(
                f"the optimizer's update_ returned a new tensor as {name}, which has no gradient in this step: it changes "
                "the parameters that grads names, and returns the others as they are"
            )
        if not isinstance(tensor, Tensor):
            raise TypeError(
                f"the optimizer's update_ returned a {type(tensor).__name__} as {name}; it returns tensors"
            )
        if (tensor.shape, tensor.dtype, tensor.device) != (param.shape, param.dtype, param.device):
            raise ValueError(
                f"the optimizer's update_ returned {name} as {tensor.dtype} of shape {tuple(tensor.shape)} on "
                f"{tensor.device}, and the parameter is {param.dtype} of shape {tuple(param.shape)} on {param.device}"
            )
    return replaced


def kind(out: Any) -> str:
    return f"{len(out)} values" if type(out) is tuple else f"a {type(out).__name__}"


def update_where(
    flags: Any, optimizer: Any, grads: Any, opt_state: Any, params: Any, step: Any, info: Mapping[str, Any]
) -> tuple[Any, Any, dict[str, Any]]:
    """An update on copies, if a flag is set; in graphs, whose host reads no flag, tensors choose whether it is made."""
    flag = any_of(flags)
    if flag is False:
        return params, opt_state, {}
    owned, owned_state = own_copies(grads, params, opt_state)
    new_params, new_state, report = optimizer.update_(grads, owned_state, owned, step, **{**info, "applied": flags})
    new_tensors(new_params, params, grads)  # raises if they do not fit
    return where(flag, new_params, params), where(flag, new_state, opt_state), report


def update_by_hand(
    optimizer: Any, grads: Any, opt_state: Any, params: Any, step: Any, scale: Any, info: Mapping[str, Any]
) -> tuple[Any, Any, bool | Tensor]:
    """A pure update: transform, copy, update."""
    out = optimizer.transform(grads, opt_state, params, step, scale=scale, **info)
    # By hand, it may be called in a gradient function of a step that is traced, whose flags the host cannot read.
    flags = flags_in_graph(out) if tracing() else read(out)
    new, opt_state, _ = update_where(
        flags, optimizer, out.grads, out.state, params, step, {**info, "carry": out.carry}
    )
    return {**params, **new}, opt_state, any_of(flags)


# States of another optimizer


def contents(opt_state: Any) -> str:
    """Contents of an `opt_state`, for messages: its parts, and what each keeps.

    >>> contents({"AdamW": {"state": {"weight": {"step": 0, "exp_avg": 0}}}, "ema": {"average": {}, "updates": 0}})
    'AdamW (step, exp_avg for a parameter), ema (average, updates)'
    """
    if opt_state is None:
        return "nothing"
    if not isinstance(opt_state, Mapping):
        return f"a {type(opt_state).__name__}"
    parts = [
        f"{name} ({_kept(entry)})" if isinstance(entry, Mapping) else str(name) for name, entry in opt_state.items()
    ]
    return ", ".join(parts) or "nothing"


def _kept(entry: Mapping[Any, Any]) -> str:
    match entry:
        case {"state": dict(entries)}:
            return f"{_listed(next(filter(None, entries.values()), ()))} for a parameter"
        case {"inner": dict(inner), **more}:
            return f"{_listed(more)} around {contents(inner)}" if more else contents(inner)
        case _ if entry and all(isinstance(member, Mapping) for member in entry.values()) and len(entry) <= 8:
            return "; ".join(f"{label}: {contents(member)}" for label, member in entry.items())
    return _listed(entry)


def _listed(keys: Iterable[Any]) -> str:
    return ", ".join(map(str, keys)) or "nothing"


def wrong_state(opt_state: Any, who: str, keeps: Iterable[Any]) -> ValueError:
    """Error for an `opt_state` that an optimizer cannot continue, since it keeps something else."""
    contained = (
        "the state was made without an optimizer" if opt_state is None else f"opt_state holds {contents(opt_state)}"
    )
    return ValueError(
        f"{contained}, and {who.partition('  # kernel')[0]} is to update it, which keeps {_listed(keeps)}. Make the "
        "state with this optimizer, ll.init_state(model, optimizer), or a new opt_state by optimizer.init(params)"
    )


def unknown_names(method: str, given: Iterable[str], known: Iterable[str]) -> TypeError:
    """Error for named arguments that no part of an update takes, so that they would be dropped."""
    (name, *_) = sorted({*given} - {*known})
    near = difflib.get_close_matches(name, [*known], 1)
    meant = f": perhaps {near[0]}=" if near else ""
    return TypeError(
        f"optimizer.{method} got {name}=, which no part takes{meant} ({', '.join(sorted(known))} are known)"
    )
