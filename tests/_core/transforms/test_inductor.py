"""Rewritten graphs for Inductor, and for CUDA graphs, the inputs that stay at their addresses."""

import pytest
import torch
from torch._inductor import compile_fx as inductor
from torch._inductor.cudagraph_utils import check_for_mutation_ignore_cuda_graph_managed_tensor as why_skipped
from torch.fx.experimental.proxy_tensor import make_fx

import looplib as ll
from looplib.transforms import _inductor


def compiled_with(monkeypatch, *, donate, **options):
    """Train two steps, and return each graph that looplib told Inductor more about, with its code and fixed inputs."""
    seen, compile_inner = [], inductor.compile_fx_inner

    def inner(graph, inputs, **settings):
        made = compile_inner(graph, inputs, **settings)
        seen.append((graph, made, list(settings.get("static_input_idxs", ()))))
        return made

    monkeypatch.setattr(inductor, "compile_fx_inner", inner)
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    optimizer = ll.optimizer(torch.optim.SGD, lr=lambda step: 0.1 / (step + 1), momentum=0.9)
    grad_fn = ll.make_grad_fn(model, lambda model, x: (model(x) * scale).square().mean())
    step = ll.compile_step(ll.make_train_step(grad_fn, optimizer, donate=donate), **options)
    state = ll.init_state(model, optimizer)
    with inductor.config.patch(force_disable_caches=True):
        for _ in range(2):
            state, _ = step(state, torch.ones(4, 3))
    return seen


scale = torch.tensor([1.0, 2.0])  # a tensor of the graph itself


@pytest.mark.slow
def test_all_that_a_donated_step_writes_stays_where_it_is(monkeypatch):
    ((graph, made, fixed),) = compiled_with(monkeypatch, donate=True, mode="reduce-overhead")
    written = set(made.mutated_input_idxs)
    assert len(written) == 4 + 4 + 3  # parameters, momenta and the statistics of batch norm
    assert why_skipped(graph, made.mutated_inputs, made.mutated_input_idxs, fixed) is None
    assert "mutated inputs" in why_skipped(graph, made.mutated_inputs, made.mutated_input_idxs, ())
    inputs = [node.meta["val"] for node in graph.graph.find_nodes(op="placeholder")]
    moving = [tuple(inputs[index].shape) for index in range(len(inputs)) if index not in fixed]
    assert moving == [(2,), (2,), (), (4, 3)]  # `scale` forward and backward, the learning rate and the batch


@pytest.mark.slow
def test_a_graph_that_writes_nothing_is_compiled_as_by_torch(monkeypatch):
    assert compiled_with(monkeypatch, donate=False, mode="reduce-overhead") == []


def test_a_state_that_is_not_aligned_is_copied_for_the_run_and_written_back():
    storage = torch.arange(9.0)
    aligned, shifted, batch = torch.zeros(4), storage[1:5], torch.ones(4)
    assert shifted.data_ptr() % 16

    def compiled(one, other, batch):
        assert not one.data_ptr() % 16
        assert not other.data_ptr() % 16
        return [one.add_(batch).sum(), other.add_(batch).sum()]

    sums = _inductor._run_apart(compiled, [0, 1], [aligned, shifted, batch])
    assert [total.item() for total in sums] == [4, 1 + 2 + 3 + 4 + 4]
    assert aligned.tolist() == [1] * 4
    assert storage.tolist() == [0, 2, 3, 4, 5, 5, 6, 7, 8]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_scaled_sum_in_two_operations_is_rounded_as_in_one(dtype):
    x, y = torch.randn(64), torch.randn(64).to(dtype)

    def plain(x, y):
        return torch.add(x, y, alpha=0.1), torch.sub(y, x, alpha=0.3), torch.add(x, 2, alpha=3)

    graph = make_fx(plain)(x, y)
    _inductor.without_alpha(graph)
    for found, expected in zip(graph(x, y), plain(x, y), strict=True):
        assert found.dtype is expected.dtype
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)  # one operation rounds once, two twice


def test_a_power_is_computed_once_and_not_for_each_element():
    def scaled(x, step):
        return x / (1 - 0.9**step).sqrt()

    inputs = torch.randn(3, 4), torch.tensor(3.0)
    graph = make_fx(scaled, tracing_mode="fake")(*inputs)
    _inductor.powers_once(graph)
    (node,) = graph.graph.find_nodes(op="call_function", target=torch.ops.aten.div.Tensor)
    assert node.args[1].target is torch.ops.aten.as_strided.default  # which Inductor writes to memory
    assert torch.equal(graph(*inputs), scaled(*inputs))
