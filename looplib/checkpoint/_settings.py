"""Settings of a run, stored in checkpoints and compared when resuming."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from looplib._core.checks import check, check_type
from looplib._core.mappings import mapped
from looplib._core.provenance import Provenance, other_settings, provenance_of, restored_into
from looplib._core.records import described, differences, without_secrets
from looplib.types import TrainState


class Run(NamedTuple):
    """A restored state without its trees, and the warning about settings that differ from those saved."""

    counts: dict[str, Any]
    made_with: Provenance
    warning: str = ""


class Settings:
    """Settings of a run: those that the user describes, and those known from its states.

    Args:
        describe: settings by name. Loaders and optimizers among them describe themselves.
    """

    def __init__(self, describe: Mapping[str, Any] | None) -> None:
        advice = 'give a mapping of names to settings, such as {"loader": loader, **vars(args)}'
        check_type("describe is", describe, (Mapping, type(None)), advice)
        settings = {str(name): setting for name, setting in (describe or {}).items()}
        self._described: dict[str, Any] = without_secrets(mapped(described, settings))
        self._loaders = [name for name, setting in settings.items() if hasattr(setting, "resume")]

    def description(self, state: TrainState) -> dict[str, Any]:
        """Settings as stored in the manifest of a checkpoint of this state."""
        known = provenance_of(state)
        loaders = {"loaders": [*known.loaders]} if known.loaders else {}
        return loaders | self._compared(state)

    def continued(self, path: Path, counts: dict[str, Any], saved: Mapping[str, Any], template: TrainState) -> Run:
        """The run of a checkpoint, continued with the settings of `template`. `saved` are those of the checkpoint."""
        length = template.epoch_length
        _check_position(path, counts, length)
        changed = differences(saved, self._compared(template))
        changed += differences({"epoch_length": counts["epoch_length"]}, {"epoch_length": length})
        seed = differences({"seed": counts["seed"]}, {"seed": template.seed})
        warning = other_settings(path, changed, seed) if changed or seed else ""
        # A described loader has been compared, and need not be when it yields batches.
        is_compared = any(name in saved for name in self._loaders)
        known = restored_into(template, saved, str(path), counts["step"], is_compared)
        return Run({**counts, "epoch_length": length}, known, warning)

    def _compared(self, state: TrainState) -> dict[str, Any]:
        """Settings without the loaders that a state knows, which are compared when they are called."""
        optimizer = provenance_of(state).optimizer
        return {**({} if optimizer is None else {"optimizer": optimizer}), **self._described}


def _check_position(path: Path, counts: Mapping[str, Any], length: int | None) -> None:
    """Raise ValueError if a checkpoint stands within an epoch of a different length: its position is in other batches."""
    saved_length = counts["epoch_length"]
    restored = f"ckpt.restore(state.replace(epoch_length={saved_length}))"
    check(
        counts["batch"] == 0 or length == saved_length,
        f"{path} was made with epoch_length={saved_length}, the state with {length}, and it stands within an epoch, "
        f"after batch {counts['batch']}: the batch size or the data has changed. Nothing needs to be lost. To "
        f"continue this epoch at the sample that comes next: state = loader.resume({restored}). To leave out the rest "
        f"of it: state = {restored}.replace(epoch_length={length}, epoch={counts['epoch'] + 1}, batch=0)",
    )
