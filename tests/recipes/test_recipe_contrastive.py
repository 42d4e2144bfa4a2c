"""The contrastive recipe, small: gradient caching holds less, and its score is that of scikit-learn."""

import pytest
from sklearn.neighbors import KNeighborsClassifier
from test_recipes import load


def test_gradient_caching_holds_less(tmp_path):
    recipe = load("contrastive_digits")
    small = {"epochs": 2, "batch_size": 256, "width": 16}
    cached = recipe.main(**small, microbatches=16, directory=str(tmp_path / "cached"))
    plain = recipe.main(**small, microbatches=0, directory=str(tmp_path / "plain"))
    name = "held for the backward pass, MB"
    assert cached[name] < plain[name] / 8
    assert cached["by pixels"] == plain["by pixels"]


def test_the_score_is_that_of_scikit_learns_nearest_neighbour():
    recipe = load("contrastive_digits")
    (train_x, train_y), (test_x, test_y) = recipe.load_data()
    known, unknown = train_x[:100].flatten(1), test_x.flatten(1)
    expected = KNeighborsClassifier(1).fit(known, train_y[:100]).score(unknown, test_y)
    assert recipe.agreement(known, unknown, train_y, test_y) == pytest.approx(expected, abs=1e-6)
