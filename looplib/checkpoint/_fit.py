"""Compatibility of a checkpoint with a state: paths, shapes, dtypes and kinds of leaves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from looplib._core.checks import check, few
from looplib._core.mappings import subset, without
from looplib.checkpoint._format import name_of
from looplib.checkpoint._read import Reader


def check_fit(
    path: Path, wanted: Mapping[str, Any], reader: Reader, selected: Callable[[str], bool], convert: bool
) -> None:
    """Raise ValueError that lists all differences between the leaves of a state and those of a checkpoint."""
    saved = {**reader.tensors, **reader.ties, **reader.values}
    misfits = [f"{leaf_path} is in the state, and not in the checkpoint" for leaf_path in without(wanted, saved)]
    unexpected = filter(selected, without(saved, wanted))
    misfits += [f"{leaf_path} is in the checkpoint, and not in the state" for leaf_path in unexpected]
    common = subset(wanted, saved).items()
    misfits += filter(None, (_difference(leaf_path, leaf, reader, convert) for leaf_path, leaf in common))
    advice = "\nRestore into a state of the model and optimizer that it was saved from, or use another directory"
    check(not misfits, f"{path} does not fit the state:\n  " + few(misfits, 10, "\n  ") + advice)


def _difference(leaf_path: str, leaf: Any, reader: Reader, convert: bool) -> str:
    about = reader.about(leaf_path)
    if about is None or not isinstance(leaf, Tensor):
        saved = "a tensor" if about else type(reader.values[leaf_path]).__name__
        new = "a tensor" if isinstance(leaf, Tensor) else type(leaf).__name__
        # An int may become a float, and a None may be set later.
        unset = "NoneType" in (saved, new) and new != "a tensor"
        fits = saved == new or {saved, new} == {"int", "float"} or unset
        return "" if fits else f"{leaf_path} is {saved} in the checkpoint, {new} in the state"
    saved_shape = tuple(about["shape"])
    if saved_shape != tuple(leaf.shape):
        return f"{leaf_path} has shape {saved_shape} in the checkpoint, {tuple(leaf.shape)} in the state"
    dtype = name_of(leaf.dtype)
    if about["dtype"] != dtype and not convert:
        return f"{leaf_path} is {about['dtype']} in the checkpoint, {dtype} in the state (or convert=True)"
    return ""
