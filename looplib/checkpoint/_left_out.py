"""Checkpoints of what is trained: parameters that are left out, and a digest of them that a restore verifies."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from looplib._core.checks import check
from looplib._core.checksums import checksums
from looplib._core.mappings import without
from looplib._core.ranks import is_sharded
from looplib._core.torch_private import version
from looplib.checkpoint._describe import trees_of
from looplib.checkpoint._format import leaves_of
from looplib.types import TrainState

Select = Callable[[str, Tensor], bool]


class LeftOut:
    """The choice of parameters to save. The others are read once, and again if torch has counted a write to them since.

    Args:
        select: `select(name, tensor) -> bool`, or None to save all.
    """

    def __init__(self, select: Select | None) -> None:
        check(
            select is None or callable(select), f"select is {select!r}; give select(name, tensor) -> bool", TypeError
        )
        self._select = select
        self._seen: list[tuple[weakref.ref[Tensor], int]] = []
        self._about: dict[str, Any] = {}

    def trees(self, state: TrainState) -> tuple[dict[str, Any], dict[str, Any]]:
        """Trees to save, and what the manifest says of the parameters that are not among them."""
        trees = trees_of(state)
        if self._select is None:
            return trees, {}
        saved = {name: tensor for name, tensor in state.params.items() if self._select(name, tensor)}
        check(bool(saved), "select chooses none of the state's parameters, so there would be no weights to save")
        rest = without(state.params, saved)
        if not self._has_seen(rest.values()):
            self._about = about(leaves_of({"params": rest}))
            self._seen = [(weakref.ref(tensor), version(tensor)) for tensor in rest.values()]
        return {**trees, "params": saved}, {"left_out": self._about} if rest else {}

    def _has_seen(self, tensors: Collection[Tensor]) -> bool:
        """True if these tensors were read last, and torch has counted no write since."""
        return len(self._seen) == len(tensors) and all(
            seen() is tensor and written == version(tensor)
            for (seen, written), tensor in zip(self._seen, tensors, strict=True)
        )


def about(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Number, size and digest of parameters that are left out, by path."""
    sharded = [path for path, leaf in leaves.items() if is_sharded(leaf)]
    check(
        not sharded,
        f"select leaves out {', '.join(sharded[:3])}, which FSDP2 has sharded: no rank has the whole tensor to compute a "
        "digest of. Save all parameters, or use DistributedDataParallel",
    )
    facts = [
        (path, str(leaf.dtype), tuple(leaf.shape), checksum)
        for (path, leaf), checksum in zip(leaves.items(), checksums(leaves.values()), strict=True)
    ]
    digest = hashlib.sha256(repr(sorted(facts)).encode()).hexdigest()[:32]
    return {"tensors": len(leaves), "bytes": sum(leaf.nbytes for leaf in leaves.values()), "digest": digest}


def paths_left_out(path: Path, manifest: Mapping[str, Any], leaves: Mapping[str, Any]) -> set[str]:
    """Parameters of a state that a checkpoint left out. Raise ValueError if they are not those of the saved run."""
    expected = manifest.get("left_out")
    if expected is None:
        return set()
    saved = manifest["tensors"].keys() | manifest.get("shards", {}).keys()
    rest = {one: leaf for one, leaf in leaves.items() if one.startswith("/params/") and one not in saved}
    found = about(rest)
    check(
        found == expected,
        f"{path} was saved without the {expected['tensors']} parameters of its base model ({expected['bytes']} bytes, "
        f"digest {expected['digest']}), and those of the state are others ({found['tensors']} parameters, "
        f"{found['bytes']} bytes, digest {found['digest']}): load the weights that the run began with before init_state",
    )
    return set(rest)
