"""The loops beside the scripts that they replace: trained as the Trainer trains, through a signal, on two ranks."""

import importlib.util
import inspect

import pytest
import torch
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


def make_small(module, patch=setattr, *, dropout):
    """100 windows to train on, 20 to evaluate, and a smaller GPT-2, for the recipe or the original."""
    (train, test), config = module.load_data(), module.GPT2Config
    sizes = {"n_embd": 32, "n_layer": 1, "resid_pdrop": dropout, "embd_pdrop": dropout, "attn_pdrop": dropout}
    patch(module, "load_data", lambda: (train[:100], test[:20]))
    patch(module, "GPT2Config", lambda **given: config(**given | sizes))


def load(name, dropout=0.1):
    spec = importlib.util.spec_from_file_location(name, ROOT / f"recipes/{name}.py")
    recipe = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(recipe)
    if name == "from_transformers":
        make_small(recipe, dropout=dropout)
    return recipe


def run(name, folder, hidden_dropout=0.1, **settings):
    """The scores of a small run."""
    return load(name, hidden_dropout).main(**SMALL[name] | settings, **{FOLDER[name]: str(folder)})


class Order(torch.utils.data.Sampler):
    """That of looplib's loader, for the Trainer."""

    def __init__(self, count, seed):
        self.count, self.epoch = count, 0
        self.loader = ll.make_loader(range(count), batch_size=count, seed=seed)

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return self.count

    def __iter__(self):
        return iter(self.loader.indices(ll.TrainState(epoch=self.epoch)).tolist())


@pytest.fixture
def original(monkeypatch, tmp_path):
    """tests/other_trainers/original_transformers.py, small; what it gives to TrainingArguments is in `given`."""
    import original_transformers  # here, as the ranks import this file as well
    from transformers import TrainingArguments

    make_small(original_transformers, monkeypatch.setattr, dropout=0.0)
    small = SMALL["from_transformers"] | {"save_steps": 4, "logging_steps": 1, "bf16": False}
    here = {"output_dir": str(tmp_path / "original"), "disable_tqdm": True, "dataloader_pin_memory": False}

    def arguments(**given):
        original_transformers.given = given
        return TrainingArguments(**given | small | here)

    monkeypatch.setattr(original_transformers, "TrainingArguments", arguments)
    order = lambda trainer, train_set=None: Order(len(trainer.train_dataset), trainer.args.seed)  # noqa: E731
    monkeypatch.setattr(original_transformers.Trainer, "_get_train_sampler", order)
    return original_transformers


def test_the_loop_trains_as_the_trainer_with_the_same_settings(original, tmp_path, capsys):
    trainer = original.main()
    parameters = inspect.signature(load("from_transformers").main).parameters
    defaults = {name: parameter.default for name, parameter in parameters.items()}
    shared = defaults.keys() & original.given.keys() - {"output_dir"}
    assert {name: defaults[name] for name in shared} == {name: original.given[name] for name in shared}
    assert defaults.keys() - shared == {"output_dir", "early_stopping_patience"}
    assert original.given["save_steps"] == original.given["eval_steps"]
    assert f"early_stopping_patience={defaults['early_stopping_patience']}" in inspect.getsource(original)

    folder = tmp_path / "loop"
    scores = run("from_transformers", folder, hidden_dropout=0.0, logging_steps=1, bf16=False)
    rows = ll.log.read_jsonl(folder / "log.jsonl")
    # The sums of float32 in other orders, which Adam's quotients enlarge; losses fall from 5.5 to 3.6.
    for prefix, names in {"train/": ["loss", "grad_norm", "learning_rate"], "eval/": ["loss", "accuracy"]}.items():
        ours = [[row["step"], *(row[prefix + name] for name in names)] for row in rows if prefix + "loss" in row]
        before = "eval_" if prefix == "eval/" else ""
        history = [record for record in trainer.state.log_history if before + "loss" in record]
        theirs = [[record["step"], *(record[before + name] for name in names)] for record in history]
        assert len(ours) == (14 if prefix == "train/" else 4)
        for one, other in zip(ours, theirs, strict=False):  # the last of the Trainer's is its evaluate() at the end
            assert one == pytest.approx(other, rel=1e-5), (prefix, one, other)
    assert ours[0][1] > ours[-1][1] + 0.3
    assert theirs[-1][1:] == pytest.approx([scores["loss"], scores["accuracy"]], rel=1e-5)

    checkpoints = ll.checkpoint_io(folder / "checkpoints", monitor="eval/loss")
    kept = sorted(int(path.name.partition("-")[2]) for path in (tmp_path / "original").glob("checkpoint-*"))
    assert [found.step for found in checkpoints.steps()] == kept == [8, 12, 14]
    assert checkpoints.best().step == trainer.state.best_global_step
    ours, theirs = (original.GPT2LMHeadModel.from_pretrained(tmp_path / name) for name in ("loop", "original"))
    ids = torch.stack([example["input_ids"] for example in original.load_data()[1]])
    with torch.no_grad():
        torch.testing.assert_close(ours(ids).logits, theirs(ids).logits, rtol=0, atol=1e-4)
    assert list((folder / "tensorboard").glob("events.out.tfevents.*"))


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
