"""Losses that depend on the state, beside raw loops that compute the same numbers."""

import pytest
import torch
from shared import SGD, one_report
from torch import nn

import looplib as ll

on_host = ll.transforms.on_host


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def batches(count):
    return torch.randn(count, 6, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def loss_fn(model, batch):
    """A loss whose second term is weighed by the step, and whose target moves with the epoch and `extra`."""
    x, weight, target = batch
    out = model(x)
    return (out - target).square().mean() + weight * out.abs().mean()


def annealed(step):
    return min(1.0, step / 3)


def target(epoch, extra):
    return epoch + extra["temperature"]


def with_state(state, x):
    return x, on_host(annealed, state.step), on_host(target, state.epoch, state.extra)


def raw_run():
    model = net()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    for step, x in enumerate(batches(6)):
        sgd.zero_grad()
        loss_fn(model, (x, annealed(step), target(step // 2, {"temperature": 0.5}))).backward()
        sgd.step()
    return dict(model.named_parameters())


WRAPPED = {
    "alone": lambda grad_fn: ll.grads.map_batch(grad_fn, with_state),
    "around accumulate": lambda grad_fn: ll.grads.map_batch(ll.accumulate(grad_fn, 3), with_state),
    "within accumulate": lambda grad_fn: ll.accumulate(ll.grads.map_batch(grad_fn, with_state), 3),
}


def compared_with_a_raw_loop(wrap, transform):
    model = net()
    grad_fn = WRAPPED[wrap](ll.make_grad_fn(model, loss_fn))
    step = ll.make_train_step(grad_fn, SGD, donate=transform == "donated")
    state = ll.init_state(model, SGD, epoch_length=2, extra={"temperature": 0.5})
    if transform == "graph":
        step = ll.compile_step(step, backend="eager")
    if transform == "ensemble":
        step, state = ll.vmap_step(step), ll.transforms.stack_states([state])
    for x in batches(6):
        state, _ = step(state, x)
    params = {name: tensor.squeeze(0) if transform == "ensemble" else tensor for name, tensor in state.params.items()}
    torch.testing.assert_close(params, raw_run(), rtol=1e-12, atol=1e-14)


CASES = [(wrap, transform) for wrap in WRAPPED for transform in ("pure", "donated", "graph", "ensemble")]
TRACED = [case for case in CASES if case[0] != "within accumulate" and case[1] in ("graph", "ensemble")]


@one_report
@pytest.mark.parametrize(("wrap", "transform"), [case for case in CASES if case not in TRACED])
def test_the_loss_has_the_numbers_of_the_state_that_a_raw_loop_would_give_it(wrap, transform):
    compared_with_a_raw_loop(wrap, transform)


@pytest.mark.slow
@one_report
@pytest.mark.parametrize(("wrap", "transform"), TRACED)
def test_graphs_of_other_wrappers_have_these_numbers_too(wrap, transform):
    compared_with_a_raw_loop(wrap, transform)


def test_a_number_of_the_state_that_a_graph_would_freeze_is_refused():
    model = net()
    grad_fn = ll.grads.map_batch(ll.make_grad_fn(model, loss_fn), lambda state, x: (x, annealed(state.step), 0.0))
    step = ll.compile_step(ll.make_train_step(grad_fn, SGD), backend="eager")
    with pytest.raises(ll.transforms.UntraceableError, match=r"state\.step was read .*on_host"):
        step(ll.init_state(model, SGD), batches(1)[0])


def test_what_is_no_function_of_a_state_and_a_batch_is_refused_by_name():
    grad_fn = ll.make_grad_fn(net(), loss_fn)
    for wrong, shown in ((3, "3"), (grad_fn, "ll.make_grad_fn")):
        with pytest.raises(TypeError, match=rf"map_batch got {shown}.*; give a function \(state, batch\)"):
            ll.grads.map_batch(grad_fn, wrong)
