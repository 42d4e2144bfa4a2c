"""Positions in the data: the batch that a state is at, for any loader, batch size or stream.

A dataset with indices needs the state's counts alone. A stream that can continue somewhere says where, in
`state.extra`.
"""

from __future__ import annotations

import dataclasses
import json
from bisect import bisect_right
from collections.abc import Mapping
from typing import Any

from looplib._core.checks import check, check_type, few, warn
from looplib._core.collective import together_with_data
from looplib._core.positions import read_of_batch
from looplib._core.ranks import is_first, rank, world_size
from looplib.data._orders import Order
from looplib.data._plan import Plan
from looplib.types import TrainState, check_state

KEY = "stream"  # of `state.extra`


def check_position(state: TrainState, count: int, length: int, *, again: bool = False) -> None:
    """Raise ValueError if a state is not at a batch of this loader.

    A state whose epochs `end_epoch` ends may stand after the last batch: a run that was saved there, and is restarted,
    has no batches left in the epoch.

    Args:
        state: the state to read from.
        count: batches in the state's epoch.
        length: batches in epoch 0, which is `len(loader)`.
        again: True if the loader has been asked for this epoch before, so that the epoch was not ended.
    """
    check(
        state.epoch_length in (None, length),
        f"state.epoch_length is {state.epoch_length}, but this loader has {length} batches in an epoch: it has another "
        "batch_size or dataset than the run began with. To continue with this loader and keep the weights, the "
        "optimizer's state, the step and the schedules: state = loader.resume(state). For a new run: "
        "init_state(..., loader=loader); to read another set from its beginning: loader(ll.TrainState())",
    )
    check(
        state.epoch_length in (None, count),
        f"epoch {state.epoch} has {count} batches, but epoch 0 has {length}; for epochs of different lengths, write "
        "ll.init_state(..., loader=loader).replace(epoch_length=None), and call state = ll.state.end_epoch(state) after the for loop",
    )
    check(
        0 <= state.batch < count or (state.batch == count and state.epoch_length is None and not again),
        f"the state is at batch {state.batch} of epoch {state.epoch}, which has {count} batches: at the end of an epoch, "
        "make it with init_state(..., loader=loader), or call state = ll.state.end_epoch(state) after the for loop "
        "(now, if the loop was interrupted before that line), or in a loop of your own give the next position, epoch, batch = "
        "divmod(batches_taken, len(loader)); else, is this the loader, with the data and the batch_size, that the run began "
        "with?",
    )


def resumed(
    state: TrainState, plan: Plan, length: int, batch_size: int | None, order: Order, description: Mapping[str, Any]
) -> TrainState:
    """The state at the same sample, with its position and `epoch_length` counted in a loader's batches.

    Args:
        state: a state whose run used another loader, or this one.
        plan: the loader's plan of the state's epoch.
        length: batches in an epoch of the loader.
        batch_size: samples in a batch of the loader; None if that varies.
        order: order of the samples.
        description: description of the loader.
    """
    loaders, partly_read = loaders_of_position(state), state.run.partly_read
    read = read_of_batch(partly_read, state.epoch, state.batch)
    if state.batch == 0 and not read:
        return state.replace(epoch_length=length)
    if loaders and loaders[0] == description:
        return state if state.epoch_length == length else state.replace(epoch_length=length)
    if state.epoch_length == length and not read and not _had_another_batch_size(state, plan, batch_size):
        return state
    epoch, size, old_length = state.epoch, state.batch_samples, state.epoch_length
    if partly_read[0] == epoch and partly_read[2] and loaders:  # the last batch may be the one that was partly read
        size = loaders[0].get("batch_size") or size
    consumed, count = state.batch * size + read, plan.drawn
    counts = f"batch={state.batch}, epoch_length={old_length}, samples={state.samples}, batch_samples={size}"
    batch, whole = bisect_right(plan.ends, consumed), count // max(size, 1)
    drawn = {loader.get("batch_size") for loader in loaders}
    for holds, reason in (
        (
            order.any_batch_size and (batch_size or order.whole_batches),
            f"{order} has other batches with another batch_size or dataset",
        ),
        (
            size and old_length and (epoch or consumed == state.samples),
            f"its counts ({counts}) do not say which samples of epoch {epoch} have been read",
        ),
        (  # collate_fn leaves samples out, or each rank has batches of its own
            not drawn or drawn & {size, None},
            f"the last batch had {size} samples, and the loader of this run draws batches of {few(drawn)}",
        ),
        (
            consumed <= count and (order.any_length or old_length in (whole, whole + (whole * size < count))),
            f"{old_length} batches of {size} samples are not an epoch of the {count} samples that the loader has now, "
            f"and {order} puts another dataset into another order",
        ),
        (
            batch >= len(plan) or consumed == plan.start(batch) or batch_size is not None,
            f"{consumed} samples have been read, and no batch of this loader begins there; one does with "
            f"order=ll.data.growing({{0: {size}, {epoch * count + consumed}: ...}})",
        ),
    ):
        check(
            holds,
            f"cannot continue within epoch {epoch} at batch {state.batch} of {old_length}: {reason}. Finish this epoch "
            "with the batch_size and the dataset that it began with, on any number of ranks; or leave out the rest of "
            "it, which keeps the weights, the optimizer's state, the step and the schedules: "
            f"state.replace(epoch={epoch + 1}, batch=0, epoch_length={length})",
        )
    if not drawn and is_first():
        warn(
            f"the run does not know its loader, so its batches in epoch {epoch} are taken to have had {size} samples each, as "
            "the last one: write ll.init_state(..., loader=loader), with the loader that the run began with"
        )
    if batch >= len(plan):
        return state.replace(epoch=epoch + 1, batch=0, epoch_length=length)
    run = dataclasses.replace(state.run, partly_read=(epoch, batch, consumed - plan.start(batch)))
    return state.replace(batch=batch, epoch_length=length, run=run)


def is_just_restored(state: TrainState) -> bool:
    """True if no step has been made since the restore of a checkpoint."""
    return bool(state.run.restored) and state.run.at_step == state.step


def loaders_of_position(state: TrainState) -> tuple[Mapping[str, Any], ...]:
    """Settings of the loaders in whose batches the position of a state is; none if they are not known."""
    return state.run.saved_loaders if is_just_restored(state) else state.run.known_loaders


def _had_another_batch_size(state: TrainState, plan: Plan, batch_size: int | None) -> bool:
    """True if batches of a different size were read, although the epoch has as many batches as now.

    An example is 9 samples in batches of 4 or of 3. The state knows the loaders of its run. If it knows none, the
    samples of its last batch decide.
    """
    if state.batch <= len(plan) and state.batch_samples in (0, plan.size(state.batch - 1)):
        return False
    sizes = {loader.get("batch_size") for loader in loaders_of_position(state)}
    others = sizes - {batch_size}
    return not sizes or state.batch_samples in others or sizes == others


def with_position(loader: Any, state: TrainState) -> TrainState:
    """Keep the position of a stream in the state, for a dataset that has `state_dict` and `load_state_dict`.

    >>> import looplib as ll
    >>> class Numbers:
    ...     at = 0
    ...     def __iter__(self):
    ...         while self.at < 8:
    ...             self.at += 1
    ...             yield self.at
    ...     def state_dict(self):
    ...         return {"at": self.at}
    ...     def load_state_dict(self, saved):
    ...         self.at = saved["at"]
    >>> loader = ll.make_loader(Numbers(), batch_size=2)
    >>> state = ll.TrainState(extra={"stream": ""})
    >>> batches = loader(state)
    >>> next(batches)
    tensor([1, 2])
    >>> state = ll.data.with_position(loader, state.replace(batch=1))
    >>> state.extra["stream"]
    '{"epoch": 0, "batch": 1, "ranks": [{"at": 2}]}'
    >>> next(loader(state))
    tensor([3, 4])

    Without it, a resumed run reads the batches before `state.batch` again and skips them, which takes long for a large
    stream. With it, `loader(state)` hands the stored position to the dataset and continues there. Streams of Hugging Face
    `datasets` have these methods. Create the state with `extra={"stream": ""}`, and call this before each save:

        ckpt.save(ll.data.with_position(loader, state))

    The position is a line of JSON in `state.extra["stream"]`, with the epoch and batch that it belongs to. At any
    other batch it is ignored. On several ranks that read streams of their own (`divide=False`, such as
    `split_dataset_by_node`), all ranks call this together, and the resumed run needs the same number of ranks.

    Only what is in the dataset's `state_dict` is kept. Hugging Face `datasets` fill a shuffle buffer with new
    samples, so in this epoch the resumed run does not see those that were in the buffer, as `datasets` itself warns. Draws from
    the global random streams (torch, numpy, `random`) in the dataset differ from those of an uninterrupted run.

    Args:
        loader: a loader over a stream, with `num_workers=0`.
        state: the state after the last batch that this loader has yielded.

    Raises:
        TypeError: the dataset is no stream with `state_dict` and `load_state_dict`, `num_workers` is above 0, the position
            is no JSON, or `state.extra` is neither a dict nor None.
        ValueError: the loader has yielded more or fewer batches than the state has seen.
    """
    check_state(state, "ll.data.with_position(loader, state)")
    dataset, source = loader.dataset, loader.source
    check(
        getattr(source, "keeps_position", False),
        f"{type(dataset).__name__} is no stream with state_dict and load_state_dict, or is read by workers, which are "
        "ahead of the loop: give such a stream, with num_workers=0, or save without with_position, and a resumed run "
        "reads past what was seen",
        TypeError,
    )
    extra = {} if state.extra is None else state.extra
    check_type("state.extra is", extra, Mapping, f"give a dict to add {KEY!r} to")
    text = ""
    if state.batch:
        epoch, batch = source.yielded
        check(
            (epoch, batch) == (state.epoch, state.batch),
            f"the state is at batch {state.batch} of epoch {state.epoch}, and the loader has yielded {batch} of epoch "
            f"{epoch}: call with_position between two batches, with the newest state",
        )
        position = dataset.state_dict()
        ranks = [position] if loader.divide else together_with_data().gather(position)
        text = json.dumps({"epoch": epoch, "batch": batch, "ranks": ranks})
    return state.replace(extra={**extra, KEY: text})


def stored_position(state: TrainState, name: str, divide: bool, read: int) -> Any:
    """The position that `with_position` has kept of a stream of this name, if it is that of the state's batch.

    A batch of which the run has read some samples begins elsewhere: the position was kept between batches of another size.
    """
    text = state.extra.get(KEY) if isinstance(state.extra, Mapping) else None
    saved = json.loads(text) if text else {}
    if read or (saved.get("epoch"), saved.get("batch")) != (state.epoch, state.batch):
        return None
    ranks = saved["ranks"]
    check(
        divide or len(ranks) == world_size(),
        f"{name} was read on {len(ranks)} ranks that each have samples of their own, and there are {world_size()}: "
        "continue with as many, or from the end of an epoch",
    )
    return ranks[0 if divide else rank()]
