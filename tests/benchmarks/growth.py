"""Growth of the cost of a step, beside the raw loop: with tensors, parts, predicates, samples, members, and steps made.

    python tests/benchmarks/growth.py
    python tests/benchmarks/growth.py --only tensors --seconds 60

In each round raw loop and looplib take turns at all points of a curve, in shuffled order. The first table has, for each
curve, looplib's time over the raw loop's at the first and at the last point, and the change between them with its 95%
interval over the rounds: above 1, looplib grows faster than the raw loop. A pure step is compared with the raw loop that
copies its weights and moments before each update, as a pure step must, and predicates with as many calls of a plain
function. The other tables have all points. `growth.svg` beside the JSON file has the curves.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from harness import (
    Mebibytes,
    Ratio,
    Report,
    Seconds,
    Step,
    in_turns,
    interval,
    options_of,
    parser,
    resampled,
    status,
    svg,
)
from loops import in_order, looplib_step, raw_step, stepping
from models import classify, many, mlp
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import looplib as ll

RAW, DONATED, PURE, LOOPLIB = "raw", "donated", "pure", "looplib"
COPYING, CALLING = "raw, with copies", "raw, functions"
FAIR = {PURE: COPYING, LOOPLIB: CALLING}  # what a contender is compared with, on curves that have it
SIZES = (1, 10, 100, 1000)  # numbers in the tensors of a model of many tensors, in turn


def on_all(make: Callable[[], tuple[nn.Module, Any, Any]], clips: int = 0) -> dict[str, Step]:
    def clip(model: nn.Module) -> None:
        for _ in range(clips):
            torch.nn.utils.clip_grad_value_(model.parameters(), 10.0)

    parts = [(f"clip {number}", ll.optim.clip_by_value(10.0)) for number in range(clips)]
    optimizer = ll.chain(*parts, ll.optimizer(torch.optim.AdamW, lr=1e-3))
    return {
        RAW: raw_step(*make(), clip=clip),
        COPYING: raw_step(*make(), clip=clip, copies=True),
        DONATED: looplib_step(*make(), True, optimizer=optimizer),
        PURE: looplib_step(*make(), False, optimizer=optimizer),
    }


def tensors(count: int) -> dict[str, Step]:
    def make() -> tuple[nn.Module, Any, Any]:
        torch.manual_seed(0)
        return many([(size,) for size in itertools.islice(itertools.cycle(SIZES), count)])

    return on_all(make)


def small() -> tuple[nn.Module, Any, Any]:
    torch.manual_seed(0)
    return mlp()


def parts(count: int) -> dict[str, Step]:
    """As many calls of `clip_grad_value_`, and as many `clip_by_value` in a chain."""
    return on_all(small, count)


def predicates(count: int) -> dict[str, Step]:
    """`step % n == 0` for as many n, as many calls of a function that returns it, and as many `every_n_steps(n)`."""
    periods = [2 + number for number in range(count)]

    def counted() -> Callable[[], int]:
        raw, numbers = raw_step(*small()), itertools.count(1)

        def step() -> int:
            raw()
            return next(numbers)

        return step

    run = counted()

    def expressions() -> int:
        step, true = run(), 0
        for period in periods:
            if step % period == 0:
                true += 1
        return true

    return {
        RAW: expressions,
        CALLING: asking(counted(), [every(period) for period in periods]),
        LOOPLIB: asking(looplib_step(*small(), True), [ll.every_n_steps(period) for period in periods]),
    }


def every(period: int) -> Callable[[int], bool]:
    return lambda step: step % period == 0


def asking(run: Callable[[], Any], functions: Sequence[Callable[[Any], bool]]) -> Step:
    """A step, and a call of each function with what the step returns."""

    def step() -> int:
        position, true = run(), 0
        for ask in functions:
            if ask(position):
                true += 1
        return true

    return step


RAW_LIMIT = 10**7  # samples, above which the list of a DataLoader's indices takes many GB


def reading(count: int, later: bool) -> dict[str, Step]:
    """A batch of an epoch that has begun (`later`), or the order of an epoch with its first batch.

    looplib's first batch is one after the middle, as of a run that is resumed; a DataLoader's is the first of all.
    """
    loader, numbers = ll.make_loader(range(count), batch_size=64), itertools.count()
    raw: Any = DataLoader(range(count if count <= RAW_LIMIT else 1), batch_size=64, shuffle=True)  # type: ignore[arg-type]
    first = 0 if later else len(loader) // 2

    def epochs_of_looplib() -> Iterator[Any]:
        return (loader(ll.TrainState(epoch=epoch, batch=first)) for epoch in numbers)

    def batch_of(epochs: Iterator[Any]) -> Step:
        if later:
            batches = itertools.chain.from_iterable(epochs)
            return lambda: next(batches)
        return lambda: next(next(epochs))

    found = {LOOPLIB: batch_of(epochs_of_looplib())}
    if count <= RAW_LIMIT:
        found[RAW] = batch_of(iter(raw) for _ in itertools.count())
    return found


def members(count: int) -> dict[str, Step]:
    """As many raw loops one after the other, and a stack (not compiled)."""
    raw, copying, states = [], [], []
    optimizer = ll.optimizer(torch.optim.AdamW, lr=1e-3)
    for seed in range(count):
        torch.manual_seed(seed)
        model, _, batch = mlp()
        raw.append(raw_step(mlp()[0], classify, batch))
        copying.append(raw_step(mlp()[0], classify, batch, copies=True))
        states.append(ll.init_state(model, optimizer, seed=seed))

    found = {RAW: in_order(raw), COPYING: in_order(copying)}
    for name, donate in ((DONATED, True), (PURE, False)):
        train_step = ll.vmap_step(ll.make_train_step(ll.make_grad_fn(model, classify), optimizer, donate=donate))
        found[name] = stepping(train_step, ll.transforms.stack_states(states), batch)
    return found


@dataclass(frozen=True)
class Curve:
    """Cost of a step at several points.

    Attributes:
        make: the contenders at a point.
        linear: axes are linear, because the first point is 0.
    """

    make: Callable[[int], dict[str, Step]]
    points: Sequence[int]
    label: str
    linear: bool = False
    weight: float = 1.0


CURVES = {
    "tensors": Curve(tensors, (10, 100, 1000, 10_000), "parameter tensors", weight=1.5),
    "parts": Curve(parts, range(9), "parts in a chain", True),
    "predicates": Curve(predicates, (0, 1, 3, 10, 30, 100), "predicates asked", True),
    "samples, a later batch": Curve(lambda count: reading(count, True), [10**n for n in range(3, 9)], "samples"),
    "samples, the first batch": Curve(lambda count: reading(count, False), [10**n for n in range(3, 9)], "samples"),
    "members": Curve(members, (1, 4, 16, 64, 256, 1024), "members", weight=1.5),
}
STEPS = "steps made"
Times = dict[str, list[float]]


def base_of(name: str, times: Times) -> str:
    """The raw loop that a contender is compared with."""
    fair = FAIR.get(name, RAW)
    return fair if fair in times else RAW


def change(first: Times, last: Times, name: str) -> Ratio:
    """Ratio to the raw loop at the last point, over that at the first, with a 95% interval from resampled rounds.

    The same rounds are drawn for both points, since each round has measured all points of a curve. The windows of steps
    made have as many rounds each, one window after the other.
    """
    base = base_of(name, first)
    ratios = [statistics.median(times[name]) / statistics.median(times[base]) for times in (last, first)]
    drawn = [resampled(times[name], times[base]) for times in (last, first)]
    return Ratio(ratios[0] / ratios[1], *interval(drawn[0] / drawn[1]))


def verdict(found: Ratio) -> str:
    assert found.low is not None
    assert found.high is not None
    if found.high <= 1.02:
        return "no"
    return "**yes**" if found.low > 1.02 else "not certain"


def show(report: Report, title: str, curve: dict[int, Times]) -> None:
    """The change between the ends of a curve that both have, and all points."""
    both = [point for point, times in curve.items() if RAW in times]
    first, last = curve[both[0]], curve[both[-1]]
    for name in [name for name in first if not name.startswith(RAW)]:
        base, found = base_of(name, first), change(first, last, name)
        ends = [statistics.median(times[name]) / statistics.median(times[base]) for times in (first, last)]
        cells = {
            "from": f"{both[0]:,}",
            "to": f"{both[-1]:,}",
            "over": base,
            "at the first": f"{ends[0]:.2f}",
            "at the last": f"{ends[1]:.2f}",
            "change": found,
            "grows faster": verdict(found),
        }
        report.add(f"{title}, {name}", cells, "growth")
    for point, times in curve.items():
        report.add(f"{point:,}", {name: Seconds(statistics.median(times[name])) for name in sorted(times)}, title)


def measure(report: Report, title: str, seconds: float) -> dict[int, Times]:
    """Times at all points of a curve. Each round measures all of them, so that what is compared had the same machine."""
    curve, begin = CURVES[title], time.perf_counter()
    points = curve.points[:3] if report.dry_run else curve.points
    steps = {(point, name): step for point in points for name, step in curve.make(point).items()}
    for step in steps.values():
        step()
    times = in_turns(steps, max(0.0, seconds - (time.perf_counter() - begin)), block=0.03, least=5)
    found: dict[int, Times] = {point: {} for point in points}
    for (point, name), values in times.items():
        found[point][name] = values
    return found


def batches_of_raw(data: TensorDataset) -> Iterator[Any]:
    while True:
        yield from DataLoader(data, batch_size=16, shuffle=True)


def raw_run(data: TensorDataset) -> Callable[[int], list[float]]:
    model, loss_fn, _ = small()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    batches, number = batches_of_raw(data), itertools.count(1)

    def run(steps: int) -> list[float]:
        times, total = [], torch.zeros(())
        for _ in range(steps):
            start = time.perf_counter()
            optimizer.zero_grad()
            loss = loss_fn(model, next(batches))
            loss.backward()
            optimizer.step()
            total += loss.detach()
            if next(number) % 100 == 0:
                total.item()
                total = torch.zeros(())
            times.append(time.perf_counter() - start)
        return times

    return run


def looplib_run(data: TensorDataset) -> Callable[[int], list[float]]:
    model, loss_fn, _ = small()
    optimizer = ll.optimizer(torch.optim.AdamW, lr=1e-3)
    train_step = ll.make_train_step(ll.make_grad_fn(model, loss_fn), optimizer, donate=True)
    loader = ll.make_loader(data, batch_size=16)
    state, window, log_now = (
        ll.init_state(model, optimizer, loader=loader),
        ll.Window(),
        ll.every_n_steps(100),
    )

    def run(steps: int) -> list[float]:
        nonlocal state, window
        times: list[float] = []
        while len(times) < steps:
            start = time.perf_counter()
            for batch in loader(state):
                state, metrics = train_step(state, batch)
                window = window.add(metrics)
                if log_now(state):
                    ll.compute(window.metrics())
                    window = ll.Window()
                times.append(time.perf_counter() - start)
                start = time.perf_counter()
                if len(times) == steps:
                    break
        return times

    return run


def steps_made(report: Report, seconds: float) -> dict[int, Times]:
    """Loops with data, metrics and a predicate, in blocks that take turns: times and memory of each block.

    Runs in a process that has measured nothing before, where memory that was let go could hide what is taken. Fewer
    steps are made where these take more than twice the seconds given.
    """
    end = time.perf_counter() + 2 * seconds
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(1600, 32), torch.randint(0, 10, (1600,)))
    runs = {RAW: raw_run(data), LOOPLIB: looplib_run(data)}
    windows, length = (3, 40) if report.dry_run else (10, 10_000)
    parts = 10  # of a window, which take turns
    for run in runs.values():
        run(length // 10)
    first, later = f"grown in the first {windows * length // 2:,} steps", "grown in the steps after these"
    grown = {part: dict.fromkeys(runs, 0.0) for part in (first, later)}
    found: dict[int, Times] = {}
    for window in range(1, windows + 1):
        times: Times = {name: [] for name in runs}
        for _ in range(parts):
            for name in random.sample(list(runs), len(runs)):
                before = status("VmRSS")
                times[name].append(statistics.median(runs[name](length // parts)))
                grown[first if 2 * window <= windows else later][name] += status("VmRSS") - before
        found[window * length] = times
        if not report.dry_run and time.perf_counter() > end and window > 2:
            break
    for part, sizes in grown.items():
        report.add(part, {name: Mebibytes(size) for name, size in sizes.items()}, "memory")
    return found


FIGURE = "Time of a step over tensors, parts of an update, predicates, samples, members and steps made, raw and with looplib"
LINES = {  # color and style
    RAW: ("#808080", "-"),
    COPYING: ("#808080", "--"),
    CALLING: ("#808080", "--"),
    DONATED: ("#2f86d0", "-"),
    LOOPLIB: ("#2f86d0", "-"),
    PURE: ("#d95f02", "-"),
}


def draw(curves: dict[str, dict[int, Times]], path: Path) -> None:
    """Curves in colors that can be read on a light and on a dark page."""
    rows = -(-len(curves) // 4)
    with svg(path, 4, (12, 2.8 * rows), rows) as axes:
        for axis in axes[len(curves) :]:
            axis.set_visible(False)
        for axis, (title, curve) in zip(axes, curves.items(), strict=False):
            for name in sorted({name for times in curve.values() for name in times}):
                points = [point for point, times in curve.items() if name in times]
                values = [1e6 * statistics.median(curve[point][name]) for point in points]
                color, style = LINES[name]
                axis.plot(points, values, style, marker="o", markersize=3, label=name, color=color)
            times = [1e6 * statistics.median(values) for point in curve.values() for values in point.values()]
            if title == STEPS or CURVES[title].linear:
                axis.set_ylim(0, 1.3 * max(times))
                axis.locator_params(axis="x", integer=True, nbins=3)  # labels of 100,000 have room
                axis.xaxis.set_major_formatter("{x:,.0f}")
            else:  # at least a decade, so that what is flat looks flat
                axis.set(xscale="log", yscale="log", ylim=(min(times) / 3, 3 * max(times)))
                axis.minorticks_off()
            axis.set(
                title=title, xlabel=title if title == STEPS else CURVES[title].label, ylabel="microseconds a step"
            )


def main(options: argparse.Namespace) -> int:
    report = Report("growth", options, "MLP 32-64-10, batch 16, fused AdamW")
    found: dict[str, dict[int, Times]] = {}
    weights = {STEPS: 2.5} | {title: curve.weight for title, curve in CURVES.items()}
    for title, seconds in report.rows([name for name in weights if name in options.only], weights):
        with report.attempt(title):
            found[title] = steps_made(report, seconds) if title == STEPS else measure(report, title, seconds)
            show(report, title, found[title])
        with report.attempt("figure"):  # after each curve, so that a run that is stopped has one
            draw(found, report.path.with_suffix(".svg"))
            report.figures = [f"![{FIGURE}](../../notebooks/figures/growth.svg)"]
    return report.close()


if __name__ == "__main__":
    made = parser(__doc__, 250.0)
    names = [*CURVES, STEPS]
    made.add_argument("--only", nargs="+", choices=names, default=names, help="curves; all unless given")
    sys.exit(main(options_of(made)))
