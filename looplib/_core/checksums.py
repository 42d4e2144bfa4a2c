"""Checksums of tensors, computed on their device."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from looplib._core.checks import is_plain
from looplib._core.torch_private import functorch_level_of

_PLACE, _FIRST, _SECOND = 0x1E3779B97F4A7C15, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15


def checksum(tensor: Tensor) -> Tensor:
    """Hash of the bits of all numbers and their positions: a scalar int64 tensor, computed without waiting.

    It is the same on every device and for all strides, and always changes if only one 8-byte word changes. It does
    not protect against deliberately constructed collisions.
    """
    data = bits_of(tensor.detach())
    whole = data.numel() // 8 * 8
    words = data[:whole].clone() if data.storage_offset() % 8 else data[:whole]
    words = words.view(torch.int64)
    total = _hash(_word_of(data[whole:]), 0)
    # Words at a time: as many as fit a cache, or few large kernels.
    chunk = 1 << (16 if words.device.type == "cpu" else 22)
    for begin in range(0, words.numel(), chunk):
        total = total + _hash(words[begin : begin + chunk], begin + 1)
    return total


def bits_of(tensor: Tensor) -> Tensor:
    """Bytes of a tensor as uint8, in the order of its numbers."""
    tensor = tensor.to_dense() if tensor.layout is not torch.strided else tensor
    return tensor.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def checksums(tensors: Iterable[Tensor]) -> list[int]:
    """Checksums of several tensors, copied to the CPU in one transfer."""
    sums = [checksum(tensor) for tensor in tensors]
    return torch.stack([each.to(sums[0].device) for each in sums]).tolist() if sums else []


def has_values(tensor: Tensor) -> bool:
    """True for a plain tensor whose values can be read here: not a shard, and not inside a transform."""
    return (
        is_plain(tensor)
        and tensor.device.type != "meta"
        and not tensor.is_quantized
        and functorch_level_of(tensor) < 1
    )


def _word_of(rest: Tensor) -> Tensor:
    """The last bytes, padded to a word."""
    shifts = 8 * torch.arange(rest.numel(), device=rest.device)
    return (rest.to(torch.int64) << shifts).sum().reshape(1)


def _hash(words: Tensor, place: int) -> Tensor:
    """Mix each word with its position, as in splitmix64, and add up modulo 2**64."""
    words = words + torch.arange(place, place + words.numel(), device=words.device) * _PLACE
    words = (words ^ _shifted(words, 30)) * _FIRST
    words = (words ^ _shifted(words, 27)) * _SECOND
    return (words ^ _shifted(words, 31)).sum()


def _shifted(words: Tensor, by: int) -> Tensor:
    """Logical right shift."""
    return (words >> by) & ((1 << (64 - by)) - 1)
