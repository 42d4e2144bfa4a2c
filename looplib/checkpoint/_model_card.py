"""Model card: the numbers of a run, as the Hugging Face Hub reads them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from looplib._core.checks import check_type
from looplib.checkpoint._describe import Checkpoint
from looplib.checkpoint._format_read import read_manifest
from looplib.checkpoint._hub import package


def model_card(
    checkpoint: Checkpoint,
    name: str,
    *,
    task: str,
    dataset: str,
    config: Mapping[str, Any] | None = None,
    text: str = "",
    **metadata: Any,
) -> Any:
    """Model card of a checkpoint: its metrics as the Hub's evaluation results, and tables of metrics and settings.

    >>> import looplib as ll, tempfile, torch
    >>> model, optimizer = torch.nn.Linear(2, 1), ll.optimizer(torch.optim.SGD, lr=0.1)
    >>> ckpt = ll.checkpoint_io(tempfile.mkdtemp())
    >>> path = ckpt.save(ll.init_state(model, optimizer), {"eval/loss": 0.25})
    >>> card = ll.checkpoint.model_card(ckpt.latest(), "tiny", task="regression", dataset="points", license="mit")
    >>> card.data.license, card.data.eval_results[0].metric_value
    ('mit', 0.25)
    >>> print(card.text[card.text.index("| optimizer"):])
    | optimizer.class | torch.optim.sgd.SGD |
    | optimizer.lr | 0.1 |
    <BLANKLINE>

    `ll.checkpoint.hub(..., card=lambda checkpoint: ll.checkpoint.model_card(checkpoint, ...))` pushes one with each
    checkpoint. Else `card.save("README.md")`, or change `card.text` and `card.data` first.

    Args:
        checkpoint: the checkpoint that the card describes, such as `ckpt.best()`.
        name: name of the model.
        task: task of the evaluation, such as "text-classification".
        dataset: name of the dataset of the evaluation.
        config: hyperparameters and versions of the run, possibly nested, such as `ll.log.configuration(state)`. The
            default is what the checkpoint stores: optimizer, loaders, and what `describe` adds.
        text: your own text, in Markdown, after the title.
        **metadata: arguments of huggingface_hub's `ModelCardData`, such as `license`, `language` or `base_model`.

    Returns:
        A `huggingface_hub.ModelCard`. Metrics that are not finite are in the table alone.

    Raises:
        ImportError: huggingface_hub is not installed.
        TypeError: `checkpoint` is not a `Checkpoint`.
    """
    check_type("checkpoint is", checkpoint, Checkpoint, "give one that ckpt.latest() or ckpt.best() returns")
    hub = package()
    evaluation = {"task_type": task, "dataset_type": dataset, "dataset_name": dataset}
    results = [
        hub.EvalResult(**evaluation, metric_type=metric, metric_name=metric, metric_value=value)
        for metric, value in checkpoint.metrics.items()
        if math.isfinite(value)
    ]
    data = hub.ModelCardData(model_name=name, eval_results=results or None, **metadata)
    counts = f"step {checkpoint.step:,}, epoch {checkpoint.epoch}, {checkpoint.samples:,} samples"
    settings = read_manifest(checkpoint.path)["made_with"] if config is None else config
    sections = [
        f"# {name}",
        text.strip(),
        f"## Metrics\n\nOf {counts}, saved at {checkpoint.created}.",
        _table("metric", {metric: f"{value:.6g}" for metric, value in checkpoint.metrics.items()}),
        "## Settings",
        _table("setting", dict(_flat(settings))),
    ]
    return hub.ModelCard(f"---\n{data.to_yaml()}\n---\n\n" + "\n\n".join(filter(None, sections)) + "\n")


def _flat(settings: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Settings by dotted name."""
    if isinstance(settings, Mapping):
        for key, value in settings.items():
            yield from _flat(value, f"{name}.{key}" if name else str(key))
    elif isinstance(settings, (list, tuple)) and any(isinstance(value, Mapping) for value in settings):
        for index, value in enumerate(settings):
            yield from _flat(value, f"{name}.{index}")
    else:
        yield name, settings


def _table(kind: str, rows: Mapping[str, Any]) -> str:
    cells = [(kind, "value"), ("---", "---"), *rows.items()]
    return "\n".join(f"| {_cell(name)} | {_cell(value)} |" for name, value in cells) if rows else ""


def _cell(value: Any) -> str:
    return " ".join(str(value).split()).replace("|", "\\|")
