"""Position in the data: where a run continues if its epochs have a different length than when it was saved."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from looplib.types import TrainState


def position(path: Path, counts: Mapping[str, Any], template: TrainState) -> dict[str, Any]:
    """The counts to continue with: the saved ones, with the `epoch_length` of the new state between two epochs.

    Raises ValueError within an epoch of another length.
    """
    length = template.epoch_length
    if counts["epoch_length"] == length or counts["batch"] == 0:
        return {**counts, "epoch_length": length}
    saved, batch = counts["epoch_length"], counts["batch"]
    raise ValueError(
        f"{path} was made with epoch_length={saved}, the state with {length}, and it stands within an epoch, after "
        f"batch {batch}. To finish that epoch as it began, and change the data or the batch size at its end, make the "
        f"loader as it was and epoch_length={saved}. To start the next epoch now, and keep weights, optimizer state, "
        f"step and schedules: state = ckpt.restore(state.replace(epoch_length={saved})).replace(epoch_length={length}, "
        f"epoch={counts['epoch'] + 1}, batch=0)"
    )
