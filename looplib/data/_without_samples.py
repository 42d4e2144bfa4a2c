"""Leaving samples out of a run: the same batches without some samples of the dataset."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from torch import Tensor

from looplib.data._loader import Loader
from looplib.data._plan import Plan, listed
from looplib.data._samples import Samples


def without_samples(loader: Loader, rows: Iterable[Any] | Tensor) -> Loader:
    """The same loader without some samples of the dataset.

    >>> import looplib as ll, torch
    >>> loader = ll.make_loader(torch.arange(6), batch_size=3, order=ll.data.in_order())
    >>> loader = without_samples(loader, [1, 5])
    >>> list(loader(ll.TrainState())), len(loader)
    ([tensor([0, 2]), tensor([3, 4])], 2)

    A batch that had one of them is smaller by it, and they are never read. All else stays as it was: the order,
    the numbers of the batches, the length of an epoch, and what is drawn while another sample is read. So a run that
    continues from an earlier state has the bits that it would have had, up to the first batch that had one of them. (A
    batch of which nothing is left takes a sample of the next one, or of one before.)

    To continue after a spike: `state = kept[100]; loader = ll.data.without_samples(loader, [17, 503])`. The list
    belongs to the script, as the seed and the batch size do: a run that is resumed needs it again.

    Args:
        loader: from `make_loader`, or from this.
        rows: indices of the dataset, or the keys that its sampler gives.

    Raises:
        TypeError: a loader over a stream, whose samples have no indices.
        ValueError: a row that the dataset does not have; by `loader(state)`, fewer samples left than batches.
    """
    source = loader.source
    if not isinstance(source, Samples):
        raise TypeError(
            f"a stream ({type(loader.dataset).__name__}) has no numbered rows; leave them out where it yields them"
        )
    gone = set(listed(rows))
    count = len(loader.dataset) if hasattr(loader.dataset, "__len__") else float("inf")
    beyond = [row for row in gone if isinstance(row, int) and not 0 <= row < count]
    if beyond:
        raise ValueError(
            f"rows {', '.join(map(str, sorted(beyond)))} are not in the dataset, whose {count} rows are numbered from 0"
        )
    planned = source.plan

    def plan_of(epoch: int) -> Plan:
        plan = planned(epoch).without(gone)
        if plan.ends[0] < 1:
            raise ValueError(
                f"epoch {epoch} has {len(plan)} batches and only {plan.ends[-1]} samples without the {len(gone)} "
                "rows left out, so some batches would have none; leave out fewer, or make a loader of the samples "
                "that are left (torch.utils.data.Subset), which is another order and length"
            )
        return plan

    return dataclasses.replace(
        loader, source=dataclasses.replace(source, plan=plan_of), left_out=loader.left_out | gone
    )
