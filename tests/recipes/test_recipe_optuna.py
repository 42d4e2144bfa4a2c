"""The search of recipes/optuna_pruning.py: which trials end early, and what the best of them is worth."""

import itertools
import re
import signal

import pytest
from test_recipes import load


@pytest.mark.slow
def test_a_search_that_was_interrupted_continues(tmp_path, monkeypatch, capsys):
    recipe = load("optuna_pruning")
    settings = {"epochs": 2, "directory": str(tmp_path / "run"), "storage": f"sqlite:///{tmp_path}/optuna.db"}
    loss_fn, calls = recipe.loss_fn, itertools.count(1)

    def interrupted(*given):
        if next(calls) == 40:  # in the second trial
            signal.raise_signal(signal.SIGINT)
        return loss_fn(*given)

    monkeypatch.setattr(recipe, "loss_fn", interrupted)
    with pytest.raises(KeyboardInterrupt):
        recipe.main(trials=3, **settings)
    assert "trial 0: complete" in capsys.readouterr().out
    found = recipe.main(trials=3, **settings)
    shown = capsys.readouterr().out
    assert "1 of 3 trials are done" in shown
    assert "trial 0:" not in shown
    assert recipe.main(trials=3, **settings)["loss"] == found["loss"]
    assert "3 of 3 trials are done" in capsys.readouterr().out
    assert len(set(re.findall(r"lr .*", shown))) == 3  # no settings are tried twice
    assert found["loss"] == found["best_value"]
