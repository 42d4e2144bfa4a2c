"""Classify handwritten digits with a small convolutional network.

    pip install scikit-learn matplotlib
    python recipes/classify_digits.py              (or with other settings: --epochs 10 --seed 1)

The 1,797 images of 8 x 8 pixels come with scikit-learn; 360 of them are held out. The folder runs/digits has the log
(a line for every tenth step and every epoch), a plot of it, and checkpoints of the last and the best epoch.

Ctrl-C stops. Run the same command to continue; the weights are the same, bit for bit. After a
crash, it continues from the last epoch. To start again, delete the folder or give another --directory.

Reached: 99.2% to 100% of the held-out digits with seeds 0 to 9, in 7 seconds on one core (median 99.4% or 99.7%, and
99.2% to 99.7% with seed 0, by processor: each adds in another order, and one digit is 0.3%).
"""

from __future__ import annotations

import argparse
import inspect
import re
import sys
import time
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import looplib as ll


def main(
    epochs: int = 30,  # passes over the training set
    batch_size: int = 64,  # images in a batch
    lr: float = 3e-3,  # learning rate at its peak, after the warmup
    warmup: float = 0.1,  # share of all steps in which the learning rate rises from 0; it then falls along a cosine
    weight_decay: float = 0.1,  # of the convolutions and the linear layer
    max_norm: float = 1.0,  # gradients are scaled down to this norm
    width: int = 32,  # channels of the first convolution
    dropout: float = 0.5,  # probability of dropping a feature
    log_every: int = 10,  # steps between two lines of the log
    seed: int = 0,  # of the weights, the order of the images, their shifts and the dropout
    directory: str = "runs/digits",  # folder for log, plot and checkpoints
) -> dict[str, float]:
    began = time.perf_counter()
    torch.set_num_threads(1)  # such a small network gains nothing from more threads, and loses much on shared cores
    torch.manual_seed(seed)
    train_set, test_set = load_data()
    model = make_model(width, dropout)
    loader = ll.make_loader(train_set, batch_size=batch_size, seed=seed)
    test_batches = DataLoader(test_set, batch_size=256)

    steps = epochs * len(loader)
    rate = ll.warmup_cosine(lr, warmup=warmup, total=steps)
    groups = [(lambda name, tensor: tensor.ndim < 2, {"weight_decay": 0.0})]  # norms and biases
    optimizer = ll.chain(
        ll.clip_by_global_norm(max_norm),
        ll.optimizer(torch.optim.AdamW, lr=rate, weight_decay=weight_decay, groups=groups),
    )
    train_step = ll.make_train_step(ll.make_grad_fn(model, loss_fn), optimizer, donate=True)
    eval_step = ll.make_eval_step(model, metric_fn)
    log_now, eval_now, done = ll.every_n_steps(log_every), ll.at_epoch_end(), ll.after_epochs(epochs)

    folder = Path(directory)
    log_path, plot_path = folder / "log.jsonl", folder / "curves.png"
    to_file = ll.jsonl(log_path)
    log = ll.tee(to_file, ll.console())
    ckpt = ll.checkpoint_io(folder / "checkpoints", keep_last=1, keep_best=1, monitor="eval/loss")

    state = ckpt.restore(ll.init_state(model, optimizer, seed=seed, loader=loader))
    if done(state):
        print(f"already finished at step {state.step}; delete {directory} to start again")

    try:
        bar = ll.progress(loader, epochs=epochs)
        while not done(state):
            for batch in bar(state):
                state, metrics = train_step(state, batch)
                bar.show(metrics)
                if log_now(state):
                    to_file(state, ll.compute(metrics, prefix="train/"))
                if eval_now(state):
                    log(state, scores := ll.evaluate(eval_step, state, test_batches, prefix="eval/"))
                    ckpt.save(state, scores)
        scores = ll.evaluate(eval_step, state, test_batches)
        ll.plot(log_path, ["loss", "accuracy"], smooth=0.8, path=plot_path)
    except KeyboardInterrupt:
        if not eval_now(state):  # the end of an epoch is saved above, with its scores
            ckpt.save(state)
        print(f"\nstopped at step {state.step} of {steps}; run the same command to continue")
        raise

    scores["seconds"] = time.perf_counter() - began
    print(f"{scores['accuracy']:.2%} of the {len(test_set)} held-out digits right, {scores['seconds']:.1f} s")
    print(f"plot: {plot_path}   log: {log_path}   checkpoints: {folder / 'checkpoints'}")
    return scores


def load_data() -> tuple[TensorDataset, TensorDataset]:
    """Images (n, 1, 8, 8), float32 from 0 to 1, and labels (n,)."""
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
    """Shift each image by -1, 0 or 1 pixels in both directions."""
    # Draws in a loss function depend only on the state's seed and step, so a resumed run draws the same numbers.
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


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, about in re.findall(r"^    (\w+): .*?,  # (.*)", inspect.getsource(main), re.MULTILINE):
        default = inspect.signature(main).parameters[name].default
        parser.add_argument(f"--{name}", type=type(default), default=default, help=f"{about} (default: {default!r})")
    try:
        main(**vars(parser.parse_args()))
    except KeyboardInterrupt:
        sys.exit(130)
