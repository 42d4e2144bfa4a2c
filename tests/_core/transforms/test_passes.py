"""Passes over a graph: what they make of it gives the same numbers."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx

from looplib.transforms import _passes


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_scaled_sum_in_two_operations_is_rounded_as_in_one(dtype):
    x, y = torch.randn(64), torch.randn(64).to(dtype)

    def plain(x, y):
        return torch.add(x, y, alpha=0.1), torch.sub(y, x, alpha=0.3), torch.add(x, 2, alpha=3)

    graph = make_fx(plain)(x, y)
    _passes.without_alpha(graph)
    for found, expected in zip(graph(x, y), plain(x, y), strict=True):
        assert found.dtype is expected.dtype
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)  # one operation rounds once, two twice


@pytest.mark.slow
@given(data=st.data())
@settings(deadline=None)
def test_a_permuted_stack_is_a_stack_of_permuted_tensors(data):
    shape = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=4))
    size = len(shape) + 1
    dim = data.draw(st.integers(-size, size - 1))
    order = [axis - size * data.draw(st.booleans()) for axis in data.draw(st.permutations(range(size)))]
    inner = data.draw(st.permutations(range(len(shape))))  # how they lie in memory
    tensors = [torch.randn(shape).permute(inner) for _ in range(data.draw(st.integers(1, 4)))]

    def plain(*tensors):
        first = tensors[0] + 1
        permuted = torch.stack([first, *tensors[1:]], dim).permute(order)
        first.add_(1)  # which is after what was stacked
        return permuted.clone(memory_format=torch.contiguous_format)

    graph = make_fx(plain)(*tensors)
    _passes.stacked_where_it_goes(graph)
    assert torch.equal(graph(*tensors), plain(*tensors))
    assert graph(*tensors).is_contiguous()
