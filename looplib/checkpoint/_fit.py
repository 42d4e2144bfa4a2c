"""The fit of a checkpoint to a state: paths, shapes, dtypes and kinds of leaves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from looplib.checkpoint._format_read import Reader


def check_fit(
    path: Path, wanted: Mapping[str, Any], reader: Reader, selected: Callable[[str], bool], convert: bool
) -> None:
    """Raise ValueError with all that differs between the leaves of a state and those of a checkpoint."""
    saved = {**reader.shards, **reader.tensors, **reader.values}
    misfits = [
        f"{leaf_path} is in the state, and not in the checkpoint" for leaf_path in wanted if leaf_path not in saved
    ]
    misfits += [
        f"{leaf_path} is in the checkpoint, and not in the state"
        for leaf_path in saved
        if selected(leaf_path) and leaf_path not in wanted
    ]
    for leaf_path, leaf in wanted.items():
        if leaf_path in saved and (difference := _difference(leaf_path, leaf, reader, convert)):
            misfits.append(f"{leaf_path} {difference}")
    if misfits:
        more = f"\n  and {len(misfits) - 10} more" if len(misfits) > 10 else ""
        raise ValueError(f"{path} does not fit the state:\n  " + "\n  ".join(misfits[:10]) + more)


def _difference(leaf_path: str, leaf: Any, reader: Reader, convert: bool) -> str:
    about = reader.about(leaf_path)
    if about is None:
        value = reader.values[leaf_path]
        if isinstance(leaf, Tensor):
            return f"is {type(value).__name__} in the checkpoint, a tensor in the state"
        if not _same_kind(leaf, value):
            return f"is {type(value).__name__} in the checkpoint, {type(leaf).__name__} in the state"
        return ""
    if leaf is None:
        return ""  # something that was not there yet
    if not isinstance(leaf, Tensor):
        return f"is a tensor in the checkpoint, {type(leaf).__name__} in the state"
    dtype, saved_shape = str(leaf.dtype).removeprefix("torch."), tuple(about["shape"])
    if saved_shape != tuple(leaf.shape):
        return f"has shape {saved_shape} in the checkpoint, {tuple(leaf.shape)} in the state"
    if about["dtype"] != dtype and not convert:
        return f"is {about['dtype']} in the checkpoint, {dtype} in the state (or convert=True)"
    return ""


def _same_kind(one: Any, other: Any) -> bool:
    """A number may be whole at one time and not at another, and a None may be set later."""
    kinds = {type(one), type(other)}
    return len(kinds) == 1 or kinds == {int, float} or type(None) in kinds
