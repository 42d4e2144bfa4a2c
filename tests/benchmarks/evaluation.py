"""Memory and rate of evaluating 20,000 samples with 5,000 classes, beside the transformers Trainer.

    python tests/benchmarks/evaluation.py
    python tests/benchmarks/evaluation.py --rows 100000 --only looplib     (memory does not grow)

A linear model of 64 features, in batches of 100, gives 400 MB of logits in all; loss and accuracy are wanted. Each
contender is a process of its own, one after another, in turns; memory is its peak above what it held before the
evaluation (Linux), the rate that of the fastest of its evaluations. The Trainer is measured as it is used most, with
`compute_metrics` over all logits, and with `preprocess_logits_for_metrics` that keeps the argmax alone.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import sys
import tempfile
import timeit
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from harness import (
    Count,
    Mebibytes,
    Report,
    growth_of,
    options_of,
    own_process,
    parser,
    quiet_arguments,
    with_system_malloc,
)
from torch import Tensor, nn

import looplib as ll

CLASSES, FEATURES, BATCH = 5000, 64, 100


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        logits = self.head(x)
        return logits if labels is None else {"loss": F.cross_entropy(logits, labels), "logits": logits}


def data(rows: int) -> torch.utils.data.TensorDataset:
    torch.manual_seed(0)
    return torch.utils.data.TensorDataset(torch.randn(rows, FEATURES), torch.randint(0, CLASSES, (rows,)))


def looplib(rows: int) -> Callable[[], object]:
    def metric_fn(model: Model, batch: Any) -> dict[str, Any]:
        x, y = batch
        logits = model(x)
        return {"loss": F.cross_entropy(logits, y), "accuracy": ll.Mean((logits.argmax(1) == y).sum(), len(y))}

    model = Model()
    eval_step, state = ll.make_eval_step(model, metric_fn), ll.init_state(model)
    loader = ll.make_loader(data(rows), batch_size=BATCH, order=ll.data.in_order())
    return lambda: ll.evaluate(eval_step, state, loader)


def trainer(rows: int, preprocessed: bool) -> Callable[[], object]:
    transformers = importlib.import_module("transformers")

    def collate(items: list[Any]) -> dict[str, Tensor]:
        return {"x": torch.stack([x for x, _ in items]), "labels": torch.stack([y for _, y in items])}

    def compute_metrics(found: Any) -> dict[str, float]:
        guesses = found.predictions if preprocessed else found.predictions.argmax(1)
        return {"accuracy": float((guesses == found.label_ids).mean())}

    arguments = quiet_arguments(tempfile.mkdtemp(), per_device_eval_batch_size=BATCH, label_names=["labels"])
    made = transformers.Trainer(
        Model(),
        arguments,
        data_collator=collate,
        eval_dataset=data(rows),
        compute_metrics=compute_metrics,
        preprocess_logits_for_metrics=(lambda logits, labels: logits.argmax(-1)) if preprocessed else None,
    )
    evaluate: Callable[[], object] = made.evaluate
    return evaluate


CONTENDERS: dict[str, Callable[[int], Callable[[], object]]] = {
    "looplib": looplib,
    "Trainer, `compute_metrics` over all logits": lambda rows: trainer(rows, False),
    "Trainer, keeping the argmax alone": lambda rows: trainer(rows, True),
}


def one(name: str, rows: int, times: int) -> None:
    """Run by a process of its own: prints MiB and samples a second."""
    CONTENDERS[name](2 * BATCH)()  # what is imported and allocated once
    evaluate = CONTENDERS[name](rows)

    def fastest() -> float:
        return min(timeit.repeat(evaluate, number=1, repeat=times))

    memory, seconds = growth_of(fastest)
    print(json.dumps([memory, rows / seconds]))


def measured(name: str, rows: int, times: int) -> list[float]:
    """MiB and samples a second, of a process."""
    arguments = ["--one", name, "--rows", rows, "--times", times, "--system-malloc"]
    found: list[float] = own_process(__file__, *arguments, environment=with_system_malloc())
    return found


def main(options: argparse.Namespace) -> int:
    rows, times = (200, 1) if options.dry_run else (options.rows, options.times)
    report = Report("evaluation", options, f"{rows:,} x {CLASSES:,} logits")
    names = [name for name in CONTENDERS if options.only is None or options.only in name]
    trainer_needs = ["transformers.trainer", "accelerate"]
    names = report.available({name: [] if name == "looplib" else trainer_needs for name in names})
    found: dict[str, list[list[float]]] = {}
    for row, _ in report.rows([f"{name}, round {number}" for number in range(options.rounds) for name in names]):
        name = row.rpartition(", ")[0]
        with report.attempt(row):
            found.setdefault(name, []).append(measured(name, rows, times))
            memory, rate = (statistics.median(column) for column in zip(*found[name], strict=True))
            report.add(name, {"peak memory above the start": Mebibytes(memory), "samples per second": Count(rate)})
        if options.dry_run and len(found) == len(names):
            break
    return report.close()


if __name__ == "__main__":
    made = parser(__doc__, 100.0)
    made.add_argument("--rows", type=int, default=20_000)
    made.add_argument("--rounds", type=int, default=2)
    made.add_argument("--times", type=int, default=1, help="evaluations in each process, of which the fastest counts")
    made.add_argument("--only", help="a part of a contender's name")
    made.add_argument("--one", help=argparse.SUPPRESS)
    options = options_of(made)
    if options.one:
        one(options.one, options.rows, options.times)
    else:
        sys.exit(main(options))
