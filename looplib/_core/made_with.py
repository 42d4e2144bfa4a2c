"""What a run is made with: noted on the marks of its states, for checkpoints to hold and later runs to compare.

`init_state` notes the optimizer, a loader notes itself on the state that it gives batches for, and a restore notes what
the checkpoint says. Steps and `replace` hand one reference on, so the notes cost a step nothing.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from looplib._core import ownership
from looplib._core.descriptions import differences
from looplib._core.ownership import Marked
from looplib._core.ranks import rank

_KEPT = 8  # so that a run that makes a loader for each of many shards does not make its checkpoints grow


@dataclass(frozen=True, slots=True)
class MadeWith:
    """Descriptions, as plain values, of what a state was made with.

    Attributes:
        optimizer: that of `init_state`, or None.
        loaders: those that have given batches for the run, the latest last.
        restored: the checkpoint that the state, or one before it, was restored from, if it knows its loaders; else "".
        at_step: the step of that restored state.
    """

    optimizer: Mapping[str, Any] | None = None
    loaders: tuple[Mapping[str, Any], ...] = ()
    restored: str = ""
    at_step: int = 0


def known_of(state: Marked) -> MadeWith:
    """What is known of how a state was made: nothing of one that was made from its fields, by hand."""
    known: MadeWith | None = ownership.made_with(state)
    return known or MadeWith()


def note_loader(state: Any, description: Mapping[str, Any]) -> None:
    """Note the loader that gives batches for a state.

    Warn of one that is different from those that a checkpoint was saved with, where the state has been restored from
    it. A later state may take another loader, as the same run would have without the restore.
    """
    known = known_of(state)
    if description in known.loaders:
        return
    loaders = known.loaders
    if known.restored and known.at_step == state.step:
        before = [loader for loader in loaders if _of_same_data(loader, description)] or loaders
        if changed := differences(*_comparable(before, description)):
            loaders = tuple(loader for loader in loaders if loader not in before)
            if rank() == 0:
                warnings.warn(other_settings(known.restored, changed), stacklevel=3)
    ownership.note_made_with(state, replace(known, loaders=(*loaders, description)[-_KEPT:]))


def _of_same_data(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return all(one.get(key) == other.get(key) for key in ("dataset", "samples"))


def _comparable(before: Sequence[Mapping[str, Any]], now: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The settings that several loaders share, and those of another: what they vary is no setting of the run."""
    first, *others = before
    shared = {key: value for key, value in first.items() if key in now and all(o.get(key) == value for o in others)}
    return {"loader": shared}, {"loader": {key: now[key] for key in shared}}


def restored_into(template: Marked, saved: Any, path: str, step: int, loader_is_compared: bool) -> MadeWith:
    """What a state is made with that a checkpoint is restored into: `saved` is what its manifest holds of that."""
    known, before = known_of(template), saved if isinstance(saved, Mapping) else {}
    optimizer, loaders = before.get("optimizer"), before.get("loaders")
    if known.optimizer is None and isinstance(optimizer, Mapping):
        known = replace(known, optimizer=optimizer)
    if loader_is_compared or not isinstance(loaders, list):
        return known
    described = tuple(loader for loader in loaders if isinstance(loader, Mapping))
    return replace(known, loaders=described, restored=path if described else "", at_step=step)


def other_settings(path: Any, changed: Sequence[str], seed: str = "") -> str:
    """The warning of settings that are different from those that a checkpoint was saved with.

    Args:
        path: the checkpoint.
        changed: the settings that the run continues with, each in words.
        seed: the seed, in words, which the restored state keeps from the checkpoint.
    """
    more = f"; and {len(changed) - 10} more" if len(changed) > 10 else ""
    named = [*changed[:10], seed] if seed else changed[:10]
    taken = [*(["the new ones"] if changed else []), *(["the checkpoint's seed"] if seed else [])]
    how_to_change = " (state.replace(seed=...) changes it)" if seed else ""
    return (
        f"{path} was saved with other settings: {'; '.join(named)}{more}. The run continues from it with "
        f"{' and '.join(taken)}{how_to_change}; to start over, give checkpoint_io another directory or delete this one"
    )
