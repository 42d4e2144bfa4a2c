"""Fused kernels in graphs: the update of a group as one operation.

torch's fused kernel, on the tensors of a group, is one operation of a graph. The class's own step is about thirty for
each parameter, on which Inductor spends most of the time of a first compiled step. Its code is faster, though, since an
update fuses with the operations that compute the gradient. So Inductor's graphs update few parameters by the class's own
step, and many by the kernel. In a graph without machine code, the kernel updates any number.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from looplib._core import torch_private, tracing
from looplib.optim._kernels import FUSED, aligned, fused_groups
from looplib.optim._recipe import KERNEL_OPTIONS, Recipe
from looplib.types import Grads, Params

_CLASSES = {cls.__name__: cls for cls in FUSED}


def fits(
    recipe: Recipe,
    grads: Grads,
    params: Params,
    states: Mapping[str, dict[str, Any]],
    groups: Sequence[dict[str, Any]],
) -> bool:
    """True if fused kernels are to update these parameters in the current trace, as they would without one."""
    if recipe.cls not in FUSED or not tracing.takes_kernel(len(grads)):
        return False
    members = recipe.members({name: params[name] for name in grads})
    with torch_private.disable_current_modes():  # it takes a step on a number
        fused = fused_groups(recipe, params, members)
    asked = recipe.group_values("fused")
    return all(
        (ours or users)
        and _uniform([(params[name], grads[name], states[name]) for name in names])
        and _settled(group)
        for names, ours, users, group in zip(members, fused, asked, groups, strict=True)
        if names
    )


def _uniform(rows: Sequence[tuple[Tensor, Tensor, dict[str, Any]]]) -> bool:
    """True if parameters, gradients and states are float tensors on the CPU that differ in shape only."""
    keys = rows[0][2].keys()
    entries = [entry for *_, state in rows for entry in state.values()]
    if any(state.keys() != keys for *_, state in rows) or not all(isinstance(entry, Tensor) for entry in entries):
        return False
    moments = [[param, *(state[key] for key in keys if key != "step")] for param, _, state in rows]
    kinds = {(tensor.device.type, tensor.dtype) for column in moments for tensor in column}
    kinds |= {(grad.device.type, grad.dtype) for _, grad, _ in rows}
    counts = {state["step"].dtype for *_, state in rows if "step" in state}
    plain = len(kinds) == 1 and kinds.pop()[0] == "cpu" and counts <= {torch.float32}
    return plain and aligned([*zip(*moments, strict=True)])


def _settled(group: Mapping[str, Any]) -> bool:
    """True if a kernel can be called with these hyperparameters: it takes no tuple of which a member is a schedule."""
    members = [member for value in group.values() if isinstance(value, tuple) for member in value]
    moving = any(isinstance(member, Tensor) for member in members)
    return not (moving or group.get("capturable") or group.get("differentiable"))


def by_kernels(
    recipe: Recipe, grads: Grads, states: Mapping[str, Any], tensors: Params, groups: Sequence[dict[str, Any]]
) -> None:
    """Update these tensors and their states in place, by one operation for each group."""
    names_of = {id(tensor): name for name, tensor in tensors.items()}
    for group in groups:
        names = [names_of[id(tensor)] for tensor in group["params"]]
        if not names:
            continue
        values = {key: value for key, value in group.items() if key not in {"params", *KERNEL_OPTIONS}}
        moving = {key: value for key, value in values.items() if isinstance(value, Tensor)}
        settled = {key: value for key, value in values.items() if key not in moving}
        keys = [*states[names[0]]]
        FUSED_UPDATE(
            recipe.cls.__name__,
            json.dumps(settled, default=float),
            [*moving],
            [*moving.values()],
            [grads[name] for name in names],
            group["params"],
            keys,
            [states[name][key] for key in keys for name in names],
        )


def fused_update(
    cls: str,
    settled: str,
    moving: Sequence[str],
    numbers: Sequence[Tensor],
    grads: Sequence[Tensor],
    params: Sequence[Tensor],
    keys: Sequence[str],
    entries: Sequence[Tensor],
) -> None:
    """The operation itself."""
    values = {**_values(settled), **dict(zip(moving, (number.item() for number in numbers), strict=True))}
    count = len(params)
    columns = {key: entries[place * count : (place + 1) * count] for place, key in enumerate(keys)}
    if not aligned([params, grads]):  # the kernel pairs elements by their position in memory
        grads = [torch.empty_like(param).copy_(grad) for param, grad in zip(params, grads, strict=True)]
    if "step" in columns:
        torch_private.foreach_add_(columns["step"], 1)
    FUSED[_CLASSES[cls]](values, params, grads, columns)


_values: Callable[[str], dict[str, Any]] = functools.cache(json.loads)

# A graph in Inductor's cache has the operation's name, so that a second process finds it.
_operation = torch.library.custom_op(
    "looplib::fused_update_",
    fused_update,
    mutates_args=("params", "entries"),
    device_types="cpu",
    schema="(str cls, str settled, str[] moving, Tensor[] numbers, Tensor[] grads, Tensor(a!)[] params, str[] keys, "
    "Tensor(b!)[] entries) -> ()",
)
_operation.register_fake(lambda *_: None)

FUSED_UPDATE = torch.ops.looplib.fused_update_.default
