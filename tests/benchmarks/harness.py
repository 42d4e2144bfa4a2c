"""Shared parts of the benchmarks: contenders in turns, ratios with intervals, and a report as a table, JSON and a progress bar.

Each script takes `--seconds` for all its rows together and gives each row its share of what is left, so that no script
takes much longer than it was given. Where nothing is left, a row is measured as briefly as it can be; beyond one and a half
times the seconds given, the others are left out. `--dry-run` runs the same code at a tiny size; its figures mean nothing.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from tqdm import tqdm

Step = Callable[[], object]
Name = TypeVar("Name", bound=Hashable)
ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path("runs/benchmarks")

# glibc returns memory to the system and takes it again, page by page, depending on which tensor is at the end of its
# heap, which depends on the order of the first allocations and is worth about 1% of a transformer's step either way.
KEEP_MEMORY = {"MALLOC_TRIM_THRESHOLD_": str(1 << 32), "MALLOC_MMAP_THRESHOLD_": str(1 << 25)}


def parser(doc: str | None, seconds: float) -> argparse.ArgumentParser:
    """Options that all scripts have."""
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--seconds", type=float, default=seconds, help=f"for all rows together ({seconds:.0f})")
    made.add_argument("--json", type=Path, help="file for the figures; by default in runs/benchmarks")
    made.add_argument("--dry-run", action="store_true", help="tiny sizes and few rounds: the figures mean nothing")
    made.add_argument("--system-malloc", action="store_true", help="let glibc trim its heap between steps")
    return made


def options_of(made: argparse.ArgumentParser) -> argparse.Namespace:
    """The options given, in a process with one thread of torch whose heap keeps its memory."""
    options = made.parse_args()
    if not options.system_malloc and not KEEP_MEMORY.items() <= os.environ.items():
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **KEEP_MEMORY})
    torch.set_num_threads(1)
    return options


def compile_without_cache() -> None:
    """Give Inductor an empty folder, so that compiling takes what it takes the first time."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp()


def in_turns(
    steps: Mapping[Name, Step], seconds: float, *, block: float = 0.05, least: int = 3
) -> dict[Name, list[float]]:
    """Seconds of a step of each contender in each round.

    In each round each contender runs steps for `block` seconds, at least one, in shuffled order; a round counts their
    median. Short blocks begin with a step that does not count, since the caches are another contender's. Python's
    collector leaves alone what was there before, so that no round pays for a walk over all modules that are loaded.
    """
    gc.collect()
    gc.freeze()
    try:
        return _in_turns(steps, seconds, block, least)
    finally:
        gc.unfreeze()


def _in_turns(steps: Mapping[Name, Step], seconds: float, block: float, least: int) -> dict[Name, list[float]]:
    for step in steps.values():
        begin = time.perf_counter()
        for _ in range(3):
            step()
            if time.perf_counter() - begin > block:
                break
    rounds: dict[Name, list[float]] = {name: [] for name in steps}
    begin = time.perf_counter()
    done = 0
    while done < least or (time.perf_counter() - begin) * (done + 1) / done < seconds:
        for name in random.sample(list(steps), len(steps)):
            rounds[name].append(_block(steps[name], block, bool(done) and rounds[name][-1] < block))
        done += 1
    return rounds


def _block(step: Step, block: float, warm: bool) -> float:
    if warm:
        step()
    times = []
    end = time.perf_counter() + block
    while True:
        start = time.perf_counter()
        step()
        now = time.perf_counter()
        times.append(now - start)
        if now >= end:
            return statistics.median(times)


@dataclass(frozen=True)
class Ratio:
    """Ratio of two contenders' medians with its 95% interval, which fewer than three rounds do not have."""

    value: float
    low: float | None = None
    high: float | None = None

    def __str__(self) -> str:
        if self.low is None or self.high is None:
            return digits(self.value)
        return f"{digits(self.value)} [{digits(self.low)}, {digits(self.high)}]"


@dataclass(frozen=True)
class Seconds:
    value: float

    def __str__(self) -> str:
        if self.value < 1e-3:
            return f"{1e6 * self.value:.3g} us"
        return f"{1e3 * self.value:.3g} ms" if self.value < 1 else f"{self.value:.3g} s"


@dataclass(frozen=True)
class Mebibytes:
    value: float

    def __str__(self) -> str:
        return f"{self.value:,.1f} MiB" if self.value < 100 else f"{self.value:,.0f} MiB"


@dataclass(frozen=True)
class Times(Ratio):
    """Speedup over the raw loops."""

    def __str__(self) -> str:
        shown = [
            f"{value:.2g}" if value < 10 else f"{value:.0f}" for value in (self.value, self.low or 0, self.high or 0)
        ]
        return f"{shown[0]} times faster" + (f" [{shown[1]}, {shown[2]}]" if self.low is not None else "")


@dataclass(frozen=True)
class Count:
    value: float

    def __str__(self) -> str:
        return f"{self.value:,.0f}"


def digits(value: float) -> str:
    return f"{value:.2f}" if abs(value) >= 0.1 else f"{value:.2g}"


def ratio(ours: Sequence[float], base: Sequence[float]) -> Ratio:
    """The ratio of the medians, with an interval from resampled rounds. Both were measured in each round."""
    value = statistics.median(ours) / statistics.median(base)
    return Ratio(value, *interval(resampled(ours, base))) if len(ours) >= 3 else Ratio(value)


def resampled(ours: Sequence[float], base: Sequence[float]) -> Tensor:
    """A thousand ratios of the medians, each over as many rounds drawn with replacement: the same draws at each call."""
    pair = torch.tensor([ours, base], dtype=torch.float64)
    drawn = torch.randint(pair.shape[1], (1000, pair.shape[1]), generator=torch.Generator().manual_seed(0))
    above, below = pair[:, drawn].quantile(0.5, dim=2)
    ratios: Tensor = above / below
    return ratios


def interval(drawn: Tensor) -> tuple[float, float]:
    low, high = drawn.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return low, high


class OutOfTimeError(Exception):
    """The time that the script was given is used up."""


class Report:
    """Figures so far, printed as they come and written to a JSON file after each.

    Attributes:
        name: of the script, and of the file in `runs/benchmarks`.
        end: time on `time.perf_counter()` by which the script wants to be done.
        failures: what was not measured, and why.
    """

    def __init__(self, name: str, options: argparse.Namespace, about: str = "") -> None:
        self.name, self.dry_run, self.given = name, options.dry_run, options.seconds
        self.path = options.json or RESULTS / f"{name}.json"
        self.began = time.perf_counter()
        self.end = self.began + options.seconds
        self.about = ", ".join(filter(None, [about, machine()]))
        self.tables: dict[str, dict[str, dict[str, Any]]] = {}
        self.figures: list[str] = []
        self.notes: list[str] = []
        self.failures: dict[str, str] = {}
        self.finished = False
        self.write()

    def rows(self, names: Sequence[str], weights: Mapping[str, float] | None = None) -> Iterator[tuple[str, float]]:
        """Each name with the seconds that it may take, beside a progress bar. Rows that are left out are named."""
        shares = [(weights or {}).get(name, 1.0) for name in names]
        bar = tqdm(names, desc=self.name, disable=None)
        for number, name in enumerate(bar):
            bar.set_postfix_str(name)
            left = self.end - time.perf_counter()
            if left <= -0.5 * self.given and not self.dry_run:
                self.fail(name, OutOfTimeError(f"the {self.given:.0f} s given were used up"))
                continue
            yield name, 0.0 if self.dry_run else max(0.0, left) * shares[number] / sum(shares[number:])

    def check_time(self, needed: float) -> None:
        """Raise OutOfTimeError if fewer seconds are left than are needed."""
        left = self.end - time.perf_counter()
        if left < needed:
            raise OutOfTimeError(f"{max(left, 0):.0f} s are left of the time given, and about {needed:.0f} s needed")

    @contextmanager
    def attempt(self, name: str) -> Iterator[None]:
        """Report an error by name and carry on."""
        try:
            yield
        except (Exception, SystemExit) as error:
            self.fail(name, error)

    def fail(self, name: str, error: BaseException) -> None:
        reason = next(iter(str(error).strip().splitlines()), "")
        self.failures[name] = reason if isinstance(error, ImportError) else f"{type(error).__name__}: {reason}"
        tqdm.write(f"{name}: NOT MEASURED, {self.failures[name]}")
        if not isinstance(error, (ImportError, OutOfTimeError)):
            traceback.print_exception(error)
        self.write()

    def available(self, contenders: Mapping[str, Sequence[str]]) -> list[str]:
        """Those of the contenders whose modules can be imported; the others are named in the report."""
        found = []
        for name, modules in contenders.items():
            with self.attempt(name):
                for module in modules:
                    importlib.import_module(module)
                found.append(name)
        return found

    def add(self, row: str, cells: Mapping[str, Any], table: str = "") -> None:
        """Add cells to a row: figures, or strings."""
        self.tables.setdefault(table, {}).setdefault(row, {}).update(cells)
        tqdm.write(f"{row}: " + ", ".join(f"{name} {value}" for name, value in cells.items()))
        sys.stdout.flush()
        self.write()

    def compare(self, row: str, found: Mapping[str, list[float]], base: str, table: str = "") -> None:
        """Add the time of one contender, and the others' ratios to it."""
        ratios = {name: ratio(times, found[base]) for name, times in found.items() if name != base}
        self.add(row, {base: Seconds(statistics.median(found[base])), **ratios}, table)

    def note(self, line: str) -> None:
        """Add a line below the tables."""
        self.notes.append(line)
        tqdm.write(line)
        self.write()

    def markdown(self) -> str:
        parts = [*self.figures, *[_table(table, rows) for table, rows in self.tables.items()]]
        if self.notes:
            parts.append("\n".join(f"- {line}" for line in self.notes))
        if self.failures:
            parts.append("\n".join(f"- Not measured: {name} ({why})." for name, why in self.failures.items()))
        state = "" if self.finished else "Stopped before the end. "
        dry = "**A dry run: the figures mean nothing.** " if self.dry_run else ""
        taken = time.perf_counter() - self.began
        return "\n\n".join([*parts, f"{dry}{state}{time.strftime('%Y-%m-%d')}: {self.about}; {taken:.0f} s in all."])

    def write(self) -> None:
        """Replace the file, so that it is complete whenever the script is killed."""
        everything = {
            "name": self.name,
            "about": self.about,
            "dry_run": self.dry_run,
            "finished": self.finished,
            "seconds": time.perf_counter() - self.began,
            "tables": self.tables,
            "notes": self.notes,
            "failures": self.failures,
            "markdown": self.markdown(),
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        part = self.path.with_suffix(".partial")
        part.write_text(json.dumps(everything, indent=1, default=_plain) + "\n")
        os.replace(part, self.path)

    def close(self) -> int:
        """Print the tables. The exit status is 1 if a contender failed for another reason than being absent."""
        self.finished = True
        self.write()
        print(f"\n{self.markdown()}\n\nWritten to {self.path}", flush=True)
        return int(any("Error: " in why and "OutOfTimeError" not in why for why in self.failures.values()))


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return {**asdict(value), "text": str(value)}
    return str(value)


def _table(title: str, rows: Mapping[str, Mapping[str, Any]]) -> str:
    columns = list(dict.fromkeys(column for cells in rows.values() for column in cells))
    lines = [[row, *[str(cells.get(column, "")) for column in columns]] for row, cells in rows.items()]
    return "\n".join(markdown_table([title, *columns], lines))


def markdown_table(head: list[str], cells: list[list[str]]) -> list[str]:
    """Lines of a table."""
    rows = [head, ["---"] * len(head), *cells]
    return [f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in rows]


def machine() -> str:
    """Version of torch, threads, the processor, and whether it has other work, which slows long steps most."""
    model = platform.machine()
    if Path("/proc/cpuinfo").exists():
        names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
        model = f"{model} {names[0].partition(': ')[2]}" if names else model
    threads = torch.get_num_threads()
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    busy = f", **busy with other programs: load {load:.1f} at the start**" if load > cores + 1 else ""
    return f"torch {torch.__version__}, {threads} thread{'s' * (threads > 1)}, {cores} cores of {model}{busy}"


@contextmanager
def svg(path: Path, columns: int, size: tuple[float, float], rows: int = 1) -> Iterator[list[Any]]:
    """Axes to draw on, which are written as a figure in colors that can be read on a light and on a dark page."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    gray = "#808080"
    style: Any = {"svg.hashsalt": "looplib", "svg.fonttype": "none"}  # text stays text, and the file small
    style |= dict.fromkeys(["text.color", "axes.labelcolor", "xtick.color", "ytick.color"], gray)
    with rc_context({**style, "font.sans-serif": ["DejaVu Sans", "Verdana", "sans-serif"]}):
        figure = Figure(figsize=size, layout="constrained")
        axes = list(figure.subplots(rows, columns, squeeze=False).flat)
        yield axes
        for axis in axes:
            axis.title.set_color(gray)
            axis.spines[:].set_color(gray)
            if axis.get_visible():
                axis.legend(frameon=False, fontsize=8)
        figure.savefig(path, transparent=True, metadata={"Date": None})


def quiet_arguments(folder: str, **options: Any) -> Any:
    """`transformers.TrainingArguments` on the CPU at a constant rate, with all off that is not asked for."""
    off: dict[str, Any] = {
        "report_to": [],
        "disable_tqdm": True,
        "save_strategy": "no",
        "logging_strategy": "no",
        "logging_nan_inf_filter": False,
        "max_grad_norm": 0,
        "lr_scheduler_type": "constant",
        "remove_unused_columns": False,
        "dataloader_pin_memory": False,
        "use_cpu": True,
    }
    return importlib.import_module("transformers").TrainingArguments(folder, **off | options)


def own_process(
    script: str, *arguments: Any, environment: Mapping[str, str] = os.environ, timeout: float | None = None
) -> Any:
    """The last line that a script prints in a process of its own, which is JSON."""
    paths = os.pathsep.join(filter(None, [str(ROOT), environment.get("PYTHONPATH")]))
    out = subprocess.run(
        [sys.executable, script, *map(str, arguments)],
        capture_output=True,
        text=True,
        env={**environment, "PYTHONPATH": paths},
        timeout=timeout,
    )
    if out.returncode:
        raise RuntimeError(out.stderr.strip().rpartition("\n")[2])
    return json.loads(out.stdout.splitlines()[-1])


def growth_of(function: Callable[[], Any]) -> tuple[float, Any]:
    """MiB by which this process grows, at most, while it runs a function (Linux), and what that returns."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    result = function()
    return status("VmHWM") - before, result


def peak_memory(script: str, call: str, *arguments: str, needs: Sequence[str] = ()) -> float:
    """MiB by which a process of its own grows, at most, while it makes a contender and runs `steps` steps (Linux).

    The model, its weights and the optimizer's moments are part of it, since some contenders make the moments at the
    start and others in the first step. Modules are not.

    Args:
        script: name of the benchmark's module.
        call: name of its function that takes the arguments and returns a step.
        arguments: strings; the last is the number of steps.
        needs: modules to import first.
    """
    return float(own_process(__file__, script, " ".join(needs), call, *arguments))


def print_peak_memory(script: str, needs: str, call: str, *arguments: str) -> None:
    """The process that `peak_memory` starts."""
    torch.set_num_threads(1)
    module, *_ = [importlib.import_module(name) for name in [script, *needs.split()]]
    torch.optim.AdamW([torch.ones(1, requires_grad=True)]).step()  # imports what torch imports late

    def run() -> None:
        step = getattr(module, call)(*arguments[:-1])
        for _ in range(int(arguments[-1])):
            step()  # and nothing keeps what it returns, which may be a state

    print(growth_of(run)[0], flush=True)
    os._exit(0)  # threads that wait for a turn are not joined


def status(name: str) -> float:
    """MiB of a line of this process' status: VmRSS now, VmHWM at its peak (Linux)."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(name)) / 2**10


if __name__ == "__main__":
    print_peak_memory(*sys.argv[1:])
