"""The script that opens recipes/FROM_TRANSFORMERS.md, for the Trainer and for looplib: both train alike."""

import runpy
from pathlib import Path

import pytest
import torch
from test_recipe_from_trainers import Order
from transformers import Trainer, ViTForImageClassification

import looplib as ll

HERE = Path(__file__).parent


@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true:UserWarning")
def test_both_scripts_are_short_and_train_alike(tmp_path, monkeypatch):
    assert all(
        len((HERE / f"script_{name}.py").read_text().splitlines()) < 50 for name in ("transformers", "looplib")
    )
    monkeypatch.chdir(tmp_path)
    # The scripts are run as they are, but for the order of the samples: the Trainer gets that of looplib's loader.
    order = lambda trainer, train_set=None: Order(len(trainer.train_dataset), trainer.args.seed)  # noqa: E731
    monkeypatch.setattr(Trainer, "_get_train_sampler", order)
    theirs, ours = (runpy.run_path(HERE / f"script_{name}.py") for name in ("transformers", "looplib"))
    history, rows = theirs["trainer"].state.log_history, ll.log.read_jsonl("runs/loop/log.jsonl")

    losses = [[row["step"], row["loss"]] for row in history if "loss" in row]
    found = [[row["step"], row["train/loss"]] for row in rows if "train/loss" in row]
    assert [step for step, _ in losses] == list(range(20, 111, 20))
    assert found == [pytest.approx(row, rel=1e-5) for row in losses]  # float32; measured: 2e-7
    assert losses[-1][1] < losses[0][1] / 3

    scores = [[row["step"], row["eval_loss"], row["eval_accuracy"]] for row in history if "eval_loss" in row]
    found = [[row["step"], row["eval/loss"], row["eval/accuracy"]] for row in rows if "eval/loss" in row]
    assert [row[0] for row in found] == list(range(22, 111, 22))
    assert found == [pytest.approx(row, rel=1e-5) for row in scores[:5]]  # the sixth is evaluate() at the end

    assert ours["state"].step == theirs["trainer"].state.best_global_step
    images = torch.stack([row["pixel_values"] for row in ours["eval_set"]])
    best = [ViTForImageClassification.from_pretrained(f"runs/{name}/best") for name in ("trainer", "loop")]
    with torch.no_grad():
        torch.testing.assert_close(best[1](images).logits, best[0](images).logits, rtol=1e-3, atol=1e-3)
