"""Checksums of tensors, computed on their device."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from looplib._core.checks import is_plain
from looplib._core.torch_private import functorch_level_of

_PLACE, _FIRST, _SECOND = 0x1E3779B97F4A7C15, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15
_CHUNK = 1 << 16  # words, on CPUs


def checksum(tensor: Tensor) -> Tensor:
    """Hash of the bits of all numbers and their positions: a scalar int64 tensor, computed without waiting.

    It is the same on every device and for all strides, and always changes if only one 8-byte word changes. It does
    not protect against deliberately constructed collisions.
    """
    data = bits_of(tensor.detach())
    whole = data.numel() // 8 * 8
    words = data[:whole].clone() if data.storage_offset() % 8 else data[:whole]
    words = words.view(torch.int64)
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    if whole < data.numel():
        last = _word_of(data[whole:])  # at place 0
        total += _mix(last, torch.empty_like(last)).sum()
    # Words at a time: as many as fit a cache, or few large kernels. They are mixed in memory that is taken once.
    chunk = min(max(1, words.numel()), _CHUNK if words.device.type == "cpu" else 1 << 22)
    places = torch.arange(1, chunk + 1, device=words.device).mul_(_PLACE)
    mixed, scratch = torch.empty_like(places), torch.empty_like(places)
    for begin in range(0, words.numel(), chunk):
        part = words[begin : begin + chunk]
        if begin:
            places.add_(_signed(chunk * _PLACE))
        n = part.numel()
        total += _mix(torch.add(part, places[:n], out=mixed[:n]), scratch[:n]).sum()
    return total


def bits_of(tensor: Tensor) -> Tensor:
    """Bytes of a tensor as uint8, in the order of its numbers."""
    tensor = tensor.to_dense() if tensor.layout is not torch.strided else tensor
    plain = tensor.resolve_conj().resolve_neg().contiguous()
    # Not reshape(-1): a dimension of one element counts as contiguous with any stride, and view() would refuse it.
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8)


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


def _mix(words: Tensor, scratch: Tensor) -> Tensor:
    """Mix each word in place, as in splitmix64, modulo 2**64."""
    for by, factor in ((30, _FIRST), (27, _SECOND)):
        words.bitwise_xor_(_shifted(words, by, scratch)).mul_(factor)
    return words.bitwise_xor_(_shifted(words, 31, scratch))


def _shifted(words: Tensor, by: int, scratch: Tensor) -> Tensor:
    """Logical right shift."""
    return torch.bitwise_right_shift(words, by, out=scratch).bitwise_and_((1 << (64 - by)) - 1)


def _signed(number: int) -> int:
    """The int64 with the bits of a number modulo 2**64."""
    return (number + 2**63) % 2**64 - 2**63
