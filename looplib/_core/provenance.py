"""Provenance of a run: recorded on its states, stored in checkpoints, and compared by later runs.

`init_state` records the optimizer, a loader records itself on the state for which it yields batches, and a restore
records what the checkpoint contains. Steps and `replace` pass on one reference, so a step costs nothing extra.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from looplib._core import lease
from looplib._core.checks import few, warn
from looplib._core.lease import Leased
from looplib._core.ranks import rank

_MOST_STEPS = 8  # on one batch, of several networks


@dataclass(frozen=True, slots=True)
class Provenance:
    """Descriptions, as plain values, of what a state was made with.

    Attributes:
        optimizer: that of `init_state`, or None.
        loaders: those that have yielded batches for the run, latest last.
        restored: path of the checkpoint from which the state or an earlier one was restored, if its loaders are
            known; otherwise "".
        at_step: step of that restored state.
        model: that of `init_state`, or None.
        reading: the last iteration of a loader (`data._loader.Reading`), which the states of its loop share; or None.
    """

    optimizer: Mapping[str, Any] | None = None
    loaders: tuple[Mapping[str, Any], ...] = ()
    restored: str = ""
    at_step: int = 0
    model: Mapping[str, Any] | None = None
    reading: Any = None


def provenance_of(state: Leased) -> Provenance:
    """Provenance of a state. Nothing is known of one created directly from its fields."""
    known: Provenance | None = lease.provenance(state)
    return known or Provenance()


def warn_of_position(state: Any) -> None:
    """Warn if a state has moved by several batches for each batch that its loader has yielded, or by none.

    A batch may be trained on many times on purpose, so it takes two batches, with the same few steps for each. It stays
    where it was on purpose if the updates within the epoch belong to no batch and the epoch is not read to its end.
    """
    reading = provenance_of(state).reading
    if reading is None or reading.drawn < 2 or state.epoch_length != reading.epoch_length:
        return
    if state.no_batch and reading.ended and (state.epoch, state.batch) == (reading.epoch, reading.batch):
        if state.step > reading.step and rank() == 0:
            warn(
                f"the loader has given all {reading.drawn} batches of the epoch, and the state is still at batch "
                f"{state.batch}, so the same epoch comes again: ll.apply_gradients leaves the position in the data unless "
                "it is told that the update consumes a batch, ll.apply_gradients(..., samples=len(batch))"
            )
        return
    moved = (state.epoch - reading.epoch) * (state.epoch_length or 0) + state.batch - reading.batch
    each, rest = divmod(moved, reading.drawn)
    if 1 < each <= _MOST_STEPS and not rest and rank() == 0:
        warn(
            f"the state has moved by {each} batches for each batch of the loader, so epochs end too early, "
            "and a resumed run leaves samples out: if several train steps use one batch, make all but the first by "
            "ll.make_train_step(..., same_batch=True)"
        )


def other_settings(path: Any, changed: Sequence[str], seed: Sequence[str] = ()) -> str:
    """Warning about settings that differ from those of the saved run.

    Args:
        path: path of the checkpoint.
        changed: settings with which the run continues, each in words.
        seed: the seed in words, if the restored state takes a different one from the checkpoint.
    """
    taken = {few(changed, 10, "; "): "the new ones"} if changed else {}
    taken |= dict.fromkeys(seed, "the checkpoint's seed (state.replace(seed=...) changes it)")
    return (
        f"{path} was saved with other settings: {'; '.join(taken)}. The run continues from it with "
        f"{' and '.join(taken.values())}; to start over, give checkpoint_io another directory or delete this one"
    )
