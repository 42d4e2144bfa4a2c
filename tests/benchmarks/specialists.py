"""looplib beside libraries that do one thing, each on its own ground, interleaved in one run.

    pip install -e ".[benchmarks]" && python tests/benchmarks/specialists.py
    python tests/benchmarks/specialists.py --only "exact AUC" --seconds 20

Each row is one task: DP-SGD, MAML, averages of the weights, stacks of members, reading data, metrics, batches by length,
checkpoints. All contenders of a row run in one process and take turns in shuffled order. Before they are timed, they
must have computed the same numbers, where the task has one answer. The table shows looplib's time, the fastest other
contender, and the ratio with its 95% interval over the rounds. Below it stand the rows in which the upper end of the
interval is above 1.02, and for each row what makes the difference. In some rows a bare loop does only what looplib has to do
to keep its promise: "the least over it" is its time over that of the fastest other contender.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import logging
import random
import statistics
import sys
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from harness import Report, Seconds, Step, in_turns, options_of, parser, ratio
from loops import stepping
from models import classify
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap
from torch.utils.data import DataLoader, TensorDataset, default_collate

import looplib as ll

Prepared = tuple[Step, Callable[[], Any]]  # a step to time, and what all contenders must agree on
Contenders = dict[str, Callable[[], Prepared]]
LOOPLIB = "looplib"
LEAST = "the least"  # a contender that is no library: what looplib's promise costs in a bare loop


def library(name: str) -> Any:
    return importlib.import_module(name)


def mlp(wide: int = 64) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, wide), nn.ReLU(), nn.Linear(wide, 10))


def labeled(*shape: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(*shape, generator=generator), torch.randint(0, 10, shape[:1], generator=generator)


def values_of(tensors: Any) -> list[Tensor]:
    """Copies of the values of a mapping of tensors, in their order."""
    return [tensor.detach().clone() for tensor in tensors.values()]


def training(
    train_step: ll.types.TrainStep, optimizer: ll.types.Optimizer, model: Any, batch: Any, steps: int
) -> Prepared:
    """A step of looplib, and the weights that an evaluation takes after `steps` of them."""
    step = stepping(train_step, ll.init_state(model, optimizer), batch)

    def answer() -> list[Tensor]:
        for _ in range(steps - 1):
            step()
        return values_of(ll.eval_state(optimizer, step()).params)

    return step, answer


def loop(
    optimizer: Any, loss: Callable[[], Tensor], params: Callable[[], Any], steps: int, after: Step | None = None
) -> Prepared:
    """A step of a raw loop, and the weights after `steps` of them; `after` follows each update."""

    def step() -> None:
        optimizer.zero_grad()
        loss().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if after:
            after()

    def answer() -> list[Tensor]:
        for _ in range(steps):
            step()
        return values_of(params())

    return step, answer


def named(model: nn.Module) -> Callable[[], dict[str, Tensor]]:
    return lambda: dict(model.named_parameters())


# DP-SGD. The noise differs by design, so contenders are compared with a noise of 0.


def private_model(kind: str) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    if kind == "MLP":
        return mlp(), labeled(64, 32)
    torch.manual_seed(0)
    layers = (nn.Conv2d(1, 16, 3, padding=1), nn.Tanh(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(1024, 10))
    return nn.Sequential(*layers), labeled(64, 1, 16, 16)


def dp_sgd(kind: str, traced: bool = False) -> Contenders:
    def looplib(noise: float) -> Prepared:
        model, batch = private_model(kind)
        grad_fn = ll.contrib.clip_per_sample(ll.contrib.make_per_sample_grad_fn(model, classify), 1.0)
        grad_fn = ll.contrib.add_noise(grad_fn, 1.0, noise, expected_batch_size=64)
        optimizer = ll.optimizer(torch.optim.SGD, lr=0.1, momentum=0.9)
        train_step = ll.make_train_step(grad_fn, optimizer, donate=True)
        train_step = ll.compile_step(train_step, backend="eager") if traced else train_step
        return training(train_step, optimizer, model, batch, 2)

    def opacus(noise: float, mode: str) -> Prepared:
        modules = library("opacus.grad_sample.utils"), library("opacus.optimizers")
        model, (x, y) = private_model(kind)
        wrapped: Any = modules[0].prepare_module(model, mode, force_functorch=mode == "functorch")
        inner = torch.optim.SGD(wrapped.parameters(), lr=0.1, momentum=0.9, fused=True)
        optimizer = modules[1].DPOptimizer(inner, noise_multiplier=noise, max_grad_norm=1.0, expected_batch_size=64)
        return loop(optimizer, lambda: F.cross_entropy(wrapped(x), y), named(model), 2)

    def prepared(make: Callable[[float], Prepared]) -> Callable[[], Prepared]:
        return lambda: (make(1.0)[0], make(0.0)[1])

    return {
        LOOPLIB: prepared(looplib),
        "Opacus, hooks": prepared(lambda noise: opacus(noise, "hooks")),
        "Opacus, functorch": prepared(lambda noise: opacus(noise, "functorch")),
    }


# MAML: sinusoids, five inner steps of SGD, one outer step of Adam.

INNER_STEPS, INNER_LR = 5, 0.01


def squared_error(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def meta_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(1, 40), nn.ReLU(), nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 1))


def sinusoids() -> tuple[Tensor, Tensor]:
    """25 tasks of 20 points: 10 to train on, 10 to test on."""
    generator = torch.Generator().manual_seed(0)
    amplitude, phase = (torch.rand(25, 1, 1, generator=generator) for _ in range(2))
    x = 10 * torch.rand(25, 20, 1, generator=generator) - 5
    return x, (0.1 + 4.9 * amplitude) * (x - 3.14 * phase).sin()


def looplib_maml(compiled: bool) -> Prepared:
    """MAML on 25 tasks with 5 inner steps."""
    model, tasks = meta_model(), sinusoids()
    inner = ll.optimizer(torch.optim.SGD, lr=INNER_LR)
    inner_step = ll.make_train_step(ll.make_grad_fn(model, squared_error), inner)
    inner_step, start = ll.transforms.differentiable(inner_step), ll.copy_state(ll.init_state(model, inner))

    def meta_loss(model: Any, tasks: Any) -> Tensor:
        params = dict(model.named_parameters())

        def error(x: Tensor, y: Tensor) -> Tensor:
            state = start.replace(params=params)
            for _ in range(INNER_STEPS):
                state, _ = inner_step(state, (x[:10], y[:10]))
            return F.mse_loss(functional_call(model, state.params, x[10:]), y[10:])

        return vmap(error)(*tasks).mean()

    outer = ll.optimizer(torch.optim.Adam, lr=1e-3)
    train_step = ll.make_train_step(ll.make_grad_fn(model, meta_loss), outer, donate=True)
    train_step = ll.compile_step(train_step) if compiled else train_step
    return training(train_step, outer, model, tasks, 1)


def maml() -> Contenders:
    def outer_loop(model: nn.Module, meta_loss: Callable[[], Tensor]) -> Prepared:
        outer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
        return loop(outer, meta_loss, named(model), 1)

    def by_hand() -> Prepared:
        model, (x, y) = meta_model(), sinusoids()

        def error(params: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
            return F.mse_loss(functional_call(model, params, x), y)

        def tuned(params: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
            for _ in range(INNER_STEPS):
                grads = torch.func.grad(error)(params, x[:10], y[:10])
                params = {name: tensor - INNER_LR * grads[name] for name, tensor in params.items()}
            return error(params, x[10:], y[10:])

        def meta_loss() -> Tensor:
            return vmap(tuned, in_dims=(None, 0, 0))(dict(model.named_parameters()), x, y).mean()

        return outer_loop(model, meta_loss)

    def torchopt() -> Prepared:
        torchopt, (x, y), model = library("torchopt"), sinusoids(), meta_model()
        inner = torchopt.MetaSGD(model, lr=INNER_LR)

        def meta_loss() -> Tensor:
            start, start_of_inner = torchopt.extract_state_dict(model), torchopt.extract_state_dict(inner)
            errors = []
            for task in range(len(x)):
                for _ in range(INNER_STEPS):
                    inner.step(F.mse_loss(model(x[task, :10]), y[task, :10]))
                errors.append(F.mse_loss(model(x[task, 10:]), y[task, 10:]))
                torchopt.recover_state_dict(model, start)
                torchopt.recover_state_dict(inner, start_of_inner)
            return torch.stack(errors).mean()

        return outer_loop(model, meta_loss)

    return {LOOPLIB: lambda: looplib_maml(False), "torch.func by hand": by_hand, "TorchOpt": torchopt}


# An average of the weights beside each step.

DECAY = 0.99


def averages(wide: int) -> Contenders:
    def looplib() -> Prepared:
        model = mlp(wide)
        optimizer = ll.chain(ll.optimizer(torch.optim.AdamW, lr=1e-3), ll.ema(DECAY, start=1))
        train_step = ll.make_train_step(ll.make_grad_fn(model, classify), optimizer, donate=True)
        return training(train_step, optimizer, model, labeled(16, 32), 4)

    def averaging(average: Callable[[nn.Module], tuple[Step, Any]]) -> Prepared:
        model, batch = mlp(wide), labeled(16, 32)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        update, averaged = average(model)
        return loop(optimizer, lambda: classify(model, batch), named(averaged), 4, update)

    def averaged_model(model: nn.Module) -> tuple[Step, Any]:
        utils = torch.optim.swa_utils
        averaged = utils.AveragedModel(model, multi_avg_fn=utils.get_ema_multi_avg_fn(DECAY))  # type: ignore[no-untyped-call]
        return lambda: averaged.update_parameters(model), averaged.module

    def ema_pytorch(model: nn.Module) -> tuple[Step, Any]:
        options = {"update_after_step": 0, "update_every": 1, "min_value": DECAY, "use_foreach": True}
        ema = library("ema_pytorch").EMA(model, beta=DECAY, **options)
        return ema.update, ema.ema_model

    return {
        LOOPLIB: looplib,
        "AveragedModel": lambda: averaging(averaged_model),
        "ema-pytorch": lambda: averaging(ema_pytorch),
    }


# Members trained together, eagerly.


def members(count: int) -> Contenders:
    def models() -> list[nn.Module]:
        made = []
        for seed in range(count):
            model = mlp()
            torch.manual_seed(seed)
            for layer in (model[0], model[2]):  # type: ignore[index]
                layer.reset_parameters()
            made.append(model)
        return made

    batch = labeled(16, 32)

    def looplib() -> Prepared:
        optimizer = ll.optimizer(torch.optim.AdamW, lr=1e-3)
        each = models()
        stack = ll.transforms.stack_states(
            [ll.init_state(model, optimizer, seed=seed) for seed, model in enumerate(each)]
        )
        train_step = ll.make_train_step(ll.make_grad_fn(each[0], classify), optimizer, donate=True)
        step = stepping(ll.vmap_step(train_step), stack, batch)
        return step, lambda: values_of([step() for _ in range(3)][-1].params)

    def by_hand() -> Prepared:
        each = models()
        params, buffers = stack_module_state(each)
        optimizer = torch.optim.AdamW(params.values(), lr=1e-3, fused=True)

        def loss(params: Any, buffers: Any) -> Tensor:
            return F.cross_entropy(functional_call(each[0], (params, buffers), batch[0]), batch[1])

        return loop(optimizer, lambda: vmap(loss)(params, buffers).sum(), lambda: params, 3)

    return {LOOPLIB: looplib, "stack_module_state": by_hand}


# An epoch of data.


class Items(torch.utils.data.Dataset[Any]):
    """Items made by a few lines of Python each."""

    def __init__(self, count: int) -> None:
        self.x, self.y = labeled(count, 32)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index] * 2.0, self.y[index]


class Lists(Items):
    def __getitems__(self, indices: list[int]) -> list[tuple[Tensor, Tensor]]:
        return [(self.x[index] * 2.0, self.y[index]) for index in indices]


def seeded(loader: ll.data.Loader, epoch: int, collate: Callable[[Any], Any]) -> Callable[[], Any]:
    """The batches of an epoch in a bare loop with looplib's draws; nothing watches the streams, and numpy's is not kept."""
    plan = [loader.indices(ll.TrainState(epoch=epoch, batch=k)) for k in range(len(loader))]
    batches, read, stream = [torch.as_tensor(keys).tolist() for keys in plan], loader.dataset, torch.default_generator

    def run() -> Any:
        for keys in batches:
            states = stream.get_state(), random.getstate()
            stream.manual_seed(keys[0])
            random.seed(keys[0])
            np.random.seed(keys[0])  # noqa: NPY002
            if hasattr(read, "__getitems__"):
                samples = read.__getitems__(keys)
            else:
                samples = [read[key] for key in keys]
            stream.set_state(states[0])
            random.setstate(states[1])
            yield collate(samples)

    return run


def epochs(make: Callable[[], Any], workers: int = 0, bound: bool = False) -> Contenders:
    options: dict[str, Any] = {"num_workers": workers, **({"persistent_workers": True} if workers else {})}

    def looplib() -> Prepared:
        dataset, numbers = make(), itertools.count()
        shuffled = ll.make_loader(dataset, batch_size=64, **options)
        sequential = ll.make_loader(dataset, batch_size=64, order=ll.data.sequential())
        return (
            lambda: drained(shuffled(ll.TrainState(epoch=next(numbers)))),
            lambda: list(sequential(ll.TrainState())),
        )

    def other(cls: Any) -> Prepared:
        dataset = make()
        shuffled = cls(dataset, batch_size=64, shuffle=True, **options)
        return lambda: drained(shuffled), lambda: list(cls(dataset, batch_size=64))

    def least() -> Prepared:
        shuffled = ll.make_loader(make(), batch_size=64)
        sequential = ll.make_loader(make(), batch_size=64, order=ll.data.sequential())
        run, answer = (seeded(loader, 0, default_collate) for loader in (shuffled, sequential))
        return lambda: drained(run()), lambda: list(answer())

    return {
        LOOPLIB: looplib,
        "DataLoader": lambda: other(DataLoader),
        "StatefulDataLoader": lambda: other(library("torchdata.stateful_dataloader").StatefulDataLoader),
        **({LEAST: least} if bound else {}),
    }


def drained(batches: Any) -> None:
    for _ in batches:
        pass


# Metrics.


def value_of(value: Callable[[], Any]) -> Prepared:
    return value, lambda: torch.as_tensor(value()).double()


def torchmetric(batches: list[tuple[Tensor, Tensor]], name: str, *arguments: Any, **options: Any) -> Prepared:
    """A metric of torchmetrics over batches of predictions and labels."""
    metric = getattr(library("torchmetrics.classification"), name)(*arguments, validate_args=False, **options)

    def value() -> Any:
        metric.reset()
        for batch in batches:
            metric.update(*batch)
        return metric.compute()

    return value_of(value)


def auc(count: int) -> Contenders:
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 2, (count,), generator=generator)
    scores = torch.rand(count, generator=generator) * 0.9 + labels * 0.1

    def sklearn() -> Prepared:
        roc_auc_score = library("sklearn.metrics").roc_auc_score
        return value_of(lambda: roc_auc_score(labels.numpy(), scores.numpy()))

    return {
        LOOPLIB: lambda: value_of(lambda: ll.metrics.AUC.of(scores, labels).compute()),
        "torchmetrics": lambda: torchmetric([(scores, labels)], "BinaryAUROC"),
        "scikit-learn": sklearn,
    }


def over_batches(
    classes: int, batches: int, ours: Callable[[Tensor, Tensor], Any], theirs: str, options: dict[str, Any], sk: str
) -> Contenders:
    """A metric over batches of 256: logits of `classes` classes and labels."""
    generator = torch.Generator().manual_seed(0)
    data = [
        (torch.randn(256, classes, generator=generator), torch.randint(0, classes, (256,), generator=generator))
        for _ in range(batches)
    ]

    def looplib() -> Prepared:
        def value() -> Any:
            merged = ours(*data[0])
            for batch in data[1:]:
                merged = merged.merge(ours(*batch))
            return merged.matrix if sk == "confusion_matrix" else merged.compute()

        return value_of(value)

    def sklearn() -> Prepared:
        function = getattr(library("sklearn.metrics"), sk)

        def value() -> Any:
            guesses, labels = zip(*[(logits.argmax(1), labels) for logits, labels in data], strict=True)
            return function(torch.cat(labels).numpy(), torch.cat(guesses).numpy())

        return value_of(value)

    theirs_over_batches = partial(torchmetric, data, theirs, classes, **options)
    return {LOOPLIB: looplib, "torchmetrics": theirs_over_batches, "scikit-learn": sklearn}


def accuracies(batches: int) -> Contenders:
    ours = ll.metrics.accuracy
    return over_batches(100, batches, ours, "MulticlassAccuracy", {"average": "micro"}, "accuracy_score")


def matrices(batches: int) -> Contenders:
    def ours(logits: Tensor, labels: Tensor) -> Any:
        return ll.metrics.ConfusionMatrix.of(logits, labels, classes=100)

    return over_batches(100, batches, ours, "MulticlassConfusionMatrix", {}, "confusion_matrix")


# Batches by length. The orders differ, so contenders must agree on what is in an epoch and nearly on its padding.


class Texts(torch.utils.data.Dataset[Any]):
    def __init__(self, count: int) -> None:
        draws = random.Random(0)
        self.lengths = [min(512, 1 + int(draws.expovariate(1 / 80))) for _ in range(count)]
        self.texts = [torch.full((length,), number + 1) for number, length in enumerate(self.lengths)]

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> Tensor:
        return self.texts[index]


def padded(texts: list[Tensor]) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(texts, batch_first=True)


def by_length(count: int) -> Contenders:
    texts = Texts(count)

    def agreed(batches: Any) -> tuple[Tensor, bool]:
        batches = list(batches)
        tokens, padding = sum(map(torch.count_nonzero, batches)), sum(batch.numel() for batch in batches)
        seen = torch.cat([batch[:, 0] for batch in batches]).sort().values
        return seen, bool(tokens > 0.9 * padding)

    def looplib() -> Prepared:
        numbers = itertools.count()
        order = ll.data.by_length(texts.lengths)
        loader = ll.make_loader(texts, batch_size=32, order=order, collate_fn=padded)
        return (
            lambda: drained(loader(ll.TrainState(epoch=next(numbers)))),
            lambda: agreed(loader(ll.TrainState())),
        )

    def least() -> Prepared:
        order = ll.data.by_length(texts.lengths)
        run = seeded(ll.make_loader(texts, batch_size=32, order=order), 0, padded)
        return lambda: drained(run()), lambda: agreed(run())

    def other(prepare: Callable[[Any], Any]) -> Prepared:
        sampler = library("transformers.trainer_pt_utils").LengthGroupedSampler(32, lengths=texts.lengths)
        loader = prepare(DataLoader(texts, batch_size=32, sampler=sampler, collate_fn=padded))
        return lambda: drained(loader), lambda: agreed(loader)

    return {
        LOOPLIB: looplib,
        "transformers": lambda: other(lambda loader: loader),
        "accelerate, with transformers' sampler": lambda: other(library("accelerate").Accelerator(cpu=True).prepare),
        LEAST: least,
    }


# Checkpoints: the state of a run, saved with its files synced, and restored.


def checkpoints(parameters: float, loading: bool) -> Contenders:
    from checkpoint import Run, sync

    run = Run(parameters)
    root = Path(tempfile.mkdtemp())

    def looplib() -> Prepared:
        ckpt = ll.checkpoint_io(root / "looplib", keep_last=1)
        last = [run.donated]

        def save() -> None:
            last[0] = last[0].replace(step=last[0].step + 1)
            ckpt.save(last[0])

        def load() -> None:
            last[0] = ckpt.restore(last[0], quiet=True)

        def restored() -> bool:
            saved = {name: tensor.detach().clone() for name, tensor in last[0].params.items()}
            with torch.no_grad():
                for tensor in last[0].params.values():
                    tensor.zero_()
            load()
            return all(torch.equal(saved[name], tensor) for name, tensor in last[0].params.items())

        save()
        return load if loading else save, restored

    def other(write: Callable[[Path], object], read: Callable[[Path], dict[str, Tensor]]) -> Prepared:
        import shutil

        folder, numbers = Path(tempfile.mkdtemp(dir=root)), itertools.count()

        def save() -> None:
            earlier = list(folder.iterdir())
            path = folder / str(next(numbers))
            path.mkdir()
            write(path)
            sync(folder)
            for old in earlier:
                shutil.rmtree(old)

        def load() -> dict[str, Tensor]:
            (path,) = folder.iterdir()
            return read(path)

        def restored() -> bool:
            saved = [tensor.detach().clone() for tensor in run.model.parameters()]
            with torch.no_grad():
                for tensor in run.model.parameters():
                    tensor.zero_()
            found = load()
            names = [name for name, _ in run.model.named_parameters()]
            return all(torch.equal(found[name], tensor) for name, tensor in zip(names, saved, strict=True))

        save()
        return load if loading else save, restored

    def safetensors() -> Prepared:
        package, kept = library("safetensors.torch"), run.tensors()

        def read(path: Path) -> dict[str, Tensor]:
            for name, tensor in package.load_file(path / "all.safetensors").items():
                kept[name].data.copy_(tensor)
            return kept

        return other(lambda path: package.save_file(run.tensors(), path / "all.safetensors"), read)

    def dcp() -> Prepared:
        package, kept = library("torch.distributed.checkpoint"), run.state_dict()

        def read(path: Path) -> dict[str, Tensor]:
            package.load(kept, checkpoint_id=path, no_dist=True)
            found: dict[str, Tensor] = kept["model"]
            return found

        return other(lambda path: package.save(run.state_dict(), checkpoint_id=path, no_dist=True), read)

    def torch_save() -> Prepared:
        def read(path: Path) -> dict[str, Tensor]:
            found = torch.load(path / "all.pt", weights_only=True)
            run.model.load_state_dict(found["model"])
            run.optimizer.load_state_dict(found["optimizer"])
            return run.model.state_dict()

        return other(lambda path: torch.save(run.state_dict(), path / "all.pt"), read)

    return {LOOPLIB: looplib, "safetensors": safetensors, "torch DCP": dcp, "torch.save": torch_save}


@dataclass(frozen=True)
class Row:
    """A task at its usual and at a tiny size.

    Attributes:
        make: the contenders; the argument is True for the tiny size.
        why: what makes the difference.
        tolerance: largest difference between the answers, relative and absolute; None for equal bits.
    """

    make: Callable[[bool], Contenders]
    why: str
    tolerance: float | None = 1e-4


SEEDED = (
    "looplib seeds the global streams of torch, `random` and numpy for each batch, and looks afterwards whether the dataset has "
    "used them, in which case it seeds them for each sample. So its draws are a function of (seed, epoch, index) with any number "
    "of workers. It also saves and restores the three streams for each batch. The others do none of this. The least is a "
    "bare loop over indices that are known before: it reads and stacks the samples and does the same seeding, but does not "
    "look for draws and does not keep numpy's stream"
)
TRACED = (
    'looplib\'s step is `compile_step(train_step, backend="eager")`: traced once, then run as a list of operations; '
    "Opacus's hooks and autograd record them again at each step"
)
ROWS = {
    "DP-SGD, MLP, batch 64": Row(
        lambda tiny: dp_sgd("MLP"),
        "Opacus's hooks have a formula for the per-sample gradients of a linear layer, a product of two matrices; looplib "
        "differentiates any model for each sample by `vmap`, as Opacus does with functorch, and clips and sums by one "
        "product for each tensor. `vmap(grad(loss))` by hand takes about 0.9 of the time of Opacus's whole step, so looplib "
        "cannot be first as long as torch.func goes through the loss at each step; the row that is traced does so once. "
        "looplib does not trace unasked, since Python in the loss function would no longer run at each step",
    ),
    "DP-SGD, MLP, batch 64, traced": Row(lambda tiny: dp_sgd("MLP", traced=True), TRACED),
    "DP-SGD, convolution, batch 64": Row(
        lambda tiny: dp_sgd("convolution"),
        "the activations take most of the time, and are the same on both sides; what torch.func adds at each step takes a "
        "third of looplib's time, which the row that is traced leaves out",
    ),
    "DP-SGD, convolution, batch 64, traced": Row(lambda tiny: dp_sgd("convolution", traced=True), TRACED),
    "MAML, 25 tasks, 5 inner steps": Row(
        lambda tiny: maml(),
        "looplib batches all tasks into one graph, as `torch.func` by hand; TorchOpt takes them in turn, as in its own "
        "examples. By hand, the inner steps have no metrics and no checks of the state",
    ),
    "EMA at each step, MLP": Row(
        lambda tiny: averages(64),
        "the average is one call on lists of tensors that looplib's update has already; the others walk through two "
        "modules at each step",
    ),
    "EMA at each step, 4.3 M parameters": Row(
        lambda tiny: averages(1000 if tiny else 100_000),
        "all make the same passes over the same memory, so there is little to gain",
    ),
    "32 members, eager": Row(
        lambda tiny: members(3 if tiny else 32),
        "looplib traces the batched step once and runs its list of operations, about half of which are AdamW's; by hand, "
        "`vmap` and autograd record it again at each step, and the update is one fused kernel",
    ),
    "epoch of tensors": Row(
        lambda tiny: epochs(lambda: TensorDataset(*labeled(256 if tiny else 6400, 32))),
        "looplib reads a batch by one `index_select` for each tensor; the others read single samples and stack them",
        None,
    ),
    "epoch of Python items": Row(
        lambda tiny: epochs(lambda: Items(256 if tiny else 6400), bound=True),
        SEEDED,
        None,
    ),
    "the same with `__getitems__`": Row(
        lambda tiny: epochs(lambda: Lists(256 if tiny else 6400), bound=True),
        "looplib seeds the three streams once for each batch, saves and restores them; reading and stacking the samples is "
        "the same for all, and nearly all of DataLoader's time. The least is the same bare loop as for Python items, but for "
        "the seeds of single samples",
        None,
    ),
    "the same with 2 workers": Row(
        lambda tiny: epochs(lambda: Items(256 if tiny else 6400), workers=2),
        "all share memory for each tensor of a batch, which takes longer than making the batch",
        None,
    ),
    "exact AUC of a million scores": Row(
        lambda tiny: auc(1000 if tiny else 1_000_000),
        "most of the time is a sort: looplib sorts the bits of the scores as integers, which torch does by radix, and the "
        "others sort floats",
        1e-5,
    ),
    "accuracy, 40 batches of 256 x 100": Row(
        lambda tiny: accuracies(2 if tiny else 40),
        "the search for the highest class of each row takes half of the time; looplib calls `max`, which torch does faster "
        "on CPUs than the `argmax` of the others. The rest is small operations, some of which looplib makes to count NaN as "
        "a miss, leave out ignored labels and find labels out of range",
        1e-6,
    ),
    "confusion matrix, 40 batches of 256 x 100": Row(
        lambda tiny: matrices(2 if tiny else 40),
        "as for the accuracy, looplib finds the highest class by `max`; the count of the pairs is the same work, and looplib "
        "also counts labels out of range, to report them",
        None,
    ),
    "batches by length, 6,400 texts": Row(
        lambda tiny: by_length(640 if tiny else 6400),
        SEEDED + ". A sample here is one look-up in a list, so this outweighs the reading",
        None,
    ),
    "save of 60 MB, synced": Row(
        lambda tiny: checkpoints(1e4 if tiny else 5e6, False),
        "looplib computes a checksum of each tensor in a second thread, and writes and syncs a manifest, but starts writing "
        "to disk while it still copies to the file; `torch.save` packs a zip archive, DCP plans the save first",
        None,
    ),
    "load of 60 MB": Row(
        lambda tiny: checkpoints(1e4 if tiny else 5e6, True),
        "safetensors maps the file and copies it. looplib makes the same copy (a fifth of its processor time), but before it "
        "writes to the first tensor it verifies the checksums of all (two fifths, in several threads) and that the paths, "
        "dtypes, shapes and shared memory of all 384 leaves fit the state (two fifths, in Python)",
        None,
    ),
}


def check_same(answers: dict[str, Any], tolerance: float | None) -> None:
    """Raise if the answer of a contender differs from the first one's."""
    (first, expected), *others = answers.items()
    for name, answer in others:
        try:
            near = tolerance or 0.0
            torch.testing.assert_close(answer, expected, rtol=near, atol=near, check_dtype=False)
        except AssertionError as error:
            raise AssertionError(f"{name} does not agree with {first}: {error}") from None


def measure(report: Report, name: str, row: Row, seconds: float) -> None:
    steps: dict[str, Step] = {}
    answers = {}
    for contender, make in row.make(report.dry_run).items():
        with report.attempt(f"{contender} ({name})"):
            steps[contender], answer = make()
            answers[contender] = answer()
    if LOOPLIB not in answers or len(answers) < 2:
        return  # the failures are in the report
    check_same(answers, row.tolerance)
    times = in_turns({key: steps[key] for key in answers}, seconds)
    least = times.pop(LEAST, None)
    medians = {contender: statistics.median(values) for contender, values in times.items()}
    ours = Seconds(medians.pop(LOOPLIB))
    ranking = sorted(medians, key=medians.__getitem__)
    found = ratio(times[LOOPLIB], times[ranking[0]])
    others = ", ".join(f"{contender} {Seconds(medians[contender])}" for contender in ranking[1:])
    fastest = f"{ranking[0]} {Seconds(medians[ranking[0]])}"
    report.add(name, {"looplib": ours, "fastest other": fastest, "looplib over it": found, "others": others})
    if least:
        report.add(name, {"the least over it": ratio(least, times[ranking[0]])})
    certain = found.high is not None and found.high <= 1.02
    report.note(f"{name}{'' if certain else ' (looplib is **not first**, or not certainly)'}: {row.why}.")


def main(options: argparse.Namespace) -> int:
    report = Report("specialists", options)
    chosen = [name for name in ROWS if any(part in name for part in options.only or [""])]
    for name, seconds in report.rows(chosen):
        with report.attempt(name):
            measure(report, name, ROWS[name], seconds)
    return report.close()


if __name__ == "__main__":
    made = parser(__doc__, 250.0)
    made.add_argument("--only", nargs="+", help="parts of the names of rows")
    arguments = options_of(made)
    warnings.simplefilter("ignore")
    logging.disable()
    sys.exit(main(arguments))
