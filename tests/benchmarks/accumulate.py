"""Cost of a step of eight microbatches against a raw loop of eight backward calls: time and memory, interleaved.

    python tests/benchmarks/accumulate.py

For a tiny MLP (8 microbatches of 16 samples) and a transformer of 5 million parameters (8 microbatches of 4 x 128
tokens), with fused AdamW everywhere: the raw loop (`(loss / 8).backward()` and the sum of the losses), looplib
donated and pure, `accelerate` following its documentation (`accelerator.accumulate`), and the transformers Trainer.
Updates of all contenders alternate in shuffled order; the ratio is that of the median times of an update. All get
their batches from memory; the Trainer's come through its DataLoader, which cannot be avoided. Peak memory is measured
in a separate process for each contender, above its memory before the first update (Linux); there also for the whole
batch at once, and with activation checkpointing of the transformer's blocks.
"""

from __future__ import annotations

import argparse
import importlib
import os
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from typing import Any

import torch
from step_overhead import Block, Step, classify, times, transformer
from torch import Tensor, nn

import looplib as ll

PIECES = 8


def mlp() -> tuple[nn.Module, Callable[..., Tensor], Any]:
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))
    return model, classify, (torch.randn(16 * PIECES, 32), torch.randint(0, 10, (16 * PIECES,)))


MODELS = {"MLP 32-64-10, 8 x 16": mlp, "transformer, 4.9 M, 8 x 4 x 128": transformer}


def pieces_of(batch: Any) -> list[Any]:
    if isinstance(batch, Tensor):
        return list(batch.chunk(PIECES))
    return list(zip(*[tensor.chunk(PIECES) for tensor in batch], strict=True))


def raw(model_name: str) -> Step:
    model, loss_fn, batch = MODELS[model_name]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    pieces = pieces_of(batch)

    def step() -> None:
        optimizer.zero_grad()
        total: Tensor | float = 0.0
        for piece in pieces:
            loss = loss_fn(model, piece) / PIECES
            loss.backward()  # type: ignore[no-untyped-call]
            total = total + loss.detach()
        optimizer.step()

    return step


def one_batch(model_name: str) -> Step:
    model, loss_fn, batch = MODELS[model_name]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    def step() -> None:
        optimizer.zero_grad()
        loss_fn(model, batch).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return step


def looplib(model_name: str, donate: bool, pieces: int = PIECES, recompute: bool = False) -> Step:
    model, loss_fn, batch = MODELS[model_name]()
    optimizer = ll.optimizer(torch.optim.AdamW, lr=1e-3)
    if recompute:
        loss_fn = ll.losses.recompute(loss_fn, (Block, nn.ReLU))
    grad_fn = ll.accumulate(ll.make_grad_fn(model, loss_fn), microbatches=pieces)
    train_step = ll.make_train_step(grad_fn, optimizer, donate=donate)
    state = ll.init_state(model, optimizer)

    def step() -> None:
        nonlocal state
        state, _ = train_step(state, batch)

    return step


def accelerate(model_name: str) -> Step:
    model, loss_fn, batch = MODELS[model_name]()
    accelerator = importlib.import_module("accelerate").Accelerator(cpu=True, gradient_accumulation_steps=PIECES)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    model, optimizer = accelerator.prepare(model, optimizer)
    pieces = pieces_of(batch)

    def step() -> None:
        total: Tensor | float = 0.0
        for piece in pieces:
            with accelerator.accumulate(model):
                loss = loss_fn(model, piece)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                total = total + loss.detach() / PIECES

    return step


class Rows(torch.utils.data.Dataset[Any]):
    """Dataset whose items are microbatches, so that the DataLoader has nothing to collate."""

    def __init__(self, pieces: list[Any]) -> None:
        self.pieces = pieces

    def __len__(self) -> int:
        return 10_000_000

    def __getitem__(self, index: int) -> Any:
        return self.pieces[index % len(self.pieces)]


def trainer(model_name: str) -> Step:
    """The real Trainer in a thread, which waits before each update for its turn."""
    transformers = importlib.import_module("transformers")
    model, loss_fn, batch = MODELS[model_name]()
    go, done = threading.Semaphore(0), threading.Semaphore(0)

    class Turns(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            go.acquire()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            done.release()

    class Quiet(transformers.Trainer):  # type: ignore[misc, name-defined]
        def compute_loss(self, model: nn.Module, inputs: Any, *_: Any, **__: Any) -> Tensor:
            return loss_fn(model, inputs["piece"])

        def get_train_dataloader(self) -> Any:
            def collate(items: list[Any]) -> dict[str, Any]:
                return {"piece": items[0]}

            return torch.utils.data.DataLoader(Rows(pieces_of(batch)), batch_size=1, collate_fn=collate)

    arguments = transformers.TrainingArguments(
        tempfile.mkdtemp(),
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        save_strategy="no",
        logging_strategy="no",
        gradient_accumulation_steps=PIECES,
        max_steps=1_000_000,
        max_grad_norm=0,
        optim="adamw_torch_fused",
        lr_scheduler_type="constant",
        remove_unused_columns=False,
    )
    thread = threading.Thread(target=Quiet(model, arguments, callbacks=[Turns()]).train, daemon=True)
    thread.start()

    def step() -> None:
        go.release()
        done.acquire()

    return step


CONTENDERS: dict[str, Callable[[str], Step]] = {
    "raw loop": raw,
    "looplib, donated": lambda name: looplib(name, True),
    "looplib, pure": lambda name: looplib(name, False),
    "accelerate": accelerate,
    "transformers Trainer": trainer,
}
MEMORY_ALONE: dict[str, Callable[[str], Step]] = {
    "raw, one batch": one_batch,
    "one batch, recompute": lambda name: looplib(name, True, pieces=1, recompute=True),
    "8 pieces, recompute": lambda name: looplib(name, True, recompute=True),
}


def peak_memory(model_name: str, name: str) -> float:
    """MiB by which a process of its own grows, at most, over five updates."""
    code = (
        "import sys, os, re, resource; sys.path.insert(0, sys.argv[1]); import accumulate as b, torch; "
        "torch.set_num_threads(1); step = {**b.CONTENDERS, **b.MEMORY_ALONE}[sys.argv[2]](sys.argv[3]); "
        "before = int(open('/proc/self/statm').read().split()[1]) * resource.getpagesize() / 2**20; "
        # the peak of the imports is forgotten
        "open('/proc/self/clear_refs', 'w').write('5'); [step() for _ in range(5)]; "
        "print(int(re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1]) / 2**10 - before); "
        "sys.stdout.flush(); os._exit(0)"
    )
    here = __file__.rpartition("/")[0] or "."
    out = subprocess.run([sys.executable, "-c", code, here, name, model_name], capture_output=True, text=True)
    if out.returncode:
        raise RuntimeError(out.stderr)
    return float(out.stdout.split()[-1])


def main(seconds: float, memory: bool) -> None:
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, one thread, fused AdamW, {PIECES} pieces, {seconds:.0f} s a model")
    for model_name in MODELS:
        print(f"\n{model_name}")
        found = times({name: make(model_name) for name, make in CONTENDERS.items()}, seconds)
        base = statistics.median(found["raw loop"])
        for name in [*CONTENDERS, *(MEMORY_ALONE if memory else ())]:
            line = f"  {name:21}"
            if name in found:
                median = statistics.median(found[name])
                line += (
                    f"{median / 1000:10.3f} ms an update  {median / base:5.3f} x raw  ({len(found[name])} updates)"
                )
            if memory:
                peaks = [peak_memory(model_name, name) for _ in range(3)]
                line += f"  peak {statistics.median(peaks):7.1f} MiB"
            print(line, flush=True)
    sys.stdout.flush()
    os._exit(0)  # the Trainers wait for a turn that will not come


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="for each of the two models")
    parser.add_argument("--system-malloc", action="store_true", help="let glibc trim its heap (see step_overhead.py)")
    parser.add_argument("--no-memory", action="store_true", help="times alone")
    arguments = parser.parse_args()
    keep = {"MALLOC_TRIM_THRESHOLD_": str(1 << 32), "MALLOC_MMAP_THRESHOLD_": str(1 << 25)}
    if not arguments.system_malloc and not keep.items() <= os.environ.items():
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **keep})
    main(arguments.seconds, not arguments.no_memory)
