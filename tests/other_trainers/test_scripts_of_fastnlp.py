"""The scripts of recipes/FROM_FASTNLP.md and FROM_DIST_TRAINER.md: looplib's train as loops of torch alone do.

fastNLP is not installed here, so its own scripts are only read by Python.
"""

import ast
import os

import pytest
import torch
from answers import ROOT, blocks
from ranks import launch, run_script
from torch.nn import functional as F

import looplib as ll

EPOCHS = 3
FASTNLP = blocks(ROOT / "recipes/FROM_FASTNLP.md")
DIST_TRAINER = blocks(ROOT / "recipes/FROM_DIST_TRAINER.md")


def shortened(script, epochs, to=EPOCHS):
    """The script with another number of epochs."""
    assert script.count(f"after_epochs({epochs})") >= 1
    assert script.count(f"{epochs} * len(loader)") == 1
    return script.replace(f"after_epochs({epochs})", f"after_epochs({to})").replace(
        f"{epochs} * len(loader)", f"{to} * len(loader)"
    )


def run(script):
    names = {"__name__": "__main__"}
    exec(compile(script, "page", "exec"), names)
    return names


def raw_loop(setup, make, peak, dtype):
    """The network after a loop of torch alone: two microbatches, a warmup, clipping to norm 1 and autocast."""
    names = run(setup)
    net, train_set = names["net"], names["train_set"]
    optimizer, scaler = make(net.parameters()), torch.amp.GradScaler("cpu", enabled=dtype == torch.float16)
    loader = ll.make_loader(range(len(train_set)), batch_size=64, seed=0)  # for the order of the samples alone
    total = EPOCHS * len(loader)
    warmup = round(0.1 * total)
    for step in range(total):
        rate = peak * min(step / warmup, (total - step) / (total - warmup))
        for group in optimizer.param_groups:
            group["lr"] = rate
        epoch, batch = divmod(step, len(loader))
        indices = loader.indices(ll.TrainState(epoch=epoch, batch=batch))
        for part in indices.tensor_split(2):
            x, y = (torch.stack([list(train_set[i].values())[k] for i in part]) for k in (0, 1))
            with torch.autocast("cpu", dtype):
                loss = F.cross_entropy(net(x), y)
            scaler.scale(loss * len(part) / len(indices)).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return net


def assert_close(state, net):
    torch.testing.assert_close(
        dict(state.params), {name: tensor.detach() for name, tensor in net.named_parameters()}, rtol=1e-2, atol=2e-3
    )


def last(names):
    return names["ckpt"].restore(ll.copy_state(names["state"]))


def adamw(parameters):
    return torch.optim.AdamW(parameters, weight_decay=0.1)


@pytest.mark.parametrize("scripts", [FASTNLP, DIST_TRAINER], ids=["Trainer", "DistTrainer"])
@pytest.mark.every_case
def test_fastnlps_scripts_are_python_and_share_their_data(scripts):
    setup, theirs, ours = scripts
    for script in (theirs, ours):
        ast.parse(setup + script)
        assert {"train_set", "dev_set", "net"} <= {
            node.id for node in ast.walk(ast.parse(script)) if isinstance(node, ast.Name)
        }


@pytest.mark.slow
def test_the_trainers_loop_trains_as_a_raw_loop_and_resumes(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    setup, _, ours = FASTNLP
    names = run(setup + shortened(ours, 40))
    assert_close(last(names), raw_loop(setup, adamw, 3e-3, torch.bfloat16))
    scores = [checkpoint.metrics["eval/acc"] for checkpoint in names["ckpt"].steps()]
    assert len(scores) <= 3, "the last and the best two"
    [printed] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    assert ast.literal_eval(printed)["acc"] == max(scores) > 0.5
    again = run(setup + shortened(ours, 40))
    assert not ll.debug.differences(again["state"], names["state"])


@pytest.mark.slow
def test_the_dist_trainers_loop_trains_as_a_raw_loop(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    setup, _, ours = DIST_TRAINER
    names = run(setup + shortened(ours, 30))
    assert_close(last(names), raw_loop(setup, torch.optim.Adam, 4e-3, torch.float16))
    rows = ll.log.read_jsonl("runs/loop/log.jsonl")
    assert [row["step"] for row in rows if "train/loss" in row] == [10, 20, 30, 40, 50, 60]
    assert [row["step"] for row in rows if "dev/acc" in row] == [22, 44, 66]


@pytest.mark.slow
def test_the_dist_trainers_loop_trains_on_two_ranks_as_on_one(tmp_path, monkeypatch):
    setup, _, ours = DIST_TRAINER
    script = setup + shortened(ours, 30, to=1)
    (tmp_path / "train.py").write_text(script)
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
    launch(2, run_in, str(tmp_path / "two"), str(tmp_path / "train.py"))
    monkeypatch.chdir(tmp_path / "one")
    run(script)
    one, two = (ll.log.read_jsonl(tmp_path / folder / "runs/loop/log.jsonl") for folder in ("one", "two"))
    assert len(one) == 3
    for first, second in zip(one, two, strict=True):
        assert second == pytest.approx(first, rel=2e-2)


def run_in(folder, path):
    os.chdir(folder)
    run_script(path)
