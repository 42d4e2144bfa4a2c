"""Work of a compiled step before it runs the machine code."""

import torch
from torch import nn

import looplib as ll
from looplib.transforms import _compiler


def test_a_step_that_was_prepared_is_not_looked_through_again(monkeypatch):
    model, optimizer = nn.Linear(4, 3), ll.optimizer(torch.optim.AdamW, lr=0.1)
    grad_fn = ll.make_grad_fn(model, lambda model, x: model(x).square().mean())
    step = ll.compile_step(ll.make_train_step(grad_fn, optimizer), backend="eager")
    state = ll.init_state(model, optimizer)
    first, second = torch.randn(5, 4), torch.randn(5, 4)
    state, _ = step(state, first)
    looked = []
    plain = _compiler.expression
    monkeypatch.setattr(_compiler, "expression", lambda tree: looked.append(tree) or plain(tree))
    state, _ = step(state, second)
    assert looked == [second]
