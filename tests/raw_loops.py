"""Loops of plain torch, whose objects a checkpoint saves and restores by name: what `tests/checkpoint/test_objects.py` runs."""

import sys
import warnings
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import lr_scheduler
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn
from torchdata.stateful_dataloader import StatefulDataLoader

import looplib as ll

BEFORE, AFTER = 8, 9  # steps before the save, which is within the second epoch, and after it


class Shuffled:
    """A sampler with a state: an order that it draws for each epoch, and how far it has come."""

    def __init__(self, seed):
        self.generator, self.order, self.position = torch.Generator().manual_seed(seed), [], 0

    def __next__(self):
        if self.position == len(self.order):
            self.order, self.position = torch.randperm(24, generator=self.generator).tolist(), 0
        self.position += 4
        return self.order[self.position - 4 : self.position]

    def state_dict(self):
        return {"generator": self.generator.get_state(), "order": self.order, "position": self.position}

    def load_state_dict(self, state):
        self.generator.set_state(state["generator"])
        self.order, self.position = state["order"], state["position"]


class Loader:
    """StatefulDataLoader, of which a loop asks for the next batch."""

    def __init__(self, seed, workers):
        generator, rows = torch.Generator().manual_seed(seed), [torch.tensor(index) for index in range(24)]
        more = {"generator": generator, "num_workers": workers}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torchdata calls what torch has deprecated
            self.loader, self.batches = StatefulDataLoader(rows, batch_size=4, shuffle=True, **more), None
        self.state_dict, self.generator = self.loader.state_dict, generator

    def __next__(self):
        while True:
            self.batches = self.batches or iter(self.loader)
            for batch in self.batches:
                return batch.tolist()
            self.batches = None

    def load_state_dict(self, state):
        self.loader.load_state_dict(state)


def net(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 3))


def of_words(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Embedding(9, 3, sparse=True), nn.Flatten(), nn.Dropout(0.3))


def sequential(optimizer):
    parts = [lr_scheduler.LinearLR(optimizer, 0.2, 1, 5), lr_scheduler.CosineAnnealingLR(optimizer, 30)]
    return lr_scheduler.SequentialLR(optimizer, parts, [5])


OPTIMIZERS = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.01),
    "AdamW in channels_last": lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
    "AdamW amsgrad, fused": lambda params: torch.optim.AdamW(params, lr=0.01, amsgrad=True, fused=True),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True),
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=0.1),
    "RAdam": lambda params: torch.optim.RAdam(params, lr=0.01),
    "LBFGS": lambda params: torch.optim.LBFGS(params, lr=0.1, max_iter=3, line_search_fn="strong_wolfe"),
    "Adafactor": lambda params: torch.optim.Adafactor(params, lr=0.01),
    "SparseAdam": lambda params: torch.optim.SparseAdam(params, lr=0.01),
    "lr as a tensor": lambda params: torch.optim.Adam(params, lr=torch.tensor(0.01), capturable=False),
}
SCHEDULERS = {
    "CosineAnnealingLR": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 20),
    "OneCycleLR": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=30),
    "SequentialLR": sequential,
    "ReduceLROnPlateau": lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, patience=1, factor=0.5),
    "MultiStepLR": lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [3, 7, 12], 0.5),
    "LambdaLR": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step),
    "CosineAnnealingWarmRestarts": lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 5),
    "CyclicLR": lambda optimizer: lr_scheduler.CyclicLR(optimizer, 0.01, 0.1, 4),
    "SWALR": lambda optimizer: SWALR(optimizer, 0.02, 6),
}
# Without workers, torchdata itself draws another order after a resume, from the next epoch on.
FEEDS = {"sampler": Shuffled, "StatefulDataLoader": lambda seed: Loader(seed, 2)}
CASES = [*OPTIMIZERS, *SCHEDULERS, "GradScaler", *FEEDS, "AveragedModel"]


class Conv(nn.Sequential):
    """A network whose weights, and so the moments of an optimizer, are in channels_last."""

    def __init__(self):
        super().__init__(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(32, 3))
        self.to(memory_format=torch.channels_last)

    def forward(self, x):
        return super().forward(x[:, :3, None, None] * torch.arange(16.0).view(4, 4))


def objects_of(case, seed):
    """New objects of a run, by name, as a script makes them."""
    torch.manual_seed(seed)
    model = {"SparseAdam": of_words, "AdamW in channels_last": lambda _: Conv()}.get(case, net)(seed)
    optimizer = OPTIMIZERS.get(case, OPTIMIZERS["SGD"])(model.parameters())
    run = {"model": model, "optimizer": optimizer, "random": ll.checkpoint.RandomStreams(), "step": 0}
    run["scheduler"] = SCHEDULERS.get(case, SCHEDULERS["CosineAnnealingLR"])(optimizer)
    run["feed"] = FEEDS.get(case, Shuffled)(seed)
    if case == "GradScaler":
        run["scaler"] = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    if case == "AveragedModel":
        run["ema"] = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    return run


def train(case, run, steps):
    """A loop as people write it."""
    data = torch.Generator().manual_seed(3)
    if case == "SparseAdam":
        inputs, labels = torch.randint(9, (24, 1), generator=data), torch.randint(3, (24,), generator=data)
    else:
        inputs, labels = torch.randn(24, 5, generator=data), torch.randint(3, (24,), generator=data)
    model, optimizer, scaler = run["model"], run["optimizer"], run.get("scaler")
    for _ in range(steps):
        rows = next(run["feed"])

        def loss_of(rows=rows):
            optimizer.zero_grad()
            loss = cross_entropy(model(inputs[rows]), labels[rows])
            (loss if scaler is None else scaler.scale(loss)).backward()
            return loss

        if case == "LBFGS":
            loss = optimizer.step(loss_of)
        else:
            loss = loss_of()
            optimizer.step() if scaler is None else scaler.step(optimizer)
        if scaler is not None:
            scaler.update()
        plateau = isinstance(run["scheduler"], lr_scheduler.ReduceLROnPlateau)
        run["scheduler"].step(*[loss.item()] if plateau else [])
        if "ema" in run:
            run["ema"].update_parameters(model)
        run["step"] += 1


def end_of(run):
    """All that a run ends with. Of a loader, the rest is drawn."""
    states = {
        name: run[name].state_dict() for name in ("model", "optimizer", "scheduler", "scaler", "ema") if name in run
    }
    return {**states, "rows": [next(run["feed"]) for _ in range(7)], "draw": torch.rand(3), "step": run["step"]}


if __name__ == "__main__":  # a new process, whose objects have no state yet
    folder = Path(sys.argv[1])
    for case in sys.argv[2:]:
        run = ll.checkpoint_io(folder / case).restore(objects_of(case, seed=7), quiet=True)
        train(case, run, AFTER)
        torch.save(end_of(run), folder / f"{case}.pt")
