"""Conversion of a torch DataLoader's settings to a looplib loader."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from looplib.data._orders import Order, batch_sampler, in_order, sampler, shuffled, weighted

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
    count = len(dataset) if hasattr(dataset, "__len__") else None
    orders: dict[tuple[str, bool], Callable[[], Order]] = {  # by the sampler's name and `replacement`
        ("SequentialSampler", False): in_order,
        ("RandomSampler", False): shuffled,
        ("WeightedRandomSampler", True): lambda: weighted(source.weights, source.num_samples),
    }
    order = orders.get((_torchs_name(source), getattr(source, "replacement", False)))
    if order is None or len(getattr(source, "weights", source)) != count:
        return sampler(source)
    return order()


def _torchs_name(source: Any) -> str:
    """Name of torch's or torchdata's own class; empty for a subclass of it, which may use a different order."""
    kind = type(source)
    return kind.__name__ if kind.__module__.partition(".")[0] in ("torch", "torchdata") else ""
