"""Provenance of a run: recorded on the marks of its states, stored in checkpoints, and compared by later runs.

`init_state` records the optimizer, a loader records itself on the state for which it yields batches, and a restore
records what the checkpoint contains. Steps and `replace` pass on one reference, so a step costs nothing extra.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from looplib._core import ownership
from looplib._core.checks import few
from looplib._core.descriptions import differences
from looplib._core.mappings import pick
from looplib._core.notices import warn
from looplib._core.ownership import Marked
from looplib._core.ranks import rank

_KEPT = 8  # limits the size of checkpoints of runs that make a loader for each of many shards


@dataclass(frozen=True, slots=True)
class MadeWith:
    """Descriptions, as plain values, of what a state was made with.

    Attributes:
        optimizer: that of `init_state`, or None.
        loaders: those that have yielded batches for the run, latest last.
        restored: path of the checkpoint from which the state or an earlier one was restored, if its loaders are
            known; otherwise "".
        at_step: step of that restored state.
        model: that of `init_state`, or None.
    """

    optimizer: Mapping[str, Any] | None = None
    loaders: tuple[Mapping[str, Any], ...] = ()
    restored: str = ""
    at_step: int = 0
    model: Mapping[str, Any] | None = None

    def __setstate__(self, values: Sequence[Any]) -> None:
        fields = dataclasses.fields(self)
        defaults = [field.default for field in fields[len(values) :]]  # of a pickle with fewer fields
        for field, value in zip(fields, [*values, *defaults], strict=True):
            object.__setattr__(self, field.name, value)


def known_of(state: Marked) -> MadeWith:
    """Provenance of a state. Nothing is known of one created directly from its fields."""
    known: MadeWith | None = ownership.made_with(state)
    return known or MadeWith()


def note_loader(state: Any, description: Mapping[str, Any]) -> None:
    """Record the loader that yields batches for a state.

    If the state was restored from a checkpoint, warn about a loader that differs from those of the saved run. Later
    states may use different loaders, as they could have without the restore.
    """
    known = known_of(state)
    if description in known.loaders:
        return
    loaders = known.loaders
    if known.restored and known.at_step == state.step:
        loaders = _without_replaced(known, description)
    ownership.note_made_with(state, replace(known, loaders=(*loaders, description)[-_KEPT:]))


def _without_replaced(known: MadeWith, description: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    """The saved run's loaders, without those that this one takes the place of with other settings, and a warning then."""
    loaders = known.loaders
    before = [loader for loader in loaders if _of_same_data(loader, description)] or loaders
    changed = differences(*_comparable(before, description))
    if not changed:
        return loaders
    if rank() == 0:
        warn(other_settings(known.restored, changed))
    return tuple(loader for loader in loaders if loader not in before)


def _of_same_data(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return all(one.get(key) == other.get(key) for key in ("dataset", "samples"))


def _comparable(before: Sequence[Mapping[str, Any]], now: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Settings shared by several loaders, and those of one more. Settings that vary between them are not compared."""
    first, *others = before
    shared = {key: value for key, value in first.items() if key in now and all(o.get(key) == value for o in others)}
    return {"loader": shared}, {"loader": pick(now, shared)}


def restored_into(
    template: Marked, saved: Mapping[str, Any], path: str, step: int, loader_is_compared: bool
) -> MadeWith:
    """Provenance of a restored state; `saved` is the manifest's entry."""
    known, optimizer, loaders = known_of(template), saved.get("optimizer"), saved.get("loaders")
    if known.optimizer is None and isinstance(optimizer, Mapping):
        known = replace(known, optimizer=optimizer)
    if loader_is_compared or not isinstance(loaders, list):
        return known
    described = tuple(loader for loader in loaders if isinstance(loader, Mapping))
    return replace(known, loaders=described, restored=path if described else "", at_step=step)


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
