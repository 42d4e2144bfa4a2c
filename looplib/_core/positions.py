"""Positions within an epoch, converted from the batches of one loader to those of another.

A position is a batch, and the number of its first samples that the run has read before, in batches of a different size.
Loaders are compared by their descriptions, which a checkpoint holds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from looplib._core.mappings import without

PartlyRead = tuple[int, int, int]  # epoch, batch, samples

_OF_BATCHES = ("batch_size", "batch_size_per_rank", "drop_last")  # settings that leave the order of the samples alone


def read_of_batch(partly_read: PartlyRead, epoch: int, batch: int) -> int:
    """Samples of a batch that a run has read before it.

    >>> read_of_batch((1, 4, 2), 1, 4), read_of_batch((1, 4, 2), 1, 5)
    (2, 0)
    """
    return partly_read[2] if partly_read[:2] == (epoch, batch) else 0


def same_samples(old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    """True for two loaders that read the same samples in the same order, in batches of different sizes.

    >>> same_samples({"order": "shuffled()", "batch_size": 4}, {"order": "shuffled()", "batch_size": 6})
    True
    >>> same_samples({"order": "shuffled()", "batch_size": 4}, {"order": "sequential()", "batch_size": 6})
    False

    Loaders that stand beside the first one (`zipped`) follow from the number of its batches, so their samples would differ.
    The workers of a stream read batches of their own, so samples have one order with at most one of them.
    """
    has_sizes = all(isinstance(loader.get("batch_size"), int) for loader in (old, new))
    is_alike = without(old, _OF_BATCHES) == without(new, _OF_BATCHES)
    has_one_order = new.get("workers", 1) <= 1 and "beside" not in new
    return has_sizes and is_alike and has_one_order and old["batch_size"] != new["batch_size"]


def all_same_samples(old: Sequence[Mapping[str, Any]], new: Sequence[Mapping[str, Any]]) -> bool:
    """True for loaders that read the same samples in batches whose sizes have all changed by one factor.

    >>> pair, larger = ([{"batch_size": size}, {"batch_size": 2 * size}] for size in (4, 6))
    >>> all_same_samples(pair, larger), all_same_samples(pair, [larger[0], pair[1]])
    (True, False)

    So loaders that a run reads side by side stay together: each has read the same part of its batch.
    """
    if not old or len(old) != len(new) or not all(map(same_samples, old, new)):
        return False
    was, now = old[0]["batch_size"], new[0]["batch_size"]
    return all(
        before["batch_size"] * now == after["batch_size"] * was for before, after in zip(old, new, strict=True)
    )


def is_elastic(old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    """True for two loaders that differ in nothing but the number of ranks, with a batch size for each of them."""
    sizes = ("batch_size",)
    return old.get("batch_size_per_rank") is not None and without(old, sizes) == without(new, sizes)
