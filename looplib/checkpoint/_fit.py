"""Compatibility of a checkpoint with a state: paths, shapes, dtypes and kinds of leaves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from looplib.checkpoint._format_read import Reader


def check_fit(
    path: Path, wanted: Mapping[str, Any], reader: Reader, selected: Callable[[str], bool], convert: bool
) -> None:
    """Raise ValueError that lists all differences between the leaves of a state and those of a checkpoint."""
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


def without_later_entries(tree: Any, reader: Reader, leaf_path: str = "") -> Any:
    """A state's tree without entries `started` of optimizers that an older checkpoint does not have.

    For an optimizer state without such an entry, all parameters count as started after the first step, as was true
    when the checkpoint was written.
    """
    if not isinstance(tree, dict):
        return tree
    return {
        key: without_later_entries(value, reader, f"{leaf_path}/{key}")
        for key, value in tree.items()
        if not _is_later(key, value) or f"{leaf_path}/{key}" in reader.tensors
    }


def _is_later(key: Any, value: Any) -> bool:
    return key == "started" and isinstance(value, Tensor) and value.dtype is torch.bool


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
        return ""  # a value that had not been set yet
    if not isinstance(leaf, Tensor):
        return f"is a tensor in the checkpoint, {type(leaf).__name__} in the state"
    dtype, saved_shape = str(leaf.dtype).removeprefix("torch."), tuple(about["shape"])
    if saved_shape != tuple(leaf.shape):
        return f"has shape {saved_shape} in the checkpoint, {tuple(leaf.shape)} in the state"
    if about["dtype"] != dtype and not convert:
        return f"is {about['dtype']} in the checkpoint, {dtype} in the state (or convert=True)"
    return ""


def _same_kind(one: Any, other: Any) -> bool:
    """True if two plain values are compatible: an int may become a float, and a None may be set later."""
    kinds = {type(one), type(other)}
    return len(kinds) == 1 or kinds == {int, float} or type(None) in kinds
