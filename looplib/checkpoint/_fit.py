"""Compatibility of a checkpoint with a state: paths, shapes, dtypes and kinds of leaves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from looplib._core.checks import check, few
from looplib._core.mappings import subset, without
from looplib.checkpoint._format_read import Reader


def check_fit(
    path: Path, wanted: Mapping[str, Any], reader: Reader, selected: Callable[[str], bool], convert: bool
) -> None:
    """Raise ValueError that lists all differences between the leaves of a state and those of a checkpoint."""
    saved = {**reader.shards, **reader.tensors, **reader.values}
    misfits = [f"{leaf_path} is in the state, and not in the checkpoint" for leaf_path in without(wanted, saved)]
    unexpected = filter(selected, without(saved, wanted))
    misfits += [f"{leaf_path} is in the checkpoint, and not in the state" for leaf_path in unexpected]
    common = subset(wanted, saved).items()
    misfits += filter(None, (_difference(leaf_path, leaf, reader, convert) for leaf_path, leaf in common))
    advice = "\nRestore into a state of the model and optimizer that it was saved from, or use another directory"
    check(not misfits, f"{path} does not fit the state:\n  " + few(misfits, 10, "\n  ") + advice)


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
        if key != "started"
        or getattr(value, "dtype", None) is not torch.bool
        or f"{leaf_path}/{key}" in reader.tensors
    }


def _difference(leaf_path: str, leaf: Any, reader: Reader, convert: bool) -> str:
    about = reader.about(leaf_path)
    if about is None or not isinstance(leaf, Tensor):
        saved, new = "a tensor" if about else _kind(reader.values[leaf_path]), _kind(leaf)
        return "" if _fits(saved, new) else f"{leaf_path} is {saved} in the checkpoint, {new} in the state"
    return _difference_of_tensors(leaf_path, leaf, about, convert)


def _difference_of_tensors(leaf_path: str, leaf: Tensor, about: Mapping[str, Any], convert: bool) -> str:
    dtype, saved_shape = str(leaf.dtype).removeprefix("torch."), tuple(about["shape"])
    if saved_shape != tuple(leaf.shape):
        return f"{leaf_path} has shape {saved_shape} in the checkpoint, {tuple(leaf.shape)} in the state"
    if about["dtype"] != dtype and not convert:
        return f"{leaf_path} is {about['dtype']} in the checkpoint, {dtype} in the state (or convert=True)"
    return ""


def _kind(leaf: Any) -> str:
    return "a tensor" if isinstance(leaf, Tensor) else type(leaf).__name__


def _fits(saved: str, new: str) -> bool:
    """True for compatible kinds of leaves: an int may become a float, and a None may be set later."""
    unset = "NoneType" in (saved, new) and new != "a tensor"
    return saved == new or {saved, new} == {"int", "float"} or unset
