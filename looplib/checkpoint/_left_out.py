"""Checkpoints of what is trained: parameters that are left out, and checksums of them that a restore compares."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from looplib._core.checks import check, few
from looplib._core.checksums import checksums
from looplib._core.mappings import subset, without
from looplib._core.ranks import is_sharded
from looplib.checkpoint._format import leaves_of, trees_of
from looplib.types import TrainState

Select = Callable[[str, Tensor], bool]


def trees_to_save(state: TrainState, select: Select | None) -> tuple[dict[str, Any], dict[str, int]]:
    """Trees to save, and checksums of the parameters that `select` leaves out, by path."""
    trees = trees_of(state)
    if select is None:
        return trees, {}
    saved = {name: tensor for name, tensor in state.params.items() if select(name, tensor)}
    check(bool(saved), "select chooses none of the state's parameters, so there would be no weights to save")
    return {**trees, "params": saved}, _checksums(leaves_of({"params": without(state.params, saved)}))


def _checksums(leaves: Mapping[str, Any]) -> dict[str, int]:
    sharded = [path for path, leaf in leaves.items() if is_sharded(leaf)]
    check(
        not sharded,
        f"select leaves out {few(sharded, 3)}, which FSDP2 has sharded: no rank has the whole tensor to compute a checksum "
        "of. Save all parameters, or use DistributedDataParallel",
    )
    return dict(zip(leaves, checksums(leaves.values()), strict=True))


def check_left_out(path: Path, left_out: Mapping[str, int], leaves: Mapping[str, Any]) -> None:
    """Raise ValueError if the parameters of a state that a checkpoint left out are not those of the saved run."""
    missing = without(left_out, leaves)
    check(
        not missing,
        f"{path} was saved without the parameters of its base model, and the state has no {few([*missing], 3)}: make the "
        "state with the model that the checkpoint was saved with. Is it wrapped, as by peft.get_peft_model?",
    )
    found = _checksums(subset(leaves, left_out))
    others = [leaf_path for leaf_path, checksum in left_out.items() if found[leaf_path] != checksum]
    check(
        not others,
        f"{path} was saved without the parameters of its base model, and {len(others)} of the state's are others: "
        f"{few(others, 3)}. Before init_state, load the base model that it was saved with. If merge_adapter has written "
        "into that, which unmerge_adapter rounds, merge a copy the next time: copy.deepcopy(model).merge_and_unload()",
    )
