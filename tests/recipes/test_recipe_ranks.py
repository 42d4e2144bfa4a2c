"""Recipes for several processes: stopped and resumed with different numbers of ranks, they log what one process logs."""

import os
import signal
import subprocess
import sys

import pytest
from ranks import launch
from test_recipes import RECIPES
from test_recipes import load as load_recipe

import looplib as ll

SMALL = {"steps": 18, "warmup": 2, "batch_size": 16, "length": 128, "width": 16, "depth": 2, "heads": 2, "lr": 1e-2}
SMALL |= {"microbatches": 3, "eval_every": 10, "log_every": 2, "precision": "float32"}


def load(engine):
    return load_recipe(f"language_model_{engine}")


def stopped(engine, settings, calls):
    """The recipe on one of several ranks. Only the last one gets a signal, after a number of forward passes."""
    recipe = load(engine)
    loss_fn, last = recipe.loss_fn, os.environ["RANK"] == str(int(os.environ["WORLD_SIZE"]) - 1)

    def counted(model, batch):
        nonlocal calls
        calls -= 1
        if last and not calls:
            signal.raise_signal(signal.SIGTERM)
        return loss_fn(model, batch)

    recipe.loss_fn = counted
    recipe.main(**settings)


def torchrun(ranks, *command):
    run = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), *command],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


def values(folder):
    rows = ll.log.read_jsonl(folder / "log.jsonl")
    assert all(row.pop("tokens_per_second") > 0 for row in rows if "train/loss" in row)
    return rows


@pytest.mark.slow
def test_stopped_and_gone_on_by_other_ranks_and_engines_it_logs_what_one_process_logs(tmp_path, monkeypatch, capsys):
    expected = load("ddp").main(**SMALL, sample=8, directory=str(tmp_path / "whole"))
    rows = values(tmp_path / "whole")
    assert [row["step"] for row in rows if "train/loss" in row] == list(range(2, 19, 2))
    assert [row["step"] for row in rows if "eval/loss" in row] == [10, 18]
    assert rows[-1]["eval/loss"] == expected["loss"] < 4  # 5.5 for one who knows nothing
    capsys.readouterr()

    folder = tmp_path / "run"
    settings = {**SMALL, "directory": str(folder)}

    # Two ranks of DDP, one of which is told to stop in step 5: the next line of the log is that of step 6.
    shown = launch(2, stopped, "ddp", settings, 5 * 3)
    assert "2 ranks, step 0 of 18" in shown
    assert "stopped at step 6 of 18; run the same command to continue" in shown

    # Three in shards, with 6, 5 and 5 rows of each batch, from a checkpoint of whole tensors.
    shown = launch(3, stopped, "fsdp", settings, 6 * 3)
    assert "3 ranks, step 6 of 18" in shown
    assert "stopped at step 12 of 18" in shown

    # One process without an engine, from a checkpoint of shards.
    recipe, calls = load("fsdp"), []
    loss_fn = recipe.loss_fn

    def counted(model, batch):
        calls.append(True)
        if len(calls) == 2 * 3:
            signal.raise_signal(signal.SIGTERM)
        return loss_fn(model, batch)

    with monkeypatch.context() as patched:
        patched.setattr(recipe, "loss_fn", counted)
        assert recipe.main(**settings) == {}
    shown = capsys.readouterr().out
    assert "1 ranks, step 12 of 18" in shown
    assert "stopped at step 14 of 18" in shown

    # Two in shards, by the command that the docstring gives, to the end.
    arguments = [text for name, value in settings.items() for text in (f"--{name}", str(value))]
    shown = torchrun(2, str(RECIPES / "language_model_fsdp.py"), *arguments)
    assert "2 ranks, step 14 of 18" in shown
    assert f"{expected['bits_per_byte']:.3f} bits a byte on the held-out text" in shown

    found = values(folder)
    assert [row.keys() for row in found] == [row.keys() for row in rows]
    for one, many in zip(rows, found, strict=True):
        # float32 has 24 bits; sums of it in other orders differ in the last, which Adam's quotients enlarge
        assert many == pytest.approx(one, rel=1e-6), many

    # One log and one console: what the other ranks print is in files.
    assert [shown.count(text) for text in ("ranks, step", "eval/loss", "bits a byte")] == [1, 1, 1]
    kept = [(folder / f"rank-{rank}.log").read_text() for rank in (1, 2)]
    assert [text.count("ranks, step") for text in kept] == [3, 1]
    assert "eval/loss" not in "".join(kept)
    assert sorted(path.name for path in folder.iterdir()) == ["checkpoints", "log.jsonl", "rank-1.log", "rank-2.log"]

    # A run that has ended is not trained again, and DDP's recipe takes a checkpoint of shards.
    again = load("ddp").main(**SMALL, sample=8, directory=str(folder))
    assert again == pytest.approx(expected, rel=1e-6)
    assert values(folder) == found
