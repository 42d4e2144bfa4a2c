"""Settings of a run, stored in checkpoints and compared when resuming."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from looplib._core.checks import check_type
from looplib._core.descriptions import described, differences, without_secrets
from looplib._core.lease import note_provenance
from looplib._core.provenance import Provenance, other_settings, provenance_of, restored_into
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
        self._describe = describe or {}
        resumes = {str(name): getattr(setting, "resume", None) for name, setting in self._describe.items()}
        self._resumes = {name: resume for name, resume in resumes.items() if callable(resume)}

    @cached_property
    def _described(self) -> dict[str, Any]:
        settings: dict[str, Any] = {str(name): described(setting) for name, setting in self._describe.items()}
        return without_secrets(settings)

    def description(self, state: TrainState) -> dict[str, Any]:
        """Settings as stored in the manifest of a checkpoint of this state."""
        known = provenance_of(state)
        loaders = {"loaders": [*known.loaders]} if known.loaders else {}
        return loaders | self._compared(state)

    def continued(self, path: Path, counts: dict[str, Any], made_with: Any, template: TrainState) -> Run:
        """The run of a checkpoint, continued with the settings of `template`. `made_with` are those of the checkpoint."""
        saved = made_with if isinstance(made_with, Mapping) else {}
        changed = differences(saved, self._compared(template))
        changed += differences({"epoch_length": counts["epoch_length"]}, {"epoch_length": template.epoch_length})
        seed = differences({"seed": counts["seed"]}, {"seed": template.seed})
        warning = other_settings(path, changed, seed) if changed or seed else ""
        compared = not self._resumes.keys().isdisjoint(saved)  # a loader that is described is compared here
        known = restored_into(template, saved, str(path), counts["step"], compared)
        loaders = restored_into(template, saved, str(path), counts["step"], False)
        return Run(self._position(path, counts, saved, template, loaders), known, warning)

    def _position(
        self, path: Path, counts: dict[str, Any], saved: Mapping[str, Any], template: TrainState, loaders: Provenance
    ) -> dict[str, Any]:
        """Counts to continue with, in epochs of the new state's length.

        Between two epochs only `epoch_length` changes. Within an epoch, a described loader's `resume` finds the batch
        that starts at the next sample; `loaders` has those of the saved run. Raises ValueError if there is none.
        """
        saved_length, length = counts["epoch_length"], template.epoch_length
        resume = self._resume(saved, saved_length == length)
        if counts["batch"] == 0:
            return {**counts, "epoch_length": length}
        if resume is not None and None not in (saved_length, length):
            state = TrainState(**counts)
            note_provenance(state, loaders)
            resumed = resume(state)
            names = ("epoch", "batch", "epoch_length")
            return {**counts, **{name: getattr(resumed, name) for name in names}}
        if saved_length == length:
            return counts
        restored = f"ckpt.restore(state.replace(epoch_length={saved_length}))"
        raise ValueError(
            f"{path} was made with epoch_length={saved_length}, the state with {length}, and it stands within an epoch, "
            f"after batch {counts['batch']}: the batch size or the data has changed. Nothing needs to be lost. To "
            f"continue this epoch at the sample that comes next: state = loader.resume({restored}), or give "
            'checkpoint_io(..., describe={"loader": loader}), which does so by itself. To leave out the rest of it: '
            f"state = {restored}.replace(epoch_length={length}, epoch={counts['epoch'] + 1}, batch=0)"
        )

    def _resume(self, saved: Mapping[str, Any], same_length: bool) -> Callable[[TrainState], TrainState] | None:
        """The described loader's function that converts a state's position to its own batches.

        None if there is no such loader, or if it and the length of an epoch are those of the saved run.
        """
        for name, resume in self._resumes.items():
            same_loader = saved.get(name, self._described[name]) == self._described[name]
            return None if same_length and same_loader else resume
        return None

    def _compared(self, state: TrainState) -> dict[str, Any]:
        """Settings without the loaders that a state knows, which are compared when they are called."""
        optimizer = provenance_of(state).optimizer
        return {**({} if optimizer is None else {"optimizer": optimizer}), **self._described}
