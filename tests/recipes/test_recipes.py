import ast
import importlib.util
import random
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from shared import struck
from torch import nn

import looplib as ll

RECIPES = Path(__file__).parents[2] / "recipes"


def load(name):
    spec = importlib.util.spec_from_file_location(name, RECIPES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def interruptible():
    """Ctrl-C works, in the processes started from here too: those started in the background ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_there_is_a_recipe():
    assert list(RECIPES.glob("*.py"))


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.py")), ids=lambda path: path.stem)
def test_a_recipe_is_short_and_opens_with_its_command(path):
    text = path.read_text()
    assert len(text.splitlines()) < 200
    assert f"python recipes/{path.name}" in ast.get_docstring(ast.parse(text))


# classify_digits

DIGITS = {"epochs": 3, "batch_size": 128, "width": 4, "log_every": 2}


def test_digits_are_learned_and_logged(tmp_path, capsys):
    recipe = load("classify_digits")
    scores = recipe.main(epochs=4, width=16, directory=str(tmp_path / "run"))
    assert scores["accuracy"] > 0.9
    rows = ll.log.read_jsonl(tmp_path / "run/log.jsonl")
    assert [row["step"] for row in rows if "train/loss" in row] == list(range(10, 93, 10))
    evaluated = [row for row in rows if "eval/loss" in row]
    assert [row["epoch"] for row in evaluated] == [1, 2, 3, 4]
    assert evaluated[-1]["eval/accuracy"] == scores["accuracy"]
    assert (tmp_path / "run/curves.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(file.name for file in (tmp_path / "run").iterdir()) == ["checkpoints", "curves.png", "log.jsonl"]
    steps = ll.checkpoint_io(tmp_path / "run/checkpoints").steps()
    best = min(evaluated, key=lambda row: row["eval/loss"])
    assert [found.step for found in steps] == sorted({best["step"], 92})
    assert f"{scores['accuracy']:.2%} of the 360 held-out digits" in capsys.readouterr().out


def test_digits_are_held_out_by_class_and_shifted_by_a_pixel():
    recipe = load("classify_digits")
    train_set, test_set = recipe.load_data()
    assert len(train_set) + len(test_set) == 1797
    counts = torch.bincount(test_set.tensors[1])
    assert counts.min() >= 34
    assert counts.max() <= 38
    seen = {tuple(picture.flatten().tolist()) for picture in train_set.tensors[0]}
    assert sum(tuple(picture.flatten().tolist()) in seen for picture in test_set.tensors[0]) == 0

    pictures = torch.rand(50, 1, 8, 8)
    moves = [(i, j) for i in (-1, 0, 1) for j in (-1, 0, 1)]
    zeros = nn.functional.pad(pictures, (1, 1, 1, 1))
    found = set()
    for before, after in zip(zeros, recipe.shift(pictures), strict=True):
        (move,) = [move for move in moves if torch.equal(before.roll(move, (1, 2))[:, 1:-1, 1:-1], after)]
        found.add(move)
    assert len(found) > 5


def run_digits(recipe, monkeypatch, directory, interrupts=()):
    """The model after a run that was interrupted in these steps, counted from 1, and each time started again."""
    models, calls = [], 0

    def make_model(*settings, make=recipe.make_model):
        models.append(make(*settings))
        return models[-1]

    def shift(pictures, shift=recipe.shift):
        nonlocal calls
        calls += 1
        if calls in interrupts:
            signal.raise_signal(signal.SIGINT)
        return shift(pictures)

    with monkeypatch.context() as patched:
        patched.setattr(recipe, "make_model", make_model)
        patched.setattr(recipe, "shift", shift)
        for _ in interrupts:
            with pytest.raises(KeyboardInterrupt):
                recipe.main(**DIGITS, directory=str(directory))
            assert list(directory.glob("checkpoints/step-*"))
        recipe.main(**DIGITS, directory=str(directory))
    assert len(models) == len(interrupts) + 1
    return models[-1]


def test_interrupted_digits_go_on_to_the_same_bits(tmp_path, monkeypatch, interruptible, capsys):
    recipe = load("classify_digits")
    expected = run_digits(recipe, monkeypatch, tmp_path / "whole").state_dict()
    # 3 epochs of 12 batches: the first step, amid an epoch, at an epoch's end and begin, and in the last step
    interrupts = (1, 6, 12, 13, 36)
    found = run_digits(recipe, monkeypatch, tmp_path / "parts", interrupts).state_dict()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert (tmp_path / "parts/log.jsonl").read_bytes() == (tmp_path / "whole/log.jsonl").read_bytes()
    assert (tmp_path / "parts/curves.png").exists()
    shown = capsys.readouterr().out
    for step in interrupts:
        assert f"stopped at step {step} of 36; run the same command to continue" in shown
        assert f"Restored step {step} (epoch {step // 12}, batch {step % 12}) from {tmp_path}/parts/" in shown

    log = (tmp_path / "parts/log.jsonl").read_bytes()
    again = recipe.main(**DIGITS, directory=str(tmp_path / "parts"))  # a finished run is not trained again
    assert again["accuracy"] == ll.log.read_jsonl(tmp_path / "whole/log.jsonl")[-1]["eval/accuracy"]
    assert (tmp_path / "parts/log.jsonl").read_bytes() == log
    assert f"already finished at step 36; delete {tmp_path / 'parts'} to start again" in capsys.readouterr().out


@pytest.mark.slow
def test_a_process_stopped_by_ctrl_c_continues_by_the_same_command(tmp_path, interruptible):
    settings = {"epochs": 8, "batch_size": 32, "width": 8, "log_every": 1}
    options = [argument for name, value in settings.items() for argument in (f"--{name}", str(value))]
    command = [sys.executable, str(RECIPES / "classify_digits.py"), *options]
    expected = tmp_path / "expected"
    load("classify_digits").main(**settings, directory=str(expected))
    log = tmp_path / "runs/digits/log.jsonl"

    at = random.randrange(20, 200)  # of 360 steps
    interrupted = [*struck(RECIPES / "classify_digits.py", signal.SIGINT, at), *options]
    run = subprocess.run(interrupted, cwd=tmp_path, capture_output=True, text=True)
    assert "run the same command to continue" in run.stdout, f"interrupted at {at}: {run.stdout}\n{run.stderr}"
    assert run.returncode == 130
    assert "Traceback" not in run.stderr

    again = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert again.returncode == 0, again.stderr
    assert re.search(r"Restored step \d+ .* from runs/digits/checkpoints/step-", again.stdout)
    assert log.read_bytes() == (expected / "log.jsonl").read_bytes(), f"interrupted at {at}"


@pytest.mark.parametrize(
    "path",
    sorted([*RECIPES.glob("*.py"), *RECIPES.glob("*/train.py")]),
    ids=lambda path: str(path.relative_to(RECIPES)),
)
def test_the_help_of_a_recipe_describes_it_and_each_setting(path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [str(path), "--help"])
    monkeypatch.setenv("COLUMNS", "200")
    namespace = {"__name__": "__main__"}
    source = path.read_text()
    # Imports and all else are left out: the signature with its comments and the last block are enough for the help.
    tree = ast.parse(source)
    main = next(node for node in tree.body if getattr(node, "name", "") == "main")
    monkeypatch.setattr("inspect.getsource", lambda function: ast.get_source_segment(source, main))
    body = [
        ast.parse(line).body[0]
        for line in ("from __future__ import annotations", "import argparse, inspect, re, sys")
    ]
    tree.body = [*body, main, tree.body[-1]]
    namespace["__doc__"] = ast.get_docstring(ast.parse(source))
    with pytest.raises(SystemExit) as ended:
        exec(compile(tree, str(path), "exec"), namespace)
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert namespace["__doc__"].splitlines()[0] in shown
    for argument, default in zip(main.args.args, main.args.defaults, strict=True):
        default = ast.literal_eval(default)
        line = re.search(rf"^  --{argument.arg} \S+\s+(\w.*)$", shown, re.MULTILINE)
        assert line, f"--{argument.arg} is not described"
        assert line[1].endswith(f"(default: {default!r})")


# Ctrl-C


@pytest.mark.parametrize(
    "path",
    sorted([*RECIPES.glob("*.py"), *RECIPES.glob("*/train.py")]),
    ids=lambda path: str(path.relative_to(RECIPES)),
)
def test_each_recipe_says_after_a_ctrl_c_what_to_do(path):
    text = path.read_text()
    assert re.search(r"print\(f?\"(\\n)?stopped|SystemExit\(f\"stopped", text)
    assert "run the same command to continue" in text or "rerunning starts from the beginning" in text
    last = text[text.index('if __name__ == "__main__"') :]
    assert "except KeyboardInterrupt" in last or "after_signal(" in text


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("with_torchmetrics", {"epochs": 5}),
        ("dp_sgd_digits", {"epochs": 3, "width": 2}),
        ("contrastive_digits", {"epochs": 3, "batch_size": 512, "width": 8}),
    ],
)
def test_a_recipe_that_was_interrupted_ends_as_one_that_was_not(name, settings, tmp_path, monkeypatch, interruptible):
    recipe, make_train_step, updates = load(name), ll.make_train_step, 0

    def make_interrupted_step(*args, **options):
        step = make_train_step(*args, **options)

        def interrupted(state, batch):
            nonlocal updates
            updates += 1
            if updates == 4:
                signal.raise_signal(signal.SIGINT)
            return step(state, batch)

        return interrupted

    def scores(folder):
        found = recipe.main(**settings, directory=str(folder))
        return {name: value for name, value in found.items() if not name.endswith("seconds")}

    expected = scores(tmp_path / "whole")
    monkeypatch.setattr(ll, "make_train_step", make_interrupted_step)
    with pytest.raises(KeyboardInterrupt):
        scores(tmp_path / "parts")
    monkeypatch.undo()
    assert scores(tmp_path / "parts") == expected
    assert updates == 4
