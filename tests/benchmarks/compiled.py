"""The step compiled whole against raw loops with and without torch.compile, interleaved in one run.

    python tests/benchmarks/compiled.py

For the tiny MLP and the transformer of 5 million parameters of step_overhead.py, with AdamW: the raw loop with its
fused kernel, eager; the same with the model compiled; with model and loss in one compiled function; with that, and
the optimizer's step compiled as well; looplib donated, eager; and looplib compiled, donated and pure. Steps of all
contenders take turns in shuffled order; the ratio is that of the medians over the rounds. The raw step's matrix products
and attention are also timed alone, on the tensors of one step: no compiler can make the step faster than these.

Before that, the first compiled step of the transformer, of a raw loop with this transformer compiled, of 32 members and
of MAML, each in a process of its own with an empty cache, and again in a second process, which finds it in the cache.
Both times are shown, and the processor time of the process with the compilers that it starts, which other work on the
machine changes less.

With a GPU the same is measured there in CUDA-event time, also with CUDA graphs (`mode="reduce-overhead"` on all
sides), and for GPT-2 small in bf16 under autocast, with its share of the device's matrix peak (--peak, in TFLOP/s).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from harness import ROOT, Report, Seconds, Step, compile_without_cache, in_turns, options_of, parser
from models import Block, Transformer, mlp, next_token, transformer
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import looplib as ll

Make = Callable[[], tuple[nn.Module, Callable[..., Tensor], Any]]
MODELS: dict[str, Make] = {"MLP, batch 16": mlp, "transformer, batch 32 x 128": transformer}


def gpt2() -> tuple[nn.Module, Callable[..., Tensor], Any]:
    """124 million parameters: 12 blocks of width 768, 50,304 tokens, 8 texts of 1,024."""
    model = Transformer(vocabulary=50_304, width=768, depth=0, length=1024)
    model.blocks = nn.Sequential(*[Block(768, 12) for _ in range(12)])
    return model, ll.autocast(next_token), torch.randint(0, 50_304, (8, 1025))


def made(make: Make, device: str) -> tuple[nn.Module, Callable[..., Tensor], Any]:
    torch.manual_seed(0)
    model, loss_fn, batch = make()
    return model.to(device), loss_fn, torch.utils._pytree.tree_map(lambda tensor: tensor.to(device), batch)


def raw(make: Make, device: str, compiled: str, **options: Any) -> Step:
    model, loss_fn, batch = made(make, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    called: Any = torch.compile(model, **options) if compiled == "model" else model

    def loss() -> Tensor:
        return loss_fn(called, batch)

    whole = compiled in ("loss", "all")
    forward: Callable[[], Tensor] = torch.compile(loss, **options) if whole else loss
    update: Any = optimizer.step
    if compiled == "all":
        update = torch.compile(optimizer.step, **options)

    def step() -> None:
        if options:
            torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
        optimizer.zero_grad()
        forward().backward()  # type: ignore[no-untyped-call]
        update()

    return step


def looplib(make: Make, device: str, donate: bool, compile: bool | Mapping[str, Any]) -> Step:
    model, loss_fn, batch = made(make, device)
    optimizer = ll.optimizer(torch.optim.AdamW, lr=1e-3)
    train_step = ll.make_train_step(ll.make_grad_fn(model, loss_fn), optimizer, donate=donate)
    if compile:
        train_step = ll.compile_step(train_step, **({} if compile is True else compile))
    state = ll.init_state(model, optimizer)

    def step() -> None:
        nonlocal state
        state, _ = train_step(state, batch)

    return step


def contenders(make: Make, device: str) -> dict[str, Callable[[], Step]]:
    found: dict[str, Callable[[], Step]] = {
        "raw, eager": lambda: raw(make, device, ""),
        "raw, model compiled": lambda: raw(make, device, "model"),
        "raw, model and loss": lambda: raw(make, device, "loss"),
        "raw, model, loss, update": lambda: raw(make, device, "all"),
        "looplib donated, eager": lambda: looplib(make, device, True, False),
        "looplib donated, compiled": lambda: looplib(make, device, True, True),
        "looplib pure, compiled": lambda: looplib(make, device, False, True),
    }
    if device == "cuda":
        graphs = {"mode": "reduce-overhead"}
        found["raw, all, CUDA graphs"] = lambda: raw(make, device, "all", **graphs)
        found["looplib donated, CUDA graphs"] = lambda: looplib(make, device, True, graphs)
        found["looplib pure, CUDA graphs"] = lambda: looplib(make, device, False, graphs)
    return found


# The raw step's operations that compiling does not change.
PRODUCTS = {"mm", "addmm", "bmm", "_scaled_dot_product_flash_attention_for_cpu"}
PRODUCTS |= {"_scaled_dot_product_flash_attention_for_cpu_backward"}


class Products(TorchDispatchMode):
    """Record the matrix products and attention of what runs within it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[tuple[Callable[..., Any], Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in PRODUCTS:
            self.calls.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def products_alone(make: Make, device: str) -> Step:
    """The matrix products and the attention of a raw step, forward and backward, on the tensors of one step."""
    step = raw(make, device, "")
    with Products() as products:
        step()

    def again() -> None:
        with torch.no_grad():
            for func, args, kwargs in products.calls:
                func(*args, **kwargs)

    return again


def members() -> Step:
    from ensemble import stacked

    return stacked(32, True, True)


def maml() -> Step:
    from specialists import looplib_maml

    return looplib_maml(compiled=True)[0]


FIRST: dict[str, Callable[[], Step]] = {
    "first step, MLP": lambda: looplib(mlp, "cpu", True, True),
    "first step, transformer": lambda: looplib(transformer, "cpu", True, True),
    "first step, transformer, raw, model compiled": lambda: raw(transformer, "cpu", "model"),
    "first step, 32 members": members,
    "first step, MAML": maml,
}


def first_step(row: str) -> None:
    """Print the seconds of a first step, and the processor's with its children."""
    step, begin, spent = FIRST[row](), time.perf_counter(), processor_time()
    step()
    print(json.dumps([time.perf_counter() - begin, processor_time() - spent]))


def processor_time() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def first_steps(report: Report, row: str) -> None:
    """The first step in two processes one after the other, of which the second finds the first one's cache."""
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "PYTHONPATH": paths, "TORCHINDUCTOR_CACHE_DIR": cache}
        for process in ("first process", "second process"):
            command = [sys.executable, __file__, "--first", row]
            left = max(60.0, report.end - time.perf_counter())
            out = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=left, check=False)
            if out.returncode:
                raise RuntimeError(out.stderr.strip().rpartition("\n")[2])
            passed, processor = json.loads(out.stdout.splitlines()[-1])
            cells = {process: Seconds(passed), f"{process}, processor time": Seconds(processor)}
            report.add(row, cells, "first compiled step")


def event_times(steps: dict[str, Step], seconds: float) -> dict[str, list[float]]:
    """Seconds of a step on the device, of runs of ten steps that take turns."""
    found: dict[str, list[float]] = {name: [] for name in steps}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for name in random.sample(list(steps), len(steps)):
            steps[name]()  # the caches are another contender's
            begin, done = torch.Event("cuda", enable_timing=True), torch.Event("cuda", enable_timing=True)
            begin.record()
            for _ in range(10):
                steps[name]()
            done.record()
            done.synchronize()
            found[name].append(begin.elapsed_time(done) / 1e4)
    return found


def main(options: argparse.Namespace) -> int:
    device = options.device
    compile_without_cache()
    report = Report("compiled", options, f"AdamW on {device}")
    models = {**MODELS, **({"GPT-2 small, bf16, batch 8 x 1024": gpt2} if device == "cuda" else {})}
    models = {"MLP, batch 16": mlp} if options.dry_run else models
    firsts = ["first step, MLP"] if options.dry_run else [row for row in FIRST if "MLP" not in row]
    rows = [*(firsts if device == "cpu" else []), *models]
    for row, seconds in report.rows(rows, {"transformer, batch 32 x 128": 3.0}):
        if row in FIRST:
            with report.attempt(row):
                first_steps(report, row)
            continue
        make, began = models[row], time.perf_counter()
        steps: dict[str, Step] = {}
        for name, contender in contenders(make, device).items():
            if options.dry_run and name.startswith("raw, "):
                continue  # compiling each takes many seconds
            with report.attempt(f"{name}, {row}"):
                step = contender()
                for _ in range(2):  # which compile
                    step()
                steps[name] = step
        steps.setdefault("raw, eager", raw(make, device, ""))
        if device == "cpu":
            steps["raw, products and attention alone"] = products_alone(make, device)
        left = max(0.0, seconds - (time.perf_counter() - began))
        with report.attempt(row):
            times = event_times(steps, left) if device == "cuda" else in_turns(steps, left)
            report.compare(row, times, "raw, eager", "time of a step")
            if make is gpt2:
                model, loss_fn, batch = made(make, device)
                with FlopCounterMode(display=False) as counter:
                    ll.make_grad_fn(model, loss_fn)(ll.init_state(model), batch)
                for name, values in times.items():
                    used = counter.get_total_flops() / statistics.median(values) / (options.peak * 1e12)
                    report.add(row, {name: f"{used:.1%}"}, "share of the matrix peak")
    return report.close()


if __name__ == "__main__":
    options = parser(__doc__, 220.0)
    options.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cuda or cpu")
    options.add_argument("--first", choices=list(FIRST), help=argparse.SUPPRESS)
    options.add_argument("--peak", type=float, default=989.0, help="dense TFLOP/s in bf16, of an H100 or H200")
    given = options_of(options)
    if given.first:
        first_step(given.first)
    else:
        sys.exit(main(given))
