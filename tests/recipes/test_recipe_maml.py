"""The recipe maml_sinusoids: it learns to learn, by the gradient that a loop written out by hand has."""

import functools
import math

import pytest
import torch
from test_recipes import load
from torch.func import functional_call, grad
from torch.nn import functional as F

import looplib as ll


@pytest.fixture(scope="module")
def recipe():
    return load("maml_sinusoids")


@pytest.fixture
def quickly_compiled(monkeypatch):
    """Steps are written down as graphs, as ever, and then run as they are: three programs take Inductor long."""
    monkeypatch.setattr(ll, "compile_step", functools.partial(ll.compile_step, backend="eager"))


@pytest.mark.slow
def test_a_step_on_few_points_helps_after_meta_learning_alone(recipe, quickly_compiled, tmp_path):
    picture = tmp_path / "errors.png"
    scores = recipe.main(iterations=800, lr=3e-3, test_tasks=200, picture=str(picture))
    assert scores["MAML 10-shot after 1"] < 0.6 * scores["MAML 10-shot after 0"]
    assert scores["MAML 10-shot after 10"] < scores["MAML 10-shot after 1"]
    assert scores["pretrained 10-shot after 1"] > 0.7 * scores["pretrained 10-shot after 0"]
    assert scores["oracle 5-shot after 0"] < 0.2
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_tasks_are_sinusoids_in_the_papers_ranges(recipe):
    (told, y), (x, again) = (recipe.draw_tasks(500, 7, seed=3, told=told) for told in (True, False))
    assert torch.equal(told[..., :1], x)
    assert torch.equal(y, again)
    amplitude, phase = told[..., 1:2], told[..., 2:]
    assert torch.equal(y, amplitude * torch.sin(x - phase))
    for values, low, high in ((amplitude, 0.1, 5.0), (phase, 0.0, math.pi), (x, -5.0, 5.0)):
        assert low <= values.min() < low + 0.03 * (high - low)
        assert high - 0.03 * (high - low) < values.max() <= high
    assert not torch.equal(recipe.draw_tasks(500, 7, seed=4)[1], y)


def test_the_outer_gradient_equals_that_of_a_loop_written_out(recipe):
    torch.manual_seed(0)
    model = recipe.make_model(1, 8).double()
    x, y = (tensor.double() for tensor in recipe.draw_tasks(4, 10, seed=0))
    loss = recipe.make_meta_loss(model, 0.05)(model, (x, y))
    loss.backward()

    def by_hand(params):
        losses = []
        for i in range(4):

            def error(params, half, i=i):
                return F.mse_loss(functional_call(model, params, x[i, half]), y[i, half])

            slopes = grad(error)(params, slice(0, 5))
            tuned = {name: tensor - 0.05 * slopes[name] for name, tensor in params.items()}
            losses.append(error(tuned, slice(5, 10)))
        return torch.stack(losses).mean()

    params = {name: tensor.detach() for name, tensor in model.named_parameters()}
    assert torch.allclose(loss, by_hand(params), rtol=1e-12)
    for name, slope in grad(by_hand)(params).items():
        # Products over all tasks at once add up in another order.
        assert torch.allclose(dict(model.named_parameters())[name].grad, slope, rtol=1e-10, atol=1e-14)


def test_tuning_is_gradient_descent_on_each_task_alone(recipe):
    torch.manual_seed(0)
    model = recipe.make_model(1, 8)
    params = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    tasks = recipe.draw_tasks(3, 25, seed=1)
    found = recipe.tuned_errors(model, params, 0.02, tasks, 5)
    expected = torch.zeros(11)
    model = recipe.make_model(1, 8)  # for the raw loop, since pure steps have moved on from the one above
    for x, y in zip(*tasks, strict=True):
        model.load_state_dict(params)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
        for step in range(11):
            expected[step] += F.mse_loss(model(x[5:]), y[5:]).detach() / 3
            optimizer.zero_grad()
            F.mse_loss(model(x[:5]), y[:5]).backward()
            optimizer.step()
    assert found == pytest.approx(expected.tolist(), rel=1e-5)  # float32, all tasks at once
