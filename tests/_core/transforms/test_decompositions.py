"""Operations in terms of others, against torch's own."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from looplib.transforms.decompositions import mappable


@pytest.mark.every_case
@pytest.mark.parametrize("rate", [0.25, 1.0])
def test_dropout_scales_what_it_keeps(rate):
    values = torch.ones(1000)

    def dropped(values):
        return torch.ops.aten.native_dropout(values, rate, True)

    traced = make_fx(dropped, mappable())(values)
    assert torch.ops.aten.native_dropout.default not in {node.target for node in traced.graph.nodes}
    for out, kept in (dropped(values), traced(values)):
        assert kept.dtype is torch.bool
        assert abs(kept.float().mean() - (1 - rate)) < 0.1
        torch.testing.assert_close(out, kept / (1 - rate) if rate < 1 else torch.zeros(1000))
