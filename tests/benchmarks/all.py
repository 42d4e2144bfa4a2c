"""All benchmarks one after another, in under 35 minutes on two cores, and the pages with their tables.

    python tests/benchmarks/all.py                              (an idle machine; about 33 minutes)
    python tests/benchmarks/all.py --only growth scale          (some of them, in their shares of the time)
    python tests/benchmarks/all.py --dry-run --out /tmp/dry     (tiny sizes; changes no page)

Each script gets its share of the time that is left and is stopped if it takes much longer, so that the whole keeps to
`--seconds`. A script that fails or is stopped does not stop the others: what it had measured counts, and the summary
names it. Each writes JSON into the folder. After each script its tables are put between `<!-- measured: SCRIPT -->` and
`<!-- end -->` in the pages, its figure into `notebooks/figures`, and the numbers that stand in prose (`PROSE`) are
replaced as well, so that an interrupted run keeps what it has measured. Where nothing was measured, a page keeps what it
had.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harness import KEEP_MEMORY, RESULTS, ROOT, digits
from tqdm import tqdm

HERE = Path(__file__).resolve().parent
README = ROOT / "README.md"
PAGES = [HERE / "README.md", ROOT / "recipes" / "SCALE.md"]
FIGURES = ROOT / "notebooks" / "figures"
# Seconds of each script. Those with a fixed amount of work come first, so that the others can make up for them.
SHARES = {
    "scale": 40.0,
    "adapters": 60.0,
    "imports": 70.0,
    "compiled": 385.0,
    "accumulate": 140.0,
    "checkpoint": 140.0,
    "peers": 280.0,
    "distributed": 110.0,
    "optimizers": 205.0,
    "growth": 220.0,
    "specialists": 215.0,
    "step_overhead": 205.0,
}
START = 8.0  # seconds until the imports of a script are done
GRACE = 60.0  # seconds that the last script may take beyond the whole

# Numbers in the README's prose: a pattern for the words before the number and the number, and where it is measured.
TIME = "time of a step"
PROSE = {
    r"(raw loop\'s\s+time: )[\d.]+": ("step_overhead", TIME, "MLP, batch 16", "donated"),
    r"(small MLP, )[\d.]+": ("step_overhead", TIME, "MLP, batch 16, clipping and a schedule", "donated"),
    r"(clipping in both,\s+)[\d.]+": ("step_overhead", TIME, "transformer, batch 32 x 128", "donated"),
}


def run(name: str, seconds: float, limit: float, options: argparse.Namespace) -> str:
    """Run a script in its own process group; the answer says how it ended."""
    command = [
        sys.executable,
        str(HERE / f"{name}.py"),
        f"--seconds={seconds:.0f}",
        f"--json={options.out / name}.json",
    ]
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, **KEEP_MEMORY, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    for kind in ("json", "svg"):
        (options.out / f"{name}.{kind}").unlink(missing_ok=True)
    process = subprocess.Popen(
        [*command, *["--dry-run"] * options.dry_run], env=environment, cwd=options.out, start_new_session=True
    )
    try:
        code = process.wait(timeout=limit)
    except subprocess.TimeoutExpired:
        return f"stopped after {limit:.0f} s"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # it and what it has started
        process.wait()
    return "done" if code == 0 else f"exit status {code}"


def run_all(options: argparse.Namespace) -> dict[str, tuple[str, float]]:
    """Outcome of each script, and the seconds that it took."""
    ended: dict[str, tuple[str, float]] = {}
    end = time.perf_counter() + options.seconds
    for number, name in enumerate(tqdm(options.only, desc="scripts", disable=None)):
        left = end - time.perf_counter()
        share = left * SHARES[name] / sum(SHARES[later] for later in options.only[number:])
        if share < 2 * START and not options.dry_run:
            ended[name] = "no time left", 0.0
            continue
        print(f"\n=== {name}: {share:.0f} s", flush=True)
        begin = time.perf_counter()
        limit = 600.0 if options.dry_run else min(left + GRACE, 2 * share + START)
        try:
            how = run(name, max(1.0, share - START), limit, options)
        except KeyboardInterrupt:
            ended[name] = "interrupted", time.perf_counter() - begin
            break
        finally:
            publish(name, options)
        ended[name] = how, time.perf_counter() - begin
    return ended


def publish(name: str, options: argparse.Namespace) -> None:
    """Put what a script has measured on the pages."""
    results = results_in(options.out, [name])
    if options.dry_run or options.no_pages or not results:
        return
    for page in PAGES:
        page.write_text(filled(page.read_text(), results))
    README.write_text(with_numbers(README.read_text(), results))
    if (drawn := options.out / f"{name}.svg").exists():
        shutil.copy(drawn, FIGURES / drawn.name)


def results_in(folder: Path, names: list[str]) -> dict[str, Any]:
    """JSON of each script that measured something."""
    paths = {name: folder / f"{name}.json" for name in names}
    found = {name: json.loads(path.read_text()) for name, path in paths.items() if path.exists()}
    return {name: result for name, result in found.items() if result["tables"]}


def filled(text: str, results: Mapping[str, Any]) -> str:
    """A page with new tables."""
    for name, result in results.items():
        before, begin, rest = text.partition(f"<!-- measured: {name} -->\n")
        if begin:
            _, end, after = rest.partition("<!-- end -->")
            text = f"{before}{begin}\n{result['markdown']}\n\n{end}{after}"
    return text


def with_numbers(text: str, results: Mapping[str, Any]) -> str:
    """The README with new numbers in its prose."""
    for pattern, (name, *place) in PROSE.items():
        cell: Any = results.get(name, {}).get("tables", {})
        for key in place:
            cell = cell.get(key, {})
        if cell:
            text = re.sub(pattern, rf"\g<1>{digits(cell['value'])}", text, count=1)
    return text


def summary(ended: Mapping[str, tuple[str, float]], results: Mapping[str, Any]) -> str:
    lines = []
    for name, (how, seconds) in ended.items():
        failures = results.get(name, {}).get("failures", {})
        lines.append(f"{name:14} {seconds:6.0f} s  {how}{'' if name in results else ', nothing measured'}")
        lines += [f"{'':25} not measured: {what} ({why})" for what, why in failures.items()]
    return "\n".join(lines)


def main(options: argparse.Namespace) -> int:
    options.out = options.out.resolve()
    options.out.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()
    ended = run_all(options)
    text = summary(ended, results_in(options.out, list(ended)))
    print(f"\n{text}\n{time.perf_counter() - began:.0f} s in all; JSON in {options.out}")
    print("gpu            not part of it: tests/benchmarks/gpu.py is a command of its own, for a machine with a GPU")
    return int(len(ended) < len(options.only) or any(how != "done" for how, _ in ended.values()))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=2010.0, help="for all scripts together (2010)")
    parser.add_argument("--only", nargs="+", choices=SHARES, default=list(SHARES), help="scripts; all unless given")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the JSON files")
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes; the pages stay as they are")
    parser.add_argument("--no-pages", action="store_true", help="leave the pages as they are")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: what was measured is kept
    if given.seconds == parser.get_default("seconds") and len(given.only) < len(SHARES):
        given.seconds *= sum(SHARES[name] for name in given.only) / sum(SHARES.values())
    sys.exit(main(given))
