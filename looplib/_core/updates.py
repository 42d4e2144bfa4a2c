"""Updates: whether to make one, and making it on tensors that belong to the caller.

An optimizer decides before anything is written. What it decides is a flag, a bool or a 0-dim bool tensor, and for a
partition one for each of its parts; wrappers combine flags with `&`. The host reads them once, together.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from looplib._core import torch_private
from looplib._core.checks import PLAIN
from looplib._core.mappings import mapped, stacked
from looplib._core.records import parameters_of
from looplib._core.tracing import afterwards, tracing, where


@dataclass(slots=True, eq=False)
class Decision:
    """A flag whose meaning is more than its value: one for each part, or an error to raise if it is not set.

    Attributes:
        flag: a bool, a 0-dim bool tensor, or such a flag for each label of a partition.
        checks: functions with their arguments, which may raise. They are called if some flag is not set.
    """

    flag: Any
    checks: Sequence[tuple[Callable[..., None], tuple[Any, ...]]] = ()

    def __and__(self, other: Any) -> Decision:
        one, two = self, other if isinstance(other, Decision) else Decision(other)
        return Decision(_both(one.flag, two.flag), (*one.checks, *two.checks))

    __rand__ = __and__


def _both(one: Any, other: Any) -> Any:
    if isinstance(one, dict):
        return {label: _both(flag, other) for label, flag in one.items()}
    if isinstance(other, dict):
        return _both(other, one)
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        other = other.to(one.device)
    return one & other


def flags_of(decision: Any) -> Any:
    """The flags of a decision, which are tensors while they have not been read."""
    return decision.flag if isinstance(decision, Decision) else decision


def of_parts(decisions: Mapping[str, Any]) -> Any:
    """The decision for all parts of a partition together, which has a flag for each."""
    flags = mapped(flags_of, decisions)
    checks = [decision.checks for decision in decisions.values() if isinstance(decision, Decision)]
    return all(flag is True for flag in flags.values()) or Decision(flags, [*chain.from_iterable(checks)])


leaves_of: Callable[[Any], list[Any]] = torch_private.pytree.tree_leaves  # the flags of all parts


def any_of(flags: Any) -> Any:
    """True if a flag is set, for all parts together."""
    if not isinstance(flags, dict):
        return flags
    leaves = leaves_of(flags)
    tensors = [flag for flag in leaves if isinstance(flag, Tensor)]
    if any(flag is True for flag in leaves):
        return True
    return stacked(tensors).any() if tensors else False


def read(decision: Any) -> Any:
    """The flags of a decision as bools, for which the host waits here. Raises what the decision says if one is not set."""
    if decision is True:
        return True
    flags, structure = torch_private.pytree.tree_flatten(flags_of(decision))
    tensors = [flag for flag in flags if isinstance(flag, Tensor)]
    values = iter(stacked(tensors).tolist() if tensors else [])
    known = [next(values) if isinstance(flag, Tensor) else flag for flag in flags]
    if isinstance(decision, Decision) and not all(known):
        for check, arguments in decision.checks:
            check(*arguments)
    return structure.unflatten(known)


def check_flag(flag: Any) -> None:
    """Raise unless this is a flag: a bool, or a 0-dim bool tensor."""
    if isinstance(flag, bool) or (isinstance(flag, Tensor) and flag.dtype is torch.bool and flag.dim() == 0):
        return
    kind = f"a {flag.dtype} tensor of shape {tuple(flag.shape)}" if isinstance(flag, Tensor) else repr(flag)
    raise TypeError(f"decide returned {kind} as its flag: give True, False, or a 0-dim bool tensor")


def call_decide(optimizer: Any, grads: Any, opt_state: Any, metrics: Any, params: Any, step: int) -> tuple[Any, Any]:
    """Decision of an optimizer and its state, after checking that there are two values, and that the first is a flag."""
    out = optimizer.decide(grads, opt_state, metrics, params=params, step=step)
    if type(out) is not tuple or len(out) != 2:
        raise TypeError(f"an optimizer's decide returned {_kind(out)}; it returns two values, (flag, opt_state)")
    if out[0] is not True:
        for flag in leaves_of(flags_of(out[0])):
            check_flag(flag)
    return out


def call_update(
    optimizer: Any, grads: Any, opt_state: Any, params: Any, step: int, info: Mapping[str, Any]
) -> tuple[Any, Any]:
    """The parameters and the state after an update on tensors that it may overwrite."""
    out = optimizer.update_(grads, opt_state, params, step, **info)
    if type(out) is not tuple or len(out) != 2:
        raise TypeError(f"an optimizer's update_ returned {_kind(out)}; it returns two values, (params, opt_state)")
    return out


def new_tensors(new: Any, params: Mapping[str, Tensor], grads: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors that an update has returned in place of its parameters. Raises if they do not fit these."""
    if not isinstance(new, Mapping):
        raise TypeError(f"an optimizer's update_ returned {_kind(new)} as its parameters; it returns name -> tensor")
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


def _kind(out: Any) -> str:
    return f"{len(out)} values" if isinstance(out, tuple) else f"a {type(out).__name__}"


def update_where(
    flags: Any, optimizer: Any, grads: Any, opt_state: Any, params: Any, step: int, info: Mapping[str, Any]
) -> tuple[Any, Any]:
    """An update on copies, if a flag is set; in graphs, whose host reads no flag, tensors choose whether it is made."""
    flag = any_of(flags)
    if flag is False:
        return params, opt_state
    owned, owned_state = own_copies(grads, params, opt_state)
    new_params, new_state = call_update(optimizer, grads, owned_state, owned, step, {**info, "applied": flags})
    new_tensors(new_params, params, grads)  # raises if they do not fit
    return where(flag, new_params, params), where(flag, new_state, opt_state)


def update_by_hand(
    optimizer: Any, grads: Any, opt_state: Any, params: Any, step: int, info: Mapping[str, Any]
) -> tuple[Any, Any, bool | Tensor]:
    """A pure update: decide, copy, update."""
    info = {"report": {}, **info}
    decision, opt_state = call_decide(optimizer, grads, opt_state, info.get("metrics") or {}, params, step)
    flags = flags_in_graph(decision) if tracing() else read(decision)
    new, opt_state = update_where(flags, optimizer, grads, opt_state, params, step, info)
    return {**params, **new}, opt_state, any_of(flags)


def flags_in_graph(decision: Any) -> Any:
    """The flags of a decision in a graph, whose checks are made after it has run."""
    for check, arguments in decision.checks if isinstance(decision, Decision) else ():
        afterwards(check, *arguments)
    return flags_of(decision)


# Copies


def own_copies(names: Iterable[str], params: Mapping[str, Tensor], opt_state: Any) -> tuple[dict[str, Tensor], Any]:
    """All parameters with copies in place of these, and a copy of the optimizer's state: what an update may write."""
    given = {name: params[name] for name in names}
    copies = iter(clones([*given.values(), *_tensors_in(opt_state)]))
    copied = dict(zip(given, copies, strict=False))
    for name, copy in copied.items():
        copy.requires_grad_(given[name].requires_grad)
    return {**params, **copied}, _rebuilt(opt_state, copies)


def copy_tree(tree: Any) -> Any:
    """A pytree with copies of its tensors, and with containers of its own."""
    return _rebuilt(tree, iter(clones(_tensors_in(tree))))


def _tensors_in(tree: Any) -> list[Tensor]:
    if isinstance(tree, Tensor):
        return [tree]
    if type(tree) is not dict:
        return [leaf for leaf in leaves_of(tree) if isinstance(leaf, Tensor)]
    found: list[Tensor] = []
    for value in tree.values():
        if type(value) in PLAIN:
            found.append(value)
        # A row: what a class keeps for a parameter. A call for each of thousands would take most of the time.
        elif type(value) is dict and PLAIN.issuperset(map(type, value.values())):
            found += value.values()
        else:
            found += _tensors_in(value)
    return found


def _rebuilt(tree: Any, copies: Iterator[Tensor]) -> Any:
    """The tree, with the next copies in place of its tensors."""
    if type(tree) is not dict:
        return torch_private.pytree.tree_map_only(Tensor, lambda _: next(copies), tree)
    new: dict[Any, Any] = {}
    for key, value in tree.items():
        if type(value) in PLAIN:
            new[key] = next(copies)
        elif type(value) is dict and PLAIN.issuperset(map(type, value.values())):
            new[key] = dict(zip(value, copies, strict=False))  # which takes no more copies than there are keys
        else:
            new[key] = _rebuilt(value, copies)
    return new


_is_cpu = operator.attrgetter("is_cpu")


def clones(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies of tensors with their strides, outside of any graph."""
    if not tensors:
        return []
    grad_mode = torch.is_grad_enabled()
    try:  # a signal may arrive as soon as the mode is set
        torch_private.set_grad_enabled(False)
        if PLAIN.issuperset(map(type, tensors)) and _all_contiguous(tensors):
            on_cpu = all(map(_is_cpu, tensors))
            return list(torch_private.foreach_clone(tensors)) if on_cpu else _copied_by_kernels(tensors)
        return [_clone(tensor) for tensor in tensors]
    finally:
        torch_private.set_grad_enabled(grad_mode)


def _all_contiguous(tensors: Sequence[Tensor]) -> bool:
    try:
        return all(map(Tensor.is_contiguous, tensors))
    except RuntimeError:  # of compressed sparse tensors, which have no strides
        return False


def _copied_by_kernels(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies on accelerators, by one kernel for each device and dtype: launching one for each tensor takes longer."""
    copies = [torch.empty_like(tensor) for tensor in tensors]
    groups: dict[Any, tuple[list[Tensor], list[Tensor]]] = {}
    for copy, tensor in zip(copies, tensors, strict=True):
        into, of = groups.setdefault((tensor.device, tensor.dtype), ([], []))
        into.append(copy)
        of.append(tensor.detach())
    for into, of in groups.values():
        torch_private.foreach_copy_(into, of)
    return copies


def _clone(tensor: Tensor) -> Tensor:
    """A copy with the same strides even if there are gaps, so that sums run in the same order."""
    if type(tensor) not in PLAIN or tensor.layout is not torch.strided or 0 in tensor.stride():
        return tensor.clone()
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device).copy_(tensor)


# Functions with fewer arguments


def ignore_extra_kwargs(function: Any) -> Any:
    """Wrap a function so that it ignores keyword arguments that it does not take."""
    accepted = parameters_of(function)
    if not accepted or any(one.kind is inspect.Parameter.VAR_KEYWORD for one in accepted.values()):
        return function

    def with_known_arguments(*args: Any, **extra: Any) -> Any:
        return function(*args, **{name: value for name, value in extra.items() if name in accepted})

    return with_known_arguments
