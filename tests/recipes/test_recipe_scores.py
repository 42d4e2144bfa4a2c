"""Scores and losses of recipes, by hand or beside a library: language_model, contrastive_digits, ensemble_digits,
with_torchmetrics.
"""

import pydoc_data.topics

import pytest
import torch
from sklearn import metrics as sk
from sklearn.neighbors import KNeighborsClassifier
from test_recipes import load
from torch import nn
from torch.nn import functional as F

import looplib as ll


def test_windows_hold_each_byte_of_the_documentation_once_as_a_label():
    recipe = load("language_model")
    train, test = (windows.tensors[0] for windows in recipe.load_data(64))
    text = "\n\n".join(text for _, text in sorted(pydoc_data.topics.topics.items())).encode()
    cut = len(text) * 9 // 10
    for windows, part in ((train, text[:cut]), (test, text[cut:])):
        assert bytes(windows[:, 1:].flatten().tolist()) == part[1 : 1 + 64 * len(windows)]
        assert len(part) - 64 * len(windows) <= 64 + 1


@pytest.mark.parametrize("precision", ["bfloat16", "float32"])
def test_the_loss_and_gradient_are_those_of_whole_logits(precision):
    recipe = load("language_model")
    torch.manual_seed(0)
    model = recipe.Transformer(16, 2, 2, 32, 0.0)
    batch = (torch.randint(0, 256, (4, 33)),)

    def whole(model, batch):
        logits = model.head(model(batch[0][:, :-1])).float()
        return F.cross_entropy(logits.flatten(0, 1), batch[0][:, 1:].flatten())

    state, cast = ll.init_state(model), precision == "bfloat16"
    found = ll.accumulate(ll.make_grad_fn(model, ll.autocast(recipe.loss_fn, enabled=cast)), 2)(state, batch)
    expected = ll.make_grad_fn(model, ll.autocast(whole, enabled=cast))(state, batch)
    for name, grad in expected.grads.items():
        # bfloat16 has 8 bits, and gradients are sums of products that cancel
        torch.testing.assert_close(found.grads[name], grad, rtol=0, atol=2e-3 if cast else 1e-6)


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


def test_scores_of_an_ensemble_by_hand():
    recipe = load("ensemble_digits")
    probabilities = torch.tensor([[0.9, 0.1], [0.9, 0.1], [0.9, 0.1], [0.3, 0.7], [0.45, 0.55]])
    scores = recipe.scores_of(probabilities, torch.tensor([0, 0, 1, 1, 0]))
    assert scores["accuracy"] == pytest.approx(3 / 5)
    nll = -torch.tensor([0.9, 0.9, 0.1, 0.7, 0.45]).log().mean().item()
    assert scores["nll"] == pytest.approx(nll)
    # three of confidence 0.9, two of them right; one of 0.7, right; one of 0.55, wrong
    assert scores["ece"] == pytest.approx(3 / 5 * (0.9 - 2 / 3) + 1 / 5 * 0.3 + 1 / 5 * 0.55, abs=1e-6)


def test_scores_over_batches_are_those_of_one_call(tmp_path, monkeypatch, capsys):
    recipe = load("with_torchmetrics")
    models = []
    monkeypatch.setattr(
        nn, "Sequential", lambda *parts, make=nn.Sequential: models.append(make(*parts)) or models[-1]
    )
    found = recipe.main(epochs=2, eval_batch_size=20, directory=str(tmp_path))
    (model,) = models

    rows, malignant = recipe.load_data(0)[1].tensors
    with torch.no_grad():  # in the same batches, for the same bits
        logits = torch.cat([model(part) for part in rows.split(20)])
    expected = {name: metric(logits.sigmoid(), malignant) for name, metric in recipe.METRICS.items()}
    expected["specificity"] = expected["specificity"][0]
    assert {name: found[name] for name in expected} == {name: value.item() for name, value in expected.items()}

    chances, labels = logits.sigmoid().numpy(), malignant.numpy()
    assert found["average_precision"] == pytest.approx(sk.average_precision_score(labels, chances), abs=1e-6)
    assert found["matthews"] == pytest.approx(sk.matthews_corrcoef(labels, chances > 0.5), abs=1e-6)
    spared, told, _ = sk.roc_curve(labels, chances, drop_intermediate=False)
    assert found["specificity"] == pytest.approx(1 - min(spared[told >= 0.98]), abs=1e-6)
    assert found["loss"] == pytest.approx(sk.log_loss(labels, chances.astype("float64")), abs=1e-6)

    # The table: merged and whole agree, and the mean over batches is another number.
    table = [line.split() for line in capsys.readouterr().out.splitlines()]
    table = {line[0]: [float(value) for value in line[1:]] for line in table if line[0] in found and len(line) == 4}
    assert table.keys() == found.keys()
    assert all(abs(merged - whole) < 1e-4 for merged, whole, _ in table.values())
    assert all(abs(table[name][2] - table[name][0]) > 1e-3 for name in ("specificity", "calibration_error"))
