"""The scores of recipes/with_torchmetrics.py against one call of the metrics, and against scikit-learn's."""

import pytest
import torch
from sklearn import metrics as sk
from test_recipes import load
from torch import nn

SETTINGS = {"epochs": 2, "eval_batch_size": 20}


def test_scores_over_batches_are_those_of_one_call(tmp_path, monkeypatch, capsys):
    recipe = load("with_torchmetrics")
    models = []
    monkeypatch.setattr(
        nn, "Sequential", lambda *parts, make=nn.Sequential: models.append(make(*parts)) or models[-1]
    )
    found = recipe.main(**SETTINGS, directory=str(tmp_path))
    (model,) = models

    rows, malignant = recipe.load_data(0)[1].tensors
    with torch.no_grad():  # in the same batches, for the same bits
        logits = torch.cat([model(part) for part in rows.split(20)])
    expected = recipe.COLLECTION(logits.sigmoid(), malignant)
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
