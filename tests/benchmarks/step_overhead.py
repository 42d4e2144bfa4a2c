"""Cost of a step against the raw loop: time and memory, interleaved in one run.

    python tests/benchmarks/step_overhead.py

For a tiny MLP, 4,000 tensors of ten numbers and a transformer of 5 million parameters, with fused AdamW everywhere,
plain and with a schedule and clipping by the global norm: the raw loop (`clip_grad_norm_`, `LambdaLR`), the raw loop
that also copies its weights and moments at each step, which is what a pure step cannot do without, and looplib's step
donated and pure. Blocks of steps of all contenders take turns in shuffled order; the ratio is that of the medians over
the rounds. Peak memory is measured in a separate process for each contender, above its memory before the model is made.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any

import torch
from harness import Mebibytes, Report, Step, in_turns, options_of, parser, peak_memory
from loops import looplib_step, raw_step
from models import many, mlp, small_transformer, transformer
from torch import Tensor, nn

import looplib as ll

MAX_NORM = 1.0


def small_tensors() -> tuple[nn.Module, Callable[..., Tensor], Any]:
    return many([(2, 5)] * 4000)


MODELS: dict[str, Callable[[], tuple[nn.Module, Callable[..., Tensor], Any]]] = {
    "MLP, batch 16": mlp,
    "4,000 small tensors": small_tensors,
    "transformer, batch 2 x 64": small_transformer,
    "transformer, batch 32 x 128": transformer,
}
EXTRAS = ", clipping and a schedule"


def decay(step: int) -> float:
    return 1.0 / (1.0 + 1e-4 * step)


def seeded(model_name: str) -> tuple[nn.Module, Callable[..., Tensor], Any]:
    torch.manual_seed(0)
    return MODELS[model_name]()


def raw(model_name: str, extras: bool, copies: bool) -> Step:
    if not extras:
        return raw_step(*seeded(model_name), copies=copies)

    def clip(model: nn.Module) -> None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)

    return raw_step(*seeded(model_name), clip=clip, decay=decay, copies=copies)


def looplib(model_name: str, extras: bool, donate: bool) -> Step:
    if not extras:
        return looplib_step(*seeded(model_name), donate)

    adamw = ll.optimizer(torch.optim.AdamW, lr=lambda step: 1e-3 * decay(step))
    optimizer = ll.chain(ll.clip_by_global_norm(MAX_NORM), adamw)
    return looplib_step(*seeded(model_name), donate, optimizer=optimizer)


CONTENDERS: dict[str, Callable[[str, bool], Step]] = {
    "raw": lambda model_name, extras: raw(model_name, extras, False),
    "raw, with copies": lambda model_name, extras: raw(model_name, extras, True),
    "donated": lambda model_name, extras: looplib(model_name, extras, True),
    "pure": lambda model_name, extras: looplib(model_name, extras, False),
}


def contender(name: str, model_name: str, extras: str) -> Step:
    """For `peak_memory`, in another process."""
    return CONTENDERS[name](model_name, extras == "extras")


# Shares of the time. Memory is a fixed amount of work.
MEMORY = "memory, "
WEIGHTS = {
    "MLP, batch 16": 0.8,
    "4,000 small tensors": 0.8,
    "transformer, batch 2 x 64": 1.5,
    "transformer, batch 32 x 128": 3.0,
}
MEMORY_WEIGHTS = dict.fromkeys(WEIGHTS, 0.8) | {"transformer, batch 32 x 128": 1.8}


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
    models = [
        name for name in MODELS if not (options.dry_run and "transformer" in name)
    ]  # which takes seconds a step
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
