"""Settings of a run, stored in checkpoints and compared when resuming."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

from looplib._core.checks import check_type
from looplib._core.descriptions import described, differences
from looplib._core.provenance import provenance_of
from looplib._core.secrets import without_secrets
from looplib.types import TrainState


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

    def resume(self, saved: Mapping[str, Any], same_length: bool) -> Callable[[TrainState], TrainState] | None:
        """The described loader's function that converts a state's position to its own batches.

        None if there is no such loader, or if it and the length of an epoch are those of the saved run.
        """
        for name, resume in self._resumes.items():
            same_loader = saved.get(name, self._described[name]) == self._described[name]
            return None if same_length and same_loader else resume
        return None

    @cached_property
    def _described(self) -> dict[str, Any]:
        settings: dict[str, Any] = {str(name): described(setting) for name, setting in self._describe.items()}
        return without_secrets(settings)

    def description(self, state: TrainState) -> dict[str, Any]:
        """Settings as stored in the manifest of a checkpoint of this state."""
        known = provenance_of(state)
        loaders = {"loaders": [*known.loaders]} if known.loaders else {}
        return loaders | self._compared(state)

    def differences(self, saved: Mapping[str, Any], template: TrainState) -> list[str]:
        """Settings that differ from those in a manifest, in words."""
        return differences(saved, self._compared(template))

    def _compared(self, state: TrainState) -> dict[str, Any]:
        """Settings without the loaders that a state knows, which are compared when they are called."""
        optimizer = provenance_of(state).optimizer
        return {**({} if optimizer is None else {"optimizer": optimizer}), **self._described}

    def compares_loader(self, saved: Mapping[str, Any]) -> bool:
        """True if a loader is among the settings that `differences` compares."""
        return not self._resumes.keys().isdisjoint(saved)
