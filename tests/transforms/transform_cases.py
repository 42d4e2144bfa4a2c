"""Optimizers, wrappers, models and batches on which each transform is compared with the plain step."""

import torch
import torch.nn.functional as F
from problem import sgd
from shared import classify
from torch import nn, optim

import looplib as ll


def batches(count=5, size=6, members=(), dtype=torch.float64, **scales):
    """Some batches, of which `at_7=inf` multiplies the eighth by that."""
    generator = torch.Generator().manual_seed(2)
    found = []
    for number in range(count):
        x = torch.randn(*members, size, 4, generator=generator, dtype=dtype) * scales.get(f"at_{number}", 1.0)
        found.append((x, torch.randint(0, 3, (*members, size), generator=generator)))
    return found


def counts(state):
    return state.step, state.epoch, state.batch, state.samples, state.batch_samples, state.batch_steps, state.seed


def seeded(make, seed=1, dtype=torch.float64):
    torch.manual_seed(seed)
    return make().to(dtype)


def plain():
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


def normalized(norm=nn.BatchNorm1d):
    return nn.Sequential(nn.Linear(4, 6, bias=False), norm(6), nn.ReLU(), nn.Linear(6, 3))


class Scale(nn.Module):
    """A parameter without dimensions."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x):
        return x * self.scale


def with_a_number():
    return nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.Tanh(), nn.Linear(5, 3), Scale())


def dropping():
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Dropout(0.3), nn.Linear(16, 3))


# name -> (class, learning rate, other options)
OPTIMIZERS = {
    "SGD": (optim.SGD, 0.1, {"weight_decay": 0.01}),
    "SGD, momentum": (optim.SGD, 0.1, {"momentum": 0.9}),
    "SGD, nesterov": (optim.SGD, 0.1, {"momentum": 0.9, "nesterov": True, "maximize": True}),
    "SGD, dampening": (optim.SGD, 0.1, {"momentum": 0.9, "dampening": 0.3}),
    "Adam": (optim.Adam, 0.02, {"weight_decay": 0.1}),
    "AdamW": (optim.AdamW, 0.02, {}),
    "AMSGrad": (optim.AdamW, 0.02, {"amsgrad": True}),
    "Adamax": (optim.Adamax, 0.02, {}),
    "NAdam": (optim.NAdam, 0.02, {}),
    "RMSprop": (optim.RMSprop, 0.01, {}),
    "RMSprop, centered": (optim.RMSprop, 0.01, {"centered": True, "momentum": 0.9}),
    "Adagrad": (optim.Adagrad, 0.05, {"lr_decay": 0.01, "initial_accumulator_value": 0.1}),
    "Adadelta": (optim.Adadelta, 1.0, {}),
}

# torch keeps products of NAdam's momenta in float32 on both sides, rounded in another order.
ROUGH = {"NAdam": 1e-5}


def the_same(function):
    return function


# name -> (wrapper of the gradients, wrapper of the optimizer, number of graphs: one for each thing it does in some steps)
WRAPPERS = {
    "accumulate": (lambda g: ll.accumulate(g, 2), the_same, 1),
    "accumulate ragged": (lambda g: ll.accumulate(g, 4), the_same, 1),
    "accumulate within": (lambda g: ll.accumulate(ll.accumulate(g, 2), 2), the_same, 1),
    "clip_by_global_norm": (
        lambda g: ll.accumulate(g, 3),
        lambda o: ll.chain(ll.clip_by_global_norm(0.3), o),
        1,
    ),
    "clip_by_value": (the_same, lambda o: ll.chain(ll.optim.clip_by_value(0.05), o), 1),
    "sam": (lambda g: ll.contrib.sam(g, 0.05), the_same, 1),
    "ema": (the_same, lambda o: ll.chain(o, ll.ema(ll.optim.ema_warmup(0.9), buffers=True)), 1),
    "swa": (the_same, lambda o: ll.chain(o, ll.optim.swa(start=2, every=2)), 2),
    "finite": (the_same, lambda o: ll.chain(ll.skip_nonfinite(3), o, ll.ema(0.9)), 1),
    "every": (the_same, lambda o: ll.optim.own_steps(ll.chain(ll.optim.every(o, 3), ll.ema(0.9))), 2),
    "loss scale": (the_same, lambda o: ll.chain(ll.optim.dynamic_loss_scale(growth_interval=2), o), 1),
    "partition": (
        the_same,
        lambda o: ll.optim.partition(
            {"vectors": o, "rest": ll.chain(sgd(), ll.ema())},
            lambda name, tensor: "vectors" if tensor.ndim < 2 else "rest",
        ),
        1,
    ),
}


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.cell, self.out = nn.Embedding(11, 5), nn.LSTM(5, 6, batch_first=True), nn.Linear(6, 11)

    def forward(self, x):
        return self.out(self.cell(self.tokens(x))[0])


class Attention(nn.Module):
    """Fused attention, tied weights, a frozen layer, and a buffer that is replaced."""

    def __init__(self):
        super().__init__()
        self.tokens, self.qkv, self.out = nn.Embedding(11, 8), nn.Linear(8, 24), nn.Linear(8, 11, bias=False)
        self.norm, self.frozen = nn.LayerNorm(8), nn.Linear(8, 8).requires_grad_(False)
        self.out.weight = self.tokens.weight
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls = self.calls + 1
        x = self.frozen(self.tokens(x))
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        return self.out(x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


def convolutions():
    first = nn.Conv2d(2, 4, 3, padding=1)
    norms = nn.BatchNorm2d(4), nn.GELU(), nn.MaxPool2d(2), nn.Conv2d(4, 4, 3, groups=2), nn.GroupNorm(2, 4)
    return nn.Sequential(first, *norms, nn.Dropout2d(0.3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))


def encoder(dropout=0.2):
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=dropout, batch_first=True)
    return nn.Sequential(nn.Embedding(11, 8), layer, nn.Linear(8, 11))


def next_token(model, x):
    return F.cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())


def tokens(count=3):
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, 11, (4, 4), generator=generator) for _ in range(count)]


def pictures():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 4, 2, 6, 6, generator=generator, dtype=torch.float64)
    return list(zip(x, torch.randint(0, 3, (3, 4), generator=generator), strict=True))


# name -> (function that makes the model, loss function, function that makes the batches)
MODELS = {
    "channels last": (lambda: convolutions().to(memory_format=torch.channels_last), classify, pictures),
    "convolutions": (convolutions, classify, pictures),
    "LSTM": (Recurrent, next_token, tokens),
    "attention": (Attention, next_token, tokens),
    "encoder with dropout": (encoder, next_token, tokens),
}
