"""The recipe click_through: its scores compared with scikit-learn's, its data and its model with formulas."""

import numpy as np
import pytest
import torch
from sklearn.metrics import log_loss, roc_auc_score
from test_recipes import load

import looplib as ll

SMALL = {"impressions": 30_000, "epochs": 2, "batch_size": 256, "eval_batch_size": 300, "lr": 0.02}
SMALL |= {"dimension": 4, "width": 8, "log_every": 20, "eval_every": 50}  # 2 epochs of 93 steps


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The recipe, its small run that nothing stopped, the folder and the scores of it."""
    recipe, folder = load("click_through"), tmp_path_factory.mktemp("whole")
    return recipe, folder, recipe.main(**SMALL, directory=str(folder))


def held_out(recipe):
    """The columns of the test: fields, clicked, true chance, click rate of the item."""
    _, _, test = recipe.make_data(SMALL["impressions"], 10, 1000)
    return {name: [torch.cat(columns) for columns in zip(*batches, strict=True)] for name, batches in test.items()}


def sklearn_by_user(users, clicked, chances):
    """The AUC of each user's impressions, weighed by their number, and how many users have none."""
    found, left_out = [], 0
    for user in np.unique(users):
        own = users == user
        if len(set(clicked[own])) == 1:
            left_out += 1
        else:
            found.append((roc_auc_score(clicked[own], chances[own]), own.sum()))
    aucs, counts = zip(*found, strict=True)
    return np.average(aucs, weights=counts), left_out


def test_scores_from_disk_are_those_of_the_evaluation_and_of_sklearn(whole):
    recipe, folder, scores = whole
    fields, clicked, truth, rate = (column.numpy() for column in held_out(recipe)["all"])
    (path,) = folder.glob("predictions-*")
    written = ll.evaluation.read_predictions(path)
    assert torch.equal(written["user"], torch.from_numpy(fields[:, 0]))
    assert scores["disk"] == {name: scores["model"][name] for name in ("all/auc", "all/user_auc")}
    for name, chances in {"model": written["chance"].numpy(), "truth": truth, "rate": rate}.items():
        found = scores[name]
        assert found["all/auc"] == pytest.approx(roc_auc_score(clicked, chances), abs=1e-12)
        assert found["all/loss"] == pytest.approx(log_loss(clicked, chances.astype(np.float64)), rel=1e-5)
        assert found["all/calibration"] == pytest.approx(chances.mean(dtype=np.float64) / clicked.mean(), rel=1e-6)
    user_auc, left_out = sklearn_by_user(fields[:, 0], clicked, written["chance"].numpy())
    assert scores["model"]["all/user_auc"] == pytest.approx(user_auc, abs=1e-12)
    assert scores["model"]["all/users_left_out"] == left_out > 0


def test_the_model_is_between_the_click_rate_and_the_truth(whole):
    model, truth, rate = (whole[2][name] for name in ("model", "truth", "rate"))
    for name in ("all/auc", "all/user_auc", "new_users/auc", "cold_items/auc"):
        assert rate[name] + 0.03 < model[name] < truth[name] - 0.03
    assert truth["all/loss"] < model["all/loss"] < rate["all/loss"]
    assert abs(model["all/calibration"] - 1) < 0.1


def test_the_model_has_the_products_of_all_pairs_of_fields():
    recipe = load("click_through")
    model = recipe.Model(3, 5)
    fields = recipe.make_data(3_000, 10, 100)[2]["all"][0][0]
    biases, vectors = model.table.weight[:, 0], model.table.weight[:, 1:]
    expected = []
    for row in fields:
        pairs = sum(vectors[row[i]] @ vectors[row[j]] for i in range(6) for j in range(i))
        expected.append(biases[row].sum() + pairs + model.deep(vectors[row].flatten())[0])
    torch.testing.assert_close(model(fields), torch.stack(expected))
    ends = torch.tensor([2000, 3000, 3008, 3028, 3052, 3056])  # no row is of two fields
    assert (fields < ends).all()
    assert (fields[:, 1:] >= ends[:-1]).all()
    assert model.table.num_embeddings == 3056
