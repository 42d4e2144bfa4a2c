"""Models, data and evaluations of looplib and of the transformers Trainer, which peers.py measures."""

from __future__ import annotations

import importlib
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from harness import quiet_arguments
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
    loader = ll.make_loader(data(rows), batch_size=BATCH, order=ll.data.sequential())
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
