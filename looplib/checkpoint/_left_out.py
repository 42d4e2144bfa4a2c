"""Checkpoints of what is trained: parameters that are left out, and a digest of them that a restore compares."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from looplib._core.checks import check, few
from looplib._core.checksums import checksums
from looplib._core.mappings import without
from looplib._core.ranks import is_sharded
from looplib.checkpoint._format import MANIFEST, errors_as_damage, leaves_of, trees_of
from looplib.types import TrainState

Select = Callable[[str, Tensor], bool]


def trees_to_save(state: TrainState, select: Select | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Trees to save, and what the manifest says of the parameters that `select` leaves out."""
    trees = trees_of(state)
    if select is None:
        return trees, {}
    saved = {name: tensor for name, tensor in state.params.items() if select(name, tensor)}
    check(bool(saved), "select chooses none of the state's parameters, so there would be no weights to save")
    rest = without(state.params, saved)
    return {**trees, "params": saved}, {"left_out": _digest(leaves_of({"params": rest}))} if rest else {}


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
        f"the state that it does not have are others, with digest {found}: before init_state, load the base model that "
        "it was saved with. If merge_adapter has written into that, which unmerge_adapter rounds, merge a copy the next "
        "time: copy.deepcopy(model).merge_and_unload()",
    )
    return set(rest)
