"""Loader positions: the batch of a loader that a state is at."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from looplib._core.checks import check
from looplib._core.mappings import fields_of
from looplib.data._plan import Epochs, Plan
from looplib.types import TrainState


def check_position(state: TrainState, count: int, length: int) -> None:
    """Raise ValueError if a state is not at a batch of this loader.

    Args:
        state: the state to read from.
        count: batches in the state's epoch.
        length: batches in epoch 0, which is `len(loader)`.
    """
    check(
        state.epoch_length in (None, length),
        f"state.epoch_length is {state.epoch_length}, but this loader has {length} batches in an epoch: it has another "
        "batch_size or dataset than the run began with. To continue with this loader and keep the weights, the "
        "optimizer's state, the step and the schedules: state = loader.resume(state). For a new run: "
        "init_state(..., epoch_length=len(loader)); to read another set from its beginning: loader(ll.TrainState())",
    )
    check(
        state.epoch_length in (None, count),
        f"epoch {state.epoch} has {count} batches, but epoch 0 has {length}; for epochs of different lengths, leave "
        "epoch_length out of init_state, and call state = ll.end_epoch(state) after the for loop",
    )
    check(
        state.batch != count,
        f"the state stands at the end of epoch {state.epoch} (batch {count} of {count}); make it with "
        "init_state(..., epoch_length=len(loader)), or call state = ll.end_epoch(state) after the for loop",
    )
    check(
        state.batch < count,
        f"state.batch is {state.batch}, but epoch {state.epoch} has {count} batches; is this the loader, with the data "
        "and the batch_size, that the run began with?",
    )


def read_of_next(state: TrainState, batch_size: int, samples: int) -> int:
    """Number of samples of the next batch that a run with another batch size has read, as `Restart` leaves them.

    Such a state has that number as `batch_samples`, and its `samples` agree: both are needed, so that a smaller batch
    that happens to come last is not taken for it.
    """
    read = state.samples - state.epoch * samples - state.batch * batch_size
    return read if 0 < read < batch_size and read == state.batch_samples else 0


def _at(state: TrainState, **position: int) -> TrainState:
    """The state at this position: itself, if it is there."""
    return state if fields_of(state, position) == position else state.replace(**position)


def _agrees(batches: int, length: int, consumed: int, count: int) -> bool:
    """True if so many of an epoch's batches, of any one size, may end at, or before, the samples that were consumed."""
    return (
        0 <= consumed < count
        and batches * count <= consumed * length
        and consumed * (length - 1) < count * (batches + 1)
    )


def _batches_of(plan: Epochs, epoch: int, size: int) -> int:
    """Number of batches of this size in an epoch."""
    count = plan.samples(epoch)
    batches = count // size if plan.drop_last else -(-count // size)
    return min(batches, plan.limit or batches)


@dataclass(frozen=True, eq=False)
class Restart:
    """Facts about a loader that are needed to continue a run with a different batch size or dataset.

    Attributes:
        plan: function that returns the plan of an epoch.
        length: batches in an epoch.
        name: name of the order in errors.
        any_batch_size: the samples come in the same order with any batch size.
        any_length: appended samples do not change the order of the earlier ones.
        per_rank: samples per batch, if they are given per rank. Every epoch has the same number of samples then, and the
            position in it follows from the samples of the whole run.
        resized: True if the state knows that its run had a loader with another batch size; None if it knows no loader.
    """

    plan: Callable[[int], Plan]
    length: int
    name: str
    any_batch_size: bool
    any_length: bool
    per_rank: int | None = None
    resized: bool | None = None

    def state(self, state: TrainState) -> TrainState:
        """The state at the same sample, with its position and `epoch_length` counted in this loader's batches."""
        if self.per_rank is not None:
            return self._at_sample(state, self.per_rank)
        if state.batch == 0:
            return state.replace(epoch_length=self.length)
        plan = self.plan(state.epoch)
        if state.epoch_length == self.length and not self._had_another_batch_size(state, plan):
            return state
        consumed = self._consumed(state)
        last = bisect_left(plan.ends, min(consumed, plan.ends[-1]))
        self._check(
            state,
            consumed >= plan.ends[last],
            f"{consumed} samples of epoch {state.epoch} have been read, and no batch begins there",
        )
        if (batch := last + 1) == len(plan):
            return state.replace(epoch=state.epoch + 1, batch=0, epoch_length=self.length)
        return state.replace(batch=batch, epoch_length=self.length)

    def _at_sample(self, state: TrainState, size: int) -> TrainState:
        """The state at the same sample of the epoch, which may lie within a batch of this loader."""
        assert isinstance(self.plan, Epochs)
        count, length = self.plan.samples(state.epoch), state.epoch_length
        consumed = state.samples - state.epoch * count
        if length is None or not _agrees(state.batch, length, consumed, count):
            self._check(
                state,
                length == self.length or state.batch == 0,  # such as after a step that counts tokens
                f"{state.samples} samples of the run do not say which of the {count} samples of epoch {state.epoch} have "
                "been read",
            )
            return _at(state, epoch_length=self.length)
        batch, read = divmod(consumed, size)
        return _at(state, batch=batch, epoch_length=self.length, batch_samples=read or state.batch_samples)

    def _had_another_batch_size(self, state: TrainState, plan: Plan) -> bool:
        """True if batches of a different size were read, although the epoch has as many batches as now.

        An example is 9 samples in batches of 4 or of 3. If the last batch differs in size for another reason, such as
        a `collate_fn` that drops samples, that size does not lead to the same number of batches.
        """
        size = state.batch_samples
        if size == plan.size(state.batch - 1):
            return False
        if self.resized is not None:
            return self.resized
        if size < 1 or not isinstance(self.plan, Epochs) or self.plan.batch_size is None:
            return False
        if state.epoch == 0 and state.batch * size != state.samples:
            return False
        return self.length == _batches_of(self.plan, state.epoch, size)

    def _consumed(self, state: TrainState) -> int:
        """Number of samples read in the state's epoch, if they are the first samples of this loader's epoch too."""
        size, old_length = state.batch_samples, state.epoch_length
        consumed = state.batch * size
        plan: Any = self.plan
        self._check(
            state,
            self.any_batch_size and isinstance(plan, Epochs),
            f"{self.name} puts the samples into another order with another batch_size or dataset",
        )
        self._check(
            state,
            size > 0 and old_length is not None and (state.epoch > 0 or consumed == state.samples),
            f"its counts (batch={state.batch}, epoch_length={old_length}, samples={state.samples}, "
            f"batch_samples={size}) do not say which samples of epoch {state.epoch} have been read",
        )
        count = plan.samples(state.epoch)
        same_data = self.any_length or old_length in (count // size, -(-count // size))
        self._check(
            state,
            same_data and consumed <= count,
            f"{old_length} batches of {size} samples are not an epoch of the {count} samples that the loader has now, "
            f"and {self.name} puts another dataset into another order",
        )
        return consumed

    def _check(self, state: TrainState, holds: bool, reason: str) -> None:
        check(
            holds,
            f"cannot continue within epoch {state.epoch} at batch {state.batch} of {state.epoch_length}: {reason}. "
            "Finish this epoch with the batch_size and the dataset that it began with; or leave out the rest of it, "
            "which keeps the weights, the optimizer's state, the step and the schedules: "
            f"state.replace(epoch={state.epoch + 1}, batch=0, epoch_length={self.length})",
        )
