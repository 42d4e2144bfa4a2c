"""The gradients of a scaled loss are those of the loss, and what cannot be divided by its scale is refused."""

import functools
import math

import pytest
import torch
from shared import SGD
from shared import mean_square as loss_fn
from torch import nn

import looplib as ll

SCALE = 2.0**12


def scaled(grad_fn, dtype=torch.float64, scale=SCALE):
    """The first half of an update on gradients of a scaled loss, as a train step makes it."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2).to(dtype)
    optimizer = ll.chain(ll.optim.dynamic_loss_scale(scale), SGD)
    state, inner = ll.init_state(model, optimizer), grad_fn(ll.make_grad_fn(model, loss_fn))

    def transformed(x):
        out = inner(state, x, scale=optimizer.loss_scale(state.opt_state))
        assert out.scale is state.opt_state["dynamic_loss_scale"]["loss_scale"]
        return optimizer.transform(out.grads, state.opt_state, state.params, 0, scale=out.scale)

    return transformed, model


@pytest.mark.every_case
@pytest.mark.parametrize("wrap", [lambda g: g, lambda g: ll.accumulate(g, 3)], ids=["whole", "accumulate"])
def test_the_gradients_are_those_of_the_loss_and_the_scale_is_reported(wrap):
    transformed, model = scaled(wrap)
    x = torch.randn(6, 3, dtype=torch.double)
    out = transformed(x)
    loss_fn(model, x).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(out.grads[name], parameter.grad, rtol=1e-12, atol=0)
    assert out.metrics["loss_scale"].compute() == SCALE


def test_all_gradients_are_nan_after_an_overflow():
    transformed, _ = scaled(lambda g: g)
    out = transformed(torch.tensor([[1.0, 2.0, math.inf]], dtype=torch.double))
    assert all(grad.isnan().all() for grad in out.grads.values())
    assert not out.apply


def deaf(grad_fn):
    """A wrapper that accepts keywords and does not pass them on."""

    @functools.wraps(grad_fn)
    def deaf_grad_fn(state, batch, **request):
        return grad_fn(state, batch)

    return deaf_grad_fn


@pytest.mark.parametrize("donate", [False, True])
def test_what_is_not_scaled_or_cannot_be_divided_is_refused(donate):
    halves, _ = scaled(lambda g: g, torch.float16)
    x = torch.ones(2, 3)
    with pytest.raises(ValueError, match=r"weight, bias are in float16.*ll.autocast"):
        halves(x.half())
    with pytest.raises(ValueError, match="once is enough"):
        ll.chain(ll.optim.dynamic_loss_scale(), ("second", ll.optim.dynamic_loss_scale()), SGD)

    model, optimizer = nn.Linear(3, 2), ll.chain(ll.optim.dynamic_loss_scale(), SGD)
    grad_fn = ll.make_grad_fn(model, loss_fn)
    state = ll.init_state(model, optimizer)
    for function in (deaf(grad_fn), deaf(ll.accumulate(grad_fn, 2))):
        step = ll.make_train_step(function, optimizer, donate=donate)
        with pytest.raises(TypeError, match=r"not multiplied by the scale of dynamic_loss_scale.*hands .* on"):
            step(state, x)
    with pytest.raises(TypeError, match=r"positional\(state, batch, request\), which cannot be called .*\*\*request"):
        ll.make_train_step(positional, optimizer)
    assert state.params["weight"] is model.weight  # nothing was spent


def positional(state, batch, request=None):
    raise AssertionError("called")


def test_an_update_that_adapts_a_scale_by_which_nothing_was_multiplied_is_refused():
    model, optimizer = nn.Linear(3, 2), ll.chain(ll.optim.dynamic_loss_scale(), SGD)
    state = ll.init_state(model, optimizer)
    out = ll.make_grad_fn(model, loss_fn)(state, torch.ones(2, 3))
    with pytest.raises(ValueError, match=r"dynamic_loss_scale adapts a scale by which the loss .* not multiplied"):
        ll.apply_gradients(optimizer, state, out, donate=True)
    assert state.params["weight"] is model.weight  # nothing was spent


def test_a_scaled_loss_without_a_part_that_divides_by_the_scale_is_refused():
    model = nn.Linear(3, 2)
    grad_fn, state = ll.make_grad_fn(model, loss_fn), ll.init_state(model, SGD)

    def scaled(state, batch, **request):
        return grad_fn(state, batch, **{**request, "scale": torch.tensor(2.0)})

    with pytest.raises(ValueError, match=r"no part of the update divides them .*dynamic_loss_scale\(\)"):
        ll.make_train_step(scaled, SGD)(state, torch.ones(2, 3))
