"""Cost of a step against the raw loop: time and memory, interleaved in one run.

    python tests/benchmarks/step_overhead.py

For a tiny MLP and a transformer of 5 million parameters, with fused AdamW everywhere, plain and with a schedule and
clipping by the global norm: the raw loop (`clip_grad_norm_`, `LambdaLR`), and looplib's step donated and pure. Blocks
of steps of all contenders alternate in shuffled order; the ratio is that of the median times of a step. Peak memory
is measured in a separate process for each contender, above its memory before the first step.

glibc returns memory to the system and takes it again, page by page, depending on which tensor is at the end of its
heap. This depends on the order of the first allocations, and accounts for about 1% of a transformer's step either
way. The benchmark therefore tells glibc to keep its memory, for all contenders (--system-malloc does not).
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import looplib as ll

Step = Callable[[], object]
MAX_NORM = 1.0


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


class Transformer(nn.Module):
    """4.9 million parameters: six blocks of width 256, tied embedding of 512 tokens."""

    def __init__(self, vocabulary: int = 512, width: int = 256, depth: int = 6, length: int = 128) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*[Block(width, 4) for _ in range(depth)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        out: Tensor = self.head(self.norm(self.blocks(self.tokens(tokens) + self.places(places))))
        return out


def classify(model: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    return F.cross_entropy(model(x), y)


def next_token(model: nn.Module, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def mlp() -> tuple[nn.Module, Callable[..., Tensor], Any]:
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))
    return model, classify, (torch.randn(16, 32), torch.randint(0, 10, (16,)))


def transformer() -> tuple[nn.Module, Callable[..., Tensor], Any]:
    return Transformer(), next_token, torch.randint(0, 512, (32, 129))


MODELS = {"MLP 32-64-10, batch 16": mlp, "transformer, 4.9 M, batch 32 x 128": transformer}


def decay(step: int) -> float:
    return 1.0 / (1.0 + 1e-4 * step)


def raw(model_name: str, extras: bool) -> Step:
    torch.manual_seed(0)
    model, loss_fn, batch = MODELS[model_name]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, decay)

    def plain() -> None:
        optimizer.zero_grad()
        loss_fn(model, batch).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    def with_extras() -> None:
        optimizer.zero_grad()
        loss_fn(model, batch).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        scheduler.step()

    return with_extras if extras else plain


def looplib(model_name: str, extras: bool, donate: bool) -> Step:
    torch.manual_seed(0)
    model, loss_fn, batch = MODELS[model_name]()
    grad_fn = ll.make_grad_fn(model, loss_fn)
    if extras:
        grad_fn = ll.clip_by_global_norm(grad_fn, MAX_NORM)
    optimizer = ll.optimizer(torch.optim.AdamW, lr=(lambda step: 1e-3 * decay(step)) if extras else 1e-3)
    train_step = ll.make_train_step(grad_fn, optimizer, donate=donate)
    state = ll.init_state(model, optimizer)

    def step() -> None:
        nonlocal state
        state, _ = train_step(state, batch)

    return step


CONTENDERS: dict[str, Callable[[str, bool], Step]] = {
    "raw loop": raw,
    "looplib, donated": lambda model_name, extras: looplib(model_name, extras, True),
    "looplib, pure": lambda model_name, extras: looplib(model_name, extras, False),
}


def times(steps: dict[str, Step], seconds: float) -> dict[str, list[float]]:
    """Microseconds of each step, of blocks that take turns."""
    found: dict[str, list[float]] = {name: [] for name in steps}
    for step in steps.values():
        for _ in range(5):
            step()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for name in random.sample(list(steps), len(steps)):
            step = steps[name]
            if not found[name] or found[name][-1] < 50_000:
                step()  # the caches are another contender's
            begin = time.perf_counter()
            while time.perf_counter() - begin < 0.05:
                start = time.perf_counter_ns()
                step()
                found[name].append((time.perf_counter_ns() - start) / 1000)
    return found


def peak_memory(model_name: str, extras: bool, name: str) -> float:
    """MiB by which a process of its own grows, at most, over ten steps."""
    code = (
        "import sys, resource; sys.path.insert(0, sys.argv[1]); import step_overhead as b, torch; "
        "torch.set_num_threads(1); step = b.CONTENDERS[sys.argv[2]](sys.argv[3], sys.argv[4] == 'True'); "
        "before = int(open('/proc/self/statm').read().split()[1]) * resource.getpagesize() / 2**20; "
        "[step() for _ in range(10)]; print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10 - before)"
    )
    here = __file__.rpartition("/")[0] or "."
    out = subprocess.run(
        [sys.executable, "-c", code, here, name, model_name, str(extras)], capture_output=True, text=True, check=True
    )
    return float(out.stdout)


def main(seconds: float, memory: bool) -> None:
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, one thread, fused AdamW, medians over {seconds:.0f} s a row")
    for model_name in MODELS:
        for extras in (False, True):
            print(f"\n{model_name}{', schedule and clipping' if extras else ''}")
            found = times({name: make(model_name, extras) for name, make in CONTENDERS.items()}, seconds)
            base = statistics.median(found["raw loop"])
            for name, values in found.items():
                median = statistics.median(values)
                line = f"  {name:18} {median:10.1f} us a step   {median / base:5.3f} x raw   ({len(values)} steps)"
                if memory:
                    peaks = [peak_memory(model_name, extras, name) for _ in range(3)]
                    line += f"   peak {statistics.median(peaks):7.1f} MiB"
                print(line)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=40.0, help="for each of the four rows")
    parser.add_argument("--system-malloc", action="store_true", help="let glibc trim its heap")
    parser.add_argument("--no-memory", action="store_true", help="times alone")
    arguments = parser.parse_args()
    keep = {"MALLOC_TRIM_THRESHOLD_": str(1 << 32), "MALLOC_MMAP_THRESHOLD_": str(1 << 25)}
    if not arguments.system_malloc and not keep.items() <= os.environ.items():
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **keep})
    main(arguments.seconds, not arguments.no_memory)
