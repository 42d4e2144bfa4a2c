"""Settings of a run, stored in checkpoints and compared when resuming."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

from looplib._core.checks import check_type
from looplib._core.descriptions import described, differences
from looplib._core.ownership import made_with
from looplib.types import TrainState


class Settings:
    """Settings of a run: those that the user describes, and those known from the initial state.

    Args:
        describe: settings by name. Loaders and optimizers among them describe themselves.
    """

    def __init__(self, describe: Mapping[str, Any] | None) -> None:
        advice = 'give a mapping of names to settings, such as {"loader": loader, **vars(args)}'
        check_type("describe is", describe, (Mapping, type(None)), advice)
        self._describe = describe or {}
        self._of_state: Mapping[str, Any] = {}

    def take(self, state: TrainState) -> None:
        """Record what an initial state knows. Later states of the run no longer know it."""
        self._of_state = made_with(state) or self._of_state

    def resume(self, saved: Any, same_length: bool) -> Callable[[TrainState], TrainState] | None:
        """The described loader's function that converts a state's position to its own batches.

        None if there is no such loader, or if it and the length of an epoch are those of the saved run.
        """
        for name, setting in self._describe.items():
            if callable(getattr(setting, "resume", None)):
                known = isinstance(saved, Mapping) and name in saved
                same = same_length and (not known or saved[name] == self._described[name])
                return None if same else setting.resume
        return None

    @cached_property
    def _described(self) -> Mapping[str, Any]:
        return {str(name): described(setting) for name, setting in self._describe.items()}

    @property
    def description(self) -> dict[str, Any]:
        """Settings as stored in the manifest."""
        return {**self._of_state, **self._described}

    def differences(self, saved: Any) -> list[str]:
        """Settings that differ from those in a manifest, in words. Empty for an old manifest."""
        return differences(saved, self.description) if isinstance(saved, Mapping) else []
