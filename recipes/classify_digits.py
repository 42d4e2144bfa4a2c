"""Classify handwritten digits with a small convolutional network.

    pip install "looplib[recipes]"
    python recipes/classify_digits.py              (or with other settings: --epochs 10 --seed 1)

The 1,797 pictures of 8 x 8 pixels come with scikit-learn; 360 of them are held out. The log, a line for every tenth
step and for every epoch, a picture of its curves, and checkpoints of the last and the best epoch are in runs/digits.

Ctrl-C stops after the batch at hand, and the same command goes on from there, to the same bits as without it; after
a crash it goes on from the last epoch. For a new run, delete the folder or give another --directory.

Reached: 99.2% to 100% of the held-out digits over the seeds 0 to 9, 99.7% in the middle (and with seed 0), in 7
seconds on one core.
"""

from __future__ import annotations

import argparse
import inspect
import sys
import time
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import looplib as ll


def main(
    epochs: int = 30,
    batch_size: int = 64,
    lr: float = 3e-3,  # at its peak, after the warmup
    warmup: float = 0.1,  # part of all steps in which lr rises from 0; it then falls along a cosine
    weight_decay: float = 0.1,
    max_norm: float = 1.0,  # gradients are scaled down to this norm
    width: int = 32,  # channels of the first convolution
    dropout: float = 0.5,
    log_every: int = 10,  # steps
    seed: int = 0,  # of the weights, the order of the pictures, their shifts and the dropout
    directory: str = "runs/digits",
) -> dict[str, float]:
    began = time.perf_counter()
    torch.set_num_threads(1)  # so small a network gains nothing from more, and loses much on cores that are shared
    torch.manual_seed(seed)
    train_set, test_set = load_data()
    model = make_model(width, dropout)
    loader = ll.make_loader(train_set, batch_size=batch_size, seed=seed)
    test_batches = DataLoader(test_set, batch_size=256)

    steps = epochs * len(loader)
    optimizer = ll.optimizer(
        torch.optim.AdamW,
        lr=ll.warmup_cosine(lr, warmup=round(warmup * steps), total=steps),
        weight_decay=weight_decay,
        groups=[(lambda name, tensor: tensor.ndim < 2, {"weight_decay": 0.0})],  # norms and biases
    )
    grad_fn = ll.clip_by_global_norm(ll.make_grad_fn(model, loss_fn), max_norm)
    train_step = ll.make_train_step(grad_fn, optimizer, donate=True)
    eval_step = ll.make_eval_step(model, metric_fn)
    log_now, eval_now, done = ll.every_n_steps(log_every), ll.at_epoch_end(), ll.after_epochs(epochs)

    folder = Path(directory)
    log_path, picture = folder / "log.jsonl", folder / "curves.png"
    to_file = ll.jsonl(log_path)
    log = ll.tee(to_file, ll.console())
    ckpt = ll.checkpoint_io(
        folder / "checkpoints", keep_last=1, keep_best=1, monitor="eval/loss", describe={"loader": loader}
    )

    state = ckpt.restore(ll.init_state(model, optimizer, seed=seed, epoch_length=len(loader)))
    if state.step:
        print(f"going on from step {state.step} of {steps}")

    try:
        while not done(state):
            bar = ll.progress(loader(state), state, leave=False)
            for batch in bar:
                state, metrics = train_step(state, batch)
                bar.show(metrics)
                if log_now(state):
                    to_file(state, ll.compute(metrics, prefix="train/"))
                if eval_now(state):
                    log(state, scores := ll.evaluate(eval_step, state, test_batches, prefix="eval/"))
                    ckpt.save(state, scores)
        scores = ll.evaluate(eval_step, state, test_batches)
        draw_curves(ll.read_jsonl(log_path), picture)
    except KeyboardInterrupt:
        ckpt.save(state)
        print(f"\nstopped at step {state.step} of {steps}; the same command goes on from there")
        raise

    scores["seconds"] = time.perf_counter() - began
    print(f"{scores['accuracy']:.2%} of the {len(test_set)} held-out digits right, {scores['seconds']:.1f} s")
    print(f"curves: {picture}   log: {log_path}   checkpoints: {folder / 'checkpoints'}")
    return scores


def load_data() -> tuple[TensorDataset, TensorDataset]:
    """Pictures (n, 1, 8, 8) in float32 from 0 to 1, and labels (n,)."""
    digits = load_digits()
    pictures = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    train, test = train_test_split(range(len(labels)), test_size=0.2, stratify=labels, random_state=0)
    return TensorDataset(pictures[train], labels[train]), TensorDataset(pictures[test], labels[test])


def make_model(width: int, dropout: float) -> nn.Module:
    def block(channels_in: int, channels_out: int) -> list[nn.Module]:
        conv = nn.Conv2d(channels_in, channels_out, 3, padding=1, bias=False)
        return [conv, nn.BatchNorm2d(channels_out), nn.ReLU()]

    return nn.Sequential(
        *block(1, width),
        *block(width, width),
        nn.MaxPool2d(2),
        *block(width, 2 * width),
        *block(2 * width, 2 * width),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Dropout(dropout),
        nn.Linear(2 * width, 10),
    )


def shift(pictures: Tensor) -> Tensor:
    """Each picture moved by -1, 0 or 1 pixels, in both directions."""
    # What is drawn in a loss function depends on the state's seed and step alone, so a run that goes on draws alike.
    size = pictures.shape[-1]
    windows = F.pad(pictures, (1, 1, 1, 1)).unfold(2, size, 1).unfold(3, size, 1)  # (n, 1, 3, 3, 8, 8)
    rows, columns = torch.randint(3, (2, len(pictures)), device=pictures.device)
    return windows[torch.arange(len(pictures)), :, rows, columns]


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    pictures, labels = batch
    logits = model(shift(pictures))
    return F.cross_entropy(logits, labels), {"accuracy": (logits.argmax(1) == labels).float().mean()}


def metric_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    pictures, labels = batch
    logits = model(pictures)
    return {"loss": F.cross_entropy(logits, labels), "accuracy": (logits.argmax(1) == labels).float().mean()}


def draw_curves(rows: list[dict[str, Any]], path: Path) -> None:
    figure = Figure(figsize=(10, 4), layout="constrained")
    for name, axes in zip(("loss", "accuracy"), figure.subplots(1, 2), strict=True):
        for prefix, label, style in (
            ("train/", "training batches", {"color": "tab:blue", "alpha": 0.5, "linewidth": 1}),
            ("eval/", "held-out digits", {"color": "tab:orange", "linewidth": 2, "marker": "o", "markersize": 4}),
        ):
            steps = [row["step"] for row in rows if prefix + name in row]
            values = [row[prefix + name] for row in rows if prefix + name in row]
            axes.plot(steps, values, label=label, **style)
        axes.set(xlabel="step", title=f"{name}: {values[-1]:.4f} on held-out digits")
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
    figure.axes[0].set_yscale("log")
    figure.axes[1].set_ylim(min(0.8, values[-1]), 1.01)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    for setting in inspect.signature(main).parameters.values():
        parser.add_argument(f"--{setting.name}", type=type(setting.default), default=setting.default)
    try:
        main(**vars(parser.parse_args()))
    except KeyboardInterrupt:
        sys.exit(130)
