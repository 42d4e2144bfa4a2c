"""Rewritten graphs for Inductor, and who is told that it compiles."""

import io
import sys
from types import SimpleNamespace

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from looplib.transforms import _backends, _compile_step


@pytest.mark.every_case
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64])
def test_a_scaled_sum_in_two_operations_is_rounded_as_in_one(dtype):
    x, y = torch.randn(64), torch.randn(64).mul(9).to(dtype)

    def plain(x, y):
        return torch.add(x, y, alpha=0.1), torch.sub(y, x, alpha=0.3), torch.add(x, 2, alpha=3)

    graph = make_fx(plain, tracing_mode="fake")(x, y)
    _backends.without_alpha(graph)
    for found, expected in zip(graph(x, y), plain(x, y), strict=True):
        assert found.dtype is expected.dtype
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)  # one operation rounds once, two twice


def test_a_power_is_computed_once_and_not_for_each_element():
    def scaled(x, step):
        return x / (1 - 0.9**step).sqrt()

    inputs = torch.randn(3, 4), torch.tensor(3.0)
    graph = make_fx(scaled, tracing_mode="fake")(*inputs)
    _backends.powers_once(graph)
    (node,) = graph.graph.find_nodes(op="call_function", target=torch.ops.aten.div.Tensor)
    assert node.args[1].target is torch.ops.aten.as_strided.default  # which Inductor writes to memory
    assert torch.equal(graph(*inputs), scaled(*inputs))


def test_those_who_watch_a_terminal_or_a_notebook_are_told_of_a_compilation(monkeypatch):
    for kernel, on_terminal in ((False, False), (False, True), (True, False)):
        shell = SimpleNamespace(**{"kernel": None} if kernel else {})
        monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda shell=shell: shell))
        monkeypatch.setattr(sys, "stderr", io.StringIO())
        monkeypatch.setattr(sys.stderr, "isatty", lambda answer=on_terminal: answer)
        assert _compile_step._is_watched() is (kernel or on_terminal)
