"""Learn embeddings of handwritten digits without labels: a contrastive loss over a batch that need not fit into memory.

    pip install scikit-learn
    python recipes/contrastive_digits.py           (or with other settings: --microbatches 1 --epochs 20)

Each image gives two views, shifted and with noise. An encoder learns to tell which two belong together among all 512
images of a batch (InfoNCE with in-batch negatives). The loss compares every image with every other, so microbatches
cannot be processed separately. `ll.contrib.make_contrastive_grad_fn` computes its gradient in the memory of one
microbatch anyway, for one more forward pass. `--microbatches 0` uses the plain form, one graph of the whole batch.

The score: each of the 540 held-out images gets the label of the nearest among 100 labelled images, by the embeddings
and, for comparison, by the pixels. "Held for the backward pass" is the largest size of the graphs during one
gradient.

Reached: 93.5% to 95.9% of the held-out images with seeds 0 to 2 in 18 seconds on one core, with 4.5 MB held for the
backward pass; the plain form (`--microbatches 0`) 92.6% to 95.6% in 10 seconds, with 46 MB. By pixels it is 89.6%.
"""

from __future__ import annotations

import argparse
import inspect
import math
import re
import sys

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import looplib as ll


def main(
    epochs: int = 60,  # passes over the training set
    batch_size: int = 512,  # images that are compared with each other
    microbatches: int = 16,  # of a batch; 0 for one graph of all of it
    lr: float = 3e-3,  # learning rate at its peak; it falls along a cosine
    weight_decay: float = 1e-2,  # of all weights
    temperature: float = 0.1,  # of the similarities
    labelled: int = 100,  # labelled images, to score the embeddings
    noise: float = 0.2,  # standard deviation, for pixels between 0 and 1
    width: int = 32,  # channels
    seed: int = 0,  # of the weights, the order of the images and their views
    directory: str = "runs/contrastive_digits",  # folder for the checkpoint
) -> dict[str, float]:
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    (train_x, train_y), (test_x, test_y) = load_data()
    model = encoder(width)

    def embed_fn(model: nn.Module, batch: tuple[Tensor]) -> tuple[Tensor, Tensor]:
        (x,) = batch  # a view's random numbers depend on the seed, the step and the microbatch
        return embed(model, view(x, noise)), embed(model, view(x, noise))

    def loss_fn(views: tuple[Tensor, Tensor]) -> tuple[Tensor, dict[str, ll.Mean]]:
        one, other = views
        logits, target = one @ other.T / temperature, torch.arange(len(one))
        loss = (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2
        return loss, {"matched": ll.Mean((logits.argmax(1) == target).sum(), len(target))}

    if microbatches:
        grad_fn = ll.contrib.make_contrastive_grad_fn(model, embed_fn, loss_fn, microbatches=microbatches)
    else:
        grad_fn = ll.make_grad_fn(model, lambda model, batch: loss_fn(embed_fn(model, batch)))
    loader = ll.make_loader(TensorDataset(train_x), batch_size=batch_size, drop_last=True, seed=seed)
    steps = epochs * len(loader)
    schedule = ll.warmup_cosine(lr, warmup=steps // 10, total=steps)
    optimizer = ll.chain(
        ll.clip_by_global_norm(1.0), ll.optimizer(torch.optim.AdamW, lr=schedule, weight_decay=weight_decay)
    )
    state = ll.init_state(model, optimizer, seed=seed, loader=loader)
    held = most_held(lambda: grad_fn(state, next(iter(loader(state)))))
    train_step = ll.make_train_step(grad_fn, optimizer, donate=True)
    done = ll.after_epochs(epochs)
    ckpt = ll.checkpoint_io(directory, keep_last=1)
    state = ckpt.restore(state)
    if done(state):
        print(f"already finished at step {state.step}; delete {directory} to start again")

    log, window = ll.console(), ll.Window()
    every = ll.every_n_epochs(max(1, epochs // 6))
    bar = ll.progress(loader, epochs=epochs)
    try:
        while not done(state):
            for batch in bar(state):
                state, metrics = train_step(state, batch)
                window = window.add(metrics)
                bar.show(metrics)
            if every(state):
                log(state, ll.compute(window.metrics()))
                window = ll.Window()
    finally:  # at the end, and at Ctrl-C
        ckpt.save(state)
    predict_step = ll.make_predict_step(model, embed)
    known, unknown = (
        torch.cat(list(ll.predict(predict_step, state, torch.split(x, 512)))) for x in (train_x[:labelled], test_x)
    )
    scores = {
        "by embeddings": agreement(known, unknown, train_y, test_y),
        "by pixels": agreement(train_x[:labelled].flatten(1), test_x.flatten(1), train_y, test_y),
        "held for the backward pass, MB": held / 1e6,
    }
    print(", ".join(f"{name}: {value:.3f}" for name, value in scores.items()))
    return scores


def load_data() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    digits = load_digits()
    train_x, test_x, train_y, test_y = train_test_split(
        torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16,
        torch.tensor(digits.target),
        test_size=540,
        random_state=0,
    )
    return (train_x, train_y), (test_x, test_y)


def encoder(width: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1),
        nn.GroupNorm(8, width),
        nn.ReLU(),
        nn.Conv2d(width, 2 * width, 3, stride=2, padding=1),
        nn.GroupNorm(8, 2 * width),
        nn.ReLU(),
        nn.Conv2d(2 * width, 2 * width, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(8 * width, 64),
    )


def embed(model: nn.Module, x: Tensor) -> Tensor:
    """One unit vector for each image."""
    return F.normalize(model(x), dim=1)


def view(x: Tensor, noise: float) -> Tensor:
    """Rotate, scale and shift each image a little, and add noise."""
    angle, scale = (torch.rand(2, len(x)) * 2 - 1) * torch.tensor([[math.pi / 12], [0.15]])
    cos, sin = (1 + scale) * angle.cos(), (1 + scale) * angle.sin()
    shift = (torch.rand(2, len(x)) * 2 - 1) * 0.25
    matrices = torch.stack([torch.stack([cos, -sin, shift[0]], 1), torch.stack([sin, cos, shift[1]], 1)], 1)
    grid = F.affine_grid(matrices, list(x.shape), align_corners=False)
    return F.grid_sample(x, grid, align_corners=False) + noise * torch.randn_like(x)


def agreement(known: Tensor, unknown: Tensor, labels: Tensor, truth: Tensor) -> float:
    """Fraction of images that have the label of the nearest known one."""
    return float((labels[torch.cdist(unknown, known).argmin(1)] == truth).float().mean())


class Held:
    """A tensor that a graph holds for its backward pass."""

    now = most = 0

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.bytes = tensor, tensor.numel() * tensor.element_size()
        Held.now += self.bytes
        Held.most = max(Held.most, Held.now)

    def __del__(self) -> None:
        Held.now -= self.bytes


def most_held(function: object) -> int:
    """Largest number of bytes held by graphs while the function runs."""
    assert callable(function)
    Held.now = Held.most = 0
    with torch.autograd.graph.saved_tensors_hooks(Held, lambda held: held.tensor):
        function()
    return Held.most


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
