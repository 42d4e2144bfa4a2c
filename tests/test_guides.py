"""The guides from other loops: both scripts of each page run and agree, and what the pages say of them holds."""

import ast
import contextlib
import csv
import re

import accelerate
import pytest
import torch
from public import ROOT
from ranks import launch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

import looplib as ll

NAMES = ["FROM_A_RAW_LOOP", "FROM_LIGHTNING", "FROM_ACCELERATE"]
PAGES = {name: (ROOT / f"recipes/{name}.md").read_text() for name in NAMES}
BLOCKS = {name: re.findall(r"```python\n(.*?)```", text, re.S) for name, text in PAGES.items()}
RAW, OURS, LOAD, SAVE = BLOCKS["FROM_A_RAW_LOOP"]


def run(script, folder):
    folder.mkdir(exist_ok=True)
    with contextlib.chdir(folder):
        names = {"__name__": "__main__"}
        exec(compile(script, "guide", "exec"), names)
    return names


def replaced(script, *changes):
    """The script after changes, each of which must fit in one place."""
    for before, after in changes:
        assert script.count(before) == 1, before
        script = script.replace(before, after)
    return script


@pytest.fixture
def looplibs_order(monkeypatch):
    """Let torch's shuffling draw the samples of each epoch as looplib's loader does; returns a setter of the first epoch."""
    first = [0]

    def order(sampler):
        sampler.epoch = getattr(sampler, "epoch", first[0] - 1) + 1
        loader = ll.make_loader(range(len(sampler.data_source)), batch_size=len(sampler.data_source))
        return iter(loader.indices(ll.TrainState(epoch=sampler.epoch)).tolist())

    monkeypatch.setattr(RandomSampler, "__iter__", order)
    return lambda epoch: first.__setitem__(0, epoch)


def same_bits(model, other):
    one, two = model.state_dict(), other.state_dict()
    return one.keys() == two.keys() and all(torch.equal(tensor, two[name]) for name, tensor in one.items())


def close(model, other):
    """Equal but for rounding, which an optimizer of torch's carries on for some hundred updates."""
    torch.testing.assert_close(dict(model.state_dict()), dict(other.state_dict()), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_a_guide_is_one_page_whose_names_exist(name):
    assert len(PAGES[name].splitlines()) <= 150
    for path in set(re.findall(r"\bll\.((?:\w+\.)*\w+)", PAGES[name])):
        thing = ll
        for part in path.split("."):
            thing = getattr(thing, part)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("FROM_A_RAW_LOOP", ["loss.backward", "optimizer.step"]),
        ("FROM_LIGHTNING", ["Trainer", "Lightning", "LightningModule", "training_step"]),
        ("FROM_ACCELERATE", ["accelerator.prepare", "accelerator.backward", "Fabric", "fabric.backward"]),
    ],
)
@pytest.mark.every_case
def test_the_words_of_other_loops_lead_to_the_guides(name, words):
    """`tests/test_site.py` looks for each word in the site's search."""
    rows = (row.split(" | ") for row in (ROOT / "recipes/WORDS.md").read_text().splitlines() if " | " in row)
    first = {row[0].removeprefix("| "): re.search(r"\]\((.+?)\)", row[1]) for row in rows}
    [listed] = [row.split(", ") for row, place in first.items() if place and place[1] == f"{name}.md"]
    assert {*words} <= {*listed}


# From a raw loop


@pytest.mark.slow
def test_the_raw_loop_and_looplibs_end_with_the_same_bits_and_print_the_same_numbers(
    tmp_path, looplibs_order, capsys
):
    raw = run(RAW, tmp_path / "raw")
    printed = [line.split() for line in capsys.readouterr().out.splitlines()]
    ours = run(OURS, tmp_path / "ours")
    logged = [line.partition(" ") for line in capsys.readouterr().out.splitlines() if "{" in line]
    assert same_bits(raw["model"], ours["model"])
    assert len(printed) == len(logged) == 10
    for (epoch, loss, accuracy), (number, _, values) in zip(printed, logged, strict=True):
        assert epoch == number
        values = ast.literal_eval(values)
        assert [values["loss"], values["accuracy"]] == pytest.approx([float(loss), float(accuracy)], rel=1e-6)
    assert float(printed[-1][2]) > 0.9


def test_the_bits_need_the_same_kernel_clipping_and_schedule(tmp_path, looplibs_order):
    def raw(name, *changes):
        return run(replaced(RAW, ("range(first, 10)", "range(first, 2)"), *changes), tmp_path / name)["model"]

    def ours(name, *changes):
        return run(replaced(OURS, ("after_epochs(10)", "after_epochs(2)"), *changes), tmp_path / name)["model"]

    plain, left_out = ("fused=True", "fused=False"), (", fused=True", "")
    fused, looped = ours("fused"), ours("looped", plain)
    assert same_bits(raw("raw looped", plain), looped)
    # On the CPU, torch's own choice is the plain loop, and looplib's the fused kernel.
    assert same_bits(raw("raw default", left_out), looped)
    assert same_bits(ours("default", left_out), fused)
    assert not same_bits(looped, fused)
    for line in "        nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n", "        scheduler.step()\n":
        assert not same_bits(raw(line.strip()[:9], (line, "")), fused)


def test_your_own_data_loader_is_taken():
    theirs = DataLoader(TensorDataset(torch.arange(10)), batch_size=4, shuffle=True)
    loader, mine = ll.make_loader(theirs), ll.make_loader(theirs.dataset, batch_size=4)
    state = ll.TrainState(epoch=3)
    assert [batch[0].tolist() for batch in loader(state)] == [batch[0].tolist() for batch in mine(state)]


def clip(model, adamw):
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    adamw.step()
    adamw.zero_grad()


EDITS = {
    "clip_grad_norm_, step and zero_grad": clip,
    "model.eval()": lambda model, adamw: model.eval(),
    "torch.manual_seed": lambda model, adamw: torch.manual_seed(7),
}


WARNED = ["clip_grad_norm_, step and zero_grad"]


@pytest.mark.every_case
@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("edit", EDITS)
def test_lines_of_a_raw_loop_between_steps_have_no_effect(edit, donate):
    x, y = torch.randn(16, 8), torch.arange(16) % 3

    def trained(between):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3))
        adamw = torch.optim.AdamW(model.parameters(), lr=0.1)
        optimizer = ll.optimizer(torch.optim.AdamW, lr=0.1)
        grad_fn = ll.make_grad_fn(model, lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]))
        step, state = ll.make_train_step(grad_fn, optimizer, donate=donate), ll.init_state(model, optimizer)
        for _ in range(4):
            state, _ = step(state, (x, y))
            assert all(param.grad is None for param in model.parameters())
            between(model, adamw)
        return state

    with (
        pytest.warns(UserWarning, match=r"its step\(\) changes nothing")
        if edit in WARNED
        else contextlib.nullcontext()
    ):
        edited = trained(EDITS[edit])
    assert not ll.debug.differences(edited, trained(lambda model, adamw: None))


def test_a_whole_update_by_hand_trains_the_module_that_donated_steps_follow_and_is_not_counted():
    x, moved = torch.randn(4, 8), {}
    for donate in False, True:
        torch.manual_seed(0)
        model = nn.Linear(8, 8)
        raw = torch.optim.SGD(model.parameters(), lr=0.1)
        grad_fn = ll.make_grad_fn(model, lambda model, x: model(x).square().mean())
        state, _ = ll.make_train_step(grad_fn, SGD, donate=donate)(ll.init_state(model, SGD), x)
        before = state.params["weight"].clone()
        with contextlib.nullcontext() if donate else pytest.warns(UserWarning, match="weights of before training"):
            model(x).square().mean().backward()
        raw.step()
        assert state.step == 1
        moved[donate] = not torch.equal(state.params["weight"], before)
    assert moved == {False: False, True: True}


def test_batch_norm_is_frozen_by_eval_before_make_grad_fn():
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    model[1].eval()
    step = ll.make_train_step(ll.make_grad_fn(model, lambda model, x: model(x).square().mean()), SGD, donate=True)
    step(ll.init_state(model, SGD), torch.randn(4, 8))
    assert model[1].num_batches_tracked == 0


SGD = ll.optimizer(torch.optim.SGD, lr=0.1)


def stopped(script, folder):
    """Run a raw script until it has saved for the fourth time."""
    with pytest.raises(SystemExit):
        run(f"{script}    if epoch == 3:\n        raise SystemExit\n", folder)


@pytest.mark.slow
def test_the_raw_script_shuffles_as_in_its_first_epoch_when_it_is_started_again(tmp_path, monkeypatch):
    orders, draw = [], RandomSampler.__iter__

    def recorded(sampler):
        orders.append([*draw(sampler)])
        return iter(orders[-1])

    monkeypatch.setattr(RandomSampler, "__iter__", recorded)
    stopped(RAW, tmp_path)
    assert len(orders) == 4
    run(RAW, tmp_path)
    assert len(orders) == 10
    assert orders[4] == orders[0] != orders[1]


@pytest.mark.slow
def test_the_raw_script_with_looplibs_checkpoints_continues_as_an_unbroken_run(tmp_path):
    head, loop = RAW.split("for epoch in range(first, 10):\n")
    head = head.partition("first = 0\n")[0].replace("import os\n", "import looplib as ll\n")
    body = loop[: loop.index("    parts = {")]
    script = f"{head}{LOAD}for epoch in range(first, 10):\n{body}{SAVE}"
    assert "torch.load" not in script
    assert "torch.save" not in script
    stopped(script, tmp_path / "parts")
    again = run(script, tmp_path / "parts")
    assert again["first"] == 4
    assert same_bits(again["model"], run(RAW, tmp_path / "whole")["model"])


@pytest.mark.parametrize("name", NAMES)
def test_looplibs_scripts_continue_as_unbroken_runs(name, tmp_path):
    script, found = re.subn(r"after_epochs\(\d+\)", "after_epochs(3)", BLOCKS[name][1])
    assert found == 1
    whole = run(script, tmp_path / "whole")["state"]
    # It stops in the third epoch, and has saved after the second.
    [line] = re.findall(r"( +)(state, metrics = train_step.*\n)", script)
    stop = f"{line[0]}if (state.epoch, state.batch) == (2, 7):\n{line[0]}    raise SystemExit\n"
    with pytest.raises(SystemExit):
        run(replaced(script, ("".join(line), "".join(line) + stop)), tmp_path / "parts")
    assert not ll.debug.differences(run(script, tmp_path / "parts")["state"], whole)
    assert whole.epoch == 3


# From Lightning


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # Lightning's own: of workers, and of a first run without a checkpoint
def test_the_script_of_lightning_and_looplibs_stop_at_the_same_best_weights(tmp_path, looplibs_order, capsys):
    theirs, ours = BLOCKS["FROM_LIGHTNING"]
    adamw = "AdamW(self.parameters(), lr=1e-2"  # the same kernel in both: which evaluation is best hangs on single samples
    theirs = run(replaced(theirs, (adamw, f"{adamw}, fused=True")), tmp_path / "theirs")
    [best] = ast.literal_eval(capsys.readouterr().out.splitlines()[-1])
    ours = run(ours, tmp_path / "ours")
    printed = ast.literal_eval(capsys.readouterr().out.splitlines()[-1])
    close(theirs["model"].net, ours["net"])
    epochs = len(ll.log.read_jsonl(tmp_path / "ours/runs/looplib/log.jsonl"))
    assert ours["state"].epoch + 3 == epochs == theirs["trainer"].current_epoch < 20
    assert best == pytest.approx(printed)


@pytest.mark.parametrize("epoch", [2, 3])
@pytest.mark.parametrize(
    "cut", ["    scores = ", "    log(", "    state = ll.update_best", "    ckpt.save", "    return state\n"]
)
def test_ctrl_c_during_the_evaluation_loses_no_line_of_the_log_and_no_count(epoch, cut, tmp_path):
    script = replaced(BLOCKS["FROM_LIGHTNING"][1], ("after_epochs(20)", "after_epochs(3)"))
    head, loop = script.split("def evaluated(state):\n")
    stop = f"    if state.epoch == {epoch}:\n        raise KeyboardInterrupt\n"
    whole = run(script, tmp_path / "whole")["state"]
    with pytest.raises(KeyboardInterrupt):
        run(f"{head}def evaluated(state):\n{loop.replace(cut, stop + cut, 1)}", tmp_path / "parts")
    assert not ll.debug.differences(run(script, tmp_path / "parts")["state"], whole)
    logs = [ll.log.read_columns(tmp_path / folder / "runs/looplib/log.jsonl") for folder in ("whole", "parts")]
    assert logs[0] == logs[1]
    assert logs[0]["epoch"] == [1, 2, 3]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # Lightning's own: of workers
@pytest.mark.parametrize(
    ("callback", "part"),
    [
        ("EMAWeightAveraging(decay=0.9)", "ll.ema(0.9, start=1, buffers=True)"),
        ("WeightAveraging()", "ll.optim.swa(start=1, buffers=True)"),
    ],
)
def test_the_averages_of_lightnings_callbacks_give_the_same_accuracies(callback, part, tmp_path, looplibs_order):
    theirs, ours = BLOCKS["FROM_LIGHTNING"]
    name = callback.partition("(")[0]
    theirs = replaced(
        theirs,
        ("AdamW(self.parameters(), lr=1e-2", "AdamW(self.parameters(), lr=1e-2, fused=True"),
        ("import EarlyStopping", f"import {name}, EarlyStopping"),
        ("callbacks=[best, stop]", f"callbacks=[{callback}], num_sanity_val_steps=0"),
        (', ckpt_path="last"', ""),
        ("max_epochs=20", "max_epochs=4"),
        ('print(trainer.validate(model, val_loader, ckpt_path="best"))', ""),
    )
    ours = replaced(
        ours,
        ("0), adamw)", f"0), adamw, {part})"),
        ("after_epochs(20)", "after_epochs(4)"),
        (
            "    scores = ll.evaluate(eval_step, state",
            "    scores = ll.evaluate(eval_step, ll.eval_state(optimizer, state)",
        ),
        ('state = ckpt.restore(state, "best")\n', ""),
    )
    module = run(theirs, tmp_path / "theirs")["model"]
    names = run(ours, tmp_path / "ours")
    ll.bind(names["net"], ll.eval_state(names["optimizer"], names["state"]))
    module.net[1].num_batches_tracked.copy_(names["net"][1].num_batches_tracked)  # a count, which Lightning averages
    close(module.net, names["net"])
    [folder] = (tmp_path / "theirs/runs/lightning/lightning_logs").iterdir()
    rows = (folder / "metrics.csv").read_text()
    columns = ll.log.read_columns(tmp_path / "ours/runs/looplib/log.jsonl")
    accuracies = [float(row["val/accuracy"]) for row in csv.DictReader(rows.splitlines()) if row["val/accuracy"]]
    assert accuracies == pytest.approx(columns["val/accuracy"])


# From accelerate


@pytest.mark.slow
def test_the_script_of_accelerate_and_looplibs_end_with_the_same_weights(tmp_path, looplibs_order, capsys):
    theirs, ours = BLOCKS["FROM_ACCELERATE"]
    theirs = run(theirs, tmp_path / "theirs")
    *_, accuracy = capsys.readouterr().out.split()
    ours = run(ours, tmp_path / "ours")
    close(theirs["accelerator"].unwrap_model(theirs["model"]), ours["model"])
    scores = ll.evaluate(ours["eval_step"], ours["state"], ours["test_batches"])
    assert scores["accuracy"] == pytest.approx(float(accuracy), abs=2 / 389)  # rounding may turn a sample


def test_the_names_of_accelerate_are_its_own():
    column = [row.split("|")[1] for row in PAGES["FROM_ACCELERATE"].splitlines() if row.startswith("| ")]
    names = re.findall(r"`(?:accelerator\.)?(\w+)(?:\(.*?\))?`", "".join(column))
    elsewhere = {"scheduler", "optimizer", "skip_first_batches"}
    assert len(names) == 12
    assert [name for name in names if name not in elsewhere and not hasattr(accelerate.Accelerator, name)] == []
    assert hasattr(accelerate, "skip_first_batches")


def in_folder(folder):
    """The script of looplib for several processes, as torchrun runs it."""
    with contextlib.chdir(folder):
        names = {"__name__": "__main__"}
        exec(
            compile(BLOCKS["FROM_ACCELERATE"][1].replace("after_epochs(10)", "after_epochs(2)"), "guide", "exec"),
            names,
        )
        if ll.distributed.rank() == 0:
            torch.save(dict(names["state"].params), "weights.pt")


@pytest.mark.slow
def test_looplibs_update_takes_as_many_samples_on_two_ranks(tmp_path):
    weights = []
    for ranks in 0, 2:
        folder = tmp_path / str(ranks)
        folder.mkdir()
        launch(ranks, in_folder, folder)
        weights.append(torch.load(folder / "weights.pt"))
    torch.testing.assert_close(*weights, rtol=1e-4, atol=1e-4)
