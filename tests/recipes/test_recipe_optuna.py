"""The search of recipes/optuna_pruning.py: which trials end early, and what the best of them is worth."""

import itertools
import re
import signal
import statistics

import pytest
from optuna.trial import TrialState
from test_recipes import load


@pytest.fixture(scope="module")
def recipe():
    return load("optuna_pruning")


def test_trials_worse_than_the_median_end_early(recipe, monkeypatch):
    calls = []
    monkeypatch.setattr(recipe, "loss_fn", lambda *given, loss_fn=recipe.loss_fn: calls.append(1) or loss_fn(*given))
    study = recipe.search(trials=10, epochs=4, startup=3, grace=2, seed=0)
    assert len(study.trials) == 10
    complete = []
    for trial in study.trials:
        losses = list(trial.intermediate_values.values())
        if trial.state == TrialState.PRUNED:  # in an epoch from the second to the last but one
            others = [other.intermediate_values[len(losses)] for other in complete]
            assert len(others) >= 3
            assert 1 < len(losses) < 4
            assert min(losses) > statistics.median(others)
        else:
            assert trial.value == trial.intermediate_values[4]
            complete.append(trial)
    assert len(complete) <= 8
    assert len(calls) == 17 * sum(len(trial.intermediate_values) for trial in study.trials)  # 1,078 digits by 64

    loss, accuracy = recipe.train(study.best_params, epochs=4, seed=0)
    assert loss == study.best_value == min(trial.value for trial in complete)
    assert accuracy > 0.8
    again = recipe.search(trials=3, epochs=4, startup=3, grace=2, seed=0)
    assert [trial.intermediate_values for trial in again.trials] == [
        trial.intermediate_values for trial in study.trials[:3]
    ]


def test_a_search_that_was_interrupted_continues(recipe, tmp_path, monkeypatch, capsys):
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
