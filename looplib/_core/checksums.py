"""Checksums of tensors, computed on their device."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from itertools import product

import torch
from torch import Tensor
from torch.nn.functional import pad

from looplib._core.checks import parts_of
from looplib._core.copies import is_shared
from looplib._core.mappings import stacked

_PLACE, _FIRST, _SECOND = 0x1E3779B97F4A7C15, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15
_CHUNK = 1 << 18  # words: they fit in a cache of a CPU, and kernels of a GPU are few


def checksum(tensor: Tensor) -> Tensor:
    """Hash of the bits of all numbers and their positions: a scalar int64 tensor, computed without waiting.

    It is the same on every device and for all strides, and always changes if only one 8-byte word changes. It does
    not protect against deliberately constructed collisions. Of a subclass, the tensors in it are hashed, such as the
    integers and the scales of a quantized one.
    """
    parts = parts_of(tensor)
    if len(parts) != 1 or parts[0] is not tensor:
        return checksum(stacked([checksum(part) for part in parts]))
    repeated = is_shared(tensor) and tensor[0].nbytes % 8 == 0  # by the members of a stack: one is copied, not all
    data = bits_of((tensor[0] if repeated else tensor).detach())
    words = pad(data, (0, -data.numel() % 8)).view(torch.int64)  # a copy, which is aligned
    total = words.new_zeros(())
    for number, begin in product(range(len(tensor) if repeated else 1), range(0, len(words), _CHUNK)):
        part, first = words[begin : begin + _CHUNK], number * len(words) + begin
        positions = torch.arange(first, first + len(part), device=words.device)
        total += _mixed(positions.mul_(_PLACE).add_(part)).sum()
    return total


def _mixed(words: Tensor) -> Tensor:
    """Mix each word in place, as in splitmix64, modulo 2**64."""
    for shift, factor in ((30, _FIRST), (27, _SECOND), (31, 1)):
        shifted = (words >> shift).bitwise_and_((1 << (64 - shift)) - 1)  # a logical shift
        words.bitwise_xor_(shifted).mul_(factor)
    return words


def bits_of(tensor: Tensor) -> Tensor:
    """Bytes of a tensor as uint8, in the order of its numbers."""
    tensor = tensor.to_dense() if tensor.layout is not torch.strided else tensor
    plain = tensor.resolve_conj().resolve_neg().contiguous()
    # Not reshape(-1): a dimension of one element counts as contiguous with any stride, and view() would refuse it.
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8)


def checksums(tensors: Iterable[Tensor]) -> list[int]:
    """Checksums of several tensors, copied to the CPU in one transfer."""
    sums = [checksum(tensor) for tensor in tensors]
    return stacked(sums).tolist() if sums else []


def bytes_of(tensor: Tensor) -> memoryview:
    """Memory of a contiguous CPU tensor of uint8, without numpy. It does not keep the tensor alive."""
    if not tensor.numel():
        return memoryview(b"")
    return memoryview((ctypes.c_char * tensor.numel()).from_address(tensor.data_ptr())).cast("B")
