"""Arguments of `make_loader`: checks, each with a message that says what to write instead, and those of a DataLoader."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, cast

from torch.utils.data import BatchSampler, DataLoader, IterableDataset, IterDataPipe

from looplib._core.checks import check, check_optional_count, check_type, few, named
from looplib._core.ranks import rank_and_size
from looplib._core.samples import are_arrays_of_one_length, are_columns
from looplib.data._orders import Order, batch_sampler, check_undivided, sampler, sequential, shuffled


class Required(enum.Enum):
    """The default of `batch_size`, which most datasets need and a DataLoader or an order may have; None says something else."""

    REQUIRED = enum.auto()

    __repr__ = enum.Enum.__str__


REQUIRED = Required.REQUIRED

_INSTEAD = {
    "limit": "max_batches=..., a number of batches, or give a torch.utils.data.Subset of the dataset",
    "sampler": "order=ll.data.sampler(...)",
    "batch_sampler": "order=ll.data.batch_sampler(...)",
    "generator": "seed=..., since the order and all draws are functions of the seed and the epoch",
    "in_order": "nothing: batches always come in the order of the epoch. (order=ll.data.sequential() does not shuffle)",
}


def check_options(order: Any, max_batches: Any, dataloader_options: Mapping[str, Any]) -> None:
    """Raise TypeError for an `order` that is not an Order, or an option that has a different name in torch's DataLoader."""
    for name in dataloader_options:
        check(name not in _INSTEAD, f"make_loader has no argument {name}; write {_INSTEAD.get(name)}", TypeError)
    check_type(
        "order is",
        order,
        Order | None,
        "expected what a call returns of ll.data.shuffled(), sequential(), "
        "with_replacement(num_samples), weighted(weights), mixture(weights, num_samples), by_length(lengths), "
        "growing(sizes), shuffled_blocks(buffer), sampler(...) or batch_sampler(...). A torch Sampler, a list of indices or a function "
        "(epoch, generator) -> indices is given as order=ll.data.sampler(...)",
    )
    check_optional_count(
        "max_batches",
        max_batches,
        advice="expected a number of batches, at least 1 (of 30% of them, max_batches=int(0.3 * batches)), or None for all",
    )


def order_of(order: Order | None, shuffle: bool | None) -> Order | None:
    """The order that is given, or that `shuffle` stands for."""
    check_type("shuffle is", shuffle, bool | None, "give True, False, or an order=...")
    check(
        shuffle is None or order is None,
        f"shuffle={shuffle} and order={order} are given: the order says whether to shuffle; leave shuffle out",
    )
    if shuffle is None:
        return order
    return shuffled() if shuffle else sequential()


def check_batch_size(
    dataset: Any, batch_size: int | Required | None, order: Order | None, drop_last: bool
) -> int | None:
    """Return the batch size, after checking it against the dataset and the order."""
    if order is not None and order.whole_batches:
        check(
            batch_size in (None, REQUIRED),
            f"batch_size={batch_size} and order={order} are given; the order makes the batches",
        )
        check(not drop_last, f"drop_last=True and order={order} are given; let the order leave out its last batch")
        batch_size = None
    check(
        batch_size is not REQUIRED,
        "make_loader needs a batch_size: write make_loader(dataset, batch_size=64), or batch_size=None if each item of "
        f"the dataset (a {type(dataset).__name__}) is a batch already",
        TypeError,
    )
    check_optional_count("batch_size", batch_size, advice="expected a positive int, or None if items are batches")
    check(
        batch_size is not None or not drop_last,
        "drop_last=True is given with batch_size=None, where each item is a batch; leave it out",
    )
    return cast("int | None", batch_size)


def of_all_ranks(per_rank: int | None, batch_size: int | Required | None, divide: bool) -> int | Required | None:
    """Samples per batch over all ranks together, of which each has this many, or the batch size that is given."""
    check_optional_count("batch_size_per_rank", per_rank, advice="expected a positive int")
    if per_rank is None:
        return batch_size
    check(
        batch_size is REQUIRED,
        f"batch_size={batch_size} and batch_size_per_rank={per_rank} are given; give one of them",
    )
    check(
        divide,
        f"batch_size_per_rank={per_rank} and divide=False are given, where each rank gets whole batches: "
        f"write batch_size={per_rank}",
    )
    return per_rank * rank_and_size()[1]


def check_stream(dataset: Any, order: Order | None, max_batches: int | None, num_workers: int, divide: bool) -> None:
    """Raise TypeError or ValueError for a dataset that is not a stream, or options that streams do not support."""
    kind = type(dataset).__name__
    check(
        hasattr(dataset, "__iter__") and not isinstance(dataset, Iterator),
        f"dataset is a {kind}; expected something with __len__ and __getitem__, or with an __iter__ that starts over "
        "each time (not an iterator, which can be read once only)",
        TypeError,
    )
    check(
        order is None or order.any_length,
        f"order={order!r} is given for a stream ({kind}), whose order is its own; a source that can be read from any sample on "
        "becomes a dataset with indices by ll.data.shards(read, lengths, buffer=...), or is shuffled without known lengths by "
        "ll.data.shuffled_stream(read, buffer=...)",
    )
    check(
        not (num_workers and isinstance(dataset, IterDataPipe)),
        f"dataset is a DataPipe ({kind}), which cannot be divided among workers here; use num_workers=0, or an "
        "IterableDataset that divides itself by get_worker_info()",
        TypeError,
    )
    if divide:
        check_undivided("dataset", dataset)
    check(
        max_batches is None,
        f"max_batches={max_batches} is given for a stream ({kind}), whose epochs the state ends: "
        f"ll.init_state(..., epoch_length={max_batches})",
    )


def check_samples(dataset: Any) -> None:
    """Raise TypeError if the columns of a dataset, several datasets or a name are passed instead of one dataset."""
    check(
        not isinstance(dataset, (str, bytes)),
        f"dataset is {named(dataset)}, whose samples would be characters; give the dataset itself",
        TypeError,
    )
    check(
        not (isinstance(dataset, (list, tuple)) and isinstance(next(iter(dataset), None), DataLoader)),
        f"dataset is {named(dataset)} of DataLoaders: make a loader of each, or one of "
        "torch.utils.data.ConcatDataset([loader.dataset for loader in loaders])",
        TypeError,
    )
    # A list of tensors that `default_collate` could stack may be one of samples.
    check(
        not (are_columns(dataset) or (isinstance(dataset, tuple) and are_arrays_of_one_length(dataset))),
        f"dataset is {named(dataset)} of tensors or arrays of the same length, so its items would be whole columns; write "
        "make_loader(torch.utils.data.TensorDataset(x, y), batch_size=...)",
        TypeError,
    )
    if isinstance(dataset, Mapping):
        check(
            dataset.keys() >= {*range(len(dataset))},
            f"dataset is {named(dataset)} with the keys {few(dataset)}, and samples are read by their index: give one of "
            "its datasets, such as dataset['train'], or of columns torch.utils.data.StackDataset(**columns), batch_size=...",
            TypeError,
        )


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


def settings_of(loader: DataLoader[Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments for `make_loader` that reproduce a DataLoader (or torchdata's StatefulDataLoader).

    Raises ValueError for arguments that are given besides.
    """
    names = sorted(name for name, value in given.items() if value not in (None, REQUIRED))
    check(
        not names,
        f"{', '.join(names)} given together with a {type(loader).__name__}, which has its own; give them to it, or "
        "give its dataset to make_loader",
    )
    batches: Any = loader.batch_sampler
    plain: Any = batches if _torchs_name(batches) == "BatchSampler" else loader
    settings = {name: getattr(loader, name) for name in _OPTIONS}
    if batches is not None and batches is not plain:
        return settings | {"order": batch_sampler(batches)}
    if loader.batch_size is None and batches is None and isinstance(loader.sampler, BatchSampler):
        return settings | {"order": replace(batch_sampler(loader.sampler), by_list=True)}
    settings |= {"batch_size": plain.batch_size, "drop_last": plain.drop_last}
    dataset, source = loader.dataset, plain.sampler
    if isinstance(dataset, IterableDataset):
        return settings
    whole = hasattr(dataset, "__len__") and len(source) == len(dataset)
    if whole and _torchs_name(source) == "SequentialSampler":
        order = sequential()
    elif whole and _torchs_name(source) == "RandomSampler" and not source.replacement:
        order = shuffled()
    else:
        order = sampler(source)
    return settings | {"order": order}


def _torchs_name(source: Any) -> str:
    """Name of torch's or torchdata's own class; empty for a subclass of it, which may use a different order."""
    kind = type(source)
    return kind.__name__ if kind.__module__.partition(".")[0] in ("torch", "torchdata") else ""
