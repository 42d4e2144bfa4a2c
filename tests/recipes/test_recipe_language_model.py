"""The recipe language_model, small: its data, learning and writing, and resuming bit for bit."""

import importlib.util
import math
import pydoc_data.topics
import signal
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

import looplib as ll

SMALL = {"steps": 6, "warmup": 2, "batch_size": 8, "length": 32, "width": 16, "depth": 1, "heads": 2}
SMALL |= {"eval_every": 4, "log_every": 2, "sample": 8, "microbatches": 4}


@pytest.fixture
def recipe():
    path = Path(__file__).parents[2] / "recipes/language_model.py"
    spec = importlib.util.spec_from_file_location("language_model", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_windows_hold_each_byte_of_the_documentation_once_as_a_label(recipe):
    train, test = (windows.tensors[0] for windows in recipe.load_data(64))
    text = "\n\n".join(text for _, text in sorted(pydoc_data.topics.topics.items())).encode()
    cut = len(text) * 9 // 10
    for windows, part in ((train, text[:cut]), (test, text[cut:])):
        assert bytes(windows[:, 1:].flatten().tolist()) == part[1 : 1 + 64 * len(windows)]
        assert len(part) - 64 * len(windows) <= 64 + 1


def test_it_learns_logs_and_writes(recipe, tmp_path, capsys):
    settings = {**SMALL, "steps": 60, "width": 32, "lr": 1e-2, "eval_every": 30}
    scores = recipe.main(**settings, directory=str(tmp_path))
    assert scores["bits_per_byte"] == scores["loss"] / math.log(2) < 5  # 8 for one who knows nothing
    rows = ll.log.read_jsonl(tmp_path / "log.jsonl")
    assert [row["step"] for row in rows if "train/loss" in row] == list(range(2, 61, 2))
    assert [row["step"] for row in rows if "eval/loss" in row] == [30, 60]
    assert all(row["tokens_per_second"] > 0 for row in rows if "train/loss" in row)
    assert [found.step for found in ll.checkpoint_io(tmp_path / "checkpoints").steps()] == [60]
    shown = capsys.readouterr().out
    assert f"{scores['bits_per_byte']:.3f} bits a byte on the held-out text" in shown
    assert "The following" in shown


@pytest.mark.parametrize("precision", ["bfloat16", "float32"])
def test_its_loss_and_gradient_are_those_of_whole_logits(recipe, precision):
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


@pytest.mark.slow
def test_interrupted_it_continues_to_the_same_bits(recipe, tmp_path, monkeypatch, capsys):
    models = []

    class Kept(recipe.Transformer):
        def __init__(self, *settings):
            super().__init__(*settings)
            models.append(self)

    monkeypatch.setattr(recipe, "Transformer", Kept)
    recipe.main(**SMALL, directory=str(tmp_path / "whole"))

    calls, loss_fn = [], recipe.loss_fn

    def pressed(model, batch):
        calls.append(True)
        if len(calls) in (3, 14):  # of 24 microbatches: in the first step, and in the fourth
            signal.raise_signal(signal.SIGINT)
        return loss_fn(model, batch)

    monkeypatch.setattr(recipe, "loss_fn", pressed)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                recipe.main(**SMALL, directory=str(tmp_path / "parts"))
        recipe.main(**SMALL, directory=str(tmp_path / "parts"))
    finally:
        signal.signal(signal.SIGINT, before)
    assert len(calls) == 24
    expected, found = models[0].state_dict(), models[-1].state_dict()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert "stopped at step 4 of 6; run the same command to continue" in capsys.readouterr().out
