"""Time to resume within an epoch: from the restore to the first new step.

    python tests/benchmarks/resume.py
    python tests/benchmarks/resume.py --samples 20000

Checkpoints are made at 1%, 50% and 99% of an epoch of a million samples, of a TensorDataset and of a map-style
dataset with random augmentation. Each is resumed in a separate process, in shuffled order, with the model and the
data made in advance: load the checkpoint, get the first batch, make a step. For comparison, a fresh run has nothing
to load and starts at the first batch. The usual alternatives, with torch.load: a DataLoader that reads and drops the
batches seen, and one whose batch sampler alone is advanced (`skip_first_batches` of accelerate, which the
transformers Trainer uses to resume). The cost of skipping beyond `--read-to` of the epoch is extrapolated linearly
from the farthest point measured, and marked ~.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from harness import Report, Seconds, options_of, own_process, parser
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import looplib as ll

BATCH_SIZE = 64
POINTS = (0.0, 0.01, 0.5, 0.99)
FEATURES = {"TensorDataset": 32, "map-style with augmentation": 28 * 28}
Times = tuple[float, float, float]  # seconds to load, to get the first batch, to take a step


class Augmented(Dataset[tuple[Tensor, int]]):
    """Images, each shifted, mirrored and made noisy at random."""

    def __init__(self, count: int) -> None:
        self.images, self.count = torch.rand(1000, 28, 28), count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image = self.images[index % len(self.images)]
        image = image.roll((random.randint(-2, 2), random.randint(-2, 2)), (0, 1))
        if random.random() < 0.5:
            image = image.flip(1)
        return image + 0.1 * torch.randn(28, 28), index % 10


def make_dataset(name: str, samples: int) -> Dataset[Any]:
    if name == "TensorDataset":
        return TensorDataset(torch.rand(samples, FEATURES[name]), torch.arange(samples) % 10)
    return Augmented(samples)


def make_model(dataset_name: str) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(FEATURES[dataset_name], 64), nn.ReLU(), nn.Linear(64, 10))


def loss_fn(model: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    return F.cross_entropy(model(x), y)


def place(folder: str, dataset_name: str, point: float) -> Path:
    return Path(folder) / dataset_name / str(point)


def save_at(folder: str, dataset_name: str, point: float, samples: int) -> None:
    length = math.ceil(samples / BATCH_SIZE)
    batch = int(point * length)
    path, model = place(folder, dataset_name, point), make_model(dataset_name)
    state = ll.init_state(model, ll.optimizer(torch.optim.AdamW, lr=1e-3), epoch_length=length)
    position = {"step": batch, "batch": batch, "samples": batch * BATCH_SIZE, "batch_samples": BATCH_SIZE}
    ll.checkpoint_io(path).save(state.replace(**position))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loss_fn(model, (torch.rand(1, FEATURES[dataset_name]), torch.tensor([0]))).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "batch": batch}, path / "torch.pt")


def looplib(dataset: Dataset[Any], model: nn.Module, path: Path, workers: int) -> Times:
    loader = ll.make_loader(dataset, batch_size=BATCH_SIZE, num_workers=workers)
    optimizer = ll.optimizer(torch.optim.AdamW, lr=1e-3)
    train_step = ll.make_train_step(ll.make_grad_fn(model, loss_fn), optimizer, donate=True)
    ckpt = ll.checkpoint_io(path)
    state = ll.init_state(model, optimizer, epoch_length=len(loader))

    start = time.perf_counter()
    state = ckpt.restore(state, quiet=True)
    loaded = time.perf_counter()
    batches = loader(state)
    batch = next(batches)
    read = time.perf_counter()
    train_step(state, batch)
    return loaded - start, read - loaded, time.perf_counter() - read


def read_past(loader: DataLoader[Any], batches: int) -> Iterator[Any]:
    remaining = iter(loader)
    for _ in range(batches):
        next(remaining)
    return remaining


def sampler_past(loader: DataLoader[Any], batches: int) -> Iterator[Any]:
    return iter(importlib.import_module("accelerate").skip_first_batches(loader, batches))


def usual(
    skip: Callable[[DataLoader[Any], int], Iterator[Any]],
    dataset: Dataset[Any],
    model: nn.Module,
    path: Path,
    workers: int,
) -> Times:
    order = torch.Generator().manual_seed(0)
    loader = DataLoader(dataset, BATCH_SIZE, shuffle=True, generator=order, num_workers=workers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if skip is sampler_past:
        importlib.import_module("accelerate").PartialState(cpu=True)

    start = time.perf_counter()
    position = 0
    if path.exists():
        saved = torch.load(path / "torch.pt", weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        position = saved["batch"]
    loaded = time.perf_counter()
    batches = skip(loader, position)
    batch = next(batches)
    read = time.perf_counter()
    optimizer.zero_grad()
    loss_fn(model, batch).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    return loaded - start, read - loaded, time.perf_counter() - read


READ_PAST, SAMPLER_PAST = "DataLoader, reading past", "DataLoader, sampler past"
CONTENDERS: dict[str, Callable[[Dataset[Any], nn.Module, Path, int], Times]] = {
    "looplib": looplib,
    SAMPLER_PAST: lambda *run: usual(sampler_past, *run),
    READ_PAST: lambda *run: usual(read_past, *run),
}


def measure(name: str, dataset_name: str, samples: int, point: float, workers: int, folder: str) -> Times:
    path = place(folder, dataset_name, point)
    return CONTENDERS[name](make_dataset(dataset_name, samples), make_model(dataset_name), path, workers)


def show(report: Report, dataset_name: str, found: dict[tuple[str, float], list[Times]]) -> None:
    """Rows of the medians so far, with what lies beyond `--read-to` extrapolated."""
    for name in CONTENDERS:
        fresh = found.get((name, 0.0), [])
        reached = [point for point in POINTS[1:] if found.get((name, point))]
        if not fresh or not reached:
            continue
        cells: dict[str, Any] = {"fresh": Seconds(statistics.median(map(sum, fresh)))}
        for point in POINTS[1:]:
            times, guessed = found.get((name, point)), ""
            if not times:
                guessed, far = "~", reached[-1]
                seen, first = (statistics.median(batch for _, batch, _ in found[name, p]) for p in (far, 0.0))
                ahead = (seen - first) * (point / far - 1)
                times = [(load, batch + ahead, step) for load, batch, step in found[name, far]]
            total = statistics.median(map(sum, times))
            cells[f"at {point:.0%}"] = f"{guessed}{Seconds(total)}"
            cells[f"over fresh, at {point:.0%}"] = f"{guessed}{1000 * (total - cells['fresh'].value):+,.1f} ms"
        report.add(f"{name}, {dataset_name}", cells, "from the restore to the first new step")


def main(options: argparse.Namespace) -> int:
    samples = 2000 if options.dry_run else options.samples
    report = Report("resume", options, f"{samples:,} samples, batches of {BATCH_SIZE}, {options.workers} workers")
    names = report.available({name: ["accelerate"] if name == SAMPLER_PAST else [] for name in CONTENDERS})
    read_to = max(options.read_to, POINTS[1])
    for dataset_name, seconds in report.rows(list(FEATURES)):
        runs = [(name, point) for name in names for point in POINTS if name != READ_PAST or point <= read_to]
        found: dict[tuple[str, float], list[Times]] = {run: [] for run in runs}
        end = time.perf_counter() + seconds
        with tempfile.TemporaryDirectory() as folder, report.attempt(dataset_name):
            for point in POINTS[1:]:
                save_at(folder, dataset_name, point, samples)
            while min(map(len, found.values())) == 0 or time.perf_counter() < end:
                for name, point in random.sample(runs, len(runs)):
                    if found[name, point] and time.perf_counter() >= end:
                        break
                    run = json.dumps([name, dataset_name, samples, point, options.workers, folder])
                    found[name, point].append(own_process(__file__, "--one", run))
            show(report, dataset_name, found)
    return report.close()


if __name__ == "__main__":
    made = parser(__doc__, 130.0)
    made.add_argument("--samples", type=int, default=1_000_000, help="in an epoch")
    made.add_argument("--read-to", type=float, default=0.01, help="how far reading past is measured")
    made.add_argument("--workers", type=int, default=0, help="of the loaders")
    made.add_argument("--one", help=argparse.SUPPRESS)
    given = options_of(made)
    if given.one:
        print(json.dumps(measure(*json.loads(given.one))))
    else:
        sys.exit(main(given))
