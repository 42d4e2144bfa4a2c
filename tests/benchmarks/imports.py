"""Time of `import looplib` beyond `import torch`, beside other libraries.

    python tests/benchmarks/imports.py

Each import runs in a process of its own, after `import torch`, in shuffled order over the rounds. Those that take more
than a second run once. The last column has Python's garbage collector off: torch's import leaves a full collection due,
which walks over all that torch has made and falls into whatever is imported next.

An import whose modules were not yet compiled to bytecode does not count. The other libraries are left out if that takes
half of the time left. Where no bytecode can be written, set PYTHONPYCACHEPREFIX: an import that never counts is reported.
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
compiled, compile_source = 0, SourceFileLoader.source_to_code
def noting(*given, **options):
    global compiled
    compiled += 1
    return compile_source(*given, **options)
SourceFileLoader.source_to_code = noting
if sys.argv[2] == "off":
    gc.disable()
begin = time.perf_counter()
exec(sys.argv[1])
print(json.dumps([time.perf_counter() - begin, compiled]))
"""
FIRST = "looplib"
Times = dict[str, list[float]]


def imported(statement: str, collector: str, limit: float | None = None) -> tuple[float, int]:
    """Seconds of an import in a new process, and how many modules it compiled to bytecode."""
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


def measure(name: str, found: Times, collector: str, limit: float | None) -> None:
    """Add the time of an import, in a second attempt if the first one had to compile modules."""
    for _ in range(2):
        seconds, compiled = imported(STATEMENTS[name], collector, limit)
        if not compiled:
            found[collector].append(seconds)
            return
    raise RuntimeError(f"{STATEMENTS[name]} compiles modules to bytecode each time: set PYTHONPYCACHEPREFIX")


def one_round(report: Report, found: dict[str, Times]) -> None:
    """Each import with and without the collector, in shuffled order. One that failed is left out from then on."""
    turns = [(name, collector) for name in found for collector in ("on", "off")]
    for name, collector in random.sample(turns, len(turns)):
        times = found.get(name, {}).get(collector)
        if times is None or (times and times[-1] >= 1.0):  # failed before; or slow, which is measured once
            continue
        limit = None if name == FIRST else max(1.0, (report.end - time.perf_counter()) / (1 if times else 2))
        try:
            measure(name, found[name], collector, limit)
        except Exception as error:
            if times and isinstance(error, OutOfTimeError):
                return  # the clock has ended, and there are times already
            del found[name]
            report.fail(name, error)


def show(report: Report, found: dict[str, Times]) -> None:
    for name, times in found.items():
        cells = {
            "beyond import torch": Seconds(statistics.median(times["on"])),
            "with the garbage collector off": Seconds(statistics.median(times["off"])),
        }
        report.add(STATEMENTS[name], cells, "time of an import")


def main(options: argparse.Namespace) -> int:
    report = Report("imports", options, "modules already compiled to bytecode")
    found: dict[str, Times] = {name: {"on": [], "off": []} for name in options.only}
    done, bar = 0, tqdm(desc="imports, rounds", disable=None)
    while found and (done == 0 or time.perf_counter() < report.end) and not (done and options.dry_run):
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
