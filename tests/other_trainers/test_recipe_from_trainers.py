"""The recipes that replace scripts of other Trainers: the best of their evaluations, early stopping, two ranks."""

import importlib.util

import pytest
from migration_page import ROOT
from ranks import launch

import looplib as ll

SMALL = {
    "from_transformers": {
        "num_train_epochs": 2,
        "learning_rate": 1e-2,
        "warmup_steps": 3,
        "logging_steps": 2,
        "eval_steps": 4,
    },
    "from_dist_trainer": {"n_epochs": 2, "print_every": 4, "validate_every": 9, "num_workers": 0},
    "from_fastnlp": {"n_epochs": 4, "batch_size": 256, "lr": 1e-2, "evaluate_every": 4, "patience": 9},
}
FOLDER = {"from_transformers": "output_dir", "from_dist_trainer": "save_path", "from_fastnlp": "folder"}
# The steps of its evaluations, and of them the best: by the loss, or by another score.
EVALUATED = {
    "from_transformers": [4, 8, 12, 14],
    "from_dist_trainer": [9, 18, 27, 36, 45, 46],
    "from_fastnlp": [4, 8, 12, 16, 20, 24],
}
BEST = {
    "from_transformers": (min, "eval/loss"),
    "from_dist_trainer": (max, "dev/acc"),
    "from_fastnlp": (max, "eval/accuracy"),
}


def load(name, dropout=0.1):
    """The recipe; that of transformers with 100 windows to train on, 20 to evaluate, and a smaller GPT-2."""
    spec = importlib.util.spec_from_file_location(name, ROOT / f"recipes/{name}.py")
    recipe = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(recipe)
    if name == "from_transformers":
        (train, test), config = recipe.load_data(), recipe.GPT2Config
        sizes = {"n_embd": 32, "n_layer": 1, "resid_pdrop": dropout, "embd_pdrop": dropout, "attn_pdrop": dropout}
        recipe.load_data = lambda: (train[:100], test[:20])
        recipe.GPT2Config = lambda **given: config(**given | sizes)
    return recipe


def run(name, folder, hidden_dropout=0.1, **settings):
    """The scores of a small run."""
    return load(name, hidden_dropout).main(**SMALL[name] | settings, **{FOLDER[name]: str(folder)})


@pytest.mark.parametrize("name", SMALL)
def test_it_ends_with_the_best_of_its_evaluations(name, tmp_path, capsys):
    scores = run(name, tmp_path)
    choose, score = BEST[name]
    evaluated = {row["step"]: row[score] for row in ll.log.read_jsonl(tmp_path / "log.jsonl") if score in row}
    assert list(evaluated) == EVALUATED[name]
    best = choose(evaluated, key=evaluated.get)
    assert scores[score.partition("/")[2]] == pytest.approx(evaluated[best], rel=1e-6)
    assert f"by the weights of step {best}" in capsys.readouterr().out


PATIENCE = {
    "from_transformers": {"learning_rate": 0.0, "early_stopping_patience": 1},
    "from_dist_trainer": {"lr": 0.0, "patience": 1},
    "from_fastnlp": {"lr": 0.0, "patience": 1},
}


@pytest.mark.parametrize("name", SMALL)
def test_it_stops_early(name, tmp_path):
    run(name, tmp_path, **PATIENCE[name])
    assert ll.log.read_jsonl(tmp_path / "log.jsonl")[-1]["step"] == EVALUATED[name][1]


PRECISE = {
    "from_transformers": {"bf16": False, "hidden_dropout": 0.0},
    "from_dist_trainer": {},
    "from_fastnlp": {"fp16": "float32", "dropout": 0.0, "overfit_batches": 2},
}
SIZE = {"from_transformers": "per_device_train_batch_size", "from_dist_trainer": "batch_size_per_gpu"}


def precise_run(name, folder, ranks):
    """The microbatches of each rank are so much smaller, where they are given by rank."""
    sizes = {SIZE[name]: 8 // ranks} if name in SIZE else {}
    run(name, folder, **PRECISE[name] | sizes)


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_two_ranks_log_what_one_process_logs(name, tmp_path):
    precise_run(name, tmp_path / "one", 1)
    launch(2, precise_run, name, tmp_path / "two", 2)
    rows, found = (ll.log.read_jsonl(tmp_path / ranks / "log.jsonl") for ranks in ("one", "two"))
    for one, two in zip(rows, found, strict=True):
        assert two == pytest.approx(one, rel=1e-4)  # sums of float32 in other orders, which Adam enlarges
