"""Sample removal: the same batches without some samples of the dataset."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from torch import Tensor

from looplib._core.checks import check
from looplib._core.records import with_repr
from looplib.data._loader import Loader
from looplib.data._plan import Plan, listed
from looplib.data._samples import Samples


def without_samples(loader: Loader, rows: Iterable[Any] | Tensor) -> Loader:
    """Remove samples of the dataset from a loader's batches.

    >>> import looplib as ll, torch
    >>> loader = ll.make_loader(torch.arange(6), batch_size=3, order=ll.data.in_order())
    >>> loader = without_samples(loader, [1, 5])
    >>> list(loader(ll.TrainState())), len(loader)
    ([tensor([0, 2]), tensor([3, 4])], 2)

    Batches that contained a removed sample become smaller, and removed samples are never read. Everything else stays:
    the order, the batch indices, the length of an epoch, and the random draws of the remaining samples. A run that
    continues from an earlier state is therefore bitwise the same up to the first batch that contained a removed
    sample. (A batch that would be empty takes a sample from a neighboring batch.)

    To continue after a loss spike: `state = kept[100]; loader = ll.data.without_samples(loader, [17, 503])`. The list
    belongs to your script, like the seed and the batch size: pass it again when you resume.

    Args:
        loader: from `make_loader` or `without_samples`.
        rows: indices in the dataset, or the keys that its sampler gives.

    Raises:
        TypeError: the loader reads a stream, whose samples have no indices.
        ValueError: the dataset has no such sample; or, from `loader(state)`, fewer samples than batches are left.
    """
    source = loader.source
    if not isinstance(source, Samples):
        raise TypeError(
            f"a stream ({type(loader.dataset).__name__}) has no numbered samples; leave them out where it yields them"
        )
    gone = set(listed(rows))
    numbers = {row for row in gone if isinstance(row, int)}
    sized = hasattr(loader.dataset, "__len__")
    count = len(loader.dataset) if sized else 0
    beyond = sorted(row for row in numbers if sized and not 0 <= row < count)
    check(not beyond, f"samples {beyond} are not in the dataset, whose {count} samples are numbered from 0")
    from_the_end = {row - count for row in numbers}
    planned = source.plan

    def plan_of(epoch: int) -> Plan:
        plan = planned(epoch).without(gone | from_the_end)
        check(
            plan.ends[0] > 0,
            f"epoch {epoch} has {len(plan)} batches and only {plan.ends[-1]} samples without the {len(gone)} samples left "
            "out, so some batches would have none; leave out fewer, or make a loader of the samples that are left "
            "(torch.utils.data.Subset), which is another order and length",
        )
        return plan

    planned_without = dataclasses.replace(source, plan=plan_of)
    without = dataclasses.replace(loader, source=planned_without, left_out=loader.left_out | gone)
    return with_repr(without, without_samples, loader, sorted(gone, key=repr))
