"""All recipes: each is short and describes itself, runs small, and continues after Ctrl-C to the same numbers."""

import ast
import contextlib
import importlib.util
import re
import signal
import sys
from pathlib import Path

import pytest
import torch
from shared import one_report
from torch.nn.modules.module import register_module_forward_pre_hook

import looplib as ll

RECIPES = Path(__file__).parents[2] / "recipes"
SCRIPTS = sorted([*RECIPES.glob("*.py"), *RECIPES.glob("*/train.py")])
each_script = pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: str(path.relative_to(RECIPES)))

# Settings of a small run, and the least and the most that a score of it may be.
LANGUAGE = {"steps": 60, "warmup": 2, "batch_size": 8, "length": 32, "width": 32, "depth": 1, "heads": 2, "lr": 1e-2}
LANGUAGE |= {"eval_every": 30, "log_every": 2}
SMALL = {
    "change_halfway": (
        {"steps": 30, "width": 16, "depth": 1, "log_every": 10, "save_every": 25},
        {"bits_per_byte": (0, 8), "apart": (1e-6, 1)},
    ),
    "classify_digits": ({"epochs": 4, "width": 16}, {"accuracy": (0.9, 1)}),
    "click_through": (
        {"impressions": 3_000, "epochs": 2, "batch_size": 64, "dimension": 4, "width": 8, "eval_every": 20},
        {},
    ),
    "contrastive_digits": ({"epochs": 2, "batch_size": 256, "width": 16}, {"by embeddings": (0.5, 1)}),
    "dp_sgd_digits": ({"epochs": 8, "noise_multiplier": 2.0, "width": 8}, {"accuracy": (0.7, 1)}),
    "ensemble_digits": (
        {"members": 2, "epochs": 6, "compile": 0},
        {"accuracy": (0.8, 1), "member_accuracy": (0.8, 1)},
    ),
    "from_dist_trainer": ({"n_epochs": 2, "print_every": 4, "validate_every": 9}, {"acc": (0.5, 1)}),
    "from_fastnlp": (
        {"n_epochs": 4, "batch_size": 256, "lr": 1e-2, "evaluate_every": 4, "patience": 9},
        {"accuracy": (0.7, 1)},
    ),
    "from_transformers": ({"num_train_epochs": 0.04, "warmup_steps": 3, "logging_steps": 2, "eval_steps": 4}, {}),
    "gan_digits": (
        {"epochs": 3, "batch_size": 256, "width": 8},
        {"accuracy": (0.95, 1), "real_classes": (10, 10)},
    ),
    "grpo_arithmetic": (
        {
            "epochs": 2,
            "questions": 125,
            "group": 4,
            "solved": 7000,
            "warmup_epochs": 1,
            "warmup_lr": 1e-2,
            "width": 32,
            "depth": 1,
        },
        {"warmup_accuracy": (0.001, 1)},
    ),
    "language_model": (LANGUAGE | {"sample": 8, "microbatches": 4}, {"bits_per_byte": (0, 5)}),
    "language_model_ddp": (LANGUAGE | {"sample": 8, "precision": "float32"}, {"loss": (0, 4)}),
    "language_model_fsdp": (LANGUAGE | {"precision": "float32"}, {"loss": (0, 4)}),
    "language_model_mesh": (
        {name: value for name, value in LANGUAGE.items() if name != "warmup"} | {"steps": 30, "eval_every": 15},
        {"loss": (0, 4)},
    ),
    "lora_rates": (
        {"members": 2, "steps": 4, "base_steps": 4, "batch_size": 4, "length": 32, "width": 16, "depth": 1},
        {"difference": (0, 1e-5), "share_of_memory": (0.5, 0.99)},
    ),
    "optuna_pruning": ({"trials": 3, "epochs": 2}, {"accuracy": (0.5, 1), "share": (1, 1)}),
    "ppo_cartpole": (
        {"iterations": 8, "environments": 8, "steps": 32, "passes": 4, "lr": 1e-2, "width": 16, "log_every": 2},
        {"mean_return": (20, 500)},
    ),
    "restore_vowels": (
        {
            "steps": 6,
            "batch_size": 16,
            "width": 16,
            "depth": 1,
            "warmup": 2,
            "beams": 2,
            "eval_every": 3,
            "held_out": 10,
        },
        {},
    ),
    "sweep_lr": ({"members": 4, "epochs": 2}, {"accuracy": (0.8, 1), "best_lr": (1e-3, 2)}),
    "vision": (
        {"examples": 100, "epochs": 16, "batch_size": 20, "lr": 1e-2, "width": 8, "ema_decay": 0.9},
        {"accuracy": (0.5, 1)},
    ),
    "with_torchmetrics": ({"epochs": 2, "eval_batch_size": 20}, {"average_precision": (0.9, 1)}),
}


def load(name):
    spec = importlib.util.spec_from_file_location(name, RECIPES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def untimed(values):
    """Scores or a row of a log without times, which are different in each run."""
    if not isinstance(values, dict):
        return values
    return {name: untimed(value) for name, value in values.items() if "second" not in name}


def logs_in(folder):
    return [untimed(ll.log.read_columns(path)) for path in sorted(Path(folder).rglob("log.jsonl"))]


def run(name, folder, interrupted=()):
    """The scores of a small run in a folder, none if Ctrl-C ended it, and the number of calls of modules that train.

    Ctrl-C is pressed in the calls of these numbers.
    """
    calls = 0

    def count(module, inputs):
        nonlocal calls
        calls += module.training
        if module.training and calls in interrupted:
            signal.raise_signal(signal.SIGINT)

    with contextlib.chdir(folder):
        hook = register_module_forward_pre_hook(count)
        try:
            return untimed(load(name).main(**SMALL[name][0])), calls
        except (KeyboardInterrupt, SystemExit):
            return {}, calls
        finally:
            hook.remove()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # read by peft
@pytest.mark.parametrize("name", SMALL)
def test_a_small_run_learns_and_one_that_was_interrupted_twice_ends_as_it_does(name, tmp_path, capsys):
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    whole.mkdir(), stopped.mkdir()
    expected, calls = run(name, whole)
    for score, (least, most) in SMALL[name][1].items():
        assert least <= expected[score] <= most, score
    assert expected
    logs = logs_in(whole)
    assert all(len(log["step"]) > 1 for log in logs)
    if name == "optuna_pruning":  # a search draws other settings for a trial that was interrupted: test_recipe_optuna
        return
    for _ in range(2):
        found, calls_before = run(name, stopped, interrupted=[int(0.3 * calls)])
        assert found == {}
        assert calls_before < calls
    assert run(name, stopped)[0] == expected
    assert logs_in(stopped) == logs
    again, calls_after = run(name, stopped)  # a finished run is not trained again
    assert (again, logs_in(stopped)) == (expected, logs)
    assert calls_after < calls


@one_report
@each_script
def test_a_recipe_is_short_and_opens_with_its_commands(path):
    text = path.read_text()
    assert len(text.splitlines()) < 200
    of_a_folder = [f"cd recipes/{path.parent.name}", f"python {path.name}", "python -m pytest"]
    for command in [f"python recipes/{path.name}"] if path.parent == RECIPES else of_a_folder:
        assert command in ast.get_docstring(ast.parse(text))


@one_report
@each_script
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


@one_report
@each_script
def test_each_recipe_says_after_a_ctrl_c_what_to_do(path):
    text = path.read_text()
    assert re.search(r"print\(f?\"(\\n)?stopped|SystemExit\(f\"stopped", text)
    assert "run the same command to continue" in text or "rerunning starts from the beginning" in text
    last = text[text.index('if __name__ == "__main__"') :]
    assert "except KeyboardInterrupt" in last or "after_signal(" in text


# Recipes whose data is a part to train on and held-out ones, drawn by class: the arguments, and the sizes.
HELD_OUT = {
    "classify_digits": ((), [1437, 360]),
    "optuna_pruning": ((), [1078, 359, 360]),
    "vision": ((200, 1), [200, 1597]),
    "with_torchmetrics": ((3,), [398, 171]),
}


@pytest.mark.every_case
@pytest.mark.parametrize("name", HELD_OUT)
def test_no_sample_is_trained_on_and_held_out_and_each_class_has_its_share(name):
    arguments, sizes = HELD_OUT[name]
    parts = load(name).load_data(*arguments)
    assert [len(part) for part in parts] == sizes
    samples, labels = (torch.cat(column) for column in zip(*(part.tensors for part in parts), strict=True))
    assert len(samples.flatten(1).unique(dim=0)) == len(samples)
    for part in parts:
        share = torch.bincount(part.tensors[1]) / len(part)
        torch.testing.assert_close(share, torch.bincount(labels) / len(labels), rtol=0, atol=0.01)
