"""The same training by looplib, by raw loops, by nanoGPT's loop, by the transformers Trainer and by Lightning.

A contender is a function that trains so many more steps and returns the seconds of one, with the device waited for at
the beginning and the end. All use AdamW's fused kernel, and the same batches in turns.
"""

from __future__ import annotations

import importlib
import logging
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import torch
from harness import quiet_arguments
from torch import Tensor, nn

import looplib as ll
from on_gpu.device import wait
from on_gpu.models import Task

Measure = Callable[[int], float]
LR, BETAS, DECAY = 6e-4, (0.9, 0.95), 0.1


@dataclass(frozen=True)
class Contender:
    """A training that is under way.

    Attributes:
        measure: trains so many steps, and returns the seconds of one.
        step: one step alone, if the loop can be taken apart.
        loss: the loss of the last step.
        more: steps that a call trains beside those that were asked for.
    """

    measure: Measure
    step: Callable[[], object] | None
    loss: Callable[[], float]
    more: int = 0


Make = Callable[[Task, torch.device, Mapping[str, Any]], Contender]


def own_loop(step: Callable[[], object], device: torch.device, loss: Callable[[], float]) -> Contender:
    """A contender of a loop that we write."""

    def measure(steps: int) -> float:
        wait(device)
        begin = time.perf_counter()
        for _ in range(steps):
            step()
        wait(device)
        return (time.perf_counter() - begin) / steps

    return Contender(measure, step, loss)


def adamw(model: nn.Module, **options: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=LR, betas=BETAS, weight_decay=DECAY, fused=True, **options)


def looplib(donate: bool = True, compiled: str = "", mode: str | None = None) -> Make:
    """looplib's step, eager or compiled by "blocks" or as a "whole", with this mode of torch.compile."""

    def make(task: Task, device: torch.device, options: Mapping[str, Any]) -> Contender:
        model = task.make()
        if compiled == "blocks":
            for module in model.modules():
                if isinstance(module, task.blocks):
                    module.compile(**options)
        loss_fn = ll.autocast(task.loss_fn, task.autocast) if task.autocast else task.loss_fn
        grad_fn = ll.make_grad_fn(model, loss_fn)
        optimizer = ll.optimizer(torch.optim.AdamW, lr=LR, betas=BETAS, weight_decay=DECAY)
        if task.max_norm:
            optimizer = ll.chain(ll.clip_by_global_norm(task.max_norm), optimizer)
        train_step = ll.make_train_step(grad_fn, optimizer, donate=donate)
        if compiled == "whole":
            train_step = ll.compile_step(train_step, **(options or {"mode": mode}))
        state, batches = ll.init_state(model, optimizer), cycle(task.batches)
        metrics: dict[str, Any] = {}

        def step() -> None:
            nonlocal state, metrics
            state, metrics = train_step(state, next(batches))

        return own_loop(step, device, lambda: ll.compute(metrics)["loss"])

    return make


def raw(compiled: bool = False, mode: str | None = None) -> Make:
    """The loop as everyone writes it, and nanoGPT's: its model compiled, autocast, clipping, a fused AdamW.

    Of nanoGPT's train.py this leaves out what it does not do at these settings: gradient accumulation, the scaler,
    which is disabled in bfloat16, and DDP. The learning rate is constant, and the loss is read at the end alone.
    """

    def make(task: Task, device: torch.device, options: Mapping[str, Any]) -> Contender:
        model = task.make()
        called: Any = torch.compile(model, **(options or {"mode": mode})) if compiled else model
        context = torch.autocast(device.type, task.autocast) if task.autocast else nullcontext()
        optimizer, batches, loss = adamw(model), cycle(task.batches), torch.zeros(())

        def step() -> None:
            nonlocal loss
            if mode == "reduce-overhead":
                torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
            with context:
                loss = task.loss_fn(called, next(batches))
            loss.backward()  # type: ignore[no-untyped-call]
            if task.max_norm:
                torch.nn.utils.clip_grad_norm_(model.parameters(), task.max_norm)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        return own_loop(step, device, lambda: loss.item())

    return make


def captured(task: Task, device: torch.device, options: Mapping[str, Any]) -> Contender:
    """The whole raw step captured by hand, as on torch's page on CUDA graphs; a plain step where there are none."""
    model = task.make()
    can_capture = device.type == "cuda"
    optimizer = adamw(model, capturable=can_capture)
    static = [part.clone() for part in task.batches[0]]
    batches = cycle(task.batches)
    loss = torch.zeros((), device=device)

    def plain() -> None:
        optimizer.zero_grad(set_to_none=True)
        found = task.loss_fn(model, static)
        found.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        loss.copy_(found.detach())

    replay: Callable[[], object] = plain
    if can_capture:
        beside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):
            for _ in range(3):
                plain()
        torch.cuda.current_stream().wait_stream(beside)
        graph = torch.cuda.CUDAGraph()
        optimizer.zero_grad(set_to_none=True)
        with torch.cuda.graph(graph):
            plain()
        replay = graph.replay

    def step() -> None:
        for into, part in zip(static, next(batches), strict=True):
            into.copy_(part)
        replay()

    return own_loop(step, device, lambda: loss.item())


class Stamps:
    """Times at two calls of the loss function, for libraries that own the loop."""

    def __init__(self, device: torch.device, first: int, last: int) -> None:
        self.device, self.wanted, self.calls = device, (first, last), 0
        self.times: list[float] = []

    def note(self) -> None:
        if self.calls in self.wanted:
            wait(self.device)
            self.times.append(time.perf_counter())
        self.calls += 1

    def seconds(self) -> float:
        first, last = self.wanted
        return (self.times[1] - self.times[0]) / (last - first)


class Endless(torch.utils.data.IterableDataset[Tensor]):
    """The batches in turns, which a loader hands on as they are."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        return cycle(self.batches)


WARM = 2  # steps of each call before those that count
MORE = WARM + 1  # and one after them, whose beginning is their end


def trainer(task: Task, device: torch.device, options: Mapping[str, Any]) -> Contender:
    """transformers' Trainer with everything beside training off, and the model compiled."""
    transformers = importlib.import_module("transformers")
    importlib.import_module("accelerate")
    model = task.make()
    model.compile(**options)
    optimizer = adamw(model)
    last = torch.zeros(())
    stamps = Stamps(device, 0, 1)

    class Trainer(transformers.Trainer):  # type: ignore[misc, name-defined]
        def compute_loss(self, model: nn.Module, inputs: Any, *_: Any, **__: Any) -> Tensor:
            nonlocal last
            stamps.note()
            last = task.loss_fn(model, inputs["batch"])
            return last

    def measure(steps: int) -> float:
        nonlocal stamps
        stamps = Stamps(device, WARM, WARM + steps)
        with tempfile.TemporaryDirectory() as folder:
            arguments = quiet_arguments(
                folder,
                per_device_train_batch_size=1,
                max_steps=steps + MORE,
                bf16=task.autocast is torch.bfloat16,
                max_grad_norm=task.max_norm or 0.0,
                use_cpu=device.type == "cpu",
            )
            if device.type != "cpu":
                arguments._n_gpu = 1  # more would be wrapped in DataParallel
            made = Trainer(
                model,
                arguments,
                lambda items: {"batch": items[0]},
                Endless(task.batches),
                optimizers=(optimizer, None),
            )
            made.remove_callback(transformers.PrinterCallback)
            made.train()
        return stamps.seconds()

    return Contender(measure, None, lambda: last.item(), MORE)


def lightning(task: Task, device: torch.device, options: Mapping[str, Any]) -> Contender:
    """Lightning's Trainer, barebones, and the model compiled."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    pytorch = importlib.import_module("lightning.pytorch")
    model = task.make()
    model.compile(**options)
    optimizer = adamw(model)
    last = torch.zeros(())
    stamps = Stamps(device, 0, 1)

    class Module(pytorch.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Any, _: int) -> Tensor:
            nonlocal last
            stamps.note()
            last = task.loss_fn(self.model, batch)
            return last

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return optimizer

        def configure_gradient_clipping(self, *_: Any, **__: Any) -> None:  # gradient_clip_val refuses fused kernels
            if task.max_norm:
                torch.nn.utils.clip_grad_norm_(self.parameters(), task.max_norm)

    module = Module()
    loader = torch.utils.data.DataLoader(Endless(task.batches), batch_size=None)

    def measure(steps: int) -> float:
        nonlocal stamps
        stamps = Stamps(device, WARM, WARM + steps)
        made = pytorch.Trainer(
            accelerator="cpu" if device.type == "cpu" else "auto",
            devices=1,
            max_steps=steps + MORE,
            precision="bf16-mixed" if task.autocast is torch.bfloat16 else "32-true",
            barebones=True,
        )
        made.fit(module, loader)
        module.to(device)  # fit leaves it on the CPU when it ends
        return stamps.seconds()

    return Contender(measure, None, lambda: last.item(), MORE)
