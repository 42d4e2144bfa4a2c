"""Decompositions: operations in terms of others that torch can functionalize, map or differentiate."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._decomp import get_decompositions
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

_RECURRENT = (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)


class RecurrentInParts(TorchFunctionMode):
    """Run recurrent layers as products and sums that torch.vmap can map, with or without their weights.

    oneDNN's operation for an LSTM, on a CPU, can be neither mapped nor run in a graph. And torch adds the input to a
    product of the hidden state in place, which fails if only the input is mapped, so zeros of the input's are added
    to the hidden state first.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _RECURRENT:
            return func(*args, **(kwargs or {}))
        if isinstance(args[2], list):  # the weights; a packed sequence has the hidden state here
            zero = args[0].new_zeros(())
            args = (args[0], tree_map(lambda hidden: hidden + zero, args[1]), *args[2:])
        before = torch._C._get_mkldnn_enabled()
        try:
            torch._C._set_mkldnn_enabled(False)  # torch.backends.mkldnn.flags would set TF32 too, and warn
            return func(*args, **(kwargs or {}))
        finally:
            torch._C._set_mkldnn_enabled(before)


# The three tables are made by the first trace of a process, since listing torch's operations takes long.


@functools.cache
def _simple() -> dict[Any, Callable[..., Any]]:
    """Operations on lists in terms of the operation on each tensor."""
    aten = torch.ops.aten
    forms: dict[Any, Callable[..., Any]] = {aten.copy.default: _copied, aten.as_strided_scatter.default: _scattered}
    for name in dir(aten):
        base = name.removeprefix("_foreach_")
        if base != name and not base.endswith("_") and (base == "norm" or hasattr(aten, base)):
            packet = getattr(aten, name)
            overloads = [getattr(packet, overload) for overload in packet.overloads() if "out" not in overload]
            forms |= dict.fromkeys(overloads, functools.partial(_on_each, _on_one(base)))
    return forms


def _copied(into: Tensor, values: Tensor, non_blocking: bool = False) -> Tensor:
    return values.to(into.device, into.dtype).expand(into.shape)


def _scattered(
    into: Tensor, values: Tensor, size: Sequence[int], stride: Sequence[int], offset: int | None = None
) -> Any:
    """The derivative of `as_strided`, which writes to new memory: of average pooling in channels_last, for example."""
    if into.dim() != 1 or into.stride() != (1,) or into.storage_offset():
        return NotImplemented
    indices = torch.arange(len(into), device=into.device).as_strided(size, stride, offset or 0)
    return into.scatter(0, indices.flatten(), values.flatten())


def _on_one(name: str) -> Callable[..., Tensor]:
    packet: Callable[..., Tensor] = getattr(torch.ops.aten, "linalg_vector_norm" if name == "norm" else name)
    return packet


def _on_each(packet: Callable[..., Tensor], *args: Any, **kwargs: Any) -> list[Tensor]:
    return [
        packet(*[arg[index] if isinstance(arg, (list, tuple)) else arg for arg in args], **kwargs)
        for index in range(len(args[0]))
    ]


@functools.cache
def mappable() -> dict[Any, Callable[..., Any]]:
    """Operations that `torch.vmap` does not support, or only as a loop over the members."""
    aten = torch.ops.aten
    # On some devices batch norm becomes this operation, which torch.vmap would take member by member.
    norms: dict[Any, Callable[..., Any]] = get_decompositions([aten._native_batch_norm_legit_functional])
    return {
        **_simple(),
        **norms,
        aten.native_dropout.default: _dropout,
        aten.bernoulli.default: lambda rates: (torch.rand_like(rates) < rates).to(rates.dtype),
    }


def _dropout(values: Tensor, rate: float, train: bool | None) -> Any:
    if train is False:
        return NotImplemented
    kept = torch.ops.aten.bernoulli.p(torch.empty_like(values), 1 - rate)
    return values * (kept / (1 - rate) if rate < 1 else kept), kept.bool()


@functools.cache
def differentiable() -> dict[Any, Callable[..., Any]]:
    """Operations whose derivatives of every order are right.

    torch has no derivative for the statistics that a norm passes to its backward pass. It needs none if it
    differentiates the norm itself, but under torch.vmap it differentiates the operations that the norm consists of,
    and the outer gradient would be wrong.
    """
    aten = torch.ops.aten
    norms = [
        aten.native_layer_norm,
        aten.native_layer_norm_backward,
        aten.native_batch_norm,
        aten.native_batch_norm_backward,
        aten._native_batch_norm_legit,
        aten._native_batch_norm_legit_functional,
    ]
    forms: dict[Any, Callable[..., Any]] = {**_simple(), **get_decompositions(norms)}
    # torch.vmap does not support fill
    return {**forms, aten.sqrt.default: _root, aten.fill.Scalar: torch.full_like}


def _root(x: Tensor) -> Tensor:
    """Square root with a slope of 0 at 0.

    Adam divides by the root of a mean square, which is 0 for a weight that has had no gradient, such as those of a
    dead unit. The infinite slope of the root times the zero slope of the square would be NaN there, although the
    update does not depend on the weight.
    """
    positive = x != 0
    return torch.where(positive, torch.where(positive, x, 1).pow(0.5), 0)
