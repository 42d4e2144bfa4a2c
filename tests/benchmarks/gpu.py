"""Everything that only a GPU can tell: throughput, memory, CUDA graphs, host reads and saves, beside other loops.

    pip install -c tests/constraints-cuda.txt -e ".[tests,gpu]"
    python -m pytest -m gpu && python tests/benchmarks/gpu.py
    python tests/benchmarks/gpu.py --device cpu --dry-run       (all of it at a tiny size, where there is no GPU)

- language: GPT-2 small (124 million parameters) in bfloat16, 12 x 1,024 tokens: looplib eager, compiled by blocks and
  compiled whole, beside nanoGPT's loop with a compiled model, the transformers Trainer and Lightning.
- small: an MLP and a ResNet-20 at batch 128: CUDA graphs of the whole step, beside the raw loop eager, compiled, and
  captured by hand.
- saves: how long the loop stands still for a synchronous, an asynchronous donated and an asynchronous pure save.
- moments: the time and the peak memory of a step with AdamW's moments on the device and on the host.
- reads: how often the host waits for a step with a loss scale, with recomputation and with accumulation.

Contenders take turns in shuffled order, and each ratio has its 95% interval over the rounds. Goals stand beside the
figures. Progress is printed, and `gpu.json` in the folder is complete after each figure, so the command may be stopped
at any time; `gpu.md` has the tables at the end. A contender that fails is reported by name, and the others continue. Rows for which no time
is left (--seconds) are named as well. The exit status is 1 if something was not measured for another reason than
time or a missing library.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import platform
import subprocess
import sys
import warnings
from pathlib import Path

import torch
from harness import Report
from on_gpu.device import name_of
from on_gpu.rows import ROWS, Settings

import looplib as ll

BESIDE = ("transformers", "accelerate", "lightning", "triton")


def commit() -> str:
    """The commit of the checkout, or "unknown" outside of one."""
    command = ["git", "-C", str(Path(ll.__file__).parent), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip() or "unknown"


def versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "torch": torch.__version__, "looplib": commit()}
    for package in BESIDE:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def main(options: argparse.Namespace) -> int:
    device = torch.device(options.device)
    if device.type != "cpu":
        device = torch.device(device.type, device.index or 0)
        torch.accelerator.set_device_index(device)
        torch.set_float32_matmul_precision("high")  # TF32 for all contenders, which torch.compile asks for
    options.out.mkdir(parents=True, exist_ok=True)
    about = ", ".join(f"{key} {value}" for key, value in {"device": name_of(device), **versions()}.items())
    print(about, flush=True)
    if options.seconds is None:
        options.seconds = 1e6 if options.dry_run else 330.0
    options.json = options.out / "gpu.json"
    report = Report("gpu", options, about)
    peak = options.peak * 1e12 if options.peak else ll.log.peak_flops(device)
    small = options.dry_run
    settings = Settings(
        device,
        small,
        steps=1 if small else 10,
        rounds=2 if small else 20,
        compile={"backend": "eager"} if small else {},
        peak=peak or (1e12 if small else None),
        left_out=frozenset(options.leave_out),
    )
    for name in options.rows:
        measure, share = ROWS[name]
        with report.attempt(name):
            measure(report, settings, share * options.seconds)
    code = report.close()
    (options.out / "gpu.md").write_text(report.markdown() + "\n")
    return code


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found = torch.accelerator.current_accelerator(check_available=True)
    parser.add_argument(
        "--device", default=None if found is None else str(found), required=found is None, help="the GPU unless given"
    )
    parser.add_argument("--dry-run", action="store_true", help="tiny models, two rounds of one step, no Inductor")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS), help="all of them unless given")
    parser.add_argument(
        "--seconds", type=float, help="after which nothing new is begun: 330, and no limit for a dry run"
    )
    parser.add_argument("--leave-out", nargs="*", default=[], metavar="NAME", help="contenders, by their names")
    parser.add_argument("--peak", type=float, help="dense bfloat16 TFLOP/s, if the device is not among those known")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"), help="folder for the results")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    sys.exit(main(arguments))
