"""Time of `import looplib` beyond `import torch`, beside other libraries.

    python tests/benchmarks/imports.py

Each import runs in a process of its own, after `import torch`, in shuffled order over the rounds. Those that take more
than a second run once. The last column has Python's garbage collector off: torch's import leaves a full collection due,
which walks over all that torch has made and falls into whatever is imported next.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import random
import statistics
import subprocess
import sys
import time

from harness import ROOT, Report, Seconds, options_of, parser
from tqdm import tqdm

STATEMENTS = {
    "looplib": "import looplib",
    "accelerate": "import accelerate",
    "lightning": "import lightning",
    "transformers": "from transformers import Trainer, TrainingArguments",
}
CODE = """
import gc, sys, time
import torch
if sys.argv[2] == "off":
    gc.disable()
begin = time.perf_counter()
exec(sys.argv[1])
print(time.perf_counter() - begin)
"""


def seconds_of(statement: str, collector: str) -> float:
    command = [sys.executable, "-c", CODE, statement, collector]
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": ""}
    out = subprocess.run(command, capture_output=True, text=True, env=environment)
    if out.returncode:
        raise ImportError(out.stderr.strip().splitlines()[-1])
    return float(out.stdout.split()[-1])


def show(report: Report, found: dict[str, dict[str, list[float]]]) -> None:
    for name, times in found.items():
        cells = {
            "beyond import torch": Seconds(statistics.median(times["on"])),
            "with the garbage collector off": Seconds(statistics.median(times["off"])),
        }
        report.add(STATEMENTS[name], cells, "time of an import")


def main(options: argparse.Namespace) -> int:
    report = Report("imports", options, "modules already compiled to bytecode")
    found: dict[str, dict[str, list[float]]] = {}
    for name, statement in STATEMENTS.items():
        with report.attempt(name):
            if importlib.util.find_spec(name) is None:
                raise ImportError(f"No module named {name!r}")
            if name == "looplib":
                seconds_of(statement, "on")  # writes the bytecode, which others had when they were installed
            found[name] = {"on": [], "off": []}
    turns = [(name, collector) for name in found for collector in ("on", "off")]
    rounds = tqdm(desc="imports, rounds", disable=None)
    while rounds.n == 0 or time.perf_counter() < report.end:
        for name, collector in random.sample(turns, len(turns)):
            times = found[name][collector]
            if not times or times[-1] < 1.0:  # the slow ones once
                times.append(seconds_of(STATEMENTS[name], collector))
        rounds.update()
        show(report, found)
        if options.dry_run:
            break
    return report.close()


if __name__ == "__main__":
    sys.exit(main(options_of(parser(__doc__, 60.0))))
