"""The gradients of a scaled loss are those of the loss, and what cannot be divided by its scale is refused."""

import math

import pytest
import torch
from shared import SGD
from shared import mean_square as loss_fn
from torch import nn

import looplib as ll

SCALE = 2.0**12


def scaled(grad_fn, dtype=torch.float64, scale=SCALE):
    torch.manual_seed(0)
    model = nn.Linear(3, 2).to(dtype)
    optimizer = ll.chain(ll.optim.dynamic_loss_scale(scale), SGD)
    return grad_fn(ll.make_grad_fn(model, loss_fn)), ll.init_state(model, optimizer), model


@pytest.mark.every_case
@pytest.mark.parametrize("wrap", [lambda g: g, lambda g: ll.accumulate(g, 3)], ids=["whole", "accumulate"])
def test_the_gradients_are_those_of_the_loss_and_the_scale_is_reported(wrap):
    grad_fn, state, model = scaled(wrap)
    x = torch.randn(6, 3, dtype=torch.double)
    out = grad_fn(state, x)
    loss_fn(model, x).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(out.grads[name], parameter.grad, rtol=1e-12, atol=0)
    assert out.metrics["loss_scale"].compute() == SCALE
    assert out.scale is None


def test_all_gradients_are_nan_after_an_overflow():
    grad_fn, state, _ = scaled(lambda g: g)
    out = grad_fn(state, torch.tensor([[1.0, 2.0, math.inf]], dtype=torch.double))
    assert all(grad.isnan().all() for grad in out.grads.values())


def test_what_is_not_scaled_or_cannot_be_divided_is_refused():
    x = torch.ones(2, 3)
    halves, state, _ = scaled(lambda g: g, torch.float16)
    with pytest.raises(ValueError, match=r"weight, bias are in float16.*ll.autocast"):
        halves(state, x.half())
    deaf, state, _ = scaled(lambda g: lambda state, batch, request=None: g(state, batch))
    with pytest.raises(TypeError, match="third argument"):
        deaf(state, x.double())
    with pytest.raises(ValueError, match="once is enough"):
        scaled(ll.grads.scale_loss)
    twice, state, _ = scaled(lambda g: lambda *call: g(*call))  # which is seen when it runs
    with pytest.raises(ValueError, match="once is enough"):
        twice(state, x.double())


def test_a_step_that_adapts_a_scale_by_which_nothing_was_multiplied_is_refused():
    model, optimizer = nn.Linear(3, 2), ll.chain(ll.optim.dynamic_loss_scale(), SGD)
    step = ll.make_train_step(ll.make_grad_fn(model, loss_fn), optimizer, donate=True)
    state = ll.init_state(model, optimizer)
    with pytest.raises(ValueError, match=r"wrap the gradient function in ll\.grads\.scale_loss"):
        step(state, torch.ones(2, 3))
    assert state.params["weight"] is model.weight  # nothing was spent
