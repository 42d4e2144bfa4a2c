"""Find a learning rate: 32 of them in one step, and by successive halving.

    pip install scikit-learn matplotlib
    python recipes/sweep_lr.py                     (or with other settings: --members 64 --epochs 20)

Each member of a stack is a run with its own learning rate, from 1e-5 to 10, of the same network from the same initial
weights, on the digits of scikit-learn. One step trains all of them; those that diverge do not affect the others. A
figure shows the final loss of each member and its curve.

Then the same by successive halving (Jamieson and Talwalkar, 2016): after each rung the worse half is dropped, and the
others continue for the same number of updates, which finds one of the best learning rates for a fraction of the work.
Ctrl-C stops, rerunning continues the sweep (the halving takes a second, and starts over).

Reached: 0.18 (0.28 with seed 3), and 97.8% of the held-out digits with it (96.1% to 96.9% with seeds 1 to 3), in
about 2 seconds for all 32 on one core; successive halving finds the same one with 47% of the updates. The held-out
digits select the learning rate, so this score is optimistic: to report one, keep a separate test set.
"""

from __future__ import annotations

import argparse
import inspect
import json
import re
import sys
import time
from pathlib import Path

import torch
from matplotlib import colormaps
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import looplib as ll


def main(
    members: int = 32,  # learning rates
    epochs: int = 12,  # passes over the training set
    rungs: int = 4,  # of the halving; each drops half of the members
    batch_size: int = 64,  # images in a batch
    lowest: float = 1e-5,  # learning rate
    highest: float = 10.0,  # learning rate
    momentum: float = 0.9,  # of SGD
    width: int = 64,  # of the hidden layer
    seed: int = 0,  # of the weights and the order
    directory: str = "runs/sweep_lr",  # folder for the checkpoint and the figure
) -> dict[str, float]:
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    train_set, test_set = load_data()
    loader = ll.make_loader(train_set, batch_size=batch_size, drop_last=True, seed=seed)
    test_batches = DataLoader(test_set, batch_size=len(test_set))
    model = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))
    grad_fn = ll.make_grad_fn(model, loss_fn)
    eval_step = ll.vmap_step(ll.make_eval_step(model, metric_fn))

    def begin(lrs: list[float]) -> tuple[ll.types.TrainStep, ll.TrainState]:
        optimizer = ll.optimizer(torch.optim.SGD, lr=ll.transforms.per_member(lrs), momentum=momentum)
        start = ll.init_state(model, optimizer, seed=seed, loader=loader)
        return ll.vmap_step(ll.make_train_step(grad_fn, optimizer)), ll.transforms.stack_states(
            [start] * len(lrs), same_seeds=True
        )

    def evaluated(stack: ll.TrainState) -> list[dict[str, float]]:
        return ll.transforms.compute_members(ll.evaluation.evaluate_records(eval_step, stack, test_batches))

    lrs = [lowest * (highest / lowest) ** (member / max(1, members - 1)) for member in range(members)]
    began = time.perf_counter()
    train_step, start = begin(lrs)
    ckpt, file = ll.checkpoint_io(f"{directory}/checkpoints", keep_last=1), Path(directory) / "curves.json"
    stack = ckpt.restore(start)
    curves = json.loads(file.read_text()) if stack.step else []  # scores of all members after each epoch, from 0 on
    if len(curves) > epochs:
        print(f"already finished at step {stack.step}; delete {directory} to start again")
    bar = ll.progress(loader, epochs=epochs)
    try:
        while len(curves) <= epochs:
            if len(curves) == stack.epoch:
                curves.append(evaluated(stack))
            else:
                for batch in bar(stack):
                    stack, metrics = train_step(stack, batch)
                    bar.show(metrics)
    finally:  # at the end, and at Ctrl-C
        ckpt.save(stack)
        file.write_text(json.dumps(curves))
    best = min(range(members), key=lambda member: worst_if_nan(curves[-1][member]["loss"]))
    swept = time.perf_counter() - began

    # Successive halving: each rung trains the remaining members and keeps the better half.
    left, updates = list(lrs), 0
    train_step, stack = begin(left)
    for rung in range(rungs):
        rung_done = ll.after_steps((rung + 1) * epochs * len(loader) // rungs)
        while not rung_done(stack):
            for batch in loader(stack):
                stack, _ = train_step(stack, batch)
                updates += len(left)
                if rung_done(stack):
                    break
        losses = [worst_if_nan(scores["loss"]) for scores in evaluated(stack)]
        kept = sorted(range(len(left)), key=losses.__getitem__)[: max(1, len(left) // 2)]
        states = ll.transforms.unstack_states(stack)
        stack, left = (
            ll.transforms.stack_states([states[member] for member in kept], same_seeds=True),
            [left[member] for member in kept],
        )
        train_step, _ = begin(left)

    path = Path(directory) / "sweep.png"
    draw(lrs, curves, left, path)
    share = updates / (members * epochs * len(loader))
    print(f"best of {members}: lr {lrs[best]:.3g}, {curves[-1][best]['accuracy']:.2%} right, {swept:.1f} s for all")
    print(f"by halving, with {share:.0%} of the updates: lr {left[0]:.3g}   figure: {path}")
    diverged = sum(not scores["loss"] < curves[0][0]["loss"] for scores in curves[-1])
    return {
        "best_lr": lrs[best],
        "accuracy": curves[-1][best]["accuracy"],
        "loss": curves[-1][best]["loss"],
        "halving_lr": left[0],
        "halving_loss": curves[-1][lrs.index(left[0])]["loss"],
        "share": share,
        "diverged": diverged,
        "seconds": swept,
    }


def worst_if_nan(loss: float) -> float:
    return loss if loss == loss else float("inf")


def load_data() -> tuple[TensorDataset, TensorDataset]:
    """Images (n, 64), float32 from 0 to 1, and labels (n,)."""
    digits = load_digits()
    pictures, labels = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    train, test = train_test_split(range(len(labels)), test_size=0.2, stratify=labels, random_state=0)
    return TensorDataset(pictures[train], labels[train]), TensorDataset(pictures[test], labels[test])


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    pictures, labels = batch
    return F.cross_entropy(model(pictures), labels)


def metric_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    pictures, labels = batch
    logits = model(pictures)
    return {"loss": F.cross_entropy(logits, labels), "accuracy": (logits.argmax(1) == labels).float().mean()}


def draw(lrs: list[float], curves: list[list[dict[str, float]]], left: list[float], path: Path) -> None:
    figure = Figure(figsize=(10, 4), layout="constrained")
    ends, ways = figure.subplots(1, 2)
    ceiling = 2 * curves[0][0]["loss"]
    for epoch in (1, len(curves) // 2, len(curves) - 1):
        losses = [min(worst_if_nan(scores["loss"]), ceiling) for scores in curves[epoch]]
        ends.plot(lrs, losses, marker="o", markersize=4, label=f"after epoch {epoch}")
    for lr in left:
        ends.axvline(
            lr, color="gray", linestyle="--", linewidth=1, label="left by halving" if lr is left[0] else None
        )
    ends.set(xscale="log", xlabel="learning rate", title="loss of held-out digits (cut off above)")
    for member, lr in enumerate(lrs):
        way = [min(worst_if_nan(scores[member]["loss"]), ceiling) for scores in curves]
        color = colormaps["viridis"](member / len(lrs))
        ways.plot(way, color=color, linewidth=1, label=f"{lr:.5f}" if member % max(1, len(lrs) // 6) == 0 else None)
    ways.set(xlabel="epoch", title="by learning rate")
    for axes in (ends, ways):
        axes.set_yscale("log")
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    ends.legend(frameon=False)
    ways.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5), title="learning rate")
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
