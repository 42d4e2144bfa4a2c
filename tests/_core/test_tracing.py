"""Choices of a tensor in the graph of a step."""

import pytest
import torch

from looplib._core import tracing


def test_a_tensor_chooses_between_tensors_alone_in_a_graph():
    old, new = {"count": torch.tensor(1), "n": 1}, {"count": torch.tensor(2), "n": 2}
    with tracing.within(tracing.Trace(lambda function, values: None)):
        assert tracing.where(torch.tensor(True), {**new, "n": 1}, old) == {"count": torch.tensor(2), "n": 1}
        with pytest.raises(tracing.UntraceableError, match="would have to choose between 2 and 1: keep tensors"):
            tracing.where(torch.tensor(True), new, old)
