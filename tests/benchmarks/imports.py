"""Time of `import looplib` beyond `import torch`, beside other libraries.

    python tests/benchmarks/imports.py

Each import runs in a process of its own, after `import torch`, in shuffled order over the rounds. Those that take more
than a second run once. The last column has Python's garbage collector off: torch's import leaves a full collection due,
which walks over all that torch has made and falls into whatever is imported next.

Modules are compiled to bytecode before the clock starts. The other libraries are left out if that takes half of the time
left. An import that compiles its modules each time, because their bytecode cannot be written, is not measured.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time

from harness import ROOT, OutOfTimeError, Report, Seconds, options_of, parser
from tqdm import tqdm

STATEMENTS = {
    "looplib": "import looplib",
    "accelerate": "import accelerate",
    "lightning": "import lightning",
    "transformers": "from transformers import Trainer, TrainingArguments",
}
CODE = """
import gc, json, sys, time
from importlib.machinery import SourceFileLoader
import torch
compiled, compile_source = [], SourceFileLoader.source_to_code
def noting(self, data, path, **options):
    compiled.append(path)
    return compile_source(self, data, path, **options)
SourceFileLoader.source_to_code = noting
if sys.argv[2] == "off":
    gc.disable()
begin = time.perf_counter()
exec(sys.argv[1])
print(json.dumps([time.perf_counter() - begin, compiled]))
"""
FIRST = "looplib"
Times = dict[str, list[float]]


def imported(statement: str, collector: str, limit: float | None = None) -> tuple[float, list[str]]:
    """Seconds of an import in a new process, and the modules that it compiled to bytecode."""
    command = [sys.executable, "-c", CODE, statement, collector]
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": ""}
    try:
        out = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=limit)
    except subprocess.TimeoutExpired:
        raise OutOfTimeError(f"took more than {limit:.0f} s") from None
    if out.returncode:
        kind, _, reason = out.stderr.strip().splitlines()[-1].partition(": ")
        raise ImportError(reason) if kind == "ModuleNotFoundError" else RuntimeError(f"{kind}: {reason}")
    seconds, compiled = json.loads(out.stdout.splitlines()[-1])
    return seconds, compiled


def seconds_of(statement: str, collector: str, limit: float | None = None) -> float:
    """Seconds of an import whose modules are compiled already."""
    seconds, compiled = imported(statement, collector, limit)
    if compiled:
        raise RuntimeError(
            f"{statement} has compiled {len(compiled)} modules to bytecode again, {compiled[0]} first. Set "
            "PYTHONPYCACHEPREFIX to a folder that can be written."
        )
    return seconds


def prepared(statement: str, limit: float | None) -> Times:
    """Times so far, once all modules of an import are compiled: that of the first import, if it compiled nothing."""
    seconds, compiled = imported(statement, "on", limit)
    return {"on": [] if compiled else [seconds], "off": []}


def prepare(report: Report, names: list[str]) -> dict[str, Times]:
    found: dict[str, Times] = {}
    for name in tqdm(names, desc="imports, compiling", disable=None):
        with report.attempt(name):
            found[name] = prepared(STATEMENTS[name], None if name == FIRST else max(1.0, left(report) / 2))
    return found


def left(report: Report) -> float:
    return float(report.end - time.perf_counter())


def one_round(report: Report, found: dict[str, Times]) -> None:
    turns = [(name, collector) for name in found for collector in ("on", "off")]
    for name, collector in random.sample(turns, len(turns)):
        times = found.get(name, {}).get(collector)
        if times is None or (times and times[-1] >= 1.0):  # failed before; or slow, which is measured once
            continue
        with report.attempt(name):
            limit = None if name == FIRST else max(1.0, left(report))
            try:
                times.append(seconds_of(STATEMENTS[name], collector, limit))
            except Exception as error:
                if times and isinstance(error, OutOfTimeError):
                    return  # the clock has ended, and there are times already
                del found[name]
                raise


def show(report: Report, found: dict[str, Times]) -> None:
    for name, times in found.items():
        cells = {
            "beyond import torch": Seconds(statistics.median(times["on"])),
            "with the garbage collector off": Seconds(statistics.median(times["off"])),
        }
        report.add(STATEMENTS[name], cells, "time of an import")


def main(options: argparse.Namespace) -> int:
    report = Report("imports", options, "modules already compiled to bytecode")
    found, done = prepare(report, options.only), 0
    bar = tqdm(desc="imports, rounds", disable=None)
    while found and (done == 0 or left(report) > 0) and not (done and options.dry_run):
        one_round(report, found)
        bar.update()
        show(report, found)
        done += 1
    return report.close()


if __name__ == "__main__":
    made = parser(__doc__, 60.0)
    made.add_argument(
        "--only", nargs="+", choices=STATEMENTS, default=list(STATEMENTS), help="libraries; all unless given"
    )
    sys.exit(main(options_of(made)))
