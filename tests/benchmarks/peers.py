"""The same training with looplib, a raw loop and six other libraries, interleaved in one run: a table of ratios.

    pip install -e ".[peers]" && python tests/benchmarks/peers.py
    python tests/benchmarks/peers.py --seconds 60 --samples 20000 --parameters 1e6     (small)

Each library is used as its own documentation does it, with logging, progress bars, evaluation and clipping off. All
get the same batches and the same fused AdamW. A row is not measured if any library ends with different weights than
the raw loop, resumes with a different batch or loss, or finds a different accuracy. Libraries that own the loop are
not taken apart to be timed: the loss function, which all of them call once per step, records the time of each call.

- A step: the median time between two calls, of an epoch with the data read as each library does it (DataLoader;
  `make_loader` for looplib), with batches that were made in advance, and for a transformer of 4.9 million parameters.
- Resume: with the data in memory and the checkpoint on disk, until the first new batch reaches the loss function.
- Evaluation: MiB by which a separate process grows for loss and accuracy of 20,000 x 5,000 logits (Linux).
- Checkpoint: additional time of a step that saves, in the background if the library can.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import gc
import importlib
import json
import logging
import os
import random
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import evaluation
import torch
import torch.nn.functional as F
from harness import Mebibytes, Report, growth_of, options_of, own_process, parser, quiet_arguments, ratio
from harness import Seconds as Taken
from models import Transformer, classify, mlp, next_token
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import looplib as ll

LossFn = Callable[[Any, Any], Tensor]
Found = dict[str, list[float]]  # of each contender
DEPTH = 48  # linear layers of the model that is saved, as in checkpoint.py


@dataclass
class Run:
    """One epoch of training, which ends with the module's own weights changed.

    Attributes:
        batch_size: None where the items of `data` are batches.
        folder, save_every: where a checkpoint goes, and after how many steps.
        resume: begin with the checkpoint in `folder`.
    """

    model: nn.Module
    loss_fn: LossFn
    data: Any
    batch_size: int | None
    shuffle: bool = False
    folder: Path | None = None
    save_every: int = 0
    resume: bool = False

    def optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True)

    def batches(self, kind: Any = DataLoader) -> Any:
        if self.batch_size is None:
            return self.data
        order = torch.Generator().manual_seed(0) if self.shuffle else None
        return kind(self.data, self.batch_size, shuffle=self.shuffle, generator=order)

    def saved(self) -> Path:
        """The one checkpoint in the folder."""
        assert self.folder
        (found,) = self.folder.iterdir()
        return found


class Batches(list[Any]):
    """Made beforehand. A plain list would be taken by Lightning for several loaders."""


def raw(run: Run) -> None:
    model, optimizer, start = run.model, run.optimizer(), 0
    if run.resume:
        saved = torch.load(run.saved(), weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        start = saved["step"]

    def save(step: int, path: Path) -> None:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, path)

    own_loop(run, islice(run.batches(), start, None), model, optimizer, Tensor.backward, save, start)


def own_loop(
    run: Run,
    batches: Any,
    model: Any,
    optimizer: Any,
    backward: Any,
    save: Callable[[int, Path], object],
    start: int = 0,
) -> None:
    """The loop of those that leave it to the user."""
    for step, batch in enumerate(batches, start + 1):
        optimizer.zero_grad()
        loss = run.loss_fn(model, batch)
        backward(loss)
        optimizer.step()
        if run.save_every and step % run.save_every == 0:
            assert run.folder
            save(step, run.folder / str(step))


def looplib(run: Run, donate: bool = True) -> None:
    optimizer = ll.optimizer(torch.optim.AdamW, lr=1e-3)
    train_step = ll.make_train_step(ll.make_grad_fn(run.model, run.loss_fn), optimizer, donate=donate)
    state, batches = ll.init_state(run.model, optimizer), run.data
    ckpt = ll.checkpoint_io(run.folder, asynchronous=True) if run.folder else None
    if run.resume:
        assert ckpt
        state = ckpt.restore(state, quiet=True)
    if run.batch_size:
        order = ll.data.shuffled() if run.shuffle else ll.data.sequential()
        batches = ll.make_loader(run.data, batch_size=run.batch_size, order=order)(state)
    save_now = ll.every_n_steps(run.save_every or sys.maxsize)
    try:
        for batch in batches:
            state, _ = train_step(state, batch)
            if ckpt and save_now(state):
                ckpt.save(state)
    finally:
        if ckpt:
            ckpt.wait()
    ll.bind(run.model, state)


def trainer(run: Run) -> None:
    transformers = importlib.import_module("transformers")

    class Trainer(transformers.Trainer):  # type: ignore[misc, name-defined]
        def compute_loss(self, model: nn.Module, inputs: Any, *_: Any, **__: Any) -> Tensor:
            return run.loss_fn(model, inputs["batch"])

    def collate(items: list[Any]) -> dict[str, Any]:
        return {"batch": torch.utils.data.default_collate(items) if run.batch_size else items[0]}

    arguments = quiet_arguments(
        str(run.folder or tempfile.gettempdir()),
        per_device_train_batch_size=run.batch_size or 1,
        num_train_epochs=1,
        train_sampling_strategy="random" if run.shuffle else "sequential",
        save_strategy="steps" if run.save_every else "no",
        save_steps=run.save_every or 1,
    )
    made = Trainer(run.model, arguments, collate, run.data, optimizers=(run.optimizer(), None))
    made.remove_callback(transformers.PrinterCallback)
    made.train(resume_from_checkpoint=str(run.saved()) if run.resume else None)


def accelerate(run: Run) -> None:
    library, utils = importlib.import_module("accelerate"), importlib.import_module("accelerate.utils")
    config = utils.DataLoaderConfiguration(use_seedable_sampler=True)
    accelerator = library.Accelerator(cpu=True, dataloader_config=config)
    utils.set_seed(0)
    model, optimizer, loader = run.model, run.optimizer(), run.batches()
    if run.batch_size:
        loader = accelerator.prepare(loader)
    model, optimizer = accelerator.prepare(model, optimizer)
    start, batches = 0, loader
    if run.resume:
        accelerator.load_state(str(run.saved()))
        start = int(run.saved().name)
        batches = accelerator.skip_first_batches(loader, start)
    save = lambda step, path: accelerator.save_state(str(path))  # noqa: E731
    own_loop(run, batches, model, optimizer, accelerator.backward, save, start)


def stateful_loader() -> Any:
    """torchdata's, whose place in the epoch Lightning and TorchTNT put into their checkpoints."""
    return importlib.import_module("torchdata.stateful_dataloader").StatefulDataLoader


def lightning(run: Run) -> None:
    pytorch = importlib.import_module("lightning.pytorch")

    class Module(pytorch.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.model = run.model

        def training_step(self, batch: Any, _: int) -> Tensor:
            return run.loss_fn(self.model, batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return run.optimizer()

    options: dict[str, Any] = {"barebones": True}
    if run.folder:
        save = importlib.import_module("lightning.pytorch.callbacks").ModelCheckpoint(
            run.folder, every_n_train_steps=run.save_every or None, save_top_k=-1
        )
        write = importlib.import_module("lightning.pytorch.plugins.io").AsyncCheckpointIO()
        off = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        options = {"callbacks": [save], "plugins": [write], **off}
    made = pytorch.Trainer(accelerator="cpu", devices=1, max_epochs=1, **options)
    loader = run.batches(stateful_loader() if run.shuffle else DataLoader)
    made.fit(Module(), loader, ckpt_path=run.saved() if run.resume else None, weights_only=False)


def fabric(run: Run) -> None:
    assert not run.resume
    made = importlib.import_module("lightning.fabric").Fabric(accelerator="cpu", devices=1)
    model, optimizer = made.setup(run.model, run.optimizer())
    batches = run.batches()
    if run.batch_size:
        batches = made.setup_dataloaders(batches)

    def save(step: int, path: Path) -> None:
        made.save(path, {"model": model, "optimizer": optimizer, "step": step})

    own_loop(run, batches, model, optimizer, made.backward, save)


def ignite(run: Run) -> None:
    engines, handlers = importlib.import_module("ignite.engine"), importlib.import_module("ignite.handlers")
    model, optimizer = run.model, run.optimizer()

    def update(_: Any, batch: Any) -> Tensor:
        optimizer.zero_grad()
        loss = run.loss_fn(model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss.detach()

    # The one that finds its place in the data again is another engine.
    engine = (engines.DeterministicEngine if run.shuffle else engines.Engine)(update)
    parts = {"model": model, "optimizer": optimizer, "trainer": engine}
    if run.shuffle:
        torch.manual_seed(0)
    if run.save_every:
        save = handlers.Checkpoint(parts, handlers.DiskSaver(str(run.folder), require_empty=False))
        engine.add_event_handler(engines.Events.ITERATION_COMPLETED(every=run.save_every), save)
    if run.resume:
        handlers.Checkpoint.load_objects(parts, torch.load(run.saved(), weights_only=False))
        engine.run(run.batches())
    else:
        engine.run(run.batches(), max_epochs=1)


def torchtnt(run: Run) -> None:
    framework = importlib.import_module("torchtnt.framework")
    unit_class: Any = framework.unit.TrainUnit

    class Unit(unit_class):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model, self.optimizer = run.model, run.optimizer()

        def train_step(self, state: Any, data: Any) -> None:
            self.optimizer.zero_grad()
            loss = run.loss_fn(self.model, data)
            loss.backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()

    unit, loader, callbacks = Unit(), run.batches(stateful_loader() if run.shuffle else DataLoader), []
    saver = importlib.import_module("torchtnt.framework.callbacks.dcp_saver").DistributedCheckpointSaver
    if run.save_every:
        callbacks = [saver(str(run.folder), save_every_n_train_steps=run.save_every, async_checkpoint=True)]
    if run.resume:
        saver.restore(str(run.saved()), unit, train_dataloader=loader)
    framework.train(unit, loader, max_epochs=1, callbacks=callbacks)


RAW, LOOPLIB, PURE, TRAINER = "raw loop", "looplib", "looplib, pure", "Trainer"
CONTENDERS: dict[str, Callable[[Run], None]] = {
    RAW: raw,
    LOOPLIB: looplib,
    PURE: lambda run: looplib(run, donate=False),
    TRAINER: trainer,
    "accelerate": accelerate,
    "Lightning": lightning,
    "Fabric": fabric,
    "ignite": ignite,
    "TorchTNT": torchtnt,
}

# What each imports, and so needs to be installed.
MODULES = {
    TRAINER: ["transformers.trainer", "accelerate"],
    "accelerate": ["accelerate"],
    "Lightning": ["lightning.pytorch", "torchdata.stateful_dataloader", "torchmetrics"],
    "Fabric": ["lightning.fabric", "torchmetrics"],
    "ignite": ["ignite.engine", "ignite.handlers", "ignite.metrics"],
    "TorchTNT": ["torchtnt.framework.callbacks.dcp_saver", "torchdata.stateful_dataloader", "torchmetrics"],
}


def check_same(found: Any, expected: Any, what: str) -> None:
    torch.testing.assert_close(found, expected, msg=lambda text: f"{what}: {text}")


class Stop(Exception):
    """Raised by the loss function where a measurement is at its end."""


class Watched:
    """A loss function that notes when it was called, and may end the training at a call."""

    def __init__(self, loss_fn: LossFn, stop_at: int = 0) -> None:
        self.loss_fn, self.stop_at = loss_fn, stop_at
        self.stamps: list[float] = []
        self.end: tuple[Any, Tensor] | None = None  # the batch and the loss of the last call

    def __call__(self, model: Any, batch: Any) -> Tensor:
        self.stamps.append(time.perf_counter())
        loss = self.loss_fn(model, batch)
        if len(self.stamps) == self.stop_at:
            self.end = batch, loss.detach()
            raise Stop
        return loss

    def periods(self) -> list[float]:
        return [after - before for before, after in zip(self.stamps, self.stamps[1:], strict=False)]


def train(name: str, run: Run, stop_at: int = 0) -> tuple[float, Watched, nn.Module]:
    """Start time and record of a training run, with a copy of the model."""
    watched, model = Watched(run.loss_fn, stop_at), copy.deepcopy(run.model)
    gc.collect()
    began = time.perf_counter()
    with contextlib.suppress(Stop):
        CONTENDERS[name](replace(run, model=model, loss_fn=watched))
    assert bool(stop_at) == (watched.end is not None), f"{name}: {len(watched.stamps)} steps"
    assert torch.get_num_threads() == 1, f"{name} has changed the number of threads"
    return began, watched, model


def turns(names: list[str], seconds: float) -> Iterator[tuple[str, bool]]:
    """Each once in the order given, which does not count, and then in shuffled order while there is time."""
    begin, number = time.perf_counter(), 0
    while number < 2 or (time.perf_counter() - begin) * (number + 1) / number < seconds:
        for name in random.sample(names, len(names)) if number else names:
            yield name, number > 0
        number += 1


def time_steps(names: list[str], run: Run, seconds: float) -> Found:
    found: Found = {name: [] for name in names}
    expected: dict[str, Tensor] = {}
    for name, counts in turns(names, seconds):
        _, watched, model = train(name, run)
        expected = expected or model.state_dict()
        for key, value in model.state_dict().items():
            check_same(value, expected[key], f"{name}, {key} after an epoch")
        if counts:
            found[name].append(statistics.median(watched.periods()))
    return found


def mlp_epoch(length: int) -> tuple[nn.Module, TensorDataset]:
    torch.manual_seed(0)
    return mlp()[0], TensorDataset(torch.randn(length, 32), torch.randint(0, 10, (length,)))


def mlp_steps(options: argparse.Namespace, names: list[str], seconds: float) -> dict[str, Found]:
    model, data = mlp_epoch(16 * options.steps)
    return {"MLP, a step": time_steps(names, Run(model, classify, data, 16), seconds)}


def ready_steps(options: argparse.Namespace, names: list[str], seconds: float) -> dict[str, Found]:
    model, data = mlp_epoch(16 * options.steps)
    ready = Batches(zip(*[tensor.chunk(options.steps) for tensor in data.tensors], strict=True))
    return {"MLP, batches made beforehand": time_steps(names, Run(model, classify, ready, None), seconds)}


def transformer_steps(options: argparse.Namespace, names: list[str], seconds: float) -> dict[str, Found]:
    torch.manual_seed(0)
    steps = max(3, options.steps // 150)
    data, model = Tokens(torch.randint(0, 512, (4 * steps, 129))), Transformer()
    return {"transformer, a step": time_steps(names, Run(model, next_token, data, 4), seconds)}


class Tokens(Dataset[Tensor]):
    def __init__(self, rows: Tensor) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Tensor:
        return self.rows[index]


def resumes(options: argparse.Namespace, names: list[str], seconds: float) -> dict[str, Found]:
    model, data = mlp_epoch(options.samples)
    run = Run(model, classify, data, 64, shuffle=True)
    found: dict[str, Found] = {}
    names = [name for name in names if name not in ("Fabric", PURE)]
    for point in (0.5, 0.99):
        times = found[f"resume at {point:.0%} of an epoch"] = {name: [] for name in names}
        step, ends = int(point * options.samples / 64), {}
        with tempfile.TemporaryDirectory(dir=options.directory) as root:
            for name in names:
                folder = Path(root) / name
                folder.mkdir()
                ends[name] = train(name, replace(run, folder=folder, save_every=step), step + 1)[1].end
            for name, counts in turns(names, seconds / 2):
                resumed = replace(run, folder=Path(root) / name, resume=True)
                began, watched, _ = train(name, resumed, 1)
                check_same(watched.end, ends[name], f"{name}, the batch and loss that it goes on with")
                if counts:
                    times[name].append(watched.stamps[0] - began)
    return found


def checkpoints(options: argparse.Namespace, names: list[str], seconds: float) -> dict[str, Found]:
    width = max(16, 16 * round((options.parameters / DEPTH) ** 0.5 / 16))
    model = nn.Sequential(*[nn.Linear(width, width) for _ in range(DEPTH)])
    run = Run(model, lambda model, batch: model(batch[0]).square().mean(), TensorDataset(torch.randn(8, width)), 1)
    found: Found = {name: [] for name in names}
    for name, counts in turns(names, seconds):
        with tempfile.TemporaryDirectory(dir=options.directory) as folder:
            os.sync()  # nothing left to write of the previous contender
            periods = train(name, replace(run, folder=Path(folder), save_every=5), 6)[1].periods()
        if counts:
            found[name].append(periods[4] - statistics.median(periods[1:4]))  # the first allocates
    size = 12 * sum(p.numel() for p in model.parameters())
    return {f"checkpoint of {size / 1e6:.0f} MB, pause": found}


Evaluate = Callable[[], "dict[str, float]"]


def by_hand(model: nn.Module, loader: Any, both: Callable[[tuple[Tensor, Tensor]], Any]) -> dict[str, float]:
    """The loop of those that leave it to the user."""
    model.eval()
    loss, correct, count = 0.0, 0, 0
    with torch.no_grad():
        for x, y in loader:
            logits = model(x)
            loss += F.cross_entropy(logits, y).item() * len(y)
            guesses, labels = both((logits.argmax(1), y))
            correct += int((guesses == labels).sum())
            count += len(labels)
    return {"loss": loss / count, "accuracy": correct / count}


def raw_evaluation(rows: int) -> Evaluate:
    model, loader = evaluation.Model(), DataLoader(evaluation.data(rows), evaluation.BATCH)
    return lambda: by_hand(model, loader, lambda pair: pair)


def accelerate_evaluation(rows: int) -> Evaluate:
    accelerator = importlib.import_module("accelerate").Accelerator(cpu=True)
    model = evaluation.Model()
    model, loader = accelerator.prepare(model, DataLoader(evaluation.data(rows), evaluation.BATCH))
    return lambda: by_hand(model, loader, accelerator.gather_for_metrics)


def fabric_evaluation(rows: int) -> Evaluate:
    made = importlib.import_module("lightning.fabric").Fabric(accelerator="cpu", devices=1)
    model = made.setup_module(evaluation.Model())
    loader = made.setup_dataloaders(DataLoader(evaluation.data(rows), evaluation.BATCH))
    return lambda: by_hand(model, loader, lambda pair: pair)


def torchmetrics() -> tuple[Any, Any]:
    library = importlib.import_module("torchmetrics")
    return library.MeanMetric(), library.classification.MulticlassAccuracy(evaluation.CLASSES, average="micro")


def lightning_evaluation(rows: int) -> Evaluate:
    pytorch = importlib.import_module("lightning.pytorch")

    class Module(pytorch.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.model = evaluation.Model()
            _, self.accuracy = torchmetrics()

        def validation_step(self, batch: Any, _: int) -> None:
            x, y = batch
            logits = self.model(x)
            self.accuracy(logits, y)
            self.log("loss", F.cross_entropy(logits, y), batch_size=len(y))
            self.log("accuracy", self.accuracy)

    off = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    made, module = pytorch.Trainer(accelerator="cpu", devices=1, **off), Module()
    loader = DataLoader(evaluation.data(rows), evaluation.BATCH)
    return lambda: dict(made.validate(module, loader, verbose=False)[0])


def ignite_evaluation(rows: int) -> Evaluate:
    engines, metrics = importlib.import_module("ignite.engine"), importlib.import_module("ignite.metrics")
    wanted = {"loss": metrics.Loss(F.cross_entropy), "accuracy": metrics.Accuracy()}
    engine = engines.create_supervised_evaluator(evaluation.Model(), metrics=wanted)
    loader = DataLoader(evaluation.data(rows), evaluation.BATCH)
    return lambda: dict(engine.run(loader).metrics)


def torchtnt_evaluation(rows: int) -> Evaluate:
    framework = importlib.import_module("torchtnt.framework")
    unit_class: Any = framework.unit.EvalUnit

    class Unit(unit_class):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = evaluation.Model()
            self.loss, self.accuracy = torchmetrics()

        def eval_step(self, state: Any, data: Any) -> None:
            x, y = data
            logits = self.model(x)
            self.loss.update(F.cross_entropy(logits, y), len(y))
            self.accuracy.update(logits, y)

    unit, loader = Unit(), DataLoader(evaluation.data(rows), evaluation.BATCH)

    def evaluate() -> dict[str, float]:
        framework.evaluate(unit, loader)
        return {"loss": float(unit.loss.compute()), "accuracy": float(unit.accuracy.compute())}

    return evaluate


ARGMAX = "Trainer, argmax kept"
EVALUATIONS: dict[str, Callable[[int], Callable[[], Any]]] = {
    RAW: raw_evaluation,
    LOOPLIB: evaluation.looplib,
    TRAINER: lambda rows: evaluation.trainer(rows, False),
    "accelerate": accelerate_evaluation,
    "Lightning": lightning_evaluation,
    "Fabric": fabric_evaluation,
    "ignite": ignite_evaluation,
    "TorchTNT": torchtnt_evaluation,
    ARGMAX: lambda rows: evaluation.trainer(rows, True),
}


def evaluate_once(name: str, rows: int) -> None:
    """Run by a process of its own: prints MiB, loss and accuracy."""
    EVALUATIONS[name](20 * evaluation.BATCH)()  # what is imported and allocated once
    torch.manual_seed(1)
    memory, found = growth_of(EVALUATIONS[name](rows))
    scores = {key.removeprefix("eval_"): float(value) for key, value in found.items()}
    print(json.dumps([memory, scores["loss"], scores["accuracy"]]))


def evaluations(options: argparse.Namespace, names: list[str], seconds: float) -> dict[str, Found]:
    names = [name for name in EVALUATIONS if name in names or (name == ARGMAX and TRAINER in names)]
    names = names[:2] if options.dry_run else names  # each is a process of its own
    found: Found = {name: [] for name in names}
    expected = None
    # Each tensor is given back to the system when it is let go, so that the peak is what was alive at once; otherwise
    # it is what glibc had kept before, which is as large as a raw loop's and differs from process to process.
    keep_nothing = {"MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_MMAP_THRESHOLD_": "65536"}
    environment = {**os.environ, **keep_nothing}
    begin, rounds = time.perf_counter(), 0
    while not rounds or (time.perf_counter() - begin) * (rounds + 1) / rounds < seconds:
        rounds += 1
        for name in names:
            arguments = ["--one", name, "--examples", options.examples, "--system-malloc"]
            mebibytes, *scores = own_process(__file__, *arguments, environment=environment)
            expected = expected or scores
            check_same(torch.tensor(scores), torch.tensor(expected), f"{name}, loss and accuracy")
            found[name].append(mebibytes)
    return {"evaluation, memory": found}


ROWS: dict[str, Callable[[argparse.Namespace, list[str], float], dict[str, Found]]] = {
    "mlp": mlp_steps,
    "ready": ready_steps,
    "transformer": transformer_steps,
    "resume": resumes,
    "evaluation": evaluations,
    "checkpoint": checkpoints,
}


WEIGHTS = {"mlp": 1.0, "ready": 1.0, "transformer": 2.0, "resume": 2.0, "evaluation": 4.0, "checkpoint": 2.0}
TINY = {"steps": 30, "samples": 2000, "examples": 500, "parameters": 1e5}


def main(options: argparse.Namespace) -> int:
    vars(options).update(TINY if options.dry_run else {})
    report = Report("peers", options, "over the raw loop's")
    names = report.available({name: MODULES.get(name, []) for name in CONTENDERS})
    gc.freeze()  # a collection, with which the Trainer begins, is not to go through what all the others have imported
    for row, seconds in report.rows(options.rows, WEIGHTS):
        with report.attempt(row):
            for label, found in ROWS[row](options, names, seconds).items():
                base = statistics.median(found[RAW])
                cells = {name: ratio(values, found[RAW]) for name, values in found.items()}
                report.add(label, {**cells, RAW: Mebibytes(base) if "memory" in label else Taken(base)})
    if "resume" in options.rows and "Fabric" in names:
        report.note("Fabric leaves the place in the data to the user's loop, which resumes as the raw loop does.")
    return report.close()


if __name__ == "__main__":
    made = parser(__doc__, 290.0)
    made.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS), help="all of them unless given")
    made.add_argument("--steps", type=int, default=1500, help="of an epoch of the MLP; 1 in 150 of the transformer")
    made.add_argument("--samples", type=int, default=200_000, help="in the epoch that is resumed")
    made.add_argument("--examples", type=int, default=20_000, help="to evaluate")
    made.add_argument("--parameters", type=float, default=50e6, help="three times as many numbers are saved")
    made.add_argument("--directory", help="where to save; the system's temporary directory unless given")
    made.add_argument("--one", help=argparse.SUPPRESS)
    arguments = options_of(made)
    warnings.simplefilter("ignore")
    logging.disable()  # the peers' advice on loggers, workers and checkpoints
    if arguments.one:
        evaluate_once(arguments.one, arguments.examples)
    else:
        sys.exit(main(arguments))
