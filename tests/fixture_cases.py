"""Cases of the fixtures in `tests/fixtures`, shared by the script that made them and the test.

All of looplib is reached as `ll.name`, and no number comes from a random stream that is not under test.
"""

import dataclasses
import json
import random
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset, TensorDataset, get_worker_info

import looplib as ll

DATA = Path(__file__).parent / "fixtures"


def numbers(*shape, start=0, dtype=torch.float64):
    """Numbers between -0.5 and 0.5 that look like noise, exact on any machine."""
    count = int(np.prod(shape))
    whole = (torch.arange(start, start + count, dtype=torch.int64) * 7919 + 13) % 1009
    return ((whole - 504).double() / 1024).to(dtype).reshape(shape)


def filled(model, start=0):
    """The module, its weights not drawn but given."""
    with torch.no_grad():
        for place, parameter in enumerate(model.parameters()):
            parameter.copy_(numbers(*parameter.shape, start=start + 100 * place))
    return model


def plain(node, place=""):
    """The leaves of a tree by place, without the library's or torch's own walks."""
    if isinstance(node, dict):
        children = node.items()
    elif isinstance(node, (list, tuple)):
        children = enumerate(node)
    elif dataclasses.is_dataclass(node):
        children = [(field.name, getattr(node, field.name)) for field in dataclasses.fields(node)]
    else:
        if hasattr(node, "full_tensor"):
            node = node.full_tensor()
        return {place: node.detach().clone() if isinstance(node, torch.Tensor) else node}
    found = {}
    for key, child in children:
        found |= plain(child, f"{place}/{key}")
    return found


def values_of(state):
    """All that a state holds, as one dict of tensors and plain values."""
    names = ("step", "epoch", "batch", "epoch_length", "samples", "batch_samples", "batch_steps", "seed")
    trees = {name: getattr(state, name) for name in ("params", "buffers", "opt_state", "extra")}
    return plain({**{name: getattr(state, name) for name in names}, **trees})


# Steps


def mlp(dtype=torch.float64, dropout=0.0, start=0):
    layers = [nn.Linear(6, 8), nn.ReLU(), nn.Dropout(dropout), nn.Linear(8, 3)]
    return filled(nn.Sequential(*layers).to(dtype), start)


def conv(start=0):
    layers = [nn.Conv2d(1, 3, 3, bias=False), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 3)]
    return filled(nn.Sequential(*layers), start)


def batch_of(step, shape=(6,), dtype=torch.float64, rows=12):
    x = 4 * numbers(rows, *shape, start=1000 + 97 * step)
    return x.to(dtype), (torch.arange(rows) * 5 + step) % 3


def loss_fn(model, batch):
    x, y = batch
    return nn.functional.cross_entropy(model(x), y)


class Step:
    """Training configuration of a case. Fields that are not set are those of the plain one."""

    def __init__(
        self,
        optimizer=None,
        grad=lambda grad_fn: grad_fn,
        model=mlp,
        loss=loss_fn,
        donate=False,
        bad=None,
        raw=("adamw",),
        tolerance=1e-9,
        draws=False,
        make_grad_fn=ll.make_grad_fn,
    ):
        self.optimizer, self.grad, self.model, self.loss = optimizer or adamw, grad, model, loss
        self.donate, self.bad, self.raw, self.tolerance, self.draws = donate, bad or {}, raw, tolerance, draws
        self.make_grad_fn = make_grad_fn

    def make(self):
        model = self.model()
        optimizer = self.optimizer()
        grad_fn = self.grad(self.make_grad_fn(model, self.loss))
        return model, optimizer, ll.make_train_step(grad_fn, optimizer, donate=self.donate)

    def batch(self, model, number):
        parameter = next(model.parameters())
        shape = (1, 6, 6) if parameter.ndim == 4 else (6,)
        x, y = batch_of(number, shape, parameter.dtype)
        return x * self.bad.get(number, 1), y


def adamw(**options):
    return ll.optimizer(torch.optim.AdamW, **{"lr": 0.01, "weight_decay": 0.1, **options})


def sgd(**options):
    return ll.optimizer(torch.optim.SGD, **{"lr": 0.05, "momentum": 0.9, **options})


def schedule_free():
    import schedulefree

    return ll.optimizer(schedulefree.AdamWScheduleFree, lr=0.01, warmup_steps=4)


def two_optimizers():
    return ll.optim.partition(
        {"matrices": sgd(), "rest": adamw()}, lambda name, tensor: "matrices" if tensor.ndim > 1 else "rest"
    )


def scheduled():
    no_decay = (lambda name, tensor: tensor.ndim < 2, {"weight_decay": 0.0})
    return adamw(lr=ll.warmup_cosine(0.02, warmup=5, total=20), groups=[no_decay])


def mlp32():
    return mlp(torch.float32)


def mlp16():
    return mlp(torch.bfloat16)


def dropped():
    return mlp(dropout=0.4)


BAD = {3: float("nan"), 9: float("inf")}

STEPS = {
    "adamw, pure": Step(),
    "adamw, donated": Step(donate=True),
    "adamw, float32": Step(model=mlp32, donate=True, raw=("adamw32",), tolerance=1e-4),
    "schedule and groups": Step(scheduled, donate=True),
    "injected": Step(lambda: adamw(lr=ll.optim.injected(0.01))),
    "sgd": Step(sgd, raw=("sgd",)),
    "sgd, nesterov, donated": Step(lambda: sgd(nesterov=True), donate=True, raw=("sgd",)),
    "rmsprop": Step(lambda: ll.optimizer(torch.optim.RMSprop, lr=0.01), raw=("rmsprop",)),
    "adafactor": Step(lambda: ll.optimizer(torch.optim.Adafactor, lr=0.01), raw=("adafactor",)),
    "schedulefree": Step(schedule_free),
    "accumulate": Step(grad=lambda grad_fn: ll.accumulate(grad_fn, microbatches=5), donate=True),
    "accumulate, of a size, dropout": Step(
        grad=lambda grad_fn: ll.accumulate(grad_fn, size=5), model=dropped, draws=True
    ),
    "clip_by_global_norm": Step(grad=lambda grad_fn: ll.clip_by_global_norm(grad_fn, 0.2)),
    "clip_by_global_norm around accumulate": Step(
        grad=lambda grad_fn: ll.clip_by_global_norm(ll.accumulate(grad_fn, microbatches=3), 0.2)
    ),
    "clip_by_value": Step(grad=lambda grad_fn: ll.grads.clip_by_value(grad_fn, 0.05), optimizer=sgd, raw=("sgd",)),
    "adaptive_grad_clip": Step(
        grad=lambda grad_fn: ll.contrib.adaptive_grad_clip(grad_fn, 0.02), optimizer=sgd, raw=("sgd",)
    ),
    "clip_per_sample, add_noise": Step(
        sgd,
        make_grad_fn=ll.contrib.make_per_sample_grad_fn,
        grad=lambda grad_fn: ll.contrib.add_noise(ll.contrib.clip_per_sample(grad_fn, 0.3), 0.3, 0.5),
        raw=("sgd",),
        draws=True,
    ),
    "ema": Step(lambda: ll.ema(adamw(), ll.optim.ema_warmup(0.9)), donate=True),
    "ema, from step 4, every 3": Step(lambda: ll.ema(sgd(), 0.8, start=4, every=3), raw=("sgd",)),
    "swa": Step(lambda: ll.optim.swa(adamw(), start=6, every=4)),
    "lookahead": Step(lambda: ll.contrib.lookahead(adamw(), sync_period=3)),
    "partition": Step(two_optimizers, donate=True, raw=("adamw", "sgd")),
    "freeze": Step(lambda: ll.optim.freeze(adamw(), lambda name, step: name.startswith("0.") and step < 10)),
    "sam": Step(lambda: sgd(), grad=lambda grad_fn: ll.contrib.sam(grad_fn, 0.1), raw=("sgd",)),
    "sam, adaptive, dropout": Step(
        lambda: sgd(),
        grad=lambda grad_fn: ll.contrib.sam(grad_fn, 0.1, adaptive=True),
        model=dropped,
        draws=True,
        raw=("sgd",),
    ),
    "apply_if_finite": Step(lambda: ll.optim.apply_if_finite(adamw(), 5), bad=BAD),
    "apply_if_finite, donated": Step(lambda: ll.optim.apply_if_finite(scheduled(), 5), bad=BAD, donate=True),
    "skip_spikes": Step(lambda: ll.optim.skip_spikes(adamw(), window=8, sigmas=3.0), bad={13: 200.0}),
    "loss scale": Step(
        lambda: ll.optim.dynamic_loss_scale(adamw(), 64.0, growth_interval=4),
        grad=lambda grad_fn: ll.clip_by_global_norm(ll.grads.scale_loss(grad_fn), 0.5),
        bad=BAD,
    ),
    "autocast": Step(model=mlp32, loss=ll.autocast(loss_fn), raw=("bfloat16",), tolerance=0.05),
    "master_weights": Step(
        lambda: ll.optim.master_weights(adamw()), model=mlp16, raw=("bfloat16", "adamw32"), tolerance=0.05
    ),
    "dropout": Step(model=dropped, draws=True),
    "recompute, dropout": Step(model=dropped, loss=ll.losses.recompute(loss_fn, (nn.Linear, nn.Dropout)), draws=True),
    "conv": Step(model=conv, donate=True, raw=("conv",), tolerance=1e-4),
    "conv, ema of buffers": Step(
        lambda: ll.ema(adamw(), 0.9, buffers=True), model=conv, raw=("conv",), tolerance=1e-4
    ),
    "conv, accumulate, clip": Step(
        grad=lambda grad_fn: ll.clip_by_global_norm(ll.accumulate(grad_fn, microbatches=2), 0.5),
        model=conv,
        donate=True,
        raw=("conv",),
        tolerance=1e-4,
    ),
}


def run(which, steps=20):
    """State after a number of batches, the state to evaluate, and the losses on the way."""
    model, optimizer, train_step = which.make()
    state = ll.init_state(model, optimizer, seed=3, epoch_length=7)
    return optimizer, *continued(which, model, train_step, state, range(steps))


def continued(which, model, train_step, state, places):
    losses = []
    for number in places:
        state, metrics = train_step(state, which.batch(model, number))
        losses.append(ll.compute(metrics)["loss"])
    return state, losses


def trajectory(name):
    """name -> tensor, of one configuration after 20 batches."""
    optimizer, state, losses = run(STEPS[name])
    if STEPS[name].bad:
        losses = [loss for loss in losses if np.isfinite(loss)]
    evaluated = ll.eval_state(optimizer, state)
    counts = [state.step, state.epoch, state.batch, state.samples]
    found = {"counts": torch.tensor(counts), "losses": torch.tensor(losses, dtype=torch.float64)}
    for part, tree in (("params", state.params), ("buffers", state.buffers)):
        found |= {f"{part}/{name}": tensor.detach().clone() for name, tensor in tree.items()}
    for part, tree in (("params", evaluated.params), ("buffers", evaluated.buffers)):
        same = all(tree[name] is tensor for name, tensor in getattr(state, part).items())
        found |= (
            {} if same else {f"evaluated {part}/{name}": tensor.detach().clone() for name, tensor in tree.items()}
        )
    return found


def stack_trajectory():
    """Three members in one step, with dropout and learning rates of their own."""
    state, _ = stacked(20)
    return {"params/" + name: tensor.detach().clone() for name, tensor in state.params.items()}


def stacked(steps):
    model, optimizer = dropped(), adamw(lr=ll.transforms.per_member([0.01, 0.02, 0.04]))
    train_step = ll.vmap_step(ll.make_train_step(ll.make_grad_fn(model, loss_fn), optimizer))
    members = [ll.init_state(mlp(dropout=0.4, start=7 * k), optimizer, seed=k + 5) for k in range(3)]
    state = ll.transforms.stack_states(members)
    for number in range(steps):
        state, _ = train_step(state, batch_of(number))
    return state, train_step


# The same without the library, to know whether this machine's kernels round as those did that made the fixtures.

RAW = {
    "adamw": (mlp, lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1, fused=True)),
    "adamw32": (mlp32, lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1, fused=True)),
    "sgd": (mlp, lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, fused=True)),
    "rmsprop": (mlp, lambda p: torch.optim.RMSprop(p, lr=0.01)),
    "adafactor": (mlp, lambda p: torch.optim.Adafactor(p, lr=0.01)),
    "conv": (conv, lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1, fused=True)),
    "bfloat16": (mlp32, lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1, fused=True)),
}


def raw(name):
    build, make = RAW[name]
    model = build()
    optimizer = make(list(model.parameters()))
    for number in range(20):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=name == "bfloat16"):
            loss = loss_fn(model, STEPS["adamw, pure"].batch(model, number))
        loss.backward()
        optimizer.step()
    return {"params/" + name: parameter.detach().clone() for name, parameter in model.named_parameters()}


# Checkpoints


def small():
    return filled(nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Dropout(0.2), nn.Linear(5, 2)))


def small_run(optimizer, model=None, steps=4, extra=None, bad=()):
    """A state that was trained a little, after its epoch's first batch."""
    model = model or small()
    dtype = next(model.parameters()).dtype
    if optimizer is None:
        return ll.init_state(model, seed=9, epoch_length=3, extra=extra)
    step = ll.make_train_step(ll.make_grad_fn(model, lambda m, x: m(x).square().mean()), optimizer)
    state = ll.init_state(model, optimizer, seed=9, epoch_length=3, extra=extra)
    for number in range(steps):
        x = numbers(6, 3, start=50 * number, dtype=dtype)
        state, _ = step(state, x / 0 if number in bad else x)
    return state


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x):
        return self.head(self.norm(self.embedding((x * 100).long().abs().flatten() % 7)))


def nested(step=0):
    """An example of a user's `extra`."""
    best = ll.predicates.BestSoFar("eval/loss", mode="min", min_delta=0.01)
    if step:
        best = best.update(0.5, 100).update(0.7, 200)
    return {
        "best": best,
        "none": None,
        "nested": {"a": (1, -2, {"b": [True, 0.1, float("inf"), -0.0]}), "empty": {}, "text": "snow ❄ and / and ~"},
        "whole": 12345678901234567,
        "tensor": numbers(2, 3) if step else torch.zeros(2, 3, dtype=torch.float64),
        "shadow": {"0.weight": numbers(5, 3) if step else torch.zeros(5, 3, dtype=torch.float64)},
    }


def kinds_of_tensors(step=0):
    whole = torch.arange(12).reshape(3, 4)
    kinds = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.uint8, torch.int8, torch.int16]
    kinds += [torch.int32, torch.int64, torch.bool, torch.complex64, torch.complex128]
    found = {str(kind): (whole - 5).to(kind) for kind in kinds}
    found["transposed"] = numbers(3, 4).T
    found["scalar"] = torch.tensor(0.1)
    found["empty"] = torch.empty(0, 3)
    found["nan"] = torch.tensor([float("nan"), float("-inf"), -0.0])
    found["eighth"] = torch.tensor([0.5, -1.0]).to(torch.float8_e4m3fn)
    return found if step else {name: torch.zeros_like(tensor) for name, tensor in found.items()}


# kind: (optimizer, model, extra as a function of whether it is a later one, places of batches that are infinite)
CHECKPOINTS = {
    "plain": (adamw, small, lambda step: None, ()),
    "extra": (sgd, small, nested, ()),
    "tensors": (lambda: None, small, kinds_of_tensors, ()),
    "tied-ema": (lambda: ll.ema(adamw(), ll.optim.ema_warmup(0.99)), Tied, lambda step: None, ()),
    "ema-buffers": (lambda: ll.ema(sgd(), 0.9, buffers=True), small, lambda step: None, ()),
    "partition": (two_optimizers, small, lambda step: None, ()),
    "loss-scale": (lambda: ll.optim.dynamic_loss_scale(adamw(), 64.0), small, lambda step: None, (2,)),
    "if-finite": (lambda: ll.optim.apply_if_finite(adamw(), 3), small, lambda step: None, (1, 3)),
    "spikes": (lambda: ll.optim.skip_spikes(adamw(), window=4), small, lambda step: None, (3,)),
    "masters": (lambda: ll.optim.master_weights(adamw()), lambda: nn.Linear(3, 5).bfloat16(), lambda step: None, ()),
    "lookahead": (lambda: ll.contrib.lookahead(sgd(), sync_period=3), small, lambda step: None, ()),
    "swa": (lambda: ll.optim.swa(sgd(), start=1, every=2), small, lambda step: None, ()),
    "injected": (lambda: adamw(lr=ll.optim.injected(0.02)), small, lambda step: None, ()),
    "adafactor": (lambda: ll.optimizer(torch.optim.Adafactor, lr=0.02), small, lambda step: None, ()),
    "schedulefree": (schedule_free, small, lambda step: None, ()),
    "freeze": (lambda: ll.optim.freeze(adamw(), lambda name, step: name == "0.weight"), small, lambda step: None, ()),
}


def checkpoint_state(kind):
    """The state that the checkpoint of this kind is of, as the code of today makes it."""
    optimizer, model, extra, bad = CHECKPOINTS[kind]
    return small_run(optimizer(), filled(model()), extra=None, bad=bad).replace(extra=extra(1))


def checkpoint_start(kind):
    """A fresh state of the same structure, whose values are all others."""
    optimizer, model, extra, _ = CHECKPOINTS[kind]
    model = model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    return ll.init_state(model, optimizer(), epoch_length=3, extra=extra(0))


# Random draws


class Augmented(Dataset):
    """A number for each index, and what it drew from the three global streams."""

    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return [float(index), *drawn()]


class AugmentedStream(IterableDataset):
    def __init__(self, count):
        self.count = count

    def __iter__(self):
        info = get_worker_info()
        first, step = (info.id, info.num_workers) if info else (0, 1)
        for number in range(first, self.count, step):
            yield [float(number), *drawn()]


def drawn():
    return torch.rand((), dtype=torch.float64).item(), random.random(), np.random.rand()  # noqa: NPY002


def as_lists(items):
    return [list(item) for item in items]


def with_draws(items):
    """A collate_fn that draws."""
    return [[*item, *drawn()] for item in items]


def item_draws(make, workers, collate=as_lists):
    loader = ll.make_loader(make(9), batch_size=4, seed=6, num_workers=workers, collate_fn=collate)
    found = {}
    for epoch, batch in ((0, 0), (1, 0), (2, 1)):
        found[f"epoch {epoch} from {batch}"] = list(loader(ll.TrainState(epoch=epoch, batch=batch)))
    return found


def draws_of_items():
    return {
        "items": item_draws(Augmented, 0),
        "items, 2 workers": item_draws(Augmented, 2),
        "stream": item_draws(AugmentedStream, 0),
        "stream, 2 workers": item_draws(AugmentedStream, 2),
        "collate_fn": item_draws(Augmented, 0, with_draws),
    }


def mask():
    """As a string of 0 and 1, and a number drawn after it."""
    kept = nn.functional.dropout(torch.ones(24), 0.5) > 0
    return "".join(str(int(k)) for k in kept), torch.rand((), dtype=torch.float64).item()


def machine_draws():
    """Draws of torch's own stream: if they differ here, the fixtures of draws are meaningless."""
    kept = torch.get_rng_state()
    torch.manual_seed(11)
    found = [mask(), mask(), torch.randperm(30).tolist()]
    torch.set_rng_state(kept)
    return found


def masks_of(wrap, seed, step, model=None):
    model = model or filled(nn.Linear(2, 1))
    seen = []

    def with_mask(model, x):
        seen.append(mask())
        return model(x).square().mean()

    train_step = ll.make_train_step(wrap(ll.make_grad_fn(model, with_mask)), sgd(), donate=True)
    state = ll.init_state(model, sgd(), seed=seed).replace(step=step, epoch=step // 2, batch=step % 2)
    train_step(state, numbers(6, 2, dtype=torch.float32))
    return seen


def dropout_masks(model=None):
    wraps = {
        "plain": lambda grad_fn: grad_fn,
        "accumulate 3": lambda grad_fn: ll.accumulate(grad_fn, microbatches=3),
        "accumulate by 4": lambda grad_fn: ll.accumulate(grad_fn, size=4),
    }
    if model is None:
        wraps["sam"] = lambda grad_fn: ll.contrib.sam(grad_fn)
    return {
        f"{name}, seed {seed}, step {step}": masks_of(wrap, seed, step, model)
        for name, wrap in wraps.items()
        for seed in (0, 5)
        for step in (0, 1, 1000)
    }


# Orders


def reversed_by_epoch(epoch, generator):
    order = torch.randperm(20, generator=generator).tolist()
    return order[:7] if epoch else order[::-1]


def uneven_batches(epoch, generator):
    order = torch.randperm(20, generator=generator).tolist()
    return [order[i : i + 2 + i % 3] for i in range(0, 20, 5)]


LENGTHS = [(7 * i) % 11 + 1 for i in range(23)]

# name: (how many samples, options of make_loader)
ORDERS = {
    "shuffled": (23, {"batch_size": 5}),
    "shuffled, another seed": (23, {"batch_size": 5, "seed": 12345}),
    "in order": (23, {"batch_size": 5, "order": ll.data.in_order()}),
    "drop_last": (23, {"batch_size": 5, "drop_last": True}),
    "limit": (23, {"batch_size": 5, "limit": 3}),
    "weights": (23, {"batch_size": 5, "order": ll.data.weighted([i % 4 + 0.5 for i in range(23)])}),
    "weights, num_samples": (
        23,
        {"batch_size": 5, "order": ll.data.weighted([i % 4 + 0.5 for i in range(23)], num_samples=12)},
    ),
    "lengths": (23, {"batch_size": 3, "order": ll.data.by_length(LENGTHS)}),
    "lengths, pool": (23, {"batch_size": 3, "order": ll.data.by_length(LENGTHS, pool=4)}),
    "lengths, pool 1, drop_last": (
        23,
        {"batch_size": 3, "order": ll.data.by_length(LENGTHS, pool=1), "drop_last": True},
    ),
    "sampler": (20, {"batch_size": 3, "order": ll.data.sampler([*range(19, -1, -2)])}),
    "sampler of the epoch": (20, {"batch_size": 3, "order": ll.data.sampler(reversed_by_epoch)}),
    "sampler of torch": (20, {"batch_size": 6, "order": ll.data.sampler(torch.utils.data.RandomSampler(range(20)))}),
    "batch_sampler": (20, {"order": ll.data.batch_sampler(uneven_batches)}),
    "items that are batches": (8, {"batch_size": None}),
    "large": (3000, {"batch_size": 1000, "seed": 2, "limit": 1}),
}


def order_loader(name):
    count, options = ORDERS[name]
    return ll.make_loader(torch.arange(count), **{"seed": 4, **options})


def order_of(loader, epochs=(0, 1, 2, 9)):
    return {f"epoch {epoch}": read(loader, ll.TrainState(epoch=epoch)) for epoch in epochs}


def read(loader, state):
    """Batches of a loader as lists of integers."""
    return [torch.as_tensor(batch[0] if isinstance(batch, list) else batch).tolist() for batch in loader(state)]


class Count(IterableDataset):
    def __init__(self, count):
        self.count = count

    def __iter__(self):
        return iter(range(self.count))


def orders():
    found = {name: order_of(order_loader(name)) for name in ORDERS}
    shuffled = order_loader("shuffled")
    found["without_samples"] = order_of(ll.data.without_samples(shuffled, [0, 7, 8, 22]))
    found["from batch 3"] = read(shuffled, ll.TrainState(epoch=2, batch=3))
    found["weights from batch 2"] = read(order_loader("weights"), ll.TrainState(epoch=1, batch=2))
    found["tensors"] = order_of(ll.make_loader(TensorDataset(torch.arange(23)), batch_size=5, seed=4))
    found["stream"] = order_of(ll.make_loader(Count(11), batch_size=4, seed=4))
    found["stream from batch 1"] = read(ll.make_loader(Count(11), batch_size=4), ll.TrainState(batch=1))
    endless = ll.TrainState(epoch=1, epoch_length=2)
    found["stream, epochs of 2"] = read(ll.make_loader(Count(11), batch_size=4, drop_last=True), endless)
    found["stream, 2 workers"] = order_of(ll.make_loader(Count(11), batch_size=4, num_workers=2))
    indices = [shuffled.indices(ll.TrainState(epoch=1, batch=k)).tolist() for k in range(len(shuffled))]
    found["indices"] = indices
    walk = []
    model, optimizer = filled(nn.Linear(1, 1)), sgd()
    step = ll.make_train_step(ll.make_grad_fn(model, lambda m, x: m(x[:, None] / 20.0).mean()), optimizer)
    state = ll.init_state(model, optimizer, epoch_length=len(shuffled)).replace(epoch=1, batch=3)
    for _ in range(2):
        for batch in shuffled(state):
            walk.append(batch.tolist())
            state, _ = step(state, batch)
    found["a run from epoch 1, batch 3"] = [walk, state.step, state.epoch, state.batch, state.samples]
    return found


# Two ranks, in processes that `ranks.launch` starts


def sharded_start():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    model = filled(nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 2)))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    extra = {"ema": distribute_tensor(numbers(7, 3), mesh, [Shard(0)]), "best": 0.5}
    return model, ll.init_state(model, adamw(), seed=9, epoch_length=3, extra=extra)


def sharded_state():
    """Trained on two ranks, each with its own half of each batch."""
    model, state = sharded_start()
    grad_fn = ll.make_grad_fn(model, lambda m, x: m(x).square().mean())
    step = ll.make_train_step(grad_fn, adamw(), donate=True)
    rank = torch.distributed.get_rank()
    for number in range(4):
        state, _ = step(state, numbers(8, 3, start=50 * number, dtype=torch.float32)[4 * rank : 4 * rank + 4])
    return state


def one_start():
    """The same in one process."""
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))
    return ll.init_state(
        model, adamw(), epoch_length=3, extra={"ema": torch.zeros(7, 3, dtype=torch.float64), "best": 0.0}
    )


def orders_of_this_rank():
    found = {}
    for name in ("shuffled", "lengths", "weights", "drop_last"):
        loader = order_loader(name)
        found[name] = order_of(loader, (0, 1))
        parts = [[part.tolist(), bool(counts)] for part, counts in loader.parts(ll.TrainState(epoch=1, batch=1))]
        found[name + ", parts"] = parts
    found["uneven, parts"] = [
        [part.tolist(), bool(counts)]
        for part, counts in ll.make_loader(torch.arange(7), batch_size=3, order=ll.data.in_order()).parts(
            ll.TrainState()
        )
    ]
    found["stream"] = order_of(ll.make_loader(Count(12), batch_size=4), (0, 1))
    found["undivided"] = order_of(ll.make_loader(torch.arange(9), batch_size=4, divide=False), (0, 1))
    found["draws of items"] = item_draws_even(Augmented, as_lists)
    found["draws of collate_fn"] = item_draws_even(Augmented, with_draws)
    found["draws of a stream"] = item_draws_even(AugmentedStream, with_draws)
    return found


def item_draws_even(make, collate):
    loader = ll.make_loader(make(8), batch_size=4, seed=6, collate_fn=collate)
    return {str(epoch): list(loader(ll.TrainState(epoch=epoch))) for epoch in (0, 1)}


def on_two_ranks(folder, making):
    """Writes what each rank is given to a file of its own, and saves or restores the sharded checkpoint."""
    folder = Path(folder)
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    found = orders_of_this_rank()
    model = nn.parallel.DistributedDataParallel(filled(nn.Linear(2, 1)))
    found["masks"] = dropout_masks(model)
    (folder / f"rank-{rank}.json").write_text(json.dumps(found))
    if making:
        ckpt = ll.checkpoint_io(folder / "sharded")
        state = sharded_state()
        ckpt.save(state, {"loss": 0.25})
        values = values_of(state)
    else:
        _, start = sharded_start()
        values = values_of(ll.checkpoint_io(folder / "sharded").restore(start))
    if rank == 0:
        torch.save(values, folder / "sharded.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


# Logs and files of predictions


def log_rows():
    def at(step, **counts):
        return ll.TrainState(step=step, **counts)

    long = {"train/loss": 0.0123456789, "train/lr": 3e-5, "train/grad_norm": float("inf")}
    return [
        (at(50, batch=50, epoch_length=100, samples=3200), {"train/loss": 0.69314718, "train/lr": 3e-4}),
        (at(100, epoch=1, epoch_length=100, samples=6400), long),
        (at(100, epoch=1, epoch_length=100, samples=6400), {"eval/loss": 1.0, "eval/auc": float("nan")}),
        (at(150, epoch=1, batch=50, epoch_length=100, samples=9600), {"note": 'a, "b" ❄', "ok": True, "count": 7}),
        (at(120, epoch=1, batch=20, epoch_length=100, samples=7680), {"train/loss": torch.tensor(0.1)}),
        (at(160, epoch=3, samples=10_000), {"train/loss": np.float32(0.3), "big": 2**60, "minus": -1e300}),
        (at(123456789, epoch=12), {"train/loss": -float("inf")}),
    ]


def metrics_rows():
    """Numbers that come out of metrics, as a loop logs them."""
    parts = [{"loss": ll.Mean(torch.tensor(k + 0.5), 3), "accuracy": ll.Mean(float(k), 4)} for k in range(3)]
    return [(ll.TrainState(step=3), ll.compute(ll.merge(*parts), prefix="eval/"))]


def write_logs(folder):
    folder = Path(folder)
    with open(folder / "console.txt", "w", encoding="utf-8") as file:
        log = ll.tee(ll.jsonl(folder / "log.jsonl"), ll.log.csv_file(folder / "log.csv"), ll.console(file=file))
        for state, values in log_rows() + metrics_rows():
            log(state, values)
        renamed = ll.log.rename(ll.log.only(ll.console(file=file), lambda name: name == "train/loss"), {})
        renamed(*log_rows()[0])
    prints = ll.jsonl(folder / "prints.jsonl")
    for number in (0, 1):
        prints(ll.TrainState(step=number), ll.debug.fingerprint(printed(number)))


def printed(number):
    """A state of which all bits are given."""
    state = ll.init_state(filled(small(), number), adamw(), seed=3, epoch_length=7, extra=nested(1))
    return state.replace(step=number, extra={**state.extra, "tensors": kinds_of_tensors(1)})


def write_predictions(folder):
    """All numbers in it are exact on any machine."""
    model = nn.Linear(2, 3)
    with torch.no_grad():
        model.weight.copy_(torch.arange(6).reshape(3, 2))
        model.bias.fill_(0.25)

    def predict_fn(model, x):
        logits = model(x)
        return {"logits": logits, "deep": {"class": logits.argmax(1), "pair": (x.half(), x[:, 0] > 1)}}

    predict_step = ll.make_predict_step(model, predict_fn)
    state = ll.init_state(model, seed=1)
    batches = torch.arange(14.0).reshape(7, 2).split(3)
    ll.predict_to(Path(folder) / "predictions", predict_step, state, batches)
    ll.predict_to(Path(folder) / "predictions.jsonl", predict_step, state, batches)


SCHEDULES = {
    "constant": ll.schedules.constant(0.1),
    "linear": ll.schedules.linear(1.0, 0.1, total=20),
    "cosine": ll.schedules.cosine(1.0, 0.1, total=20),
    "polynomial": ll.schedules.polynomial(1.0, 0.1, total=20, power=2.0),
    "exponential": ll.schedules.exponential(1.0, factor=0.9),
    "step_decay": ll.schedules.step_decay(1.0, every=7, factor=0.5),
    "multistep_decay": ll.schedules.multistep_decay(1.0, boundaries=[3, 11]),
    "inverse_sqrt": ll.schedules.inverse_sqrt(1.0, timescale=10),
    "cosine_restarts": ll.schedules.cosine_restarts(1.0, total=20, cycles=3),
    "cyclic": ll.schedules.cyclic(0.1, 1.0, rise=4, fall=6),
    "one_cycle": ll.schedules.one_cycle(0.1, 1.0, 0.01, total=20),
    "warmup": ll.schedules.warmup(ll.schedules.constant(1.0), 5),
    "warmup_linear": ll.schedules.warmup_linear(1.0, warmup=5, total=20),
    "warmup_cosine": ll.warmup_cosine(1.0, warmup=5, total=20, final=0.1),
    "warmup_stable_decay": ll.schedules.warmup_stable_decay(1.0, warmup=4, total=20, decay=6),
    "join": ll.schedules.join([ll.schedules.constant(1.0), ll.schedules.exponential(1.0, factor=0.5)], [6]),
    "scaled": ll.schedules.scaled(ll.schedules.exponential(1.0, factor=0.9), ll.schedules.linear(1.0, total=20)),
}


def schedule_values():
    return {name: [schedule(step) for step in range(25)] for name, schedule in SCHEDULES.items()}
