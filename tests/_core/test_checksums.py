"""A checksum tells apart what differs in a bit or in a place, whatever the layout."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from shared import examples
from torch.utils._python_dispatch import TorchDispatchMode

from looplib._core import checksums
from looplib._core.checksums import checksum

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.complex64, torch.complex128, torch.int8, torch.bool]


def test_the_sign_of_zero_counts():
    assert checksum(torch.zeros(3)) != checksum(-torch.zeros(3))


def by_hand(content):
    """The same number by Python's integers: splitmix64 of each word plus its place times a constant, added up."""
    words = [content[begin : begin + 8] for begin in range(0, len(content), 8)]
    total = 0
    for place, word in enumerate(words):
        mixed = int.from_bytes(word, "little") + place * 0x1E3779B97F4A7C15
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
            mixed %= 2**64
            mixed = (mixed ^ (mixed >> shift)) * factor
        total += mixed
    return (total + 2**63) % 2**64 - 2**63


@settings(max_examples=examples(100), deadline=None)
@given(st.binary(max_size=300), st.integers(0, 20), st.sampled_from([1, 2, 5, 1 << 16]))
def test_the_value_is_that_of_integers_in_chunks_of_any_size(content, offset, chunk):
    """It is written to files, so it must not change."""
    content = bytes(range(offset)) + content
    tensor = torch.frombuffer(bytearray(content + b"x"), dtype=torch.uint8)[offset:-1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checksums, "_CHUNK", chunk)
        assert checksum(tensor).item() == by_hand(content[offset:])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_value_is_that_of_integers_for_all_strides(dtype):
    for shape in ((), (0,), (3,), (5, 7), (2, 3, 5)):
        tensor = (torch.randn(shape) * 3).to(dtype)
        for view in (tensor, tensor.t() if tensor.dim() == 2 else tensor, tensor[..., ::2] if shape else tensor):
            content = bytes(view.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8).tolist())
            assert checksum(view).item() == by_hand(content)


class Largest(TorchDispatchMode):
    """The bytes of the largest result that has memory of its own."""

    bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **kwargs or {})
        if isinstance(out, torch.Tensor):
            self.bytes = max(self.bytes, out.untyped_storage().nbytes())
        return out


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_the_members_of_a_stack_share_has_the_value_of_copies_in_the_memory_of_one(dtype):
    for shape in ((), (3,), (0,), (8,), (6, 4)):
        row = (torch.randn(shape) * 3).to(dtype)
        for members in (2, 9):
            copies = row.expand(members, *shape).clone(memory_format=torch.contiguous_format)
            with Largest() as largest:
                assert checksum(row.expand(members, *shape)) == checksum(copies.clone())
                largest.bytes = 0
                checksum(row.expand(members, *shape))
            assert row.nbytes % 8 or largest.bytes <= max(row.nbytes, 8)
