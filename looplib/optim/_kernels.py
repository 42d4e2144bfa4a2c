"""Fused kernels: where they may be used, and calls of them without the class's own step.

torch's fused kernels treat parameters, gradients and moments as flat memory and pair elements by position. They are
correct only if all of these are dense, do not overlap themselves, and share their strides.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from looplib._core import torch_private
from looplib._core.ranks import is_sharded, shards
from looplib.optim._recipe import KERNEL_OPTIONS, Recipe
from looplib.types import Params

PLAIN = {Tensor, torch.nn.Parameter}

# Classes whose fused kernel is also used for sharded tensors, on the shards of each rank.
_OF_SHARDS = {torch.optim.Adam, torch.optim.AdamW}

# Fused kernels of torch that are wrong by far more than rounding: on a CPU, SGD's handles half precision in vectors,
# and from the first full vector on moves parameters by as much as their size.
_WRONG = {(torch.optim.SGD, "cpu", dtype) for dtype in (torch.bfloat16, torch.float16)}


def chosen_by_user(recipe: Recipe) -> list[bool]:
    """For each group, True if the user chose the kernel."""
    return [bool(KERNEL_OPTIONS & {**recipe.defaults, **values}.keys()) for values in recipe.overrides]


def fused_groups(recipe: Recipe, params: Params, members: Sequence[Sequence[str]]) -> list[bool]:
    """For each group, True if looplib uses the fused kernel without having been asked to."""
    if not recipe.ours or "fused" not in inspect.signature(recipe.cls).parameters:
        return [False] * len(members)
    return [
        not chosen and bool(names) and _all_supported(recipe, [params[name] for name in names])
        for chosen, names in zip(chosen_by_user(recipe), members, strict=True)
    ]


def _all_supported(recipe: Recipe, tensors: Sequence[Tensor]) -> bool:
    if any(map(is_sharded, tensors)):
        if recipe.cls not in _OF_SHARDS:
            return False  # torch's other fused kernels do not accept DTensors
        tensors = shards(tensors)
    kinds = {(tensor.device, tensor.dtype) for tensor in tensors}
    return all(is_dense(tensor) for tensor in tensors) and all(_supports(recipe, *kind) for kind in kinds)


def _supports(recipe: Recipe, device: torch.device, dtype: torch.dtype) -> bool:
    """True if torch has a correct fused kernel for such tensors, determined by a step on a single number."""
    if (recipe.cls, device.type, dtype) in _WRONG:
        return False
    try:
        tensor = torch.zeros(1, device=device, dtype=dtype)
        tensor.grad = torch.zeros_like(tensor)
        recipe.build({"": tensor}, [*[[]] * len(recipe.groups), [""]], [*[False] * len(recipe.groups), True]).step()
    except (RuntimeError, TypeError):
        return False
    return True


_strides_of = Tensor.stride
_is_contiguous = Tensor.is_contiguous


def aligned(lists: Sequence[Sequence[Tensor]]) -> bool:
    """True if tensors at the same index of each list are dense and share their strides."""
    try:
        if all(map(_is_contiguous, chain.from_iterable(lists))):
            return True
        first, *others = ([*map(_strides_of, tensors)] for tensors in lists)
    except RuntimeError:  # sparse tensors have no strides
        return False
    return all(strides == first for strides in others) and all(map(is_dense, lists[0]))


def is_dense(tensor: Tensor) -> bool:
    """True if a tensor fills one contiguous range of memory without overlap."""
    if tensor.layout is not torch.strided:
        return False
    return tensor.is_contiguous() or _dense(tuple(tensor.shape), tensor.stride())


@functools.lru_cache(maxsize=4096)
def _dense(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    expected = 1
    for stride, size in sorted((stride, size) for size, stride in zip(shape, strides, strict=True) if size != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def check_fused(recipe: Recipe, params: Params, members: Sequence[Sequence[str]]) -> None:
    """Raise for `fused=True` with parameters on which a fused kernel would be wrong."""
    for names, fused in zip(members, recipe.group_values("fused"), strict=True):
        for name in names if fused and recipe.ours else ():
            if not is_sharded(params[name]) and not is_dense(params[name]):
                raise ValueError(
                    f"fused=True for {name}, whose strides {params[name].stride()} leave gaps or overlap (shape "
                    f"{tuple(params[name].shape)}): fused kernels read dense memory. Leave fused= out, or make the "
                    "parameter contiguous"
                )


def realigned(name: str, grad: Tensor, param: Tensor, state: dict[str, Any]) -> Tensor:
    """Gradient with the parameter's strides, for a user's `fused=True`. Raises if moments have different strides."""
    for key, moment in state.items():
        if isinstance(moment, Tensor) and moment.shape == param.shape and not aligned([[param], [moment]]):
            raise ValueError(
                f"fused=True for {name}: its {key} has strides {moment.stride()}, and the parameter {param.stride()}; "
                "fused kernels need the same. Leave fused= out, or create the state again with ll.init_state"
            )
    if grad.layout is not torch.strided or aligned([[param], [grad]]):
        return grad
    return torch.empty_like(param).copy_(grad)


def told(recipe: Recipe, plans: Sequence[Any]) -> str:
    """Name of the kernel that updates use, for `repr`: by the user's choice, and for the parameters seen so far."""
    options = {key: recipe.group_values(key) for key in sorted(KERNEL_OPTIONS)}
    chosen = [f"{key}={values[-1]}" for key, values in options.items() if key in recipe.defaults]
    if chosen:
        return ", ".join(chosen)
    if not recipe.ours or "fused" not in inspect.signature(recipe.cls).parameters:
        return "torch's default" if recipe.ours else "the class's own"
    if not plans:
        return "fused where torch has one for the parameters and strides permit, else torch's default"
    taken = {fused for plan in plans for names, fused in zip(plan.members, plan.fused, strict=True) if names}
    taken |= {False for plan in plans if plan.fell_back}
    return " and ".join(["fused"] * (True in taken) + ["torch's default"] * (False in taken))


# Calls of fused kernels, whose own functions first sort the lists again by device and dtype

Kernel = Callable[[Mapping[str, Any], Sequence[Tensor], Sequence[Tensor], Mapping[str, Sequence[Tensor]]], None]


class Columns(NamedTuple):
    """Tensors of one group, one for each of its parameters; `entries` holds those of the state by key."""

    number: int
    params: Sequence[Tensor]
    grads: Sequence[Tensor]
    entries: dict[str, Sequence[Tensor]]


def direct_kernels(plan: Any, params: Params) -> list[Kernel | None]:
    """For each group, the fused kernel that updates it, or None for the class's own step."""
    kernel = FUSED.get(plan.recipe.cls)
    alike = all(len({(params[name].device, params[name].dtype) for name in names}) < 2 for names in plan.members)
    if kernel is None or not alike or any(values.get("capturable") for values in plan.values):
        return [None] * len(plan.members)
    return [kernel if ours or asked else None for ours, asked in zip(plan.fused, plan.asked, strict=True)]


def columns_of(
    number: int,
    names: Sequence[str],
    params: Params,
    grads: Mapping[str, Tensor],
    states: Mapping[str, Mapping[str, Any]],
) -> Columns | None:
    """The tensors of these parameters for a fused kernel, on this rank; None if it would pair their elements wrongly."""
    rows = [*map(states.__getitem__, names)]
    keys = [*rows[0]]
    if {*map(len, rows)} != {len(keys)}:
        return None
    try:
        entries: dict[str, Any] = {key: [row[key] for row in rows] for key in keys}
    except KeyError:
        return None
    own, given = [*map(params.__getitem__, names)], [*map(grads.__getitem__, names)]
    if not PLAIN.issuperset(map(type, own)):  # it is elementwise, so each rank updates its shards
        own, given = shards(own), shards(given)
        entries = {key: column if key == "step" else shards(column) for key, column in entries.items()}
    if not aligned([own, given, *(column for key, column in entries.items() if key != "step")]):
        return None
    return Columns(number, own, given, entries)


def launch(kernel: Kernel, values: Mapping[str, Any], columns: Columns) -> None:
    """Count the update and call the kernel."""
    if "step" in columns.entries:
        counts = columns.entries["step"]
        if counts[0].is_cpu:  # adding a tensor takes half the time of adding a number; other backends may read it
            torch_private.foreach_add_(counts, _ONE, alpha=1)
        else:
            torch_private.foreach_add_(counts, 1)
    kernel(values, columns.params, columns.grads, columns.entries)


_ONE = torch.ones(())


def _adam(
    values: Mapping[str, Any],
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    entries: Mapping[str, Sequence[Tensor]],
) -> None:
    kernel: Any = torch_private.fused_adamw_ if values["decoupled_weight_decay"] else torch_private.fused_adam_
    kernel(
        params,
        grads,
        entries["exp_avg"],
        entries["exp_avg_sq"],
        entries["max_exp_avg_sq"] if values["amsgrad"] else [],
        entries["step"],
        lr=values["lr"],
        beta1=values["betas"][0],
        beta2=values["betas"][1],
        weight_decay=values["weight_decay"],
        eps=values["eps"],
        amsgrad=values["amsgrad"],
        maximize=values["maximize"],
    )


def _adagrad(
    values: Mapping[str, Any],
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    entries: Mapping[str, Sequence[Tensor]],
) -> None:
    torch_private.fused_adagrad_(
        params,
        grads,
        entries["sum"],
        entries["step"],
        lr=values["lr"],
        lr_decay=values["lr_decay"],
        weight_decay=values["weight_decay"],
        eps=values["eps"],
        maximize=values["maximize"],
    )


def _sgd(
    values: Mapping[str, Any],
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    entries: Mapping[str, Sequence[Tensor]],
) -> None:
    torch_private.fused_sgd_(
        params,
        grads,
        entries["momentum_buffer"] if values["momentum"] else [],
        weight_decay=values["weight_decay"],
        momentum=values["momentum"],
        lr=values["lr"],
        dampening=values["dampening"],
        nesterov=values["nesterov"],
        maximize=values["maximize"],
        is_first_step=False,
    )


# Classes whose fused kernel is called directly: their functions first sort the lists again by device and dtype.
FUSED: dict[type, Kernel] = {
    torch.optim.SGD: _sgd,
    torch.optim.Adam: _adam,
    torch.optim.AdamW: _adam,
    torch.optim.Adagrad: _adagrad,
}
