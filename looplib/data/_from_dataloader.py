"""Conversion of a torch DataLoader's settings to a looplib loader."""

from __future__ import annotations

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
    if _is_torchs("BatchSampler", batches):
        options |= {"batch_size": batches.batch_size, "drop_last": batches.drop_last}
        return options | {"order": _order_of(loader, batches.sampler)}
    if batches is not None:
        return options | {"order": batch_sampler(batches)}
    return options | {"batch_size": None, "order": _order_of(loader, loader.sampler)}


def _order_of(loader: DataLoader[Any], source: Any) -> Order:
    dataset: Any = loader.dataset
    count = len(dataset) if hasattr(dataset, "__len__") else None
    if _is_torchs("SequentialSampler", source) and len(source) == count:
        return in_order()
    if _is_torchs("RandomSampler", source) and not source.replacement and len(source) == count:
        return shuffled()
    if _is_torchs("WeightedRandomSampler", source) and source.replacement and len(source.weights) == count:
        return weighted(source.weights, source.num_samples)
    return sampler(source)


def _is_torchs(name: str, source: Any) -> bool:
    """True for torch's or torchdata's own class, and not a subclass, which may use a different order."""
    kind = type(source)
    return kind.__name__ == name and kind.__module__.partition(".")[0] in ("torch", "torchdata")
