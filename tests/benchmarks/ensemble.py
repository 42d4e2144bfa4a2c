"""Cost of the members of a stack against raw loops one after the other, interleaved in one run.

    python tests/benchmarks/ensemble.py                  (--seconds 30 for steadier medians)

For K copies of the tiny MLP with AdamW: K raw loops (fused AdamW), and looplib's step of a stack, eager (its graph
interpreted) and compiled, pure and donated. First K = 32, then K from 1 to 256 as a curve, which --picture FILE.png
draws. Blocks of steps of all contenders alternate in shuffled order; the ratio is that of the median times of a step.
Tracing and compiling come first and are shown separately.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import torch
from step_overhead import Step, classify, mlp, times

import looplib as ll

CURVE = (1, 2, 4, 8, 16, 32, 64, 128, 256)


def raw(members: int) -> Step:
    """One step of each of the hand-written loops."""
    loops = []
    for seed in range(members):
        torch.manual_seed(seed)
        model, _, batch = mlp()
        loops.append((model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)))

    def step() -> None:
        for model, optimizer in loops:
            optimizer.zero_grad()
            classify(model, batch).backward()  # type: ignore[no-untyped-call]
            optimizer.step()

    return step


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
    stack = ll.transforms.stack_states(states)

    def step() -> None:
        nonlocal stack
        stack, _ = train_step(stack, batch)

    return step


CONTENDERS = {
    "eager, pure": (False, False),
    "eager, donated": (True, False),
    "compiled, pure": (False, True),
    "compiled, donated": (True, True),
}


def compare(members: int, names: list[str], seconds: float) -> tuple[dict[str, float], dict[str, float]]:
    """The median microseconds of a step of all members, and the seconds to the first one."""
    steps, first = {"raw loops in turn": raw(members)}, {}
    for name in names:
        steps[name] = stacked(members, *CONTENDERS[name])
        begin = time.perf_counter()
        steps[name]()
        first[name] = time.perf_counter() - begin
    found = times(steps, seconds)
    return {name: statistics.median(values) for name, values in found.items()}, first


def draw(rows: dict[int, dict[str, float]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for name in next(iter(rows.values())):
        axes.plot(list(rows), [row[name] for row in rows.values()], marker="o", label=name)
    axes.set(xscale="log", yscale="log", xlabel="members", ylabel="microseconds for a step of all")
    axes.set_xticks(list(rows), map(str, rows))
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=120)


def main(seconds: float, picture: str | None) -> None:
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, one thread, MLP 32-64-10, batch 16, AdamW; medians over {seconds:.0f} s")
    medians, first = compare(32, list(CONTENDERS), seconds)
    base = medians.pop("raw loops in turn")
    print(f"\n32 members\n  {'raw loops in turn':18} {base:9.1f} us a step of all")
    for name, median in medians.items():
        print(f"  {name:18} {median:9.1f} us   {base / median:5.1f} x faster   (first step {first[name]:.1f} s)")
    names = ["eager, donated", "compiled, donated"]
    print(f"\n{'members':>8} {'raw loops':>12} " + " ".join(f"{name:>28}" for name in names))
    rows = {}
    for members in CURVE:
        rows[members], _ = compare(members, names, seconds / 4)
        base = rows[members]["raw loops in turn"]
        ratios = [f"{rows[members][name]:9.1f} us {base / rows[members][name]:5.1f} x faster" for name in names]
        print(f"{members:8} {base:9.1f} us " + " ".join(f"{ratio:>28}" for ratio in ratios), flush=True)
    if picture:
        draw(rows, Path(picture))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=12.0, help="for 32 members; a quarter for each of the curve")
    parser.add_argument("--picture", help="where to draw the curve")
    arguments = parser.parse_args()
    main(arguments.seconds, arguments.picture)
