"""Choices of a tensor in the graph of a step, and who may ask if a step is traced."""

import re
from pathlib import Path

import pytest
import torch

import looplib
from looplib._core import tracing

# Where a step is traced, and the few functions that say why they must ask.
MAY_ASK = {
    "_core/tracing.py",
    "_core/passes.py",  # the form of forward and backward passes
    "_core/chain.py",  # the form of a part, and the flags of an update by hand
    "_core/misuse.py",  # warnings look at no values there
    "_core/modules.py",  # the microbatch of a draw
    "transforms/_compile_step.py",
    "transforms/_differentiable.py",
}
ASKS = re.compile(r"\btracing\(\)|\bcurrent\(\)|\bdifferentiated\(\)|\bimport\b.*\bentered\b|tracing\.entered")


def test_parts_gradient_functions_and_losses_do_not_ask_if_they_are_traced():
    home = Path(looplib.__file__).parent
    asking = {path.relative_to(home).as_posix() for path in home.rglob("*.py") if ASKS.search(path.read_text())}
    assert asking == MAY_ASK


def test_a_tensor_chooses_between_tensors_alone_in_a_graph():
    old, new = {"count": torch.tensor(1), "n": 1}, {"count": torch.tensor(2), "n": 2}
    with tracing.within(tracing.Trace(lambda function, values: None)):
        assert tracing.where(torch.tensor(True), {**new, "n": 1}, old) == {"count": torch.tensor(2), "n": 1}
        with pytest.raises(tracing.UntraceableError, match="would have to choose between 2 and 1: keep tensors"):
            tracing.where(torch.tensor(True), new, old)
