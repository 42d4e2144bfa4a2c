"""Indexed datasets as the source of a loader: the batches of a plan, divided among ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from looplib.data._orders import Order
from looplib.data._plan import Plan, listed
from looplib.data._position import check_position
from looplib.data._readers import Job
from looplib.data._workers import Engines
from looplib.types import TrainState


@dataclass(frozen=True, eq=False)
class Samples:
    """Source of a loader over a dataset with indices.

    Attributes:
        engines: read the jobs.
        order: order of the samples.
        plan: function that returns the plan of an epoch.
        length: batches in epoch 0.
        batched: True if a batch has several keys and a rank reads only its own. Otherwise an item is a batch.
    """

    engines: Engines
    order: Order
    plan: Callable[[int], Plan]
    length: int
    batched: bool

    def plan_at(self, state: TrainState) -> Plan:
        """The plan of the state's epoch, after checking that the state is at one of its batches."""
        plan = self.plan(state.epoch)
        check_position(state, len(plan), self.length)
        return plan

    def read(self, state: TrainState, rank: int, ranks: int) -> Iterator[Any]:
        """Remaining batches of the state's epoch, as pairs: this rank's part, and the samples in the batch."""
        # The iterator holds no state, which a loop would keep alive until the end of the epoch.
        jobs = _jobs(self.plan_at(state), state.epoch, state.batch, rank, ranks, self.batched)
        if not self.engines.in_process:
            # Send lists: a tensor would go to the worker as a file descriptor, with its entire storage.
            jobs = (job._replace(keys=listed(job.keys), visits=listed(job.visits)) for job in jobs)
        return self.engines.read(state.epoch, jobs)


def _jobs(plan: Plan, epoch: int, first: int, rank: int, ranks: int, batched: bool) -> Iterator[Job]:
    """Jobs of the rest of an epoch. They refer to no loader, since an engine that is left early holds the rest."""
    for k in range(first, len(plan)):
        part = plan.part(k, rank, ranks) if batched else plan.part(k)
        visits = None if plan.visits is None else plan.visits[part]
        yield Job(epoch, k, rank, ranks, plan.size(k), plan.keys[part], visits)
