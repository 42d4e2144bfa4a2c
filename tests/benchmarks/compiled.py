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

`gpu.py` has the same on a GPU, also with CUDA graphs.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from harness import Report, Seconds, Step, compile_without_cache, in_turns, options_of, own_process, parser
from loops import looplib_step, stepping
from models import mlp, transformer
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import looplib as ll

Make = Callable[[], tuple[nn.Module, Callable[..., Tensor], Any]]
MODELS: dict[str, Make] = {"MLP, batch 16": mlp, "transformer, batch 32 x 128": transformer}


def raw(make: Make, compiled: str) -> Step:
    torch.manual_seed(0)
    model, loss_fn, batch = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    called: Any = torch.compile(model) if compiled == "model" else model

    def loss() -> Tensor:
        return loss_fn(called, batch)

    forward: Callable[[], Tensor] = torch.compile(loss) if compiled in ("loss", "all") else loss
    update: Any = torch.compile(optimizer.step) if compiled == "all" else optimizer.step

    def step() -> None:
        optimizer.zero_grad()
        forward().backward()  # type: ignore[no-untyped-call]
        update()

    return step


def looplib(make: Make, donate: bool, compiled: bool) -> Step:
    torch.manual_seed(0)
    return looplib_step(*make(), donate, compile={} if compiled else None)


CONTENDERS: dict[str, Callable[[Make], Step]] = {
    "raw, eager": lambda make: raw(make, ""),
    "raw, model compiled": lambda make: raw(make, "model"),
    "raw, model and loss": lambda make: raw(make, "loss"),
    "raw, model, loss, update": lambda make: raw(make, "all"),
    "looplib donated, eager": lambda make: looplib(make, True, False),
    "looplib donated, compiled": lambda make: looplib(make, True, True),
    "looplib pure, compiled": lambda make: looplib(make, False, True),
}


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


def products_alone(make: Make) -> Step:
    """The matrix products and the attention of a raw step, forward and backward, on the tensors of one step."""
    step = raw(make, "")
    with Products() as products:
        step()

    def again() -> None:
        with torch.no_grad():
            for func, args, kwargs in products.calls:
                func(*args, **kwargs)

    return again


def members() -> Step:
    optimizer = ll.optimizer(torch.optim.AdamW, lr=1e-3)
    states = []
    for seed in range(32):
        torch.manual_seed(seed)
        model, loss_fn, batch = mlp()
        states.append(ll.init_state(model, optimizer, seed=seed))
    train_step = ll.vmap_step(ll.make_train_step(ll.make_grad_fn(model, loss_fn), optimizer, donate=True))
    return stepping(ll.compile_step(train_step), ll.transforms.stack_states(states), batch)


def maml() -> Step:
    from specialists import looplib_maml

    return looplib_maml(compiled=True)[0]


FIRST: dict[str, Callable[[], Step]] = {
    "first step, MLP": lambda: looplib(mlp, True, True),
    "first step, transformer": lambda: looplib(transformer, True, True),
    "first step, transformer, raw, model compiled": lambda: raw(transformer, "model"),
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
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache}
        for process in ("first process", "second process"):
            left = max(60.0, report.end - time.perf_counter())
            passed, processor = own_process(__file__, "--first", row, environment=environment, timeout=left)
            cells = {process: Seconds(passed), f"{process}, processor time": Seconds(processor)}
            report.add(row, cells, "first compiled step")


def main(options: argparse.Namespace) -> int:
    compile_without_cache()
    report = Report("compiled", options, "AdamW")
    models = {"MLP, batch 16": mlp} if options.dry_run else MODELS
    firsts = ["first step, MLP"] if options.dry_run else [row for row in FIRST if "MLP" not in row]
    for row, seconds in report.rows([*firsts, *models], {"transformer, batch 32 x 128": 3.0}):
        if row in FIRST:
            with report.attempt(row):
                first_steps(report, row)
            continue
        make, began = models[row], time.perf_counter()
        steps: dict[str, Step] = {}
        for name, contender in CONTENDERS.items():
            if options.dry_run and name.startswith("raw, m"):
                continue  # compiling each takes many seconds
            with report.attempt(f"{name}, {row}"):
                step = contender(make)
                for _ in range(2):  # which compile
                    step()
                steps[name] = step
        steps["raw, products and attention alone"] = products_alone(make)
        with report.attempt(row):
            times = in_turns(steps, max(0.0, seconds - (time.perf_counter() - began)))
            report.compare(row, times, "raw, eager", "time of a step")
    return report.close()


if __name__ == "__main__":
    options = parser(__doc__, 220.0)
    options.add_argument("--first", choices=list(FIRST), help=argparse.SUPPRESS)
    given = options_of(options)
    if given.first:
        first_step(given.first)
    else:
        sys.exit(main(given))
