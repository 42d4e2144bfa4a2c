"""Position in the data: where to continue if the length of an epoch has changed since the save."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from looplib._core.lease import note_provenance
from looplib._core.provenance import Provenance
from looplib.types import TrainState


def position(
    path: Path,
    counts: Mapping[str, Any],
    template: TrainState,
    resume: Callable[[TrainState], TrainState] | None,
    known: Provenance,
) -> dict[str, Any]:
    """Counts to continue with, in epochs of the new state's length.

    Between two epochs only `epoch_length` changes. Within an epoch, a loader's `resume` finds the batch that starts
    at the next sample; `known` has the loaders of the saved run. Raises ValueError within an epoch if there is none.
    """
    saved_length, length = counts["epoch_length"], template.epoch_length
    if counts["batch"] == 0:
        return {**counts, "epoch_length": length}
    if resume is not None and None not in (saved_length, length):
        saved = TrainState(**counts)
        note_provenance(saved, known)
        resumed = resume(saved)
        names = ("epoch", "batch", "epoch_length")
        return {**counts, **{name: getattr(resumed, name) for name in names}}
    if saved_length == length:
        return dict(counts)
    restored = f"ckpt.restore(state.replace(epoch_length={saved_length}))"
    raise ValueError(
        f"{path} was made with epoch_length={saved_length}, the state with {length}, and it stands within an epoch, "
        f"after batch {counts['batch']}: the batch size or the data has changed. Nothing needs to be lost. To continue "
        f"this epoch at the sample that comes next: state = loader.resume({restored}), or give "
        'checkpoint_io(..., describe={"loader": loader}), which does so by itself. To leave out the rest of it: '
        f"state = {restored}.replace(epoch_length={length}, epoch={counts['epoch'] + 1}, batch=0)"
    )
