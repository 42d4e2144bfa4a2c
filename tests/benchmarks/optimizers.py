"""Cost of a step with each class of torch.optim, against the fastest raw loop with that class.

    python tests/benchmarks/optimizers.py                       # all classes, a small MLP
    python tests/benchmarks/optimizers.py --tensors 4000        # a model of 4,000 tensors of 10 numbers
    python tests/benchmarks/optimizers.py --only SGD AdamW --seconds 60         # 30 s for each of two classes

The raw loops are those with `fused=True`, `foreach=True` and `foreach=False`, as far as the class has them, and the best
is the one with the lowest median. looplib's steps are donated and pure, with the default kernel, and donated with each
kernel passed by the user. In each round all contenders run one block of steps, in shuffled order. A ratio is that of
two medians over the rounds, with a 95% interval from resampled rounds.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from typing import Any

import torch
import torch.nn.functional as F
from harness import Report, Seconds, Step, in_turns, options_of, parser, ratio
from torch import Tensor, nn

import looplib as ll

CLASSES: dict[str, dict[str, Any]] = {
    "SGD": {},
    "SGD momentum": {"momentum": 0.9},
    "Adam": {},
    "AdamW": {},
    "Adagrad": {},
    "RMSprop": {},
    "Adadelta": {},
    "Adamax": {},
    "NAdam": {},
    "RAdam": {},
    "ASGD": {},
    "Rprop": {},
    "Adafactor": {},
    "Muon": {},
}
KERNELS: dict[str, dict[str, Any]] = {
    "fused": {"fused": True},
    "foreach": {"foreach": True},
    "loop": {"foreach": False},
}


class Wide(nn.Module):
    """A model of many small tensors."""

    def __init__(self, tensors: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(2, 5)) for _ in range(tensors)])

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack(list(self.weights)).sum(0).flatten().expand(len(x), 10) * x.mean()


def model_of(tensors: int, biases: bool) -> nn.Module:
    torch.manual_seed(0)
    if tensors:
        return Wide(tensors)
    return nn.Sequential(nn.Linear(32, 64, bias=biases), nn.Tanh(), nn.Linear(64, 10, bias=biases))


def loss_fn(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def contenders(name: str, tensors: int) -> dict[str, Step]:
    """Steps by name: "raw, kernel" and "looplib, ...". A kernel that the class lacks is left out."""
    cls, options = getattr(torch.optim, name.split()[0]), {"lr": 1e-3, **CLASSES[name]}
    batch = torch.randn(16, 32), torch.randint(0, 10, (16,))
    biases = cls is not getattr(torch.optim, "Muon", None)  # which takes matrices alone
    steps: dict[str, Step] = {}
    for kernel, chosen in KERNELS.items():
        try:
            made = raw(cls, {**options, **chosen}, model_of(tensors, biases), batch)
            made()
        except (TypeError, RuntimeError):
            continue
        steps[f"raw, {kernel}"] = made
        steps[f"looplib, donated, {kernel}"] = looplib(
            cls, {**options, **chosen}, model_of(tensors, biases), batch, True
        )
    if not steps:
        steps["raw, loop"] = raw(cls, options, model_of(tensors, biases), batch)
    for kind, donate in (("donated", True), ("pure", False)):
        steps[f"looplib, {kind}"] = looplib(cls, options, model_of(tensors, biases), batch, donate)
    return steps


def raw(cls: Any, options: dict[str, Any], model: nn.Module, batch: tuple[Tensor, Tensor]) -> Step:
    optimizer = cls(model.parameters(), **options)

    def step() -> None:
        optimizer.zero_grad()
        loss_fn(model, batch).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return step


def looplib(cls: Any, options: dict[str, Any], model: nn.Module, batch: Any, donate: bool) -> Step:
    optimizer = ll.optimizer(cls, **options)
    train_step = ll.make_train_step(ll.make_grad_fn(model, loss_fn), optimizer, donate=donate)
    state = ll.init_state(model, optimizer)

    def step() -> None:
        nonlocal state
        state, _ = train_step(state, batch)

    return step


def main(options: argparse.Namespace) -> int:
    model = f"{options.tensors} tensors" if options.tensors else "MLP"
    report = Report("optimizers", options, model)
    for name, seconds in report.rows(options.only):
        with report.attempt(name):
            times = in_turns(contenders(name, options.tensors), seconds, block=0.04, least=5)
            medians = {kind: statistics.median(values) for kind, values in times.items()}
            best = min((kind for kind in medians if kind.startswith("raw")), key=medians.__getitem__)
            cells: dict[str, Any] = {"fastest raw loop": f"{best.removeprefix('raw, ')}, {Seconds(medians[best])}"}
            cells |= {
                kind.removeprefix("looplib, "): ratio(values, times[best])
                for kind, values in sorted(times.items(), key=lambda item: item[0].count(","))  # the default first
                if kind.startswith("looplib")
            }
            report.add(name, cells)
    return report.close()


if __name__ == "__main__":
    made = parser(__doc__, 170.0)
    made.add_argument("--tensors", type=int, default=0, help="number of small tensors, in place of the MLP")
    made.add_argument("--only", nargs="*", default=list(CLASSES), choices=list(CLASSES), help="classes")
    sys.exit(main(options_of(made)))
