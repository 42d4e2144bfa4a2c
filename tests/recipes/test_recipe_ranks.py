"""Recipes for several processes: stopped and resumed with different numbers of ranks, they log what one process logs."""

import os
import signal

import pytest
from ranks import launch, torchrun
from test_recipes import RECIPES
from test_recipes import load as load_recipe

import looplib as ll

SMALL = {"steps": 18, "warmup": 2, "batch_size": 16, "length": 128, "width": 16, "depth": 2, "heads": 2, "lr": 1e-2}
SMALL |= {"microbatches": 3, "eval_every": 10, "log_every": 2, "precision": "float32"}


def load(engine):
    return load_recipe(f"language_model_{engine}")


def stopped(engine, settings, calls):
    """The recipe on one of several ranks. Only the last one gets a signal, after a number of forward passes in training."""
    recipe = load(engine)
    loss_fn, last = recipe.loss_fn, os.environ["RANK"] == str(int(os.environ["WORLD_SIZE"]) - 1)

    def counted(model, batch):
        nonlocal calls
        calls -= model.training
        if last and model.training and not calls:
            signal.raise_signal(signal.SIGTERM)
        return loss_fn(model, batch)

    recipe.loss_fn = counted
    recipe.main(**settings)


def values(folder):
    rows = ll.log.read_jsonl(folder / "log.jsonl")
    assert all(row.pop("tokens_per_second") > 0 for row in rows if "train/loss" in row)
    return rows


def near(values):
    """Values up to the order in which sums are added: float32 has 24 bits, and Adam's quotients enlarge the last one.

    The most likely token may then be another one where two are equally likely: a few of 46,592.
    """
    return {
        name: pytest.approx(value, rel=1e-6, abs=1e-4 if name.endswith("accuracy") else None)
        for name, value in values.items()
    }


@pytest.mark.slow
def test_continued_by_other_ranks_and_engines_it_logs_what_one_process_logs(tmp_path):
    expected = load("ddp").main(**SMALL, sample=8, directory=str(tmp_path / "whole"))
    rows = values(tmp_path / "whole")
    assert rows[-1]["eval/loss"] == expected["loss"] < 4  # 5.5 for one who knows nothing

    folder = tmp_path / "run"
    settings = {**SMALL, "directory": str(folder)}

    # Two ranks of DDP, one of which is told to stop in step 5, between two lines of the log: there is one line more.
    shown = launch(2, stopped, "ddp", settings, 5 * 3)
    assert "2 ranks, step 0 of 18" in shown
    assert "stopped at step 5 of 18; run the same command to continue" in shown

    # Three in shards, with 6, 5 and 5 rows of each batch, from a checkpoint of whole tensors.
    shown = launch(3, stopped, "fsdp", settings, 7 * 3)
    assert "3 ranks, step 5 of 18" in shown
    assert "stopped at step 12 of 18" in shown

    # Two in shards, by the command that the docstring gives, to the end.
    arguments = [text for name, value in settings.items() for text in (f"--{name}", str(value))]
    done = torchrun(2, RECIPES / "language_model_fsdp.py", *arguments)
    assert done.returncode == 0, done.stderr
    shown = done.stdout
    assert "2 ranks, step 12 of 18" in shown
    assert f"{expected['bits_per_byte']:.3f} bits a byte on the held-out text" in shown

    found = values(folder)
    one, many = found[2:4]
    assert (one["step"], many["step"]) == (5, 6)  # each of one step, where the undisturbed run has a line of both
    halves = {name: (one[name] + many[name]) / 2 for name in ("train/loss", "train/grad_norm")}
    found[2:4] = [many | halves]
    assert [row.keys() for row in found] == [row.keys() for row in rows]
    for one, many in zip(rows, found, strict=True):
        assert many == near(one), many

    # A run that has ended is not trained again, and DDP's recipe takes a checkpoint of shards.
    again = load("ddp").main(**SMALL, sample=8, directory=str(folder))
    assert again == near(expected)
    assert len(values(folder)) == len(found) + 1


MESH = {"steps": 6, "batch_size": 32, "length": 32, "width": 16, "depth": 1, "heads": 4, "lr": 1e-2}
MESH |= {"eval_every": 10, "log_every": 1, "dtype": "float64"}


@pytest.mark.slow
def test_a_model_on_two_ranks_of_tensors_trains_as_in_one_process(tmp_path):
    shown = launch(2, stopped, "mesh", MESH | {"directory": str(tmp_path / "two")}, 0)
    assert "ranks that divide the data: 1; step 0 of 6" in shown
    load("mesh").main(**MESH, directory=str(tmp_path / "one"))
    one, two = (ll.log.read_columns(tmp_path / ranks / "log.jsonl") for ranks in ("one", "two"))
    for name in ("step", "train/loss", "train/grad_norm", "eval/loss"):
        # float64 has 53 bits; sums in other orders differ in the last, which Adam's quotients enlarge
        assert two[name] == [None if value is None else pytest.approx(value, rel=1e-9) for value in one[name]]
