"""Conversion of a torch DataLoader's settings to a looplib loader."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from looplib.data._orders import Order, batch_sampler, sampler, sequential, shuffled

_OPTIONS = (
    "collate_fn",
    "num_workers",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "prefetch_factor",
    "persistent_workers",
)


def settings_of(loader: DataLoader[Any]) -> dict[str, Any]:
    """Arguments for `make_loader` that reproduce a DataLoader (or torchdata's StatefulDataLoader)."""
    options: dict[str, Any] = {name: getattr(loader, name) for name in _OPTIONS}
    if isinstance(loader.dataset, IterableDataset):
        return options | {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
    batches: Any = loader.batch_sampler
    if _torchs_name(batches) == "BatchSampler":
        options |= {"batch_size": batches.batch_size, "drop_last": batches.drop_last}
        return options | {"order": _order_of(loader, batches.sampler)}
    if batches is not None:
        return options | {"order": batch_sampler(batches)}
    return options | {"batch_size": None, "order": _order_of(loader, loader.sampler)}


def _order_of(loader: DataLoader[Any], source: Any) -> Order:
    dataset: Any = loader.dataset
    whole = hasattr(dataset, "__len__") and len(source) == len(dataset)
    if whole and _torchs_name(source) == "SequentialSampler":
        return sequential()
    if whole and _torchs_name(source) == "RandomSampler" and not source.replacement:
        return shuffled()
    return sampler(source)


def _torchs_name(source: Any) -> str:
    """Name of torch's or torchdata's own class; empty for a subclass of it, which may use a different order."""
    kind = type(source)
    return kind.__name__ if kind.__module__.partition(".")[0] in ("torch", "torchdata") else ""
