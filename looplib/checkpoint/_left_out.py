"""Checkpoints of what is trained: parameters that are left out, and a digest of them that a restore verifies."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from looplib._core.checks import check, few, warn
from looplib._core.checksums import checksums
from looplib._core.mappings import without
from looplib._core.ranks import is_sharded
from looplib.checkpoint._describe import trees_of
from looplib.checkpoint._format import MANIFEST, errors_as_damage, leaves_of
from looplib.types import TrainState

Select = Callable[[str, Tensor], bool]


class LeftOut:
    """The choice of parameters to save. The others are read at each save, for their digest.

    Args:
        select: `select(name, tensor) -> bool`, or None to save all.
    """

    def __init__(self, select: Select | None) -> None:
        check(
            select is None or callable(select), f"select is {select!r}; give select(name, tensor) -> bool", TypeError
        )
        self._select = select
        self._last: tuple[list[str], str] | None = None

    def trees(self, state: TrainState) -> tuple[dict[str, Any], dict[str, Any]]:
        """Trees to save, and what the manifest says of the parameters that are not among them."""
        trees = trees_of(state)
        if self._select is None:
            return trees, {}
        saved = {name: tensor for name, tensor in state.params.items() if self._select(name, tensor)}
        check(bool(saved), "select chooses none of the state's parameters, so there would be no weights to save")
        rest = without(state.params, saved)
        digest = _digest(leaves_of({"params": rest}))
        if self._last is not None and self._last[0] == [*rest] and self._last[1] != digest:
            warn(
                f"the {len(rest)} parameters that select leaves out have changed since the last save, so this checkpoint "
                "can be restored only over the base model as it is now, and not over the one that the run began with. "
                "merge_adapter writes into the base model, and unmerge_adapter rounds it: merge a copy, "
                "copy.deepcopy(model).merge_and_unload()"
            )
        self._last = [*rest], digest
        return {**trees, "params": saved}, {"left_out": digest} if rest else {}


def _digest(leaves: Mapping[str, Any]) -> str:
    """Digest of parameters that are left out, by path: of their names, dtypes, shapes and bits."""
    sharded = [path for path, leaf in leaves.items() if is_sharded(leaf)]
    check(
        not sharded,
        f"select leaves out {few(sharded, 3)}, which FSDP2 has sharded: no rank has the whole tensor to compute a digest "
        "of. Save all parameters, or use DistributedDataParallel",
    )
    facts = [
        (path, str(leaf.dtype), tuple(leaf.shape), checksum)
        for (path, leaf), checksum in zip(leaves.items(), checksums(leaves.values()), strict=True)
    ]
    return hashlib.sha256(repr(sorted(facts)).encode()).hexdigest()[:32]


def paths_left_out(path: Path, manifest: Mapping[str, Any], leaves: Mapping[str, Any]) -> set[str]:
    """Parameters of a state that a checkpoint left out. Raise ValueError if they are not those of the saved run."""
    expected = manifest.get("left_out")
    if expected is None:
        return set()
    with errors_as_damage(path / MANIFEST):
        check(isinstance(expected, str), f"{expected!r} as a digest of what is left out")
        saved = manifest["tensors"].keys() | manifest["ties"].keys()
    rest = {one: leaf for one, leaf in leaves.items() if one.startswith("/params/") and one not in saved}
    found = _digest(rest)
    check(
        found == expected,
        f"{path} was saved without the parameters of its base model, whose digest is {expected}, and the {len(rest)} of "
        f"the state that it does not have are others, with digest {found}: load the weights that the run began with "
        "before init_state",
    )
    return set(rest)
