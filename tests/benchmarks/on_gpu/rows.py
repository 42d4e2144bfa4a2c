"""The rows of the table: a language model, small models, and saves."""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from harness import Count, Mebibytes, Ratio, Report, Seconds, ratio
from loops import looplib_step
from tqdm import tqdm

import looplib as ll
from on_gpu import contenders
from on_gpu.contenders import Contender, Make
from on_gpu.device import allocated, free, host_reads, peak_memory, wait
from on_gpu.models import Task, gpt2, small_tasks


@dataclass(frozen=True)
class Settings:
    """Settings of all measurements.

    Attributes:
        small: tiny models and few steps, to see that everything runs.
        steps: of a contender's turn.
        rounds: at most, of turns of all contenders.
        compile: arguments of torch.compile for all, in place of a mode.
        peak: of the device, in FLOP/s, or None if it is not known.
        left_out: names of contenders that are not wanted.
    """

    device: torch.device
    small: bool
    steps: int
    rounds: int
    compile: Mapping[str, Any]
    peak: float | None
    left_out: frozenset[str] = frozenset()


@dataclass
class Entry:
    """A contender with its first figures and its turns."""

    contender: Contender
    first_seconds: float
    peak: int | None
    times: list[float]


LANGUAGE: dict[str, Make] = {
    "raw loop, eager": contenders.raw(),
    "looplib, eager": contenders.looplib(),
    "nanoGPT's loop, compiled": contenders.raw(compiled=True),
    "looplib, compiled by blocks": contenders.looplib(compiled="blocks"),
    "looplib, compiled whole": contenders.looplib(compiled="whole"),
    "Trainer, compiled": contenders.trainer,
    "Lightning, compiled": contenders.lightning,
}

FIRST = 6  # steps in which all is compiled and captured, after which all have the same loss
GRAPHS = "reduce-overhead"
SMALL: dict[str, Make] = {
    "raw loop, eager": contenders.raw(),
    "raw loop, compiled": contenders.raw(compiled=True),
    "raw loop, compiled, CUDA graphs": contenders.raw(compiled=True, mode=GRAPHS),
    "raw loop, captured by hand": contenders.captured,
    "looplib, eager": contenders.looplib(),
    "looplib, pure, eager": contenders.looplib(donate=False),
    "looplib, compiled": contenders.looplib(compiled="whole"),
    "looplib, CUDA graphs": contenders.looplib(donate=False, compiled="whole", mode=GRAPHS),
}


def made(report: Report, settings: Settings, row: str, task: Task, makers: Mapping[str, Make]) -> dict[str, Entry]:
    """Each contender after its first steps, which compile, with its peak memory."""
    entries: dict[str, Entry] = {}
    first_loss = 0.0
    for name, make in makers.items():
        with report.attempt(f"{row}, {name}"):
            if name in settings.left_out:
                continue
            report.check_time(needed=0 if settings.small else 20)
            free(settings.device)
            before = allocated(settings.device)
            begin = time.perf_counter()
            contender = make(task, settings.device, settings.compile)
            contender.measure(FIRST - contender.more)
            seconds, loss = time.perf_counter() - begin, contender.loss()
            first_loss = first_loss or loss
            if task.tokens and abs(loss / first_loss - 1) > 0.02:  # bfloat16 has 3 digits
                raise AssertionError(
                    f"the loss after {FIRST} steps is {loss:.4f}, and the first one's {first_loss:.4f}"
                )

            def two_steps(contender: Contender = contender) -> None:
                contender.measure(2)

            peak = peak_memory(settings.device, two_steps, before)
            entries[name] = Entry(contender, seconds, peak, [])
            tqdm.write(f"{row}, {name}: the first {FIRST} steps took {seconds:.1f} s, loss {loss:.4f}")
    return entries


def take_turns(
    report: Report, settings: Settings, row: str, entries: dict[str, Entry], steps: int, until: float
) -> None:
    """Rounds of turns in shuffled order, until the time of the row is over. At least one round is measured."""
    for number in range(settings.rounds):
        if number and time.perf_counter() > until:
            break
        for name in random.sample(list(entries), len(entries)):
            with report.attempt(f"{row}, {name}"):
                entries[name].times.append(entries[name].contender.measure(steps))
        for name in [name for name, entry in entries.items() if len(entry.times) <= number]:
            del entries[name]  # it failed, and its error is reported
        tqdm.write(f"{row}: round {number + 1} of {settings.rounds}")


def best_other(entries: Mapping[str, Entry]) -> str:
    others = [name for name in entries if not name.startswith("looplib")]
    return min(others, key=lambda name: statistics.median(entries[name].times))


def inverse(times: Ratio) -> Ratio:
    """Ratio of throughputs from that of times."""
    if times.low is None or times.high is None:
        return Ratio(1 / times.value)
    return Ratio(1 / times.value, 1 / times.high, 1 / times.low)


def compare(
    report: Report, settings: Settings, row: str, task: Task, makers: Mapping[str, Make], seconds: float
) -> dict[str, Entry]:
    """One model with all its contenders, to the last line of its table."""
    entries = made(report, settings, row, task, makers)
    steps = settings.steps * (1 if task.tokens or settings.small else 10)  # short steps need longer turns
    take_turns(report, settings, row, entries, steps, time.perf_counter() + seconds)
    if not entries:
        return entries
    best = best_other(entries) if any(not name.startswith("looplib") for name in entries) else next(iter(entries))
    for name, entry in entries.items():
        median = statistics.median(entry.times)
        figures: dict[str, Any] = {"a step": Seconds(median)}
        if task.tokens:
            figures["tokens a second"] = Count(task.tokens / median)
            figures["MFU"] = f"{task.flops / median / settings.peak:.1%}" if settings.peak else ""
        figures["throughput over the best other"] = inverse(ratio(entry.times, entries[best].times))
        figures["peak memory"] = "" if entry.peak is None else Mebibytes(entry.peak / 2**20)
        figures["first steps"] = Seconds(entry.first_seconds)
        figures["rounds"] = len(entry.times)
        if (step := entry.contender.step) is not None:
            figures["host reads"] = host_reads(settings.device, step)
        report.add(name, figures, row)
    return entries


def language_model(report: Report, settings: Settings, seconds: float) -> None:
    """GPT-2 small in bfloat16."""
    row = "a tiny GPT-2" if settings.small else "GPT-2 small, 12 x 1,024 tokens, bfloat16"
    entries = compare(report, settings, row, gpt2(settings.device, settings.small), LANGUAGE, seconds)
    ours = [name for name in entries if name.startswith("looplib")]
    if not ours or len(ours) == len(entries):
        return
    best = best_other(entries)
    fastest = min(ours, key=lambda name: statistics.median(entries[name].times))
    speed = inverse(ratio(entries[fastest].times, entries[best].times))
    goal(report, f"throughput, {fastest} over {best}", speed, speed.value >= 1, ">= 1")
    peaks = {name: entry.peak for name, entry in entries.items() if entry.peak}
    least = min((peak for name, peak in peaks.items() if name not in ours), default=None)
    for name in ours:
        if least and (peak := peaks.get(name)):
            goal(report, f"peak memory, {name} over the least other", Ratio(peak / least), peak <= least, "<= 1")
    no_reads(report, row)


def goal(report: Report, what: str, measured: Any, met: bool, bound: str) -> None:
    """A figure beside its goal."""
    report.add(what, {"measured": measured, "goal": bound, "is": "met" if met else "missed"}, "goals")


def no_reads(report: Report, row: str) -> None:
    for name, figures in report.tables.get(row, {}).items():
        if name.startswith("looplib") and figures["host reads"] is not None:
            goal(report, f"{row}: host reads, {name}", figures["host reads"], not figures["host reads"], "0")


def small_models(report: Report, settings: Settings, seconds: float) -> None:
    """An MLP and a ResNet-20 whose kernels are so short that launching them rules."""
    tasks = small_tasks(settings.device, settings.small)
    for row, task in tasks.items():
        entries = compare(report, settings, row, task, SMALL, seconds / len(tasks))
        if "looplib, CUDA graphs" in entries and any(not name.startswith("looplib") for name in entries):
            best = best_other(entries)
            speed = inverse(ratio(entries["looplib, CUDA graphs"].times, entries[best].times))
            goal(report, f"{row}: throughput, looplib with CUDA graphs over {best}", speed, speed.value >= 1, ">= 1")
        no_reads(report, row)
        entries.clear()


def conditional_steps(report: Report, settings: Settings, seconds: float) -> None:
    """Host reads of the steps that are in no other row: float16 with a loss scale, recomputation, accumulation."""
    row = "host reads of one step"
    task, adamw = gpt2(settings.device, settings.small), ll.optimizer(torch.optim.AdamW, lr=1e-4)
    half = ll.autocast(task.loss_fn, torch.bfloat16)
    kinds: dict[str, tuple[Any, Any, Any]] = {
        "float16 with a loss scale": (
            ll.autocast(task.loss_fn, torch.float16),
            None,
            ll.chain(ll.optim.dynamic_loss_scale(), adamw),
        ),
        "recomputed blocks": (ll.losses.recompute(half, task.blocks), None, adamw),
        "accumulated over 4 microbatches": (half, partial(ll.accumulate, microbatches=4), adamw),
    }
    for name, (loss_fn, wrap, optimizer) in kinds.items():
        with report.attempt(f"{row}, {name}"):
            report.check_time(needed=0 if settings.small else 5)
            free(settings.device)
            step = looplib_step(task.make(), loss_fn, task.batches[0], True, wrap=wrap, optimizer=optimizer)
            contenders.own_loop(step, settings.device, lambda: 0.0).measure(3)
            report.add(name, {"host reads": host_reads(settings.device, step)}, row)


def moments(report: Report, settings: Settings, seconds: float) -> None:
    """GPT-2 small with AdamW's moments on the device and on the host: the time of a step and the peak of memory."""
    row, adamw = "moments of AdamW", ll.optimizer(torch.optim.AdamW, lr=1e-4)
    task = gpt2(settings.device, settings.small)
    loss_fn = ll.autocast(task.loss_fn, torch.bfloat16)
    kinds = {
        "on the device": adamw,
        "on the host": ll.optim.offload_state(adamw),
        "on the host, all in the buffer": ll.optim.offload_state(adamw, buffer_bytes=2**40),
    }
    for name, optimizer in kinds.items():
        with report.attempt(f"{row}, {name}"):
            report.check_time(needed=0 if settings.small else 10)
            free(settings.device)
            before = allocated(settings.device)
            step = looplib_step(task.make(), loss_fn, task.batches[0], True, optimizer=optimizer)
            measure = contenders.own_loop(step, settings.device, lambda: 0.0).measure
            measure(3)
            peak = peak_memory(settings.device, step, before)
            cells = {
                "a step": Seconds(statistics.median(measure(1) for _ in range(settings.steps))),
                "peak memory": "" if peak is None else Mebibytes(peak / 2**20),
            }
            report.add(name, cells, row)


def saves(report: Report, settings: Settings, seconds: float) -> None:
    """Time for which the loop stands still for a save of GPT-2 small with Adam's moments, 1.5 GB."""
    task = gpt2(settings.device, settings.small)
    kinds = {
        "synchronous": (True, False),
        "asynchronous, donated": (True, True),
        "asynchronous, pure": (False, True),
    }
    until = time.perf_counter() + seconds
    for number, (name, (donate, asynchronous)) in enumerate(kinds.items(), 1):
        with report.attempt(f"saves, {name}"):
            report.check_time(needed=0 if settings.small else 10)
            free(settings.device)
            begin = time.perf_counter()
            _save(report, settings, task, name, donate, asynchronous, begin + (until - begin) * number / len(kinds))


def _save(
    report: Report, settings: Settings, task: Task, name: str, donate: bool, asynchronous: bool, until: float
) -> None:
    step = looplib_step(task.make(), ll.autocast(task.loss_fn, torch.bfloat16), task.batches[0], donate)
    steps, called, stood, done = settings.steps, [], [], []

    def train() -> ll.TrainState:
        for _ in range(steps):
            state = step()
        wait(settings.device)
        return state

    with tempfile.TemporaryDirectory() as folder:
        ckpt = ll.checkpoint_io(folder, asynchronous=asynchronous, keep_last=1)
        train()
        for number in range(settings.rounds + 1):
            begin = time.perf_counter()
            state = train()
            usual, begin = time.perf_counter() - begin, time.perf_counter()
            ckpt.save(state)
            call = time.perf_counter() - begin
            train()
            delay = time.perf_counter() - begin - usual
            ckpt.wait()
            if number:  # the first one allocates
                called.append(call)
                stood.append(delay)
                done.append(time.perf_counter() - begin)
            if len(done) > 1 and time.perf_counter() > until:
                break
        size = sum(file.stat().st_size for file in Path(folder).rglob("*") if file.is_file())
    cells = {
        "size": Mebibytes(size / 2**20),
        "the call": Seconds(statistics.median(called)),
        f"delay of {steps} steps beside it": Seconds(statistics.median(stood)),
        "on disk after": Seconds(statistics.median(done)),
        "saves": len(done),
    }
    report.add(name, cells, "saves")


ROWS: dict[str, tuple[Callable[[Report, Settings, float], None], float]] = {
    # with the share of the time for their turns, beside what compiles
    "language": (language_model, 0.2),
    "saves": (saves, 0.12),
    "reads": (conditional_steps, 0.05),
    "moments": (moments, 0.05),
    "small": (small_models, 0.12),
}
