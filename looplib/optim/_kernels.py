"""Fused kernels: where they may be used, and calls of them without the class's own step.

torch's fused kernels treat parameters, gradients and moments as flat memory and pair elements by position. They are
correct only if all of these are dense, do not overlap themselves, and share their strides.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from looplib._core import torch_private
from looplib._core.checks import check, few
from looplib._core.ranks import is_sharded, shards
from looplib.optim._recipe import KERNEL_OPTIONS, Recipe
from looplib.types import Params

PLAIN = {Tensor, torch.nn.Parameter}

_DTYPES = {torch.float32, torch.float64, torch.bfloat16, torch.float16}


Values = Mapping[str, Any]
Tensors = Sequence[Tensor]
Entries = Mapping[str, Tensors]
Kernel = Callable[[Values, Tensors, Tensors, Entries], None]


class Part(NamedTuple):
    """Parameters of a group that share their device and dtype, as a fused kernel needs them.

    Attributes:
        group: number of the group.
        names: names of the parameters.
        kernel: the fused kernel that updates them if their strides permit, or None for the class's own step.
        asked: True if the user has asked for the fused kernel, so that strides that do not permit it are an error.
    """

    group: int
    names: list[str]
    kernel: Kernel | None
    asked: bool


def parts_of(recipe: Recipe, params: Params, members: Sequence[Sequence[str]]) -> list[Part]:
    """Parameters that are updated together, by looplib's choice of a kernel or by the user's."""
    parts = []
    for number, (names, values) in enumerate(zip(members, recipe.values, strict=True)):
        alike: dict[Any, list[str]] = {}
        for name in names:
            alike.setdefault((params[name].device, params[name].dtype), []).append(name)
            if values.get("fused") and recipe.is_torch_optim:
                _check_dense(name, params[name])
        special = recipe.makes_state_late or values.get("differentiable") or values.get("capturable")
        asked = bool(values.get("fused")) and not special
        chosen = may_choose(recipe) and KERNEL_OPTIONS.isdisjoint(values)
        for some in alike.values():
            fused = asked or (chosen and _permit(recipe, [params[name] for name in some]))
            parts.append(Part(number, some, FUSED.get(recipe.cls) if fused else None, asked))
    return parts


def may_choose(recipe: Recipe) -> bool:
    """True if looplib may take a fused kernel for this class by itself: those know nothing of a first update."""
    return recipe.cls in FUSED and not recipe.makes_state_late


def _permit(recipe: Recipe, tensors: Sequence[Tensor]) -> bool:
    """True if torch has a correct fused kernel for these tensors of one device and dtype."""
    device, dtype = tensors[0].device, tensors[0].dtype
    # SGD's on a CPU handles half precision in vectors, and from the first full vector on moves parameters by as much as
    # their size. Of torch's, Adam's alone also update DTensors.
    wrong = recipe.cls is torch.optim.SGD and device.type == "cpu" and dtype.itemsize == 2
    sharded = recipe.cls in (torch.optim.SGD, torch.optim.Adagrad) and any(map(is_sharded, tensors))
    known = device.type in torch_private.fused_devices() and dtype in _DTYPES
    return known and not wrong and not sharded and all(map(is_dense, shards(tensors)))


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


def _check_dense(name: str, tensor: Tensor) -> None:
    """Raise for `fused=True` with a parameter on which a fused kernel would be wrong."""
    if not is_sharded(tensor) and not is_dense(tensor):
        raise ValueError(
            f"fused=True for {name}, whose strides {tensor.stride()} leave gaps or overlap (shape {tuple(tensor.shape)}): "
            "fused kernels read dense memory. Leave fused= out, or make the parameter contiguous"
        )


def laid_out_like(param: Tensor, grad: Tensor) -> Tensor:
    """Gradient with the parameter's strides, for a user's `fused=True`."""
    if grad.layout is not torch.strided or aligned([[param], [grad]]):
        return grad
    return torch.empty_like(param).copy_(grad)


def kernel_name(recipe: Recipe, plans: Sequence[Any]) -> str:
    """Name of the kernel that updates use, for `repr`: by the user's choice, and for the parameters seen so far."""
    chosen = [f"{key}={recipe.defaults[key]}" for key in sorted(KERNEL_OPTIONS & recipe.defaults.keys())]
    if chosen:
        return ", ".join(chosen)
    if not may_choose(recipe):
        return "torch's default" if recipe.is_torch_optim else "the class's own"
    if not plans:
        return "fused where torch has one for the parameters and strides permit, else torch's default"
    taken = {part.kernel is not None for plan in plans for part in plan.parts}
    return " and ".join(["fused"] * (True in taken) + ["torch's default"] * (False in taken))


# Calls of fused kernels, whose own functions first sort the lists again by device and dtype


def columns_of(
    names: Sequence[str], params: Params, grads: Params, states: Mapping[str, Mapping[str, Any]], asked: bool = False
) -> tuple[Tensors, Tensors, dict[str, Any]] | None:
    """This rank's parameters, gradients and entries of the state, each as a list, as fused kernels take them.

    None if a kernel would pair their elements wrongly. If the user has asked for it, that is an error instead, but
    gradients are brought to the strides of their parameters.
    """
    rows = [*map(states.__getitem__, names)]
    keys = rows[0].keys()
    if {*map(len, rows)} != {len(keys)}:
        return None
    try:
        entries: dict[str, Any] = {key: [row[key] for row in rows] for key in keys}
    except KeyError:
        return None
    own, given = [*map(params.__getitem__, names)], [*map(grads.__getitem__, names)]
    if not PLAIN.issuperset(map(type, own)):  # kernels are elementwise, so each rank updates its shards
        own, given = shards(own), shards(given)
        entries = {key: column if key == "step" else shards(column) for key, column in entries.items()}
    moments = {key: column for key, column in entries.items() if key != "step"}
    if aligned([own, given, *moments.values()]):
        return own, given, entries
    if not asked:
        return None
    for key, column in moments.items():
        check(
            aligned([own, column]),
            f"fused=True for {few(names)}, whose strides are not those of their {key} in the state; fused kernels need "
            "the same. Leave fused= out, or create the state again with ll.init_state",
        )
    return own, [*map(laid_out_like, own, given)], entries


_ONE = torch.ones(())


def _adam(values: Values, params: Tensors, grads: Tensors, entries: Entries) -> None:
    counts = entries["step"]
    if counts[0].is_cpu:  # adding a tensor takes half the time of adding a number; other backends may read it
        torch_private.foreach_add_(counts, _ONE, alpha=1)
    else:
        torch_private.foreach_add_(counts, 1)
    kernel: Any = torch_private.fused_adamw_ if values["decoupled_weight_decay"] else torch_private.fused_adam_
    kernel(
        params,
        grads,
        entries["exp_avg"],
        entries["exp_avg_sq"],
        entries["max_exp_avg_sq"] if values["amsgrad"] else [],
        counts,
        beta1=values["betas"][0],
        beta2=values["betas"][1],
        **{key: values[key] for key in ("lr", "weight_decay", "eps", "amsgrad", "maximize")},
    )


def _adagrad(values: Values, params: Tensors, grads: Tensors, entries: Entries) -> None:
    torch_private.foreach_add_(entries["step"], 1)
    torch_private.fused_adagrad_(
        params,
        grads,
        entries["sum"],
        entries["step"],
        **{key: values[key] for key in ("lr", "lr_decay", "weight_decay", "eps", "maximize")},
    )


def _sgd(values: Values, params: Tensors, grads: Tensors, entries: Entries) -> None:
    torch_private.fused_sgd_(
        params,
        grads,
        entries["momentum_buffer"] if values["momentum"] else [],
        is_first_step=False,
        **{key: values[key] for key in ("lr", "weight_decay", "momentum", "dampening", "nesterov", "maximize")},
    )


FUSED: dict[type, Kernel] = {
    torch.optim.SGD: _sgd,
    torch.optim.Adam: _adam,
    torch.optim.AdamW: _adam,
    torch.optim.Adagrad: _adagrad,
}
