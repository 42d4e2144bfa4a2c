"""Cost of a step against the raw loop: time and memory, interleaved in one run.

    python tests/benchmarks/step_overhead.py

For a tiny MLP and a transformer of 5 million parameters, with fused AdamW everywhere, plain and with a schedule and
clipping by the global norm: the raw loop (`clip_grad_norm_`, `LambdaLR`), the raw loop that also copies its weights and
moments at each step, which is what a pure step cannot do without, and looplib's step donated and pure. Blocks of steps
of all contenders take turns in shuffled order; the ratio is that of the medians over the rounds. Peak memory is
measured in a separate process for each contender, above its memory before the model is made.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any

import torch
from harness import Mebibytes, Report, Step, in_turns, options_of, parser, peak_memory
from models import mlp, small_transformer, transformer
from torch import Tensor, nn

import looplib as ll

MAX_NORM = 1.0
MODELS: dict[str, Callable[[], tuple[nn.Module, Callable[..., Tensor], Any]]] = {
    "MLP, batch 16": mlp,
    "transformer, batch 2 x 64": small_transformer,
    "transformer, batch 32 x 128": transformer,
}
EXTRAS = ", clipping and a schedule"


def decay(step: int) -> float:
    return 1.0 / (1.0 + 1e-4 * step)


def raw(model_name: str, extras: bool) -> Step:
    torch.manual_seed(0)
    model, loss_fn, batch = MODELS[model_name]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, decay)

    def plain() -> None:
        optimizer.zero_grad()
        loss_fn(model, batch).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    def with_extras() -> None:
        optimizer.zero_grad()
        loss_fn(model, batch).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        scheduler.step()

    return with_extras if extras else plain


def copying(model_name: str, extras: bool) -> Step:
    """The raw loop, with a copy of the weights and moments before each update: the least that a pure step can take."""
    torch.manual_seed(0)
    model, loss_fn, batch = MODELS[model_name]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, decay)
    held: list[Tensor] = []
    kept: list[Tensor] = []

    def step() -> None:
        nonlocal held, kept
        optimizer.zero_grad()
        loss_fn(model, batch).backward()  # type: ignore[no-untyped-call]
        if extras:
            torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        with torch.no_grad():
            if optimizer.state and not held:
                moments = [entry[key] for entry in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]
                held = [*model.parameters(), *moments]
            kept = list(torch._foreach_clone(held)) if held else kept
        optimizer.step()
        if extras:
            scheduler.step()

    return step


def looplib(model_name: str, extras: bool, donate: bool) -> Step:
    torch.manual_seed(0)
    model, loss_fn, batch = MODELS[model_name]()
    grad_fn = ll.make_grad_fn(model, loss_fn)
    if extras:
        grad_fn = ll.clip_by_global_norm(grad_fn, MAX_NORM)
    optimizer = ll.optimizer(torch.optim.AdamW, lr=(lambda step: 1e-3 * decay(step)) if extras else 1e-3)
    train_step = ll.make_train_step(grad_fn, optimizer, donate=donate)
    state = ll.init_state(model, optimizer)

    def step() -> None:
        nonlocal state
        state, _ = train_step(state, batch)

    return step


CONTENDERS: dict[str, Callable[[str, bool], Step]] = {
    "raw": raw,
    "raw, with copies": copying,
    "donated": lambda model_name, extras: looplib(model_name, extras, True),
    "pure": lambda model_name, extras: looplib(model_name, extras, False),
}


def contender(name: str, model_name: str, extras: str) -> Step:
    """For `peak_memory`, in another process."""
    return CONTENDERS[name](model_name, extras == "extras")


# Shares of the time. Memory is a fixed amount of work.
MEMORY = "memory, "
WEIGHTS = {"MLP, batch 16": 1.0, "transformer, batch 2 x 64": 1.5, "transformer, batch 32 x 128": 2.5}
MEMORY_WEIGHTS = {"MLP, batch 16": 0.8, "transformer, batch 2 x 64": 0.8, "transformer, batch 32 x 128": 1.8}


def measure_times(report: Report, row: str, seconds: float) -> None:
    model_name, extras = row.removesuffix(EXTRAS), row.endswith(EXTRAS)
    times = in_turns({name: make(model_name, extras) for name, make in CONTENDERS.items()}, seconds)
    report.compare(row, times, "raw", "time of a step")


def measure_memory(report: Report, model_name: str) -> None:
    steps = "10" if model_name.startswith("MLP") else "3"
    for name in CONTENDERS:
        with report.attempt(f"memory of {name}, {model_name}"):
            peak = peak_memory("step_overhead", "contender", name, model_name, "", steps)
            report.add(model_name, {name: Mebibytes(peak)}, "peak memory above the start")


def main(options: argparse.Namespace) -> int:
    report = Report("step_overhead", options, "fused AdamW")
    models = list(MODELS)[:1] if options.dry_run else MODELS  # the transformer takes seconds a step
    weights = {name + suffix: WEIGHTS[name] for name in models for suffix in ("", EXTRAS)}
    weights |= {} if options.no_memory else {MEMORY + name: MEMORY_WEIGHTS[name] for name in models}
    for row, seconds in report.rows(list(weights), weights):
        with report.attempt(row):
            if row.startswith(MEMORY):
                measure_memory(report, row.removeprefix(MEMORY))
            else:
                measure_times(report, row, seconds)
    return report.close()


if __name__ == "__main__":
    made = parser(__doc__, 180.0)
    made.add_argument("--no-memory", action="store_true", help="times alone")
    sys.exit(main(options_of(made)))
