"""Cost of a step on several ranks against the raw loop: time and bytes sent, interleaved in one run.

    python tests/benchmarks/distributed.py

It starts torchrun itself, with gloo on the CPU. For a tiny MLP and a transformer of 0.9 million parameters, with
fused AdamW everywhere, DDP and FSDP2, and for a mean over samples and one over weighted tokens (or samples):

- the raw loop, which divides by the number of samples, or the weight, of all ranks: one all-reduce of a number per
  step;
- the raw loop without it, which is right only if all ranks have the same number or weight;
- looplib, donated.

In each process each contender has its own model, and they take turns in shuffled order, the same on all ranks. Each
round measures the median time of a step of each once; ratios are those of the medians over the
rounds. Bytes are those that rank 0 sends in a step, including gloo's headers, as counted by the kernel (Linux; see
tests/traffic.py). Ranks wait for each other, so a busy core slows all of them: only ratios are meaningful, and only on
a machine with at least as many idle cores as ranks.
"""

from __future__ import annotations

import argparse
import importlib
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from harness import KEEP_MEMORY, ROOT, Count, Report, Step, options_of, parser
from loops import looplib_step
from models import Block, Transformer
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import looplib as ll

LossFn = Callable[[nn.Module, Any], Any]


def mlp() -> tuple[nn.Module, Any]:
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))
    return model, (torch.randn(16, 32), torch.randint(0, 10, (16,)), torch.rand(16))


def transformer() -> tuple[nn.Module, Any]:
    tokens = torch.randint(0, 512, (4, 65))
    return Transformer(width=128, depth=4, length=64), (tokens[:, :-1], tokens[:, 1:], torch.rand(4, 64))


MODELS = {"MLP": mlp, "transformer": transformer}


def mean_loss(model: nn.Module, batch: Any) -> Tensor:
    x, y, _ = batch
    return F.cross_entropy(model(x).flatten(0, -2), y.flatten())


def weighed_loss(model: nn.Module, batch: Any) -> ll.Mean:
    x, y, weights = batch
    losses = F.cross_entropy(model(x).flatten(0, -2), y.flatten(), reduction="none")
    return ll.Mean((losses * weights.flatten()).sum(), weights.sum())


LOSSES: dict[str, LossFn] = {"mean": mean_loss, "weighted": weighed_loss}


def wrapped(model: nn.Module, engine: str) -> nn.Module:
    if engine == "DDP":
        return DistributedDataParallel(model)
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    for module in model.modules():
        if isinstance(module, Block):
            fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def raw(model: nn.Module, loss_fn: LossFn, batch: Any, counted: bool = True) -> Step:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    ranks = distributed.get_world_size()

    def step() -> None:
        if counted and loss_fn is mean_loss:
            rows = torch.tensor(len(batch[0]), dtype=torch.float64)
            on_its_way: Any = distributed.all_reduce(rows, async_op=True)  # while the forward pass runs
        loss = loss_fn(model, batch)
        if isinstance(loss, ll.Mean):
            weight = torch.as_tensor(loss.weight).double()
            if counted:
                distributed.all_reduce(weight)
                weight /= ranks
            loss = loss.total / weight
        elif counted:
            on_its_way.wait()
            loss = loss * (len(batch[0]) * ranks / rows)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


CONTENDERS: dict[str, Callable[[nn.Module, LossFn, Any], Step]] = {
    "raw": raw,
    "raw, counts no ranks": lambda model, loss_fn, batch: raw(model, loss_fn, batch, counted=False),
    "donated": lambda model, loss_fn, batch: looplib_step(model, loss_fn, batch, True),
}


def agreed(number: float) -> float:
    """The first rank's."""
    value = torch.tensor(number, dtype=torch.float64)
    distributed.broadcast(value, 0)
    return value.item()


def sent(step: Step, steps: int = 5) -> float:
    """Bytes a step."""
    bytes_sent = importlib.import_module("traffic").bytes_sent
    distributed.barrier()
    before = bytes_sent()
    for _ in range(steps):
        step()
    found: float = (bytes_sent() - before) / steps
    distributed.barrier()
    return found


def rounds_of(steps: dict[str, Step], seconds: float) -> list[dict[str, float]]:
    """Seconds of a step of each, for each round."""
    found: list[dict[str, float]] = []
    took = max(5e-5, agreed(min(_timed(step) for step in steps.values() for _ in range(3))))
    turn = max(5, round(0.1 / took))
    order, end = random.Random(0), time.perf_counter() + seconds
    while agreed(time.perf_counter() < end or len(found) < 3):
        times = {}
        for name in order.sample(list(steps), len(steps)):
            steps[name]()  # the caches are another contender's
            distributed.barrier()
            times[name] = statistics.median(_timed(steps[name]) for _ in range(turn))
        found.append(times)
    return found


def _timed(step: Step) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


ROWS = [(model, engine, loss) for model in MODELS for engine in ("DDP", "FSDP2") for loss in LOSSES]


def work(options: argparse.Namespace) -> int:
    """All rows, on each rank; the first reports."""
    with ll.distributed.setup():
        first = ll.distributed.is_rank_zero()
        report = Report("distributed", options, f"{options.ranks} ranks of gloo, fused AdamW") if first else None
        end, code = time.perf_counter() + options.seconds, 0
        for number, (model_name, engine, loss_name) in enumerate(ROWS[::3] if options.dry_run else ROWS):
            steps = {}
            for name, contender in CONTENDERS.items():
                torch.manual_seed(0)
                model, batch = MODELS[model_name]()
                steps[name] = contender(wrapped(model, engine), LOSSES[loss_name], batch)
            for step in steps.values():
                for _ in range(5):
                    step()
            crossing = {name: sent(step) for name, step in steps.items()}
            share = max(0.0, end - time.perf_counter()) / (len(ROWS) - number)
            found = rounds_of(steps, agreed(0.0 if options.dry_run else share))
            if report:
                row = f"{model_name}, {engine}, {loss_name}"
                report.compare(
                    row, {name: [times[name] for times in found] for name in steps}, "raw", "time of a step"
                )
                report.add(row, {name: Count(sent) for name, sent in crossing.items()}, "bytes that a rank sends")
        if report:
            code = report.close()
    return code


def main(options: argparse.Namespace, arguments: list[str]) -> int:
    paths = [str(ROOT), str(ROOT / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, **KEEP_MEMORY, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={options.ranks}"]
    return subprocess.call([*launch, str(Path(__file__).resolve()), *arguments], env=environment)


if __name__ == "__main__":
    made = parser(__doc__, 160.0)
    made.add_argument("--ranks", type=int, default=2)
    given = options_of(made)
    sys.exit(work(given) if ll.distributed.launched() else main(given, sys.argv[1:]))
