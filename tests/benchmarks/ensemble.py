"""Cost of the members of a stack against raw loops one after the other, interleaved in one run.

    python tests/benchmarks/ensemble.py

For 32 and 256 copies of the tiny MLP with AdamW: as many raw loops (fused AdamW), and looplib's step of a stack, eager
(its graph interpreted) and compiled, pure and donated. Blocks of steps of all contenders take turns in shuffled order;
the ratio is that of the medians over the rounds. `growth.py` has the curve from 1 to 1,024 members, and `compiled.py` the
time of a first compiled step.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import asdict

import torch
from harness import Report, Seconds, Step, Times, compile_without_cache, in_turns, options_of, parser, ratio
from loops import in_order, raw_step, stepping
from models import mlp

import looplib as ll

MEMBERS = (32, 256)


def raw(members: int) -> Step:
    """One step of each of the hand-written loops."""
    steps = []
    for seed in range(members):
        torch.manual_seed(seed)
        steps.append(raw_step(*mlp()))
    return in_order(steps)


def stacked(members: int, donate: bool, compile: bool) -> Step:
    optimizer = ll.optimizer(torch.optim.AdamW, lr=1e-3)
    states = []
    for seed in range(members):
        torch.manual_seed(seed)
        model, loss_fn, batch = mlp()
        states.append(ll.init_state(model, optimizer, seed=seed))
    grad_fn = ll.make_grad_fn(model, loss_fn)
    train_step = ll.vmap_step(ll.make_train_step(grad_fn, optimizer, donate=donate))
    train_step = ll.compile_step(train_step) if compile else train_step
    return stepping(train_step, ll.transforms.stack_states(states), batch)


CONTENDERS = {
    "eager, pure": (False, False),
    "eager, donated": (True, False),
    "compiled, pure": (False, True),
    "compiled, donated": (True, True),
}


def main(options: argparse.Namespace) -> int:
    compile_without_cache()
    report = Report("ensemble", options, "MLP 32-64-10, batch 16, AdamW")
    sizes = {f"{members} members": members for members in ((3,) if options.dry_run else MEMBERS)}
    for row, seconds in report.rows(list(sizes)):
        members, began = sizes[row], time.perf_counter()
        steps = {"raw loops in turn": raw(members)}
        for name, (donate, compile) in CONTENDERS.items():
            if options.dry_run and compile:
                continue
            with report.attempt(f"{name}, {row}"):
                step = stacked(members, donate, compile)
                step()  # which compiles
                steps[name] = step
        with report.attempt(row):
            times = in_turns(steps, max(0.0, seconds - (time.perf_counter() - began)))
            base = times.pop("raw loops in turn")
            faster = {name: Times(**asdict(ratio(base, values))) for name, values in times.items()}
            report.add(row, {"raw loops in turn": Seconds(statistics.median(base)), **faster}, "a step of all")
    return report.close()


if __name__ == "__main__":
    sys.exit(main(options_of(parser(__doc__, 130.0))))
