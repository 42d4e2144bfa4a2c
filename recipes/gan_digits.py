"""Draw handwritten digits with a generative adversarial network.

    pip install scikit-learn matplotlib
    python recipes/gan_digits.py                   (or with other settings: --epochs 100 --seed 1)

Two networks in one module and one state, and two steps on each batch; losses as in R3GAN (Huang et al., "The GAN is
dead; long live the GAN!", 2024). Log, checkpoints and a figure of real and drawn digits are in runs/gan_digits.
Ctrl-C stops after the current epoch. Run the same command to continue; the result is the same, bit for bit.

Reached with seeds 0 to 3, in 30 seconds on one core: all ten digits are drawn, and a classifier assigns 79% to 85% of
the drawn digits to a class with probability above 0.9 (held-out digits: 92%). The Frechet distance of its features
from those of held-out digits is 0.70 to 0.85 (between two halves of these: 0.86). The median distance to the nearest
training digit is 1.09 to 1.12 (held-out digits: 1.07). Seed 0 with kernels of three kinds of processors: 82% to 84%,
0.82 to 0.85, and 1.09 to 1.11.
"""

from __future__ import annotations

import argparse
import inspect
import re
import signal
from pathlib import Path
from typing import Any

import torch
from einops import rearrange
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from sklearn.neural_network import MLPClassifier
from torch import Tensor, nn
from torch.nn import functional as F

import looplib as ll

NOISE = 16  # size of the random vector from which a digit is drawn


def main(
    epochs: int = 400,  # passes over the training set
    batch_size: int = 64,  # images in a batch
    lr: float = 2e-3,  # of both networks at the start; it falls along a cosine
    decay: float = 0.998,  # of the moving average of the generator's weights, which draws the digits
    width: int = 256,  # of all hidden layers
    seed: int = 0,  # of the weights, the order of the images and the noise
    directory: str = "runs/gan_digits",  # folder for log and checkpoints
    picture: str = "runs/gan_digits/digits.png",  # file for the real and the drawn digits
) -> dict[str, float]:
    torch.set_num_threads(1)  # such small networks gain nothing from more threads
    torch.manual_seed(seed)
    train, test, train_labels, test_labels = load_data()
    model = make_model(width)
    loader = ll.make_loader(train, batch_size=batch_size, seed=seed, drop_last=True)
    adam = ll.optimizer(
        torch.optim.Adam, lr=ll.schedules.cosine(lr, total=2 * epochs * len(loader)), betas=(0.0, 0.99)
    )
    networks = {"generator": ll.chain(adam, ll.ema(ll.optim.ema_warmup(decay))), "discriminator": adam}
    optimizer = ll.optim.partition(networks, lambda name, _: name.split(".")[0])
    d_grad = ll.make_grad_fn(model, discriminator_loss, trainable=lambda name, _: name.startswith("discriminator."))
    g_grad = ll.make_grad_fn(model, generator_loss, trainable=lambda name, _: name.startswith("generator."))
    d_step = ll.make_train_step(d_grad, optimizer, donate=True)
    g_step = ll.make_train_step(g_grad, optimizer, donate=True, same_batch=True)
    log = ll.jsonl(Path(directory) / "log.jsonl")
    ckpt = ll.checkpoint_io(Path(directory) / "checkpoints", keep_last=1)
    save_now, finished = ll.every_n_epochs(50), ll.after_epochs(epochs)
    state = ckpt.restore(ll.init_state(model, optimizer, seed=seed, loader=loader))
    if finished(state):
        print(f"already finished at step {state.step}; delete {directory} to start again")
    with ll.after_signal(signal.SIGINT, signal.SIGTERM) as stop_now:  # not between the two steps of a batch
        done = finished | stop_now
        bar = ll.progress(loader, epochs=epochs)
        while not done(state):
            for pictures in bar(state):
                state, d_metrics = d_step(state, pictures)
                state, g_metrics = g_step(state, pictures)
                bar.show(g_metrics)
            log(state, ll.compute(d_metrics, prefix="discriminator/") | ll.compute(g_metrics, prefix="generator/"))
            if save_now(state):
                ckpt.save(state)
        bar.close()
    ckpt.save(state)
    if not finished(state):
        raise SystemExit(f"stopped after epoch {state.epoch} of {epochs}; run the same command to continue")
    print("training a classifier to judge the digits")
    drawn = ll.make_predict_step(model, draw)(ll.eval_state(optimizer, state), test)
    save_picture(test[:80], drawn[:80], Path(picture))
    scores = judge(train, train_labels, test, test_labels, drawn)
    print("\n".join(f"{name:16} {score:.3f}" for name, score in scores.items()), f"\npicture: {picture}")
    return scores


def load_data() -> Any:
    """Images (n, 64), float32 from 0 to 1, for training and a held-out third, with the labels of both."""
    pictures, labels = map(torch.tensor, load_digits(return_X_y=True))
    return train_test_split(pictures.float() / 16, labels, test_size=1 / 3, stratify=labels, random_state=0)


def make_model(width: int) -> nn.ModuleDict:
    def mlp(inputs: int, outputs: int, *last: nn.Module) -> nn.Sequential:
        hidden = [nn.Linear(inputs, width), nn.LeakyReLU(0.2), nn.Linear(width, width), nn.LeakyReLU(0.2)]
        return nn.Sequential(*hidden, nn.Linear(width, outputs), *last)

    return nn.ModuleDict({"generator": mlp(NOISE, 64, nn.Sigmoid()), "discriminator": mlp(64, 1)})


def draw(model: Any, real: Tensor) -> Any:
    """Draw as many digits as there are real ones, depending only on the state's seed and step."""
    return model["generator"](torch.randn(len(real), NOISE))


def generator_loss(model: Any, real: Tensor) -> Tensor:
    return F.softplus(model["discriminator"](real) - model["discriminator"](draw(model, real))).mean()


def discriminator_loss(model: Any, real: Tensor, gamma: float = 0.03) -> tuple[Tensor, dict[str, Tensor]]:
    pictures = torch.cat([real, draw(model, real).detach()]).requires_grad_()
    scores = model["discriminator"](pictures)
    (slopes,) = torch.autograd.grad(scores.sum(), pictures, create_graph=True)
    penalty, margin = slopes.square().sum() / len(real), scores[: len(real)] - scores[len(real) :]
    return F.softplus(-margin).mean() + gamma / 2 * penalty, {"margin": margin.mean(), "penalty": penalty}


def judge(train: Tensor, labels: Tensor, test: Tensor, test_labels: Tensor, drawn: Tensor) -> dict[str, float]:
    """Scores of drawn digits by a classifier trained on the same digits, and the same scores of held-out digits."""
    classifier = MLPClassifier(64, max_iter=400, random_state=0).fit(train.numpy(), labels.numpy())
    weight, bias = torch.tensor(classifier.coefs_[0]), torch.tensor(classifier.intercepts_[0])
    scores = {"accuracy": classifier.score(test.numpy(), test_labels.numpy())}
    for name, pictures in (("real", test), ("drawn", drawn)):
        p = torch.tensor(classifier.predict_proba(pictures.numpy()))
        scores[f"{name}_confident"] = (p.amax(1) > 0.9).double().mean().item()
        scores[f"{name}_classes"] = (p.argmax(1).bincount() >= 0.02 * len(p)).sum().item()
        scores[f"{name}_nearest"] = torch.cdist(pictures, train).amin(1).median().item()
        # Two halves of the same digits have a distance too, which is the best that drawn digits can reach.
        one, other = ((x @ weight + bias).relu().double() for x in (test, pictures))
        orders = torch.rand(50, len(test), generator=torch.Generator().manual_seed(0)).argsort(1).chunk(2, 1)
        scores[f"{name}_frechet"] = sum(frechet(one[i], other[j]) for i, j in zip(*orders, strict=True)) / 50
    return scores


def frechet(one: Tensor, other: Tensor) -> float:
    """Frechet distance of normal distributions with the means and covariances of two sets of features (n, d)."""
    a, b = one.T.cov(), other.T.cov()
    roots = torch.linalg.eigvals(a @ b).real.clamp(min=0).sqrt()
    return float((one.mean(0) - other.mean(0)).square().sum() + a.trace() + b.trace() - 2 * roots.sum())


def save_picture(real: Tensor, drawn: Tensor, path: Path) -> None:
    """Save a figure with 80 real digits on the left and 80 drawn ones on the right."""
    framed = F.pad(torch.cat([real, drawn]).reshape(-1, 8, 8), (1, 1, 1, 1), value=0.5)
    grids = rearrange(framed, "(side row column) h w -> side (row h) (column w)", side=2, row=8)
    figure = Figure(figsize=(12, 5.2), layout="constrained")
    for axes, grid, title in zip(figure.subplots(1, 2), grids, ("held-out digits", "drawn digits"), strict=True):
        axes.imshow(grid.numpy(), cmap="gray_r", vmin=0, vmax=1)
        axes.set_title(title)
        axes.set_axis_off()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, about in re.findall(r"^    (\w+): .*?,  # (.*)", inspect.getsource(main), re.MULTILINE):
        default = inspect.signature(main).parameters[name].default
        parser.add_argument(f"--{name}", type=type(default), default=default, help=f"{about} (default: {default!r})")
    main(**vars(parser.parse_args()))
