"""Settings of a run: what a checkpoint holds of them, and how those of a later run differ."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

from looplib._core.checks import check_type
from looplib._core.descriptions import described, differences
from looplib._core.ownership import made_with
from looplib.types import TrainState


class Settings:
    """What a run is made with: what the user describes, and what the run's first state knows.

    Args:
        describe: settings by name; a loader or an optimizer among them describes itself.
    """

    def __init__(self, describe: Mapping[str, Any] | None) -> None:
        advice = 'give a mapping of names to settings, such as {"loader": loader, **vars(args)}'
        check_type("describe is", describe, (Mapping, type(None)), advice)
        self._describe = describe or {}
        self._of_state: Mapping[str, Any] = {}

    def take(self, state: TrainState) -> None:
        """Note what a first state knows. Later states of the run do not know it any more."""
        self._of_state = made_with(state) or self._of_state

    def resume(self, saved: Any, same_length: bool) -> Callable[[TrainState], TrainState] | None:
        """The described loader's function that finds a state's position in its own batches.

        None if there is no such loader, or if it and the length of an epoch are those that the run was saved with.
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
        """As the manifest holds it."""
        return {**self._of_state, **self._described}

    def differences(self, saved: Any) -> list[str]:
        """The settings that are different from those that a manifest holds, in words; none for an old manifest."""
        return differences(saved, self.description) if isinstance(saved, Mapping) else []
