"""Gathering of sharded tensors."""

import torch

from looplib.checkpoint.interop._whole import whole


def test_a_tensor_that_is_whole_is_given_back():
    tensor = torch.nn.Parameter(torch.ones(2))
    assert whole(tensor) is tensor
