"""Time that the training loop waits for a save, and cost of background writes for the steps that run meanwhile.

    python tests/benchmarks/checkpoint.py
    python tests/benchmarks/checkpoint.py --parameters 1e6 --rounds 2 --pause 0

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
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from step_overhead import Step, Transformer, mlp, next_token
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


def make_saves(root: Path, run: Run) -> tuple[dict[str, tuple[Path, Save]], dict[str, str]]:
    """Each contender's folder and save, and what is missing for the others."""
    saves, missing = {}, {}
    for number, (name, make) in enumerate(CONTENDERS.items()):
        folder = root / str(number)
        folder.mkdir()
        try:
            saves[name] = folder, make(folder, run)
        except ImportError as error:
            missing[name] = str(error).strip().splitlines()[0]
    return saves, missing


def time_saves(
    saves: dict[str, tuple[Path, Save]], rounds: int, pause: float
) -> dict[str, list[tuple[float, float]]]:
    """Seconds until the loop may continue, and until everything is on disk, for each save."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in saves}
    for number in range(rounds + 1):
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


def show_saves(found: dict[str, list[tuple[float, float]]], missing: dict[str, str]) -> None:
    medians = {name: statistics.median(stood for stood, _ in times) for name, times in found.items()}
    print(f"\n{'':30}{'stands still, ms':>17}{'(lowest to highest)':>22}{'x plain':>9}{'on disk after, ms':>19}")
    for name in CONTENDERS:
        if name in missing:
            print(f"  {name:28}  not measured: {missing[name]}")
            continue
        all_stood = [1000 * stood for stood, _ in found[name]]
        spread = f"({min(all_stood):.1f} to {max(all_stood):.1f})"
        line = f"  {name:28}{1000 * medians[name]:17.1f}{spread:>22}{medians[name] / medians[PLAIN]:9.4f}"
        on_disk = 1000 * statistics.median(done for _, done in found[name])
        print(f"{line}{'' if name == COPY else f'{on_disk:19.1f}'}")

    fastest = min(found.keys() - BACKGROUND - {IN_LOOP}, key=lambda name: medians[name])
    print(f"\n  looplib in the loop, over the fastest other ({fastest}): {medians[IN_LOOP] / medians[fastest]:.3f}")
    print(f"  in the background from a pure state, over the same: {medians[PURE] / medians[fastest]:.4f}")
    print(f"  in the background from a donated state, over one copy: {medians[DONATED] / medians[COPY]:.3f}")


def train(model: nn.Module, loss_fn: Callable[..., Tensor], batch: Any) -> Step:
    optimizer = ll.optimizer(torch.optim.AdamW, lr=1e-3)
    train_step = ll.make_train_step(ll.make_grad_fn(model, loss_fn), optimizer, donate=True)
    state = ll.init_state(model, optimizer)

    def step() -> None:
        nonlocal state
        state, _ = train_step(state, batch)

    return step


# Small batches, so that several steps fit into one write.
MODELS: dict[str, Callable[[], Step]] = {
    "MLP 32-64-10, batch 16": lambda: train(*mlp()),
    "transformer, 4.9 M, batch 2 x 64": lambda: train(Transformer(), next_token, torch.randint(0, 512, (2, 65))),
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
    step: Step, folder: Path, save: Save, rounds: int, pause: float
) -> tuple[list[float], list[tuple[float, list[float]]]]:
    """Seconds of each step without a write; of each write, and of the steps beside it."""
    without: list[float] = []
    beside: list[tuple[float, list[float]]] = []
    duration = 0.0

    def write(finish: Finish) -> None:
        nonlocal duration
        finish()
        duration = time.perf_counter() - start

    for number in range(rounds + 1):
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


def show_steps(saves: dict[str, tuple[Path, Save]], rounds: int, pause: float) -> None:
    for model_name, make in MODELS.items():
        print(f"\n{model_name}, donated: steps beside a write in the background, over steps without")
        for name in (PURE, DCP_ASYNC):
            without, beside = time_steps(make(), *saves[name], rounds, pause)
            steps = [taken for _, times in beside for taken in times]
            medians = 1000 * statistics.median(steps), 1000 * statistics.median(without)
            # The last step of each write ran beside it in part only, so the time lost is held against the write.
            usual = statistics.mean(without)
            lost = [1 + (sum(times) - len(times) * usual) / duration for duration, times in beside]
            print(
                f"  {name:28}medians {medians[0]:8.3f} / {medians[1]:8.3f} ms = {medians[0] / medians[1]:5.3f}"
                f"   1 + time lost / time of the write = {statistics.median(lost):5.3f} "
                f"({min(lost):.3f} to {max(lost):.3f})   ({len(steps)} steps beside)"
            )


def main(parameters: float, rounds: int, pause: float, threads: int, directory: str | None) -> None:
    torch.set_num_threads(threads)
    warnings.filterwarnings("ignore", "torch.distributed is disabled")
    run = Run(parameters)
    tensors = run.tensors().values()
    with tempfile.TemporaryDirectory(dir=directory) as root:
        saves, missing = make_saves(Path(root), run)
        print(
            f"torch {torch.__version__}, threads: {threads}, medians of {rounds} rounds, "
            f"{sum(p.numel() for p in run.model.parameters()):,} parameters with Adam's moments, "
            f"{sum(tensor.nbytes for tensor in tensors) / 1e6:.1f} MB in {len(tensors)} tensors"
        )
        show_saves(time_saves(saves, rounds, pause), missing)
        show_steps(saves, rounds, pause)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=float, default=50e6, help="three times as many numbers are saved")
    parser.add_argument("--rounds", type=int, default=15, help="saves of each contender that are counted")
    parser.add_argument("--pause", type=float, default=0.5, help="seconds of rest before each save")
    parser.add_argument("--threads", type=int, default=1, help="of torch, for the steps and the copies")
    parser.add_argument("--directory", help="where to write; the system's temporary directory unless given")
    arguments = parser.parse_args()
    main(arguments.parameters, arguments.rounds, arguments.pause, arguments.threads, arguments.directory)
