"""Cost of a step of eight microbatches against a raw loop of eight backward calls: time and memory, interleaved.

    python tests/benchmarks/accumulate.py

For a tiny MLP (8 microbatches of 16 samples) and a transformer of 5 million parameters (8 microbatches of 4 x 128
tokens), with fused AdamW everywhere: the raw loop (`(loss / 8).backward()` and the sum of the losses), looplib
donated and pure, `accelerate` following its documentation (`accelerator.accumulate`), and the transformers Trainer.
Updates of all contenders take turns in shuffled order; the ratio is that of the medians over the rounds. All get
their batches from memory; the Trainer's come through its DataLoader, which cannot be avoided. Peak memory is measured
in a separate process for each contender, above its memory before the model is made (Linux); there also for the whole
batch at once, and with activation checkpointing of the transformer's blocks.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import tempfile
import threading
from collections.abc import Callable
from typing import Any

import torch
from harness import Mebibytes, Report, Step, in_turns, options_of, parser, peak_memory, quiet_arguments
from loops import looplib_step, raw_step
from models import Block, mlp, transformer
from torch import Tensor, nn

import looplib as ll

PIECES = 8


MODELS: dict[str, Callable[[], tuple[nn.Module, Callable[..., Tensor], Any]]] = {
    "MLP, 8 x 16": lambda: mlp(16 * PIECES),
    "transformer, 8 x 4 x 128": transformer,
}


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


def looplib(model_name: str, donate: bool, pieces: int = PIECES, recompute: bool = False) -> Step:
    model, loss_fn, batch = MODELS[model_name]()
    if recompute:
        loss_fn = ll.losses.recompute(loss_fn, (Block, nn.ReLU))
    return looplib_step(
        model, loss_fn, batch, donate, wrap=lambda grad_fn: ll.accumulate(grad_fn, microbatches=pieces)
    )


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

    arguments = quiet_arguments(
        tempfile.mkdtemp(), gradient_accumulation_steps=PIECES, max_steps=1_000_000, optim="adamw_torch_fused"
    )
    thread = threading.Thread(target=Quiet(model, arguments, callbacks=[Turns()]).train, daemon=True)
    thread.start()

    def step() -> None:
        go.release()
        done.acquire()

    return step


CONTENDERS: dict[str, Callable[[str], Step]] = {
    "raw": raw,
    "donated": lambda name: looplib(name, True),
    "pure": lambda name: looplib(name, False),
    "accelerate": accelerate,
    "Trainer": trainer,
}
NEEDS = {"accelerate": ["accelerate"], "Trainer": ["transformers.trainer", "accelerate"]}
MEMORY_ALONE: dict[str, Callable[[str], Step]] = {
    "raw, one batch": lambda name: raw_step(*MODELS[name]()),
    "one batch, recompute": lambda name: looplib(name, True, pieces=1, recompute=True),
    "donated, recompute": lambda name: looplib(name, True, recompute=True),
}


def contender(name: str, model_name: str) -> Step:
    """For `peak_memory`, in another process."""
    return {**CONTENDERS, **MEMORY_ALONE}[name](model_name)


def main(options: argparse.Namespace) -> None:
    report = Report("accumulate", options, f"fused AdamW, {PIECES} microbatches")
    names = [*report.available({name: NEEDS.get(name, []) for name in CONTENDERS})]
    models = list(MODELS)[: 1 if options.dry_run else None]  # the transformer takes seconds an update
    for model_name, seconds in report.rows(models, {"MLP, 8 x 16": 0.5}):
        with report.attempt(model_name):
            times = in_turns({name: CONTENDERS[name](model_name) for name in names}, seconds * 0.5)
            report.compare(model_name, times, "raw", "time of an update")
        if options.no_memory:
            continue
        for name in [*names, *MEMORY_ALONE]:
            with report.attempt(f"memory of {name}, {model_name}"):
                peak = Mebibytes(
                    peak_memory("accumulate", "contender", name, model_name, "2", needs=NEEDS.get(name, []))
                )
                report.add(model_name, {name: peak}, "peak memory above the start")
    code = report.close()
    sys.stdout.flush()
    os._exit(code)  # the Trainers wait for a turn that will not come


if __name__ == "__main__":
    made = parser(__doc__, 170.0)
    made.add_argument("--no-memory", action="store_true", help="times alone")
    main(options_of(made))
