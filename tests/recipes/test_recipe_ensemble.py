"""The recipes of ensembles and sweeps, small, and their parts against definitions written out."""

import signal
import time
from types import SimpleNamespace

import pytest
import torch
from test_recipes import interruptible, load  # noqa: F401, a fixture

import looplib as ll

PNG = b"\x89PNG"


def test_an_ensemble_of_digits_is_trained_and_compared(tmp_path, capsys):
    recipe = load("ensemble_digits")
    scores = recipe.main(members=4, epochs=6, compile=0, directory=str(tmp_path / "run"))
    assert scores["member_accuracy"] > 0.8
    assert scores["accuracy"] > 0.8
    assert scores["nll"] <= scores["member_nll"]  # by Jensen's inequality, whatever the members are
    assert min(scores["step_seconds"], scores["raw_step_seconds"]) > 0
    assert (tmp_path / "run/calibration.png").read_bytes().startswith(PNG)
    shown = capsys.readouterr().out
    assert f"{scores['ece']:.4f}" in shown
    assert "4 raw loops in turn" in shown


@pytest.mark.slow
def test_an_ensemble_that_was_interrupted_ends_as_one_that_was_not(tmp_path, monkeypatch, interruptible, capsys):  # noqa: F811
    recipe, calls = load("ensemble_digits"), 0
    settings = {"members": 2, "epochs": 2, "compile": 0, "width": 8}

    def clock():
        nonlocal calls
        calls += 1
        if calls == 7:  # it is read twice in each step
            signal.raise_signal(signal.SIGINT)
        return time.perf_counter()

    expected = recipe.main(**settings, directory=str(tmp_path / "whole"))
    with monkeypatch.context() as patched:
        patched.setattr(recipe, "time", SimpleNamespace(perf_counter=clock))
        with pytest.raises(KeyboardInterrupt):
            recipe.main(**settings, directory=str(tmp_path / "parts"))
    scores = recipe.main(**settings, directory=str(tmp_path / "parts"))
    assert {name: scores[name] for name in scores if "seconds" not in name} == {
        name: expected[name] for name in expected if "seconds" not in name
    }
    capsys.readouterr()
    recipe.main(**settings, directory=str(tmp_path / "parts"))
    assert "already finished at step 18; delete" in capsys.readouterr().out


@pytest.mark.slow
def test_members_of_other_seeds_are_others(tmp_path):
    recipe = load("ensemble_digits")
    settings = {"members": 2, "epochs": 1, "compile": 0}
    runs = [recipe.main(**settings, seed=seed, directory=str(tmp_path / str(k))) for k, seed in enumerate((0, 0, 1))]
    first, again, other = runs
    assert first["nll"] == again["nll"] != other["nll"]


def test_scores_of_probabilities_by_hand():
    recipe = load("ensemble_digits")
    probabilities = torch.tensor([[0.9, 0.1], [0.9, 0.1], [0.9, 0.1], [0.3, 0.7], [0.45, 0.55]])
    scores = recipe.scores_of(probabilities, torch.tensor([0, 0, 1, 1, 0]))
    assert scores["accuracy"] == pytest.approx(3 / 5)
    nll = -torch.tensor([0.9, 0.9, 0.1, 0.7, 0.45]).log().mean().item()
    assert scores["nll"] == pytest.approx(nll)
    # three of confidence 0.9, two of them right; one of 0.7, right; one of 0.55, wrong
    assert scores["ece"] == pytest.approx(3 / 5 * (0.9 - 2 / 3) + 1 / 5 * 0.3 + 1 / 5 * 0.55, abs=1e-6)


@pytest.mark.slow
def test_a_sweep_finds_a_learning_rate_and_halving_one_that_is_as_good(tmp_path, capsys):
    recipe = load("sweep_lr")
    found = recipe.main(members=8, epochs=4, directory=str(tmp_path / "run"))
    assert 1e-2 < found["best_lr"] < 2
    assert found["accuracy"] > 0.9
    assert found["halving_loss"] < 1.5 * found["loss"]
    assert found["share"] == pytest.approx((8 + 4 + 2 + 1) / 4 / 8)
    assert found["diverged"] >= 1
    assert (tmp_path / "run/sweep.png").read_bytes().startswith(PNG)
    assert f"lr {found['best_lr']:.3g}" in capsys.readouterr().out


@pytest.mark.slow
def test_a_sweep_that_was_interrupted_ends_as_one_that_was_not(tmp_path, monkeypatch, interruptible, capsys):  # noqa: F811
    recipe, calls = load("sweep_lr"), []
    settings = {"members": 4, "epochs": 2}
    expected = recipe.main(**settings, directory=str(tmp_path / "whole"))

    def measure(*parts, measure=ll.evaluation.measure):
        calls.append(parts)
        if len(calls) == 2:  # after the first epoch
            signal.raise_signal(signal.SIGINT)
        return measure(*parts)

    with monkeypatch.context() as patched:
        patched.setattr(ll.evaluation, "measure", measure)
        with pytest.raises(KeyboardInterrupt):
            recipe.main(**settings, directory=str(tmp_path / "parts"))
    scores = recipe.main(**settings, directory=str(tmp_path / "parts"))
    assert {**scores, "seconds": 0} == {**expected, "seconds": 0}
    assert "Restored step 22 (" in capsys.readouterr().out
    again = recipe.main(**settings, directory=str(tmp_path / "parts"))
    assert {**again, "seconds": 0} == {**expected, "seconds": 0}
    assert "already finished at step 44; delete" in capsys.readouterr().out
