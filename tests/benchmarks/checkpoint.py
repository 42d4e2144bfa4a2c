"""Time that the training loop waits for a save, and cost of background writes for the steps that run meanwhile.

    python tests/benchmarks/checkpoint.py
    python tests/benchmarks/checkpoint.py --parameters 1e6 --pause 0

A run of 50 million parameters with Adam's moments (605 MB) is saved by looplib, in the loop and in the background, by
other libraries, and as a plain write of the same bytes. If a library has not synced its files, their directory and
its parent when it returns, the benchmark does so and counts the time; for background writes, that is in the column
"on disk after". Each round saves once with each, in shuffled order, after one round that is not counted; in between
the files are deleted and everything is synced. Then steps of two models run with and without writes of the 605 MB, in
turns. `--directory` must be on a real disk, not in memory. The transformers Trainer needs accelerate: pip install
accelerate.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import os
import random
import shutil
import statistics
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from harness import Report, Seconds, Step, options_of, parser, ratio
from loops import looplib_step
from models import mlp, small_transformer
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_saver as dcp

import looplib as ll

Finish = Callable[[], object]  # returns when all is on disk
Save = Callable[[], Finish]  # returns when the loop may continue
DEPTH = 48


class Run:
    """The same run as looplib's states, and as a module with torch's optimizer and scheduler."""

    def __init__(self, parameters: float) -> None:
        width = max(16, 16 * round((parameters / DEPTH) ** 0.5 / 16))
        batch = torch.randn(1, width)
        model, self.model = (nn.Sequential(*[nn.Linear(width, width) for _ in range(DEPTH)]) for _ in range(2))

        optimizer = ll.optimizer(torch.optim.AdamW, lr=1e-3)
        grad_fn = ll.make_grad_fn(model, lambda model, x: model(x).square().mean())
        start = ll.init_state(model, optimizer)
        self.pure, _ = ll.make_train_step(grad_fn, optimizer)(start, batch)
        self.donated, _ = ll.make_train_step(grad_fn, optimizer, donate=True)(start, batch)

        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1.0)
        self.model(batch).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def tensors(self) -> dict[str, Tensor]:
        names: dict[Tensor, str] = {parameter: name for name, parameter in self.model.named_parameters()}
        moments = {
            f"{names[parameter]}.{key}": value
            for parameter, state in self.optimizer.state.items()
            for key, value in state.items()
        }
        return {**self.model.state_dict(), **moments}


def nothing() -> None:
    pass


def sync(folder: Path) -> None:
    for path in [*folder.rglob("*"), folder]:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def synced(folder: Path, write: Callable[[Path], object]) -> Save:
    def save() -> Finish:
        (folder / "step-1").mkdir()
        write(folder / "step-1")
        sync(folder)
        return nothing

    return save


def looplib(folder: Path, state: ll.TrainState, asynchronous: bool) -> Save:
    ckpt = ll.checkpoint_io(folder, asynchronous=asynchronous)  # syncs by itself

    def save() -> Finish:
        ckpt.save(state)
        return ckpt.wait

    return save


def plain_write(folder: Path, run: Run) -> Save:
    arrays: list[Any] = [tensor.reshape(-1).view(torch.uint8).numpy() for tensor in run.tensors().values()]

    def write(path: Path) -> None:
        with open(path / "bytes", "wb") as file:
            for array in arrays:
                file.write(array)

    return synced(folder, write)


def torch_save(folder: Path, run: Run) -> Save:
    return synced(folder, lambda path: torch.save(run.state_dict(), path / "all.pt"))


def safetensors_save(folder: Path, run: Run) -> Save:
    safetensors = importlib.import_module("safetensors.torch")
    return synced(folder, lambda path: safetensors.save_file(run.tensors(), path / "all.safetensors"))


def dcp_save(folder: Path, run: Run) -> Save:
    return synced(folder, lambda path: dcp.save(run.state_dict(), checkpoint_id=path, no_dist=True))


def dcp_async_save(folder: Path, run: Run) -> Save:
    def save() -> Finish:
        future: Any = dcp.async_save(run.state_dict(), checkpoint_id=folder / "step-1", no_dist=True)

        def finish() -> None:
            future.result()
            sync(folder)

        return finish

    return save


def trainer_save(folder: Path, run: Run) -> Save:
    """All that the Trainer does at a save: weights, optimizer, scheduler, random streams, its own state, rotation."""
    transformers = importlib.import_module("transformers")
    arguments = transformers.TrainingArguments(str(folder), use_cpu=True, report_to=[], disable_tqdm=True)
    trainer = transformers.Trainer(run.model, arguments, optimizers=(run.optimizer, run.scheduler))

    def save() -> Finish:
        trainer._save_checkpoint(run.model, trial=None)
        sync(folder)
        return nothing

    return save


def copy_in_memory(folder: Path, run: Run) -> Save:
    def save() -> Finish:
        copies = [tensor.clone() for tensor in run.tensors().values()]
        return copies.clear

    return save


IN_LOOP, PURE, DONATED = "looplib", "looplib, background, pure", "looplib, background, donated"
PLAIN, COPY, DCP_ASYNC = "plain write of the bytes", "one copy in memory", "torch DCP, async_save"
CONTENDERS: dict[str, Callable[[Path, Run], Save]] = {
    PLAIN: plain_write,
    IN_LOOP: lambda folder, run: looplib(folder, run.donated, False),
    "torch.save": torch_save,
    "safetensors": safetensors_save,
    "torch DCP, save": dcp_save,
    "transformers Trainer": trainer_save,
    PURE: lambda folder, run: looplib(folder, run.pure, True),
    DONATED: lambda folder, run: looplib(folder, run.donated, True),
    DCP_ASYNC: dcp_async_save,
    COPY: copy_in_memory,
}
BACKGROUND = {PURE, DONATED, DCP_ASYNC, COPY}


def settle(folder: Path, pause: float) -> None:
    """Delete the files, sync and collect garbage, so that all contenders have the same start."""
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
    gc.collect()
    os.sync()
    time.sleep(pause)


def make_saves(root: Path, run: Run, report: Report) -> dict[str, tuple[Path, Save]]:
    """Each contender's folder and save."""
    saves = {}
    for number, (name, make) in enumerate(CONTENDERS.items()):
        folder = root / str(number)
        folder.mkdir()
        with report.attempt(name):
            saves[name] = folder, make(folder, run)
    return saves


def time_saves(
    saves: dict[str, tuple[Path, Save]], seconds: float, pause: float
) -> dict[str, list[tuple[float, float]]]:
    """Seconds until the loop may continue, and until everything is on disk, for each save."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in saves}
    end = time.perf_counter() + seconds
    number = -1
    while number < 2 or time.perf_counter() < end:
        number += 1  # the first round does not count
        for name in random.sample(list(saves), len(saves)):
            folder, save = saves[name]
            settle(folder, pause)
            start = time.perf_counter()
            finish = save()
            stood = time.perf_counter() - start
            finish()
            if number:
                found[name].append((stood, time.perf_counter() - start))
            settle(folder, 0)
    return found


def show_saves(report: Report, found: dict[str, list[tuple[float, float]]]) -> None:
    stood = {name: [stood for stood, _ in times] for name, times in found.items()}
    for name, values in stood.items():
        cells = {
            "stands still": Seconds(statistics.median(values)),
            "lowest to highest": f"{Seconds(min(values))} to {Seconds(max(values))}",
            "over a plain write": ratio(values, stood[PLAIN]),
        }
        if name != COPY:
            cells["on disk after"] = Seconds(statistics.median(done for _, done in found[name]))
        report.add(name, cells, "a save")


# Small batches, so that several steps fit into one write.
MODELS: dict[str, Callable[[], Step]] = {
    "MLP 32-64-10, batch 16": lambda: looplib_step(*mlp(), True),
    "transformer, 4.9 M, batch 2 x 64": lambda: looplib_step(*small_transformer(), True),
}


def times_while(step: Step, running: Callable[[], bool]) -> list[float]:
    """Seconds of each step that began while something was running."""
    times = []
    while running():
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    return times


def time_steps(
    step: Step, folder: Path, save: Save, seconds: float, pause: float
) -> tuple[list[float], list[tuple[float, list[float]]]]:
    """Seconds of each step without a write; of each write, and of the steps beside it."""
    without: list[float] = []
    beside: list[tuple[float, list[float]]] = []
    duration = 0.0

    def write(finish: Finish) -> None:
        nonlocal duration
        finish()
        duration = time.perf_counter() - start

    end_of_all = time.perf_counter() + seconds
    number = -1
    while number < 1 or time.perf_counter() < end_of_all:
        number += 1  # the first round does not count
        for with_write in random.sample([True, False], 2):
            settle(folder, pause)
            step()  # the caches are another's
            if with_write:
                finish = save()
                start = time.perf_counter()
                writing = threading.Thread(target=write, args=(finish,))
                writing.start()
                times = times_while(step, writing.is_alive)
                if number:
                    beside.append((duration, times))
            else:
                end = time.perf_counter() + (duration or 0.1)
                times = times_while(step, lambda end=end: time.perf_counter() < end)  # type: ignore[misc]
                if number:
                    without += times
    settle(folder, 0)
    return without, beside


def show_steps(report: Report, model_name: str, saves: dict[str, tuple[Path, Save]], seconds: float) -> None:
    for name in (PURE, DCP_ASYNC):
        without, beside = time_steps(MODELS[model_name](), *saves[name], seconds / 2, 0.0)
        steps = [taken for _, times in beside for taken in times]
        # The last step of each write ran beside it in part only, so the time lost is held against the write.
        usual = statistics.mean(without)
        lost = [1 + (sum(times) - len(times) * usual) / duration for duration, times in beside]
        cells = {
            "without a write": Seconds(statistics.median(without)),
            "beside one": Seconds(statistics.median(steps)),
            "beside over without": f"{statistics.median(steps) / statistics.median(without):.3f}",
            "1 + time lost / time of the write": f"{statistics.median(lost):.3f}",
        }
        report.add(f"{model_name}, {name}", cells, "a step beside a write in the background")


def main(options: argparse.Namespace) -> int:
    torch.set_num_threads(options.threads)
    warnings.filterwarnings("ignore", "torch.distributed is disabled")
    run = Run(1e5 if options.dry_run else options.parameters)
    tensors = run.tensors().values()
    size = f"{sum(tensor.nbytes for tensor in tensors) / 1e6:.1f} MB in {len(tensors)} tensors"
    report = Report("checkpoint", options, size)
    with tempfile.TemporaryDirectory(dir=options.directory) as root:
        saves = make_saves(Path(root), run, report)
        for row, seconds in report.rows(["saves", *list(MODELS)[: 1 if options.dry_run else None]], {"saves": 4.0}):
            with report.attempt(row):
                if row == "saves":
                    show_saves(report, time_saves(saves, seconds, options.pause))
                else:
                    show_steps(report, row, saves, seconds)
    return report.close()


if __name__ == "__main__":
    made = parser(__doc__, 180.0)
    made.add_argument("--parameters", type=float, default=50e6, help="three times as many numbers are saved")
    made.add_argument("--pause", type=float, default=0.2, help="seconds of rest before each save")
    made.add_argument("--threads", type=int, default=1, help="of torch, for the steps and the copies")
    made.add_argument("--directory", help="where to write; the system's temporary directory unless given")
    sys.exit(main(options_of(made)))
