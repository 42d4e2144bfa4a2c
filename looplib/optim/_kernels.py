"""Kernel selection: a fused kernel, a function for lists, or torch's default.

torch's fused kernels treat parameters, gradients and moments as flat memory and pair elements by position. They are
correct only if all of these are dense, do not overlap themselves, and share their strides.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from looplib._core.ranks import is_sharded, shards
from looplib.optim._list_functions import IN_LISTS, agrees
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


# Classes whose foreach functions in torch have the bits of torch's loop over the parameters, on a CPU.
_FOREACH_ROUNDS_ALIKE = {
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.RMSprop,
    torch.optim.Adadelta,
    torch.optim.Adamax,
    torch.optim.Rprop,
}
_LISTED_DTYPES = {torch.float32, torch.float64}
_FEW = 1 << 17  # numbers in a group: of more, the loop has each parameter in the cache until it is done


def listed_groups(recipe: Recipe, params: Params, members: Sequence[Sequence[str]]) -> list[bool]:
    """For each group, True if looplib uses its function for lists, with the bits of torch's default or the user's choice.

    `foreach=False` is torch's default on a CPU, and in some classes `foreach=True` has the same bits.
    """
    if recipe.cls not in IN_LISTS:
        return [False] * len(members)
    return [
        bool(names)
        and _takes_lists(recipe.cls, {**recipe.defaults, **overrides})
        and _listable(tensors := [params[name] for name in names])
        and all(agrees(recipe, number, dtype) for dtype in {tensor.dtype for tensor in tensors})
        for number, (overrides, names) in enumerate(zip(recipe.overrides, members, strict=True))
    ]


def _takes_lists(cls: Any, values: Mapping[str, Any]) -> bool:
    """True if a function for lists has the bits of the kernel that the user chose. The fused one comes before it."""
    if "foreach" not in values and "fused" in inspect.signature(cls).parameters:
        return False
    if (KERNEL_OPTIONS - {"foreach"}) & values.keys():
        return False
    return not values.get("foreach") or cls in _FOREACH_ROUNDS_ALIKE


def _listable(tensors: Sequence[Tensor]) -> bool:
    kinds = {(type(tensor) in PLAIN, tensor.device.type, tensor.dtype in _LISTED_DTYPES) for tensor in tensors}
    return kinds == {(True, "cpu", True)} and sum(tensor.numel() for tensor in tensors) <= _FEW


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


def clone(tensor: Tensor) -> Tensor:
    """Copy a tensor with the same strides, even if it has gaps, so that sums run in the same order."""
    if tensor.is_contiguous() or is_sharded(tensor) or not _has_gaps(tuple(tensor.shape), tensor.stride()):
        return tensor.clone()
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device).copy_(tensor)


@functools.lru_cache(maxsize=4096)
def _has_gaps(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """True if a tensor leaves gaps in its memory and does not overlap itself."""
    if _dense(shape, strides):
        return False
    end = 1
    for stride, size in sorted((stride, size) for size, stride in zip(shape, strides, strict=True) if size != 1):
        if stride < end:
            return False
        end += stride * (size - 1)
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
    if any(listed and names for plan in plans for names, listed in zip(plan.members, plan.listed, strict=True)):
        return "foreach, with the bits of torch's default"
    if not recipe.ours or "fused" not in inspect.signature(recipe.cls).parameters:
        return "torch's default" if recipe.ours else "the class's own"
    if not plans:
        return "fused where torch has one for the parameters and strides permit, else torch's default"
    taken = {fused for plan in plans for names, fused in zip(plan.members, plan.fused, strict=True) if names}
    taken |= {False for plan in plans if plan.fell_back}
    return " and ".join(["fused"] * (True in taken) + ["torch's default"] * (False in taken))
