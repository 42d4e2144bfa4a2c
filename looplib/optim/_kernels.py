"""Fused kernels: where they may be used, and calls of them without the class's own step.

torch's fused kernels treat parameters, gradients and moments as flat memory and pair elements by position. They are
correct only if all of these are dense, do not overlap themselves, and share their strides.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import chain
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from looplib._core import torch_private
from looplib._core.checks import PLAIN, check, few
from looplib._core.mappings import mapped
from looplib._core.ranks import is_sharded, shards
from looplib.optim._recipe import KERNEL_OPTIONS, Recipe
from looplib.types import Params

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
        kernel: the fused kernel that updates them, or None for the class's own step.
    """

    group: int
    names: list[str]
    kernel: Kernel | None


def parts_of(recipe: Recipe, params: Params, members: Sequence[Sequence[str]]) -> list[Part]:
    """Parameters that are updated together, by looplib's choice of a kernel or by the user's."""
    parts = []
    for number, (names, values) in enumerate(zip(members, recipe.values, strict=True)):
        # With a complex parameter in the group, the class would refuse to make a state for kernels.
        free = KERNEL_OPTIONS.isdisjoint(values) and not any(params[name].is_complex() for name in names)
        alike: dict[Any, list[str]] = {}
        for name in names:
            alike.setdefault((params[name].device, params[name].dtype), []).append(name)
        asked = recipe.is_torch_optim and values.get("fused")
        for some in alike.values():
            tensors = [params[name] for name in some]
            gaps = [name for name, shard in zip(some, shards(tensors), strict=True) if not is_dense(shard)]
            check(
                not (asked and gaps),
                f"fused=True for {few(gaps)}, whose strides leave gaps or overlap: fused kernels read dense memory. Leave "
                "fused= out, or make the parameter contiguous",
            )
            chosen = free and not gaps and _permit(recipe, tensors)
            kernel = FUSED[recipe.cls] if may_choose(recipe) and (asked or chosen) else None
            parts.append(Part(number, some, kernel))
    return parts


def may_choose(recipe: Recipe) -> bool:
    """True if looplib may take a fused kernel for this class by itself: those know nothing of a first update."""
    return recipe.cls in FUSED and not recipe.makes_state_late


def _permit(recipe: Recipe, tensors: Tensors) -> bool:
    """True if torch has a correct fused kernel for such dense tensors of one device and dtype."""
    device, dtype = tensors[0].device, tensors[0].dtype
    # SGD's on a CPU handles half precision in vectors, and from the first full vector on moves parameters by as much as
    # their size. Of torch's, Adam's alone also update DTensors.
    wrong = recipe.cls is torch.optim.SGD and device.type == "cpu" and dtype.itemsize == 2
    sharded = recipe.cls in (torch.optim.SGD, torch.optim.Adagrad) and any(map(is_sharded, tensors))
    return device.type in torch_private.fused_devices() and dtype in _DTYPES and not (wrong or sharded)


def check_entries(part: Part, params: Params, states: Mapping[str, Mapping[str, Any]], asked: Any) -> None:
    """Raise ValueError for entries of a state that are missing, or unlike their parameter in shape, dtype or device.

    A fused kernel would read beyond their end. It also needs the strides of the parameters: where it was `asked` for, others
    are refused, and else they are left to the class's own step.
    """
    rows = [*map(states.__getitem__, part.names)]
    keys = rows[0].keys()
    for name, row in zip(part.names, rows, strict=True):
        if row.keys() != keys:
            raise ValueError(
                f"opt_state has {', '.join(row)} for {name}, and {', '.join(keys)} for {part.names[0]}: {_REMEDY}"
            )
    # Compared list by list, which is quick for many parameters.
    kinds = kinds_of([*map(params.__getitem__, part.names)])
    for key in keys:
        if key not in _NUMBERS and kinds_of([row[key] for row in rows]) != kinds:
            _refuse_entries(key, part.names, params, states)
    if asked and columns_of(part.names, params, params, states) is None:
        raise ValueError(
            f"fused=True for {few(part.names)}, whose strides are not those of their entries in the state; fused kernels "
            "need the same. Leave fused= out, or create the state again with ll.init_state"
        )


def kinds_of(tensors: Collection[Tensor]) -> tuple[list[Any], list[Any], list[Any]]:
    """Shapes, dtypes and devices of tensors."""
    return [*map(shape_of, tensors)], [*map(_dtype, tensors)], [*map(_device, tensors)]


def _refuse_entries(key: str, names: Iterable[str], params: Params, states: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise for the first entry of this key that is unlike its parameter."""
    for name in names:
        entry, param = states[name][key], params[name]
        check(
            (entry.shape, entry.dtype, entry.device) == (param.shape, param.dtype, param.device),
            f"opt_state has {key} as {entry.dtype} of shape {tuple(entry.shape)} on {entry.device} for {name}, and "
            f"the parameter is {param.dtype} of shape {tuple(param.shape)} on {param.device}: {_REMEDY}",
        )


_REMEDY = "make a new one with optimizer.init(params), or change it together with the parameters"
_NUMBERS = {"step", "mu_product"}  # entries that are one number
shape_of, _dtype, _device = attrgetter("shape"), attrgetter("dtype"), attrgetter("device")
_is_dense = torch.ops.aten.is_non_overlapping_and_dense.default
is_sparse = attrgetter("is_sparse")


def aligned(lists: Sequence[Sequence[Tensor]]) -> bool:
    """True if tensors at the same index of each list are dense and share their strides."""
    try:
        if all(map(Tensor.is_contiguous, chain.from_iterable(lists))):
            return True
        first, *others = ([*map(Tensor.stride, tensors)] for tensors in lists)
    except RuntimeError:  # sparse tensors have no strides
        return False
    return all(strides == first for strides in others) and all(map(is_dense, lists[0]))


def is_dense(tensor: Tensor) -> bool:
    """True if a tensor fills one contiguous range of memory without overlap."""
    return tensor.layout is torch.strided and (tensor.is_contiguous() or _is_dense(tensor))


def laid_out_like(params: Tensors, grads: Tensors) -> Tensors:
    """Gradients with the strides of their parameters, since fused kernels pair elements by their position in memory."""
    if aligned([params, grads]):
        return grads
    return [torch.empty_like(param).copy_(grad) for param, grad in zip(params, grads, strict=True)]


def kernel_name(recipe: Recipe, plans: Sequence[Any]) -> str:
    """Name of the kernel that updates use, for `repr`: by the user's choice, and for the parameters seen so far."""
    chosen = [f"{key}={recipe.defaults[key]}" for key in sorted(KERNEL_OPTIONS & recipe.defaults.keys())]
    if chosen:
        return ", ".join(chosen)
    if not may_choose(recipe):
        return "torch's default" if recipe.is_torch_optim else "the class's own"
    if not plans:
        return "fused where torch has one for the parameters and strides permit, else torch's default"
    taken = {"fused" if part.kernel else "torch's default" for plan in plans for part in plan.parts}
    return " and ".join(sorted(taken))


# Calls of fused kernels, whose own functions first sort the lists again by device and dtype


def columns_of(
    names: Sequence[str], params: Params, grads: Params, states: Mapping[str, Mapping[str, Any]]
) -> tuple[Tensors, Tensors, dict[str, Any]] | None:
    """This rank's parameters, gradients and entries of the state, each as a list, as fused kernels take them.

    Gradients are brought to the strides of their parameters. None if some are sparse, or if a kernel would pair elements of
    the state wrongly.
    """
    rows = [*map(states.__getitem__, names)]
    entries: dict[str, Any] = {key: [*map(itemgetter(key), rows)] for key in rows[0]}
    tensors, gradients = [*map(params.__getitem__, names)], [*map(grads.__getitem__, names)]
    if not PLAIN.issuperset(map(type, tensors)):  # kernels are elementwise, so each rank updates its shards
        tensors, gradients = shards(tensors), shards(gradients)
        entries = mapped(shards, entries)
    moments = [column for key, column in entries.items() if key != "step"]
    if tensors[0] is not params[names[0]] and any(
        [*map(shape_of, column)] != [*map(shape_of, tensors)] for column in moments
    ):
        return None  # placed otherwise over the ranks
    if aligned([tensors, gradients, *moments]):
        return tensors, gradients, entries
    if any(map(is_sparse, gradients)) or not aligned([tensors, *moments]):
        return None
    return tensors, laid_out_like(tensors, gradients), entries


_ONE = torch.ones((), dtype=torch.float32, device="cpu")  # whatever torch's default is by then


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
        lr=values["lr"],
        weight_decay=values["weight_decay"],
        eps=values["eps"],
        amsgrad=values["amsgrad"],
        maximize=values["maximize"],
    )


def _adagrad(values: Values, params: Tensors, grads: Tensors, entries: Entries) -> None:
    torch_private.foreach_add_(entries["step"], 1)
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


def _sgd(values: Values, params: Tensors, grads: Tensors, entries: Entries) -> None:
    torch_private.fused_sgd_(
        params,
        grads,
        entries["momentum_buffer"] if values["momentum"] else [],
        lr=values["lr"],
        weight_decay=values["weight_decay"],
        momentum=values["momentum"],
        dampening=values["dampening"],
        nesterov=values["nesterov"],
        maximize=values["maximize"],
        is_first_step=False,
    )


FUSED: dict[type, Kernel] = {
    torch.optim.SGD: _sgd,
    torch.optim.Adam: _adam,
    torch.optim.AdamW: _adam,
    torch.optim.Adagrad: _adagrad,
}
