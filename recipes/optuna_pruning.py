"""Search hyperparameters with Optuna, which stops trials that fall behind.

    pip install optuna scikit-learn matplotlib
    python recipes/optuna_pruning.py               (or with other settings: --epochs 10 --seed 1)
    python recipes/optuna_pruning.py --trials 80   (the trials of an earlier run are kept, and the missing ones added)

The loop is a plain one: after each epoch it reports the validation loss to the trial (`trial.report`), and ends if
the loss is worse than the median of earlier trials (`trial.should_prune`). A run is a function of its settings and
its seed, so training again with the best settings gives the same bits; only that run uses the test set. Of the 1,797
digits that come with scikit-learn, 60% are for training, 20% for validation and 20% for the test.

Reached with seeds 0 to 2, in 9 seconds on one core: 97.5% to 97.8% of the test digits; 8 to 17 of 40 trials were
pruned, and 66% to 84% of their epochs trained. Without pruning (--startup 1000), seeds 0 and 1 find the same best
settings.
"""

from __future__ import annotations

import argparse
import inspect
import math
import re
import sys
import time
from pathlib import Path
from typing import Any

import optuna
import torch
from matplotlib.figure import Figure
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import looplib as ll

Batch = tuple[Tensor, Tensor]


def main(
    trials: int = 40,  # in total, including those already in the storage
    epochs: int = 20,  # of a trial that is not pruned
    startup: int = 5,  # trials before any is pruned
    grace: int = 3,  # the first epoch after which a trial can be pruned
    seed: int = 0,  # of the weights, the order of the digits, the dropout, and of what Optuna tries
    storage: str = "",  # of Optuna, such as sqlite:///optuna.db; empty for a file in the folder
    directory: str = "runs/optuna_pruning",  # folder for the trials and the figure
) -> dict[str, float]:
    began = time.perf_counter()
    torch.set_num_threads(1)
    Path(directory).mkdir(parents=True, exist_ok=True)
    file = JournalFileBackend(str(Path(directory) / "trials.log"))
    study = search(trials, epochs, startup, grace, seed, storage or JournalStorage(file))
    ended = ended_trials(study)
    complete = [trial for trial in ended if trial.state == TrialState.COMPLETE]
    share = sum(len(trial.intermediate_values) for trial in ended) / (epochs * len(ended))

    print(f"{'trial':>5}{'loss':>9}  settings")
    for trial in sorted(complete, key=lambda trial: trial.value or 0.0)[:5]:
        settings = "  ".join(f"{name} {value:.3g}" for name, value in trial.params.items())
        print(f"{trial.number:5}{trial.value:9.4f}  {settings}")
    loss, accuracy = train(study.best_params, epochs, seed)
    path = Path(directory) / "trials.png"
    draw(study, path)
    pruned = len(ended) - len(complete)
    print(f"{pruned} of {len(ended)} trials pruned: {share:.0%} of their epochs trained   figure: {path}")
    print(f"the best of them alone: validation loss {loss:.4f}, {accuracy:.2%} of the test digits right")
    return {
        "best_value": study.best_value,
        "loss": loss,
        "accuracy": accuracy,
        "pruned": pruned,
        "share": share,
        "seconds": time.perf_counter() - began,
    }


def search(trials: int, epochs: int, startup: int, grace: int, seed: int, storage: Any = None) -> optuna.Study:
    def objective(trial: optuna.Trial) -> float:
        settings = {
            "lr": trial.suggest_float("lr", 1e-3, 3.0, log=True),
            "momentum": trial.suggest_float("momentum", 0.0, 0.99),
            "weight_decay": trial.suggest_float("weight_decay", 1e-6, 1e-1, log=True),
            "dropout": trial.suggest_float("dropout", 0.0, 0.7),
            "width": trial.suggest_int("width", 8, 128, log=True),
        }
        return train(settings, epochs, seed, trial)[0]

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(
        storage=storage,
        study_name="digits",
        load_if_exists=True,
        pruner=optuna.pruners.MedianPruner(n_startup_trials=startup, n_warmup_steps=grace),
    )
    ended = ended_trials(study)
    study.sampler = optuna.samplers.TPESampler(seed=seed + len(ended))  # the same seed would repeat the first trials
    report = [lambda study, trial: print(f"trial {trial.number}: {trial.state.name.lower()}, loss {trial.value:.4f}")]
    print(f"{len(ended)} of {trials} trials are done{'; delete their folder to start again' if ended else ''}")
    study.optimize(objective, n_trials=max(0, trials - len(ended)), callbacks=report)
    return study


def ended_trials(study: optuna.Study) -> list[optuna.trial.FrozenTrial]:
    """Trials that are complete or pruned, without one that Ctrl-C ended."""
    return study.get_trials(states=(TrialState.COMPLETE, TrialState.PRUNED))


def train(settings: dict[str, Any], epochs: int, seed: int, trial: optuna.Trial | None = None) -> tuple[float, float]:
    """Last validation loss, and for a run outside the search, the test accuracy."""
    torch.manual_seed(seed)
    train_set, validation_set, test_set = load_data()
    width, dropout = settings["width"], settings["dropout"]
    model = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Dropout(dropout), nn.Linear(width, 10))
    loader = ll.make_loader(train_set, batch_size=64, seed=seed)
    optimizer = ll.optimizer(
        torch.optim.SGD,
        lr=ll.warmup_cosine(settings["lr"], warmup=len(loader), total=epochs * len(loader)),
        momentum=settings["momentum"],
        weight_decay=settings["weight_decay"],
    )
    train_step = ll.make_train_step(ll.make_grad_fn(model, loss_fn), optimizer, donate=True)
    eval_step = ll.make_eval_step(model, metric_fn)
    eval_now, done = ll.at_epoch_end(), ll.after_epochs(epochs)

    state = ll.init_state(model, optimizer, seed=seed, loader=loader)
    while not done(state):
        for batch in loader(state):
            state, _ = train_step(state, batch)
            if eval_now(state):
                scores = ll.evaluate(eval_step, state, [validation_set.tensors])
                if trial:
                    trial.report(scores["loss"], step=state.epoch)
                    if math.isnan(scores["loss"]) or (trial.should_prune() and not done(state)):
                        raise optuna.TrialPruned
    accuracy = float("nan") if trial else ll.evaluate(eval_step, state, [test_set.tensors])["accuracy"]
    return scores["loss"], accuracy


def loss_fn(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def metric_fn(model: nn.Module, batch: Batch) -> dict[str, object]:
    logits = model(batch[0])
    return {"loss": F.cross_entropy(logits, batch[1]), "accuracy": ll.accuracy(logits, batch[1])}


def load_data() -> list[TensorDataset]:
    """Images (n, 64), float32 from 0 to 1, and labels (n,), in three parts."""
    digits = load_digits()
    pictures, labels = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    train, rest = train_test_split(range(len(labels)), test_size=0.4, stratify=labels, random_state=0)
    validation, test = train_test_split(rest, test_size=0.5, stratify=labels[rest], random_state=0)
    return [TensorDataset(pictures[rows], labels[rows]) for rows in (train, validation, test)]


def draw(study: optuna.Study, path: Path) -> None:
    figure = Figure(figsize=(10, 4), layout="constrained")
    curves, rates = figure.subplots(1, 2)
    for trial in ended_trials(study):
        steps, losses = list(trial.intermediate_values), list(trial.intermediate_values.values())
        best = trial.number == study.best_trial.number
        color = "tab:orange" if best else "tab:gray" if trial.state == TrialState.PRUNED else "tab:blue"
        curves.plot(steps, losses, color=color, linewidth=3 if best else 1, alpha=1.0 if best else 0.6)
        rates.plot(trial.params["lr"], losses[-1], color=color, marker="o", markersize=8 if best else 4)
    curves.set(xlabel="epoch", yscale="log", title="validation loss: pruned in gray, the best in orange")
    rates.set(xlabel="learning rate", xscale="log", yscale="log", title="where each trial ended")
    for axes in (curves, rates):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, about in re.findall(r"^    (\w+): .*?,  # (.*)", inspect.getsource(main), re.MULTILINE):
        default = inspect.signature(main).parameters[name].default
        parser.add_argument(f"--{name}", type=type(default), default=default, help=f"{about} (default: {default!r})")
    try:
        main(**vars(parser.parse_args()))
    except KeyboardInterrupt:
        print("\nstopped; run the same command to continue with the next trial")
        sys.exit(130)
