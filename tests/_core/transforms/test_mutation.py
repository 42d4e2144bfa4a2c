"""A donated update is compiled without the intermediate values that nothing needs any more."""

import contextlib

import pytest
import torch
from torch._inductor.scheduler import Scheduler
from torch.utils._pytree import tree_leaves

import looplib as ll
from looplib.transforms import _inductor


def trained(monkeypatch):
    """The tensors of a state after three donated steps, and the number of values that Inductor computed."""
    torch.manual_seed(0)
    model, optimizer = torch.nn.Linear(5, 3), ll.optimizer(torch.optim.AdamW, lr=1e-2, amsgrad=True)
    grad_fn = ll.make_grad_fn(model, lambda model, x: model(x).square().mean())
    train_step = ll.make_train_step(ll.clip_by_global_norm(grad_fn, 0.1), optimizer, donate=True)
    train_step = ll.compile_step(train_step, options={"fx_graph_cache": False})
    counts, plain = [], Scheduler.__init__

    def counting(scheduler, nodes):
        counts.append(len(nodes))
        plain(scheduler, nodes)

    monkeypatch.setattr(Scheduler, "__init__", counting)
    state = ll.init_state(model, optimizer)
    for _ in range(3):
        state, _ = train_step(state, torch.randn(8, 5))
    monkeypatch.setattr(Scheduler, "__init__", plain)
    return tree_leaves((state.params, state.opt_state)), counts[0]


@pytest.mark.slow
def test_a_donated_step_has_fewer_values_and_the_same_bits(monkeypatch):
    tensors, few = trained(monkeypatch)
    monkeypatch.setattr(_inductor, "only_live_values_are_kept", contextlib.nullcontext)
    expected, many = trained(monkeypatch)
    assert few < 0.7 * many
    assert all(torch.equal(one, other) for one, other in zip(tensors, expected, strict=True))
