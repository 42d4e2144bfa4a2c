"""Summary of a run: its sizes, and a table of the model's modules."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Any, TextIO

from torch import nn

from looplib._core.checks import check_count
from looplib._core.kinds import check_kind
from looplib._core.ranks import is_first, world_size


def summary(
    model: nn.Module,
    loader: Any = None,
    *,
    epochs: float | None = None,
    steps: int | None = None,
    microbatches: int = 1,
    depth: int = 1,
    file: TextIO | None = None,
) -> None:
    """Print what a run will do: samples, batch sizes, steps, parameters, dtypes, devices and ranks.

    >>> import looplib as ll, torch
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    >>> loader = ll.make_loader(range(100), batch_size=32)
    >>> ll.log.summary(model, loader, epochs=3, microbatches=2)
    samples               100
    epochs                3 of 4 batches
    steps                 12
    batch size            32: 1 rank, 2 microbatches of at most 16 samples each
    trainable parameters  58
    frozen parameters     0
    <BLANKLINE>
    module  type       parameters  trainable  dtype    device
    0       Linear             40         40  float32  cpu
    2       Linear             18         18  float32  cpu
    total   Sequential         58         58  float32  cpu

    It prints on the first rank only.

    Args:
        model: the model. Shared parameters are counted once, at the first module that has them.
        loader: a loader of `make_loader`.
        epochs: number of epochs, with a loader.
        steps: number of optimizer steps, if it is not the number of batches in these epochs.
        microbatches: number of microbatches that `accumulate` splits a batch into.
        depth: depth of the modules in the table; 0 for the total alone.
        file: where to print. Defaults to the standard output.

    Raises:
        TypeError: `model` is not a module.
        ValueError: `depth` or `microbatches` is not a count.
    """
    check_kind(model, "summary", "model")
    check_count("depth", depth, 0)
    check_count("microbatches", microbatches, 1)
    if is_first():
        total, trainable = _numbers(model.parameters()), _numbers(_trainable(model.parameters()))
        facts = _run(loader, epochs, steps, microbatches) if loader is not None else _steps(steps)
        facts += [("trainable parameters", f"{trainable:,}"), ("frozen parameters", f"{total - trainable:,}")]
        lines = _aligned(facts, "<<") + [""] + _aligned(_modules(model, depth), "<<>><<")
        print("\n".join(lines), file=file or sys.stdout)


def _run(loader: Any, epochs: float | None, steps: int | None, microbatches: int) -> list[tuple[str, str]]:
    samples, size, batches = loader.description["samples"], loader.batch_size, _length(loader)
    facts = [("samples", "unknown (a stream)" if samples is None else f"{samples:,}")]
    if epochs is not None:
        facts.append(("epochs", f"{epochs:g}" + (f" of {batches:,} batches" if batches else "")))
        steps = round(epochs * batches) if steps is None and batches else steps
    return facts + _steps(steps) + _batch_size(size, world_size() if loader.divide else 1, microbatches)


def _batch_size(size: int | None, ranks: int, microbatches: int) -> list[tuple[str, str]]:
    if size is None:
        return []
    most = _counted(-(-size // (ranks * microbatches)), "sample")
    parts = f"{_counted(ranks, 'rank')}, {_counted(microbatches, 'microbatch', 'es')} of at most {most} each"
    return [("batch size", f"{size:,}: {parts}")]


def _steps(steps: int | None) -> list[tuple[str, str]]:
    return [] if steps is None else [("steps", f"{steps:,}")]


def _length(loader: Any) -> int | None:
    try:
        return len(loader)
    except TypeError:  # a stream
        return None


def _counted(count: int, noun: str, plural: str = "s") -> str:
    return f"{count:,} {noun}{'' if count == 1 else plural}"


def _modules(model: nn.Module, depth: int) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [("module", "type", "parameters", "trainable", "dtype", "device")]
    seen: set[nn.Parameter] = set()
    for name, module in model.named_modules():
        level = name.count(".") + 1 if name else 0
        new = [p for p in module.parameters(recurse=level == depth) if p not in seen] if level <= depth else []
        seen.update(new)
        if new and depth:
            rows.append(_row(name or "(itself)", module, new))
    return [*rows, _row("total", model, [*model.parameters()])]


def _row(name: str, module: nn.Module, parameters: Sequence[nn.Parameter]) -> tuple[str, ...]:
    total, trainable = _numbers(parameters), _numbers(_trainable(parameters))
    dtypes, devices = _listed(p.dtype for p in parameters), _listed(p.device for p in parameters)
    return name, type(module).__name__, f"{total:,}", f"{trainable:,}", dtypes, devices


def _trainable(parameters: Iterable[nn.Parameter]) -> Iterable[nn.Parameter]:
    return filter(attrgetter("requires_grad"), parameters)


def _numbers(parameters: Iterable[nn.Parameter]) -> int:
    return sum(map(nn.Parameter.numel, parameters))


def _listed(values: Iterable[Any]) -> str:
    return ", ".join(sorted({str(value).removeprefix("torch.") for value in values})) or "-"


def _aligned(rows: Sequence[Sequence[str]], sides: str) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(f"{cell:{side}{width}}" for cell, side, width in zip(row, sides, widths, strict=True)).rstrip()
        for row in rows
    ]
