"""Classify handwritten digits with an ensemble: 32 small networks trained in one step.

    pip install scikit-learn matplotlib
    python recipes/ensemble_digits.py              (or with other settings: --members 8 --epochs 20)

The members differ in their initial weights (and in their dropout, if there is any), each with its own seed, and see
the same batches. One compiled step trains all of them (`ll.vmap_step`). The gain from the ensemble is measured on a
held-out 30% of scikit-learn's 1,797 images: the mean of the members' probabilities is compared with the single
members by accuracy, negative log-likelihood (NLL), and expected calibration error (ECE), which is the average
difference between the probability of the chosen class and the frequency with which it is right.

Reached in 11 seconds on one core, most of them for compiling: a step of all 32 in 2.2 to 2.4 ms, 7 times as fast as
32 raw loops one after the other. Seeds 1 to 4, each with different held-out images; mean of the members -> all 32
together:

    NLL       0.164 0.275 0.200 0.181   ->   0.145 0.245 0.176 0.161
    ECE       0.021 0.030 0.027 0.025   ->   0.019 0.022 0.021 0.021
    accuracy  95.2% 92.7% 95.0% 94.8%   ->   95.2% 93.2% 95.4% 95.6%

The gain in NLL, about 11%, is clear. The gain in ECE is small compared with its own noise, and exists only if the
members are overconfident. These settings were chosen for that among four, on seed 0. With 600 images, or half the
epochs, ECE did not change; with dropout 0.2 and lr 3e-3 as well, the members are underconfident, and their mean even
more so: ECE rose from 0.064 to 0.076 (seed 1). Ctrl-C stops, rerunning continues; delete the folder to start over.
"""

from __future__ import annotations

import argparse
import inspect
import re
import sys
import time
from pathlib import Path

import torch
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import looplib as ll


def main(
    members: int = 32,  # networks to train
    epochs: int = 60,  # passes over the training set
    batch_size: int = 32,  # images in a batch
    train_size: int = 300,  # training images; with few, members disagree, and an ensemble helps
    lr: float = 1e-2,  # learning rate at its peak; it falls along a cosine
    weight_decay: float = 0.1,  # of all weights
    width: int = 64,  # of the hidden layers
    dropout: float = 0.0,  # probability of dropping a feature
    compile: int = 1,  # 1 to compile the step, 0 to run it eagerly
    seed: int = 0,  # of the held-out images, the order of the others, and the members
    directory: str = "runs/ensemble_digits",  # folder for the checkpoint and the figure
) -> dict[str, float]:
    torch.set_num_threads(1)
    train_set, (test_pictures, test_labels) = load_data(train_size, seed)
    loader = ll.make_loader(train_set, batch_size=batch_size, drop_last=True, seed=seed)
    steps = epochs * len(loader)

    model = make_model(width, dropout)
    rate = ll.warmup_cosine(lr, warmup=steps // 10, total=steps)
    optimizer = ll.optimizer(torch.optim.AdamW, lr=rate, weight_decay=weight_decay)
    train_step = ll.vmap_step(ll.make_train_step(ll.make_grad_fn(model, loss_fn), optimizer, donate=True))
    train_step = ll.compile_step(train_step) if compile else train_step
    predict_step = ll.vmap_step(ll.make_predict_step(model, lambda model, pictures: model(pictures).softmax(1)))

    states = []
    for member in range(members * seed, members * (seed + 1)):
        torch.manual_seed(member)
        fresh = make_model(width, dropout)
        states.append(ll.init_state(fresh, optimizer, seed=member, loader=loader))
    ckpt = ll.checkpoint_io(Path(directory) / "checkpoints", keep_last=1, describe={"loader": loader})
    stack, done, times = ckpt.restore(ll.transforms.stack_states(states)), ll.after_epochs(epochs), list[float]()
    if done(stack):
        print(f"already finished at step {stack.step}; delete {directory} to start again")
    else:
        print(f"step {stack.step} of {steps}, {members} members" + ", compiling for about 10 seconds" * compile)
    bar = ll.progress(loader, epochs=epochs)
    try:
        while not done(stack):
            for batch in bar(stack):
                begin = time.perf_counter()
                stack, metrics = train_step(stack, batch)
                times.append(time.perf_counter() - begin)
                bar.show(metrics)
    finally:  # at the end, and at Ctrl-C
        ckpt.save(stack)

    probabilities = predict_step(stack, test_pictures)  # (members, images, classes)
    each = [scores_of(member, test_labels) for member in probabilities]
    single = {name: sum(scores[name] for scores in each) / members for name in each[0]}
    ensemble = scores_of(probabilities.mean(0), test_labels)
    raw = raw_loops(members, width, dropout, lr, weight_decay, next(loader(ll.TrainState())))

    path = Path(directory) / "calibration.png"
    draw_calibration(probabilities, test_labels, path)
    print(f"{'':22}{'accuracy':>10}{'NLL':>10}{'ECE':>10}")
    for name, scores in (("a member, on average", single), (f"the {members} together", ensemble)):
        print(f"{name:22}{scores['accuracy']:10.2%}{scores['nll']:10.4f}{scores['ece']:10.4f}")
    print(f"{members} raw loops in turn: {1e3 * raw:.2f} ms   figure: {path}")
    if len(times) > 1:  # the first one compiles
        step = sum(times[1:]) / (len(times) - 1)
        print(f"a step of all members: {1e3 * step:.2f} ms, so raw loops take {raw / step:.1f} times as long")
        ensemble |= {"step_seconds": step, "raw_step_seconds": raw}
    return {**ensemble, **{f"member_{name}": value for name, value in single.items()}}


def load_data(train_size: int, seed: int) -> tuple[TensorDataset, tuple[Tensor, Tensor]]:
    """Images (n, 64), float32 from 0 to 1, and labels (n,)."""
    digits = load_digits()
    pictures, labels = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    train, test = train_test_split(range(len(labels)), test_size=0.3, stratify=labels, random_state=seed)
    return TensorDataset(pictures[train[:train_size]], labels[train[:train_size]]), (pictures[test], labels[test])


def make_model(width: int, dropout: float) -> nn.Module:
    return nn.Sequential(
        nn.Linear(64, width), nn.ReLU(), nn.Dropout(dropout), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)
    )


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    pictures, labels = batch
    return F.cross_entropy(model(pictures), labels)


def scores_of(probabilities: Tensor, labels: Tensor) -> dict[str, float]:
    """Accuracy, negative log-likelihood and expected calibration error of probabilities (n, classes)."""
    confidence, chosen = probabilities.max(1)
    right = (chosen == labels).float()
    nll = -probabilities.gather(1, labels[:, None]).clamp(min=1e-12).log().mean()
    gaps = [(confidence[bin] - right[bin]).mean().abs() * bin.float().mean() for bin in bins_of(confidence)]
    return {"accuracy": right.mean().item(), "nll": nll.item(), "ece": float(sum(gaps))}


def bins_of(confidence: Tensor, count: int = 15) -> list[Tensor]:
    """Masks of the samples in each of `count` equal bins of confidence, without empty bins (Guo et al., 2017)."""
    numbers = (confidence * count).ceil().long().clamp(1, count)
    return [numbers == number for number in range(1, count + 1) if (numbers == number).any()]


def raw_loops(
    members: int, width: int, dropout: float, lr: float, weight_decay: float, batch: tuple[Tensor, Tensor]
) -> float:
    """Median time in seconds for one step of each of `members` hand-written loops."""
    models = [make_model(width, dropout) for _ in range(members)]
    optimizers = [torch.optim.AdamW(m.parameters(), lr=lr, weight_decay=weight_decay, fused=True) for m in models]
    seconds = []
    for _ in range(15):
        begin = time.perf_counter()
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            loss_fn(model, batch).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        seconds.append(time.perf_counter() - begin)
    return sorted(seconds)[len(seconds) // 2]


def draw_calibration(probabilities: Tensor, labels: Tensor, path: Path) -> None:
    figure = Figure(figsize=(9, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for name, predicted, color in (
        ("members, each by itself", probabilities.flatten(0, 1), "tab:blue"),
        ("the ensemble", probabilities.mean(0), "tab:orange"),
    ):
        confidence, chosen = predicted.max(1)
        correct = (chosen == labels.repeat(len(predicted) // len(labels))).float()
        points = [(confidence[bin].mean().item(), correct[bin].mean().item()) for bin in bins_of(confidence, 10)]
        left.plot(*zip(*points, strict=True), marker="o", label=name, color=color)
    left.plot([0, 1], [0, 1], color="gray", linewidth=1, linestyle="--", label="calibrated")
    left.set(xlabel="probability of the chosen class", ylabel="part that is right", title="calibration")
    nlls = [scores_of(one, labels)["nll"] for one in probabilities]
    sizes = range(1, len(probabilities) + 1)
    together = [scores_of(probabilities[:size].mean(0), labels)["nll"] for size in sizes]
    right.scatter(sizes, nlls, s=14, color="tab:blue", label="one member")
    right.plot(sizes, together, color="tab:orange", linewidth=2, label="the first ones together")
    right.set(xlabel="members", title="negative log-likelihood of held-out digits")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
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
        print("\nstopped; run the same command to continue")
        sys.exit(130)
