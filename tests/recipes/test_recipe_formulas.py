"""Formulas of recipes, by hand or beside scipy."""

import functools
import math

import numpy as np
import pytest
import scipy.linalg
import torch
from scipy import ndimage
from test_recipes import load
from torch.func import functional_call, grad
from torch.nn import functional as F

import looplib as ll


def test_scores_of_an_ensemble_by_hand():
    recipe = load("ensemble_digits")
    probabilities = torch.tensor([[0.9, 0.1], [0.9, 0.1], [0.9, 0.1], [0.3, 0.7], [0.45, 0.55]])
    scores = recipe.scores_of(probabilities, torch.tensor([0, 0, 1, 1, 0]))
    assert scores["accuracy"] == pytest.approx(3 / 5)
    nll = -torch.tensor([0.9, 0.9, 0.1, 0.7, 0.45]).log().mean().item()
    assert scores["nll"] == pytest.approx(nll)
    # three of confidence 0.9, two of them right; one of 0.7, right; one of 0.55, wrong
    assert scores["ece"] == pytest.approx(3 / 5 * (0.9 - 2 / 3) + 1 / 5 * 0.3 + 1 / 5 * 0.55, abs=1e-6)


def test_the_frechet_distance_of_gan_digits_is_its_formula():
    generator = np.random.default_rng(0)
    one = generator.normal(size=(50, 6))
    other = generator.normal(0.5, 2, size=(70, 6)) @ generator.normal(size=(6, 6))
    a, b = np.cov(one, rowvar=False), np.cov(other, rowvar=False)
    mean = one.mean(0) - other.mean(0)
    expected = mean @ mean + np.trace(a + b - 2 * scipy.linalg.sqrtm(a @ b).real)
    torch.testing.assert_close(load("gan_digits").frechet(torch.tensor(one), torch.tensor(other)), expected)


def test_the_outer_gradient_of_maml_equals_that_of_a_loop_written_out():
    recipe = load("maml_sinusoids")
    model = recipe.make_model(1, 8).double()
    x, y = (tensor.double() for tensor in recipe.draw_tasks(4, 10, seed=0))
    recipe.make_meta_loss(model, 0.05)(model, (x, y)).backward()

    def by_hand(params):
        losses = []
        for i in range(4):

            def error(params, half, i=i):
                return F.mse_loss(functional_call(model, params, x[i, half]), y[i, half])

            slopes = grad(error)(params, slice(0, 5))
            tuned = {name: tensor - 0.05 * slopes[name] for name, tensor in params.items()}
            losses.append(error(tuned, slice(5, 10)))
        return torch.stack(losses).mean()

    expected = grad(by_hand)({name: tensor.detach() for name, tensor in model.named_parameters()})
    for name, tensor in model.named_parameters():
        # Products over all tasks at once add up in another order.
        torch.testing.assert_close(tensor.grad, expected[name], rtol=1e-10, atol=1e-14)


def test_the_model_of_click_through_has_the_products_of_all_pairs_of_fields():
    recipe = load("click_through")
    model = recipe.Model(3, 5)
    fields = recipe.make_data(3_000, 10, 100)[2]["all"][0][0]
    biases, vectors = model.table.weight[:, 0], model.table.weight[:, 1:]
    expected = []
    for row in fields:
        pairs = sum(vectors[row[i]] @ vectors[row[j]] for i in range(6) for j in range(i))
        expected.append(biases[row].sum() + pairs + model.deep(vectors[row].flatten())[0])
    torch.testing.assert_close(model(fields), torch.stack(expected))


@pytest.mark.slow
def test_a_step_on_few_points_helps_after_maml_alone(tmp_path, monkeypatch):
    # Steps are written down as graphs, as ever, and then run as they are: three programs take Inductor long.
    monkeypatch.setattr(ll, "compile_step", functools.partial(ll.compile_step, backend="eager"))
    picture = tmp_path / "errors.png"
    scores = load("maml_sinusoids").main(iterations=800, lr=3e-3, test_tasks=200, picture=str(picture))
    assert scores["MAML 10-shot after 1"] < 0.6 * scores["MAML 10-shot after 0"]
    assert scores["pretrained 10-shot after 1"] > 0.7 * scores["pretrained 10-shot after 0"]
    assert picture.exists()


@pytest.mark.parametrize(
    ("degrees", "size", "x", "y"), [(20, 1.3, 0.4, -0.7), (0, 1, 2, -1), (90, 1, 0, 0), (-65, 0.7, -1.5, 0)]
)
def test_a_moved_picture_of_vision_is_that_of_scipy(degrees, size, x, y):
    picture = torch.rand(1, 8, 8)
    rows, columns = np.mgrid[:8, :8] - 3.5
    right, up = columns - x, -(rows - y)
    turn = math.radians(degrees)
    # where the value at (right, up) came from: turned back, and by `size` nearer to the middle
    was_right = (math.cos(turn) * right + math.sin(turn) * up) / size
    was_up = (math.cos(turn) * up - math.sin(turn) * right) / size
    places = [3.5 - was_up, 3.5 + was_right]
    expected = ndimage.map_coordinates(picture[0].double().numpy(), places, order=1, mode="grid-constant")
    found = load("vision").moved(picture, float(degrees), size, x, y)
    torch.testing.assert_close(found[0].double(), torch.tensor(expected), atol=1e-5, rtol=0)  # float32 coordinates


def test_mixed_pictures_of_vision_have_mixed_labels():
    pictures, labels = torch.rand(10, 1, 8, 8), torch.arange(10)
    found, one, two, share = load("vision").mixed(pictures, labels, 0.2)
    assert 0 <= share <= 1
    assert two.sort()[0].equal(labels)
    torch.testing.assert_close(found, share * pictures[one] + (1 - share) * pictures[two])
