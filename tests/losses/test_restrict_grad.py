"""Two losses of one forward pass, beside two passes, each for its own parameters."""

import pytest
import torch
from shared import SGD
from torch import nn
from torch.nn.functional import softplus

import looplib as ll


def net():
    torch.manual_seed(0)
    parts = {"generator": nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 3)), "critic": nn.Linear(3, 1)}
    return nn.ModuleDict(parts).double()


def losses(model, batch):
    noise, real = batch
    of_fake, of_real = model["critic"](model["generator"](noise)), model["critic"](real)
    return {"critic": softplus(of_fake).mean() + softplus(-of_real).mean(), "generator": softplus(-of_fake).mean()}


def both(model, batch):
    return sum(ll.losses.restrict_grad(loss, model[part].parameters()) for part, loss in losses(model, batch).items())


def batches(count):
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(6, 2, generator=generator).double(), torch.randn(6, 3, generator=generator).double())
        for _ in range(count)
    ]


def raw_run(count):
    """Both updates at the old weights, from a forward pass each."""
    model = net()
    optimizers = {part: torch.optim.SGD(model[part].parameters(), lr=0.1, momentum=0.9) for part in model}
    for batch in batches(count):
        grads = {part: torch.autograd.grad(losses(model, batch)[part], [*model[part].parameters()]) for part in model}
        for part, sgd in optimizers.items():
            for parameter, grad in zip(model[part].parameters(), grads[part], strict=True):
                parameter.grad = grad
            sgd.step()
    return dict(model.named_parameters())


WRAPPED = {
    "alone": lambda grad_fn: grad_fn,
    "accumulated": lambda grad_fn: ll.accumulate(grad_fn, 3),
}


@pytest.mark.every_case
@pytest.mark.parametrize("kind", ["pure", "donated", "graph"])
@pytest.mark.parametrize("wrap", WRAPPED)
def test_both_networks_move_as_by_two_passes_at_the_old_weights(wrap, kind):
    model, sgd = net(), ll.optimizer(torch.optim.SGD, lr=0.1, momentum=0.9)
    optimizer = ll.optim.partition({"generator": sgd, "critic": sgd}, lambda name, _: name.split(".")[0])
    grad_fn = WRAPPED[wrap](ll.make_grad_fn(model, both))
    step = ll.make_train_step(grad_fn, optimizer, donate=kind == "donated")
    step = ll.compile_step(step, backend="eager") if kind == "graph" else step
    state = ll.init_state(model, optimizer)
    for batch in batches(5):
        state, metrics = step(state, batch)
    torch.testing.assert_close(state.params, raw_run(5), rtol=1e-12, atol=1e-14)
    assert ll.compute(metrics)["loss"] > 0


def test_a_second_derivative_goes_through_its_backward_pass_as_through_a_plain_one():
    model, (batch,) = net(), batches(1)
    params = [*model.parameters()]
    restricted = ll.losses.restrict_grad(losses(model, batch)["critic"], params)
    norms = []
    for loss in (restricted, losses(model, batch)["critic"]):
        grads = torch.autograd.grad(loss, params, create_graph=True)
        norms.append(torch.autograd.grad(sum(grad.square().sum() for grad in grads), params, allow_unused=True))
    assert any(grad is not None and grad.any() for grad in norms[1])
    torch.testing.assert_close(norms[0], norms[1])


def test_a_scaled_loss_keeps_small_gradients_in_float16():
    """Restricted to all parameters, a loss has the bits that it has alone, of which the scale has kept many from 0."""
    model = net().float()

    def tiny(model, batch):
        return 1e-5 * softplus(model["critic"](model["generator"](batch[0])).float()).mean()

    def restricted(model, batch):
        return ll.losses.restrict_grad(tiny(model, batch), model.parameters())

    optimizer = ll.chain(ll.optim.dynamic_loss_scale(), SGD)
    state, batch = ll.init_state(model, optimizer), [part.float() for part in batches(1)[0]]

    scale = optimizer.loss_scale(state.opt_state)

    def grads(loss_fn):
        out = ll.make_grad_fn(model, ll.autocast(loss_fn, torch.float16))(state, batch, scale=scale)
        return {name: grad / scale for name, grad in out.grads.items()}

    alone = grads(tiny)
    assert all(torch.equal(grad, alone[name]) for name, grad in grads(restricted).items())
    unscaled = ll.make_grad_fn(model, ll.autocast(tiny, torch.float16))(state, batch).grads
    assert any(not torch.equal(grad, alone[name]) for name, grad in unscaled.items())


@pytest.mark.slow
def test_meta_gradients_pass_through_the_restricted_losses():
    model = net()
    step = ll.transforms.differentiable(ll.make_train_step(ll.make_grad_fn(model, both), SGD))
    state, batch = ll.init_state(model, SGD), batches(1)[0]

    def after_two_steps(bias):
        now = state.replace(params={**state.params, "critic.bias": bias})
        for _ in range(2):
            now, _ = step(now, batch)
        generator = {name.removeprefix("generator."): each for name, each in now.params.items()}
        generator = {name: each for name, each in generator.items() if "critic" not in name}
        return torch.func.functional_call(model["generator"], generator, batch[0]).square().sum()

    bias = torch.zeros(1, dtype=torch.float64)
    slope = torch.func.grad(after_two_steps)(bias)
    h = torch.full_like(bias, 1e-5)
    finite = (after_two_steps(bias + h) - after_two_steps(bias - h)) / 2e-5
    assert slope.abs() > 1e-6
    torch.testing.assert_close(slope[0], finite, rtol=1e-5, atol=1e-9)


def test_under_evaluation_it_is_the_value():
    model = net()
    step = ll.make_eval_step(model, lambda model, batch: {"loss": both(model, batch)})
    batch = batches(1)[0]
    expected = sum(losses(model, batch).values()).item()
    assert ll.compute(step(ll.init_state(model), batch))["loss"] == pytest.approx(expected, rel=1e-12)


def test_unreached_parameters_and_per_sample_gradients_are_refused():
    model, other = net(), nn.Linear(2, 2)
    for params, message in (
        ([*other.parameters()], r"no gradient reached generator\.0\.weight"),
        ([], "depends on none of these parameters"),
    ):
        grad_fn = ll.make_grad_fn(
            model, lambda model, batch, params=params: ll.losses.restrict_grad(both(model, batch), params)
        )
        with pytest.raises(ValueError, match=message):
            grad_fn(ll.init_state(model), batches(1)[0])
    per_sample = ll.contrib.make_per_sample_grad_fn(model, both)
    with pytest.raises(ValueError, match=r"torch\.func"):
        per_sample(ll.init_state(model), batches(1)[0])
