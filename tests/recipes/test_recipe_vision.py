"""The recipe vision, small, with its images compared with those of scipy."""

import math

import numpy as np
import pytest
import torch
from scipy import ndimage
from test_recipes import load
from torch.nn import functional as F


@pytest.fixture(scope="module")
def recipe():
    return load("vision")


def test_its_accuracy_is_that_of_its_model(recipe, tmp_path, monkeypatch):
    models = []
    monkeypatch.setattr(recipe, "ResNet", lambda width, make=recipe.ResNet: models.append(make(width)) or models[-1])
    settings = {"examples": 100, "epochs": 2, "batch_size": 20, "lr": 1e-2, "width": 8, "ema_decay": 0.9}
    settings["directory"] = str(tmp_path)
    scores = recipe.main(**settings)
    (model,) = models
    assert model.blocks[0].conv1.weight.is_contiguous(memory_format=torch.channels_last)
    pictures, labels = recipe.load_data(100, 0)[1].tensors
    with torch.no_grad():
        right = [model.eval()(part).argmax(1) for part in pictures.split(256)]
    assert scores["accuracy_without_ema"] == (torch.cat(right) == labels).double().mean().item()


@pytest.mark.parametrize(
    ("degrees", "size", "x", "y"), [(0, 1, 2, -1), (90, 1, 0, 0), (20, 1.3, 0.4, -0.7), (-65, 0.7, -1.5, 0)]
)
def test_a_moved_picture_is_that_of_scipy(recipe, degrees, size, x, y):
    picture = torch.rand(1, 8, 8)
    rows, columns = np.mgrid[:8, :8] - 3.5
    right, up = columns - x, -(rows - y)
    turn = math.radians(degrees)
    # where the value at (right, up) came from: turned back, and by `size` nearer to the middle
    was_right = (math.cos(turn) * right + math.sin(turn) * up) / size
    was_up = (math.cos(turn) * up - math.sin(turn) * right) / size
    places = [3.5 - was_up, 3.5 + was_right]
    expected = ndimage.map_coordinates(picture[0].double().numpy(), places, order=1, mode="grid-constant")
    found = recipe.moved(picture, float(degrees), size, x, y)
    torch.testing.assert_close(found[0].double(), torch.tensor(expected), atol=1e-5, rtol=0)  # float32 coordinates
    if degrees == 90:
        torch.testing.assert_close(found, picture.rot90(1, (1, 2)), atol=1e-5, rtol=0)


def test_mixed_pictures_have_mixed_labels(recipe):
    torch.manual_seed(0)
    pictures, labels = torch.rand(10, 1, 8, 8), torch.arange(10)
    found, one, two, share = recipe.mixed(pictures, labels, 0.2)
    assert 0 <= share <= 1
    assert two.sort()[0].equal(labels)
    torch.testing.assert_close(found, share * pictures[one] + (1 - share) * pictures[two])
    # the loss of the shares is that of torch for soft labels
    logits = torch.randn(10, 10)
    soft = share * F.one_hot(one, 10) + (1 - share) * F.one_hot(two, 10)
    losses = [F.cross_entropy(logits, target, label_smoothing=0.1) for target in (one, two)]
    expected = F.cross_entropy(logits, soft, label_smoothing=0.1)
    torch.testing.assert_close(share * losses[0] + (1 - share) * losses[1], expected)
    assert recipe.mixed(pictures, labels, 0)[0] is pictures
