"""Traced update: a class's own step, recorded as tensor operations.

Hyperparameters that change are tensors in a trace, where torch's optimizers expect numbers. `_Numbers` answers the
questions that are asked of a number, and performs on these tensors what torch's functions do with numbers.
"""

from __future__ import annotations

import functools
import inspect
import json
import operator
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from looplib._core import torch_private
from looplib._core import tracing as _tracing
from looplib._core.checks import check
from looplib._core.mappings import in_dtypes_of, pick, subset, wide_dtype, without
from looplib._core.tracing import UntraceableError, on_host
from looplib.optim._kernels import FUSED, check_entries, columns_of, laid_out_like, parts_of
from looplib.optim._recipe import KERNEL_OPTIONS, Recipe, drop_grads
from looplib.types import Grads, Params

# Classes whose plain step is operations on tensors, without a value that the host would have to read.
_IN_GRAPHS = ("Adadelta", "Adagrad", "Adam", "Adamax", "AdamW", "Muon", "NAdam", "RMSprop", "SGD")

# What the others ask the host for, or have no operation for, and what to use instead.
_NOT_IN_GRAPHS = {
    "Adafactor": "its step size is a minimum of numbers that it reads",
    "ASGD": "it reads its step size; ll.optim.swa around SGD averages weights as well",
    "LBFGS": "it evaluates the loss as often as its numbers ask for",
    "RAdam": "it reads whether its variance is known; AdamW or NAdam with a warmup begin as gently",
    "Rprop": "it indexes by masks, and its step sizes begin with the learning rate",
    "SparseAdam": "its gradients are sparse",
}


def traced_update(recipe: Recipe, grads: Grads, opt_state: Any, params: Params, step: int) -> tuple[Params, Any]:
    """Update these tensors in place, as operations of a graph."""
    _check(recipe, grads)
    states, tensors = opt_state["state"], pick(params, grads)
    instance, numbers = _lent(recipe, tensors, opt_state, step)
    first: Sequence[str] = ()
    if "started" in opt_state:
        flags = opt_state["started"]
        first, started = on_host(partial(_begun, (*flags,), (*grads,)), *flags.values())
        opt_state = {**opt_state, "started": started}
    if _tracing.takes_kernel(len(grads)):
        grads = pick(grads, _by_kernels(recipe, grads, states, tensors, instance.param_groups))
    for name, grad in grads.items():
        # In its own first update, the class makes the state of a parameter.
        state, tensors[name].grad = {} if name in first else dict(states[name]), grad
        if (
            count := state.get("step")
        ) is not None:  # in double precision, since bias corrections are computed from it
            state["step"] = count.to(wide_dtype(count.device))
        instance.state[tensors[name]] = state
    with torch.no_grad(), numbers:
        inspect.unwrap(recipe.cls.step)(instance)
    drop_grads(tensors.values())
    updated = {name: in_dtypes_of(instance.state[tensors[name]], states[name]) for name in grads}
    return params, {**opt_state, "state": {**states, **updated}}


def _begun(names: Sequence[str], updated: Sequence[str], *flags: Tensor) -> tuple[tuple[str, ...], dict[str, Tensor]]:
    """Parameters whose first update this is, and the flags after it."""
    of_update, now = {*updated}, dict(zip(names, flags, strict=True))
    first = [name for name, flag in now.items() if name in of_update and not flag]
    return (*first,), now | {name: torch.tensor(True, device="cpu") for name in first}


def _check(recipe: Recipe, grads: Grads) -> None:
    name = recipe.cls.__name__
    if not (recipe.is_torch_optim and name in _IN_GRAPHS):
        why = f" ({_NOT_IN_GRAPHS[name]})" if recipe.is_torch_optim and name in _NOT_IN_GRAPHS else ""
        raise UntraceableError(
            f"a graph has the arithmetic of torch's {', '.join(_IN_GRAPHS)}; found {name}{why}. Take the step without "
            "ll.compile_step, ll.vmap_step or ll.transforms.differentiable; the model's blocks can be compiled, "
            "for block in model.blocks: block.compile()"
        )
    sparse = ", ".join(name for name, grad in grads.items() if grad.is_sparse)
    check(
        not sparse,
        f"the gradient of {sparse} is sparse, which a graph of a step cannot hold: leave out "
        "Embedding(sparse=True), or take the step without ll.compile_step",
        UntraceableError,
    )


def _lent(recipe: Recipe, tensors: Params, opt_state: Mapping[str, Any], step: int) -> tuple[Any, _Numbers]:
    """An instance over the tensors, with changing hyperparameters as tensors."""
    with torch_private.disable_current_modes():  # where a schedule's tensor has a value that the class can check
        instance = recipe.build(tensors, recipe.members(tensors))
    numbers = _Numbers()
    injected = opt_state.get("hyperparameters") or [{}] * len(recipe.moving)
    for group, moving, tensors_of_group in zip(instance.param_groups, recipe.moving, injected, strict=True):
        for key, value in moving.items():
            group[key] = (
                numbers.of_state(tensors_of_group[key]) if key in tensors_of_group else numbers.at(value, step)
            )
        # Use the plain forms, which keep counts as tensors under torch.compile. The forms for CUDA graphs
        # (capturable) divide 0 by 0 at a learning rate of 0.
        group |= subset({"fused": False, "foreach": False, "capturable": False}, group)
    instance.state = defaultdict(dict)
    return instance, numbers


class _Numbers(TorchFunctionMode):
    """Hyperparameters as tensors, since they change, where torch's optimizers expect numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.known: dict[int, tuple[Tensor, Callable[[Any], Any], Any]] = {}

    def at(self, value: Any, step: int) -> Any:
        if isinstance(value, (tuple, list)):
            return tuple(self.at(member, step) if callable(member) else member for member in value)
        of_step = partial(_of_step, value)
        answer = on_host(of_step, step)
        if isinstance(answer, Tensor):
            self.known[id(answer)] = answer, of_step, step
        return answer

    def of_state(self, tensor: Tensor) -> Tensor:
        self.known[id(tensor)] = tensor, float, tensor
        return tensor

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in _COMPARISONS and id(args[0]) in self.known and not isinstance(args[1], Tensor):
            return self._compared(name, args)
        if name == "item":
            return args[0]
        if name == "lerp_" and isinstance(args[2], Tensor):
            into, end, weight = args
            return into.add_((end - into) * weight)
        factor = kwargs.get("alpha", kwargs.get("value"))
        if name in _SCALED and isinstance(factor, Tensor):
            into, first, *others = args
            wide = torch.promote_types(into.dtype, first.dtype)  # in which torch's kernel multiplies, for Muon
            return func(into, first.to(wide) * factor, *others)
        return func(*args, **kwargs)

    def _compared(self, name: str, args: Any) -> Any:
        _, value, source = self.known[id(args[0])]
        compare, other = _COMPARISONS[name], args[1]
        if _tracing.keeps_terms_of_0() and not other:
            return bool(compare(0.5, other))
        return on_host(lambda source: bool(compare(value(source), other)), source)


def _of_step(value: Any, step: Any) -> Any:
    """A schedule's value: at the state's step, or at a count of the optimizer's own (`own_steps`), which is a tensor."""
    return value(int(step))


_COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    form: getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge") for form in (name, f"__{name}__")
}

# Functions that multiply their first operand by a number, `alpha` or `value`.
_SCALED = {"add", "add_", "sub", "sub_", "addcdiv_", "addcmul_"}


# Fused kernels in graphs: the update of a group as one operation
#
# torch's fused kernel, on the tensors of a group, is one operation of a graph. The class's own step is about thirty for
# each parameter, on which Inductor spends most of the time of a first compiled step. Its code is faster, though, since an
# update fuses with the operations that compute the gradient. So Inductor's graphs update few parameters by the class's own
# step, and many by the kernel. In a graph without machine code, the kernel updates any number.


def _by_kernels(
    recipe: Recipe,
    grads: Grads,
    states: Mapping[str, dict[str, Any]],
    params: Params,
    groups: Sequence[dict[str, Any]],
) -> list[str]:
    """Update in place, by one operation for each call of a kernel in the eager step. Returns the parameters that are left."""
    left = []
    for part in parts_of(recipe, params, recipe.members(params)):
        number, names, kernel = part
        if kernel:
            check_entries(part, params, states, asked=False)
        values = without(groups[number], {"params", *KERNEL_OPTIONS})
        moving = {key: value for key, value in values.items() if isinstance(value, Tensor)}
        one_moves = any(isinstance(beta, Tensor) for beta in values.get("betas", ()))
        # The operation copies gradients with other strides.
        columns = columns_of(names, params, params, states) if kernel and not one_moves else None
        if columns is None or params[names[0]].device.type != "cpu":
            left += names
            continue
        constant, (tensors, _, entries) = json.dumps(without(values, moving), default=float), columns
        of_state = [*chain.from_iterable(entries.values())]
        gradients = [*pick(grads, names).values()]
        FUSED_UPDATE(
            recipe.cls.__name__, constant, [*moving], [*moving.values()], gradients, tensors, [*entries], of_state
        )
    return left


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
    FUSED[getattr(torch.optim, cls)](values, params, laid_out_like(params, grads), columns)


# Each run of a graph gives the same text again, of a few hundred bytes, whose parsing would take longer than a small update.
_values: Callable[[str], dict[str, Any]] = functools.lru_cache(256)(json.loads)

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
