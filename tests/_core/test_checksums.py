"""A checksum tells apart what differs in a bit or in a place, whatever the layout."""

import pytest
import torch

from looplib._core.checksums import checksum

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.complex64, torch.complex128, torch.int8, torch.bool]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_each_number_counts(dtype):
    tensor = torch.arange(25).remainder(2).to(dtype)
    changed = [tensor.clone() for _ in range(25)]
    for index, other in enumerate(changed):
        other[index] = 1 - int(index % 2)
    assert len({checksum(each).item() for each in [tensor, *changed]}) == 26
    assert checksum(tensor[1:]) == checksum(tensor[1:].clone())


def test_strides_do_not_count_and_places_do():
    tensor = torch.randn(5, 7)
    assert checksum(tensor.t().contiguous().t()) == checksum(tensor)
    assert checksum(tensor.roll(1)) != checksum(tensor)
    assert checksum(torch.zeros(3)) != checksum(-torch.zeros(3))


def test_tensors_of_several_chunks():
    tensor = torch.zeros(200_000)
    for place in (1, 140_000, 199_999):
        other = tensor.clone()
        other[place] = 1e-45
        assert checksum(other) != checksum(tensor)
