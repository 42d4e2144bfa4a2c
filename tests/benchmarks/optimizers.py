"""Cost of a step with each class of torch.optim, against the fastest raw loop with that class.

    python tests/benchmarks/optimizers.py                       # all classes, a small MLP
    python tests/benchmarks/optimizers.py --tensors 4000        # a model of 4,000 tensors of 10 numbers
    python tests/benchmarks/optimizers.py --only SGD AdamW --seconds 60

The raw loops are those with `fused=True`, `foreach=True` and `foreach=False`, as far as the class has them, and the best
is the one with the lowest median. looplib's steps are donated and pure, with the default kernel, and donated with each
kernel passed by the user. In each round all contenders run one block of steps, in shuffled order. A ratio is that of
two medians over the rounds, with a 95% interval from resampled rounds.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

import looplib as ll

Step = Callable[[], object]
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


def blocks(steps: dict[str, Step], seconds: float) -> dict[str, list[float]]:
    """Microseconds of a step in each round."""
    counts = {}
    for name, step in steps.items():
        for _ in range(3):
            step()
        start = time.perf_counter()
        step()
        counts[name] = max(1, round(0.02 / (time.perf_counter() - start)))
    rounds: dict[str, list[float]] = {name: [] for name in steps}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(rounds[next(iter(steps))]) < 5:
        for name in random.sample(list(steps), len(steps)):
            step = steps[name]
            step()  # the caches are another contender's
            start = time.perf_counter()
            for _ in range(counts[name]):
                step()
            rounds[name].append((time.perf_counter() - start) / counts[name] * 1e6)
    return rounds


def ratio(ours: list[float], best: list[float]) -> tuple[float, float, float]:
    """The ratio of the medians, and its 95% interval."""
    indices = range(len(ours))
    drawn = []
    for _ in range(1000):
        chosen = random.choices(indices, k=len(ours))
        drawn.append(statistics.median(ours[i] for i in chosen) / statistics.median(best[i] for i in chosen))
    drawn.sort()
    return statistics.median(ours) / statistics.median(best), drawn[25], drawn[974]


def main(names: list[str], seconds: float, tensors: int, out: Path | None) -> None:
    torch.set_num_threads(1)
    print(
        f"torch {torch.__version__}, one thread, {f'{tensors} tensors' if tensors else 'MLP'}, {seconds:.0f} s a class"
    )
    rows: list[dict[str, Any]] = []
    for name in tqdm(names, desc="classes"):
        rounds = blocks(contenders(name, tensors), seconds)
        best = min(
            (kind for kind in rounds if kind.startswith("raw")), key=lambda kind: statistics.median(rounds[kind])
        )
        tqdm.write(f"\n{name}: {best}, {statistics.median(rounds[best]):.1f} us a step")
        for kind, values in rounds.items():
            if kind != best:
                value, low, high = ratio(values, rounds[best])
                rows.append({"class": name, "step": kind, "best": best, "ratio": value, "low": low, "high": high})
                tqdm.write(f"  {kind:26} {value:6.3f} of it   [{low:.3f}, {high:.3f}]   {len(values)} rounds")
        if out is not None:
            out.write_text(json.dumps({"torch": torch.__version__, "tensors": tensors, "rows": rows}, indent=1))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20.0, help="for each class")
    parser.add_argument("--tensors", type=int, default=0, help="number of small tensors, in place of the MLP")
    parser.add_argument("--only", nargs="*", default=list(CLASSES), choices=list(CLASSES), help="classes")
    parser.add_argument("--json", type=Path, help="file for the figures")
    arguments = parser.parse_args()
    main(arguments.only, arguments.seconds, arguments.tensors, arguments.json)
