"""The loops beside the scripts that they replace: trained as the Trainer trains, through a signal, on two ranks."""

import importlib.util
import inspect
import signal
import warnings

import pytest
import torch
from migration_page import ROOT
from ranks import launch
from safetensors.torch import load_file

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
}
FOLDER = {"from_transformers": "output_dir", "from_dist_trainer": "save_path"}
SIZE = {"from_transformers": "per_device_train_batch_size", "from_dist_trainer": "batch_size_per_gpu"}
EVALUATED = {"from_transformers": [4, 8, 12, 14], "from_dist_trainer": [9, 18, 27, 36, 45, 46]}


def load(name, dropout=0.1):
    spec = importlib.util.spec_from_file_location(name, ROOT / f"recipes/{name}.py")
    recipe = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(recipe)
    if name == "from_transformers":
        make_small(recipe, dropout=dropout)
    return recipe


def make_small(module, patch=setattr, *, dropout):
    """100 windows to train on, 20 to evaluate, and a smaller GPT-2, for the recipe or the original."""
    (train, test), config = module.load_data(), module.GPT2Config
    sizes = {"n_embd": 32, "n_layer": 1, "resid_pdrop": dropout, "embd_pdrop": dropout, "attn_pdrop": dropout}
    patch(module, "load_data", lambda: (train[:100], test[:20]))
    patch(module, "GPT2Config", lambda **given: config(**given | sizes))


def run(name, folder):
    return load(name).main(**SMALL[name], **{FOLDER[name]: str(folder)})


def values(folder):
    """The log, and the tensors of the last checkpoint."""
    last = ll.checkpoint_io(folder / "checkpoints").latest()
    return ll.log.read_jsonl(folder / "log.jsonl"), load_file(last.path / "tensors.safetensors")


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
    recipe = load("from_transformers", dropout=0.0)
    defaults = {name: setting.default for name, setting in inspect.signature(recipe.main).parameters.items()}
    shared = defaults.keys() & original.given.keys() - {"output_dir"}
    assert {name: defaults[name] for name in shared} == {name: original.given[name] for name in shared}
    assert defaults.keys() - shared == {"output_dir", "early_stopping_patience"}
    assert original.given["save_steps"] == original.given["eval_steps"]
    assert f"early_stopping_patience={defaults['early_stopping_patience']}" in inspect.getsource(original)

    folder = tmp_path / "loop"
    settings = SMALL["from_transformers"] | {"logging_steps": 1, "bf16": False}
    scores = recipe.main(**settings, output_dir=str(folder))
    rows, _ = values(folder)
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
    ids = torch.stack([example["input_ids"] for example in recipe.load_data()[1]])
    with torch.no_grad():
        torch.testing.assert_close(ours(ids).logits, theirs(ids).logits, rtol=0, atol=1e-4)
    assert list((folder / "tensorboard").glob("events.out.tfevents.*"))


@pytest.mark.parametrize("name", SMALL)
def test_it_is_short_and_ends_with_the_best_of_its_evaluations(name, tmp_path, capsys):
    assert len((ROOT / f"recipes/{name}.py").read_text().splitlines()) < 130
    scores = run(name, tmp_path)
    rows, _ = values(tmp_path)
    prefix, score, choose = ("dev/", "acc", max) if name == "from_dist_trainer" else ("eval/", "loss", min)
    found = {row["step"]: row[prefix + score] for row in rows if prefix + score in row}
    assert list(found) == EVALUATED[name]
    assert scores[score] == pytest.approx(choose(found.values()), rel=1e-6)
    best = next(step for step, value in found.items() if value == choose(found.values()))
    assert f"by the weights of step {best}" in capsys.readouterr().out


@pytest.mark.parametrize("name", SMALL)
def test_stopped_by_a_signal_the_same_command_continues_to_the_same_bits(name, tmp_path, capsys):
    expected = run(name, tmp_path / "whole")
    recipe, calls = load(name), 0
    metric_fn = recipe.metric_fn if name == "from_transformers" else recipe.loss_fn

    def counted(*arguments, **settings):
        nonlocal calls
        calls += 1
        if calls == 2 * 5:  # the fifth update, of two microbatches; those of an evaluation count too
            signal.raise_signal(signal.SIGTERM)
        return metric_fn(*arguments, **settings)

    setattr(recipe, metric_fn.__name__, counted)
    settings = SMALL[name] | {FOLDER[name]: str(tmp_path / "parts")}
    assert recipe.main(**settings) == {}
    stop = {"from_transformers": 4, "from_dist_trainer": 8}[name]
    assert f"stopped at step {stop} of {EVALUATED[name][-1]}; run the same command" in capsys.readouterr().out
    assert recipe.main(**settings) == expected
    (rows, tensors), (found_rows, found) = values(tmp_path / "whole"), values(tmp_path / "parts")
    assert found_rows == rows
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[place], tensor) for place, tensor in tensors.items())


@pytest.mark.parametrize("name", SMALL)
def test_it_stops_early(name, tmp_path):
    rate, patience = {
        "from_transformers": ("learning_rate", "early_stopping_patience"),
        "from_dist_trainer": ("lr", "patience"),
    }[name]
    load(name).main(**SMALL[name] | {rate: 0.0, patience: 1, FOLDER[name]: str(tmp_path)})
    assert values(tmp_path)[0][-1]["step"] == EVALUATED[name][1]


def test_a_fraction_of_an_epoch_is_rounded_up_to_whole_steps(tmp_path):
    settings = SMALL["from_transformers"] | {"num_train_epochs": 0.5}  # of seven updates in an epoch
    load("from_transformers").main(**settings, output_dir=str(tmp_path))
    assert values(tmp_path)[0][-1]["step"] == 4


def test_o1_has_a_loss_scale_and_a_minus_is_for_less(tmp_path):
    settings = SMALL["from_dist_trainer"] | {"n_epochs": 1, "fp16": "O1", "metric_key": "-loss"}
    scores = load("from_dist_trainer").main(**settings, save_path=str(tmp_path))
    rows, _ = values(tmp_path)
    assert all("train/loss_scale" in row for row in rows if "train/loss" in row)
    assert scores["loss"] == pytest.approx(min(row["dev/loss"] for row in rows if "dev/loss" in row), rel=1e-6)


def train(name, settings):
    load(name, dropout=0.0).main(**settings)


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_two_ranks_log_what_one_process_logs(name, tmp_path):
    settings = SMALL[name] | ({"bf16": False} if name == "from_transformers" else {})
    train(name, settings | {SIZE[name]: 8, FOLDER[name]: str(tmp_path / "one")})
    launch(2, train, name, settings | {SIZE[name]: 4, FOLDER[name]: str(tmp_path / "two")})
    (rows, _), (found, _) = values(tmp_path / "one"), values(tmp_path / "two")
    for one, two in zip(rows, found, strict=True):
        assert two == pytest.approx(one, rel=1e-4)  # sums of float32 in other orders, which Adam enlarges


def train_until_a_signal(name, settings):
    recipe, calls = load(name), 0
    loss = "metric_fn" if name == "from_transformers" else "loss_fn"
    function = getattr(recipe, loss)

    def counted(*arguments, **others):
        nonlocal calls
        calls += 1
        if calls == 2 * 3 and ll.distributed.rank() == 1:  # the third update, of two microbatches
            signal.raise_signal(signal.SIGTERM)
        return function(*arguments, **others)

    setattr(recipe, loss, counted)
    assert recipe.main(**settings) == {}


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_stopped_on_two_ranks_it_continues_on_one_at_the_same_sample(name, tmp_path):
    settings = SMALL[name] | {FOLDER[name]: str(tmp_path), SIZE[name]: 4}
    launch(2, train_until_a_signal, name, settings)
    checkpoints = ll.checkpoint_io(tmp_path / "checkpoints")
    step, seen = checkpoints.latest().step, values(tmp_path)[0][-1]["samples"]
    assert seen == step * 2 * 4 * 2
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        scores = load(name).main(**settings)
    assert any("on each rank, and" in str(one.message) for one in said)
    rows, _ = values(tmp_path)
    samples = 100 if name == "from_transformers" else len(load(name).load_data()[0])
    assert rows[-1]["samples"] == 2 * samples  # each once in each of two epochs
    after = [row for row in rows if row["step"] > step and "epoch" in row and row["epoch"] == 0]
    assert all(row["samples"] == seen + (row["step"] - step) * 8 for row in after)
    assert after
    assert all(value == value for value in scores.values())
