"""The recipe ensemble_digits: its scores by hand."""

import pytest
import torch
from test_recipes import load


def test_scores_of_probabilities_by_hand():
    recipe = load("ensemble_digits")
    probabilities = torch.tensor([[0.9, 0.1], [0.9, 0.1], [0.9, 0.1], [0.3, 0.7], [0.45, 0.55]])
    scores = recipe.scores_of(probabilities, torch.tensor([0, 0, 1, 1, 0]))
    assert scores["accuracy"] == pytest.approx(3 / 5)
    nll = -torch.tensor([0.9, 0.9, 0.1, 0.7, 0.45]).log().mean().item()
    assert scores["nll"] == pytest.approx(nll)
    # three of confidence 0.9, two of them right; one of 0.7, right; one of 0.55, wrong
    assert scores["ece"] == pytest.approx(3 / 5 * (0.9 - 2 / 3) + 1 / 5 * 0.3 + 1 / 5 * 0.55, abs=1e-6)
