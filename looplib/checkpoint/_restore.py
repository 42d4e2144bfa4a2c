"""Checkpoint restoring into the structure of a state.

Everything that this process needs is read and verified before anything is written, so a state is restored completely
or not at all.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from looplib._core import interrupts as _interrupts
from looplib._core import lease
from looplib._core.checks import check, few
from looplib._core.mappings import fields_of, subset, without
from looplib._core.overlap import same_value
from looplib._core.provenance import provenance_of
from looplib._core.ranks import is_sharded
from looplib._core.torch_private import pytree
from looplib.checkpoint._format import (
    MANIFEST,
    WEIGHTS,
    counts_in,
    errors_as_damage,
    leaves_of,
    local,
    name_of,
    trees_of,
    words,
)
from looplib.checkpoint._left_out import check_left_out
from looplib.checkpoint._read import Reader, read_manifest
from looplib.checkpoint._settings import Run, Settings
from looplib.checkpoint._shards import box_of, new_like, whole
from looplib.checkpoint._write import same_memory
from looplib.types import COUNTS, TREES, TrainState


@dataclass(frozen=True, slots=True)
class Selection:
    """Leaves to restore: all, or parameters and buffers, or those of them that `names` selects."""

    weights_only: bool = False
    names: Callable[[str], bool] | None = None

    @property
    def everything(self) -> bool:
        return not self.weights_only and self.names is None

    def __call__(self, leaf_path: str) -> bool:
        if self.everything or not leaf_path.startswith(WEIGHTS):
            return self.everything
        name = leaf_path.split("/", 2)[-1].replace("~1", "/").replace("~0", "~")
        return self.names is None or self.names(name)

    def named(self, restored: TrainState) -> str:
        """Name of what was restored."""
        if self.everything:
            return f"step {restored.step} (epoch {restored.epoch}, batch {restored.batch})"
        return "weights" if self.names is None else "some of the weights"


class Loaded(NamedTuple):
    """A checkpoint that has been read and verified.

    Attributes:
        state: function that returns the restored state and cannot fail.
        checksum: the manifest's checksum, which shows if all ranks have read the same checkpoint.
        warning: text about settings that differ from those saved, or "".
    """

    state: Callable[[], TrainState]
    checksum: int
    warning: str


def load(path: Path, template: TrainState, selected: Selection, convert: bool, settings: Settings) -> Loaded:
    """Read and verify all that this process needs to restore a checkpoint into the structure of `template`."""
    manifest, checksum = read_manifest(path)
    reader = Reader(path, manifest)
    with errors_as_damage(path / MANIFEST):
        counts = counts_in(manifest)
    tree = trees_of(template)
    leaves = leaves_of(tree)
    left_out = manifest.get("left_out", {})
    check_left_out(path, left_out, leaves)
    wanted = subset(leaves, set(filter(selected, without(leaves, left_out))))
    _check_fit(path, wanted, reader, selected, convert)
    run = Run(fields_of(template, COUNTS), provenance_of(template))
    if selected.everything:
        run = settings.continued(path, counts, manifest.get("made_with"), template)
    values = _values(reader, wanted)
    is_bound = {isinstance(leaf, nn.Parameter) for leaf in template.params.values()} == {True}
    roots = same_memory({each: leaf for each, leaf in leaves.items() if _has_memory(leaf)}) if is_bound else {}
    restored_leaves, writes = _placed(path, leaves, wanted, roots, reader, values)
    remaining = iter(restored_leaves.values())
    restored = functools.partial(_restored, pytree.tree_map(lambda _: next(remaining), tree), run)
    state = functools.partial(_write_over, template, writes, restored) if writes else restored
    return Loaded(state, checksum, run.warning)


def _restored(trees: Mapping[str, Any], run: Run) -> TrainState:
    state = TrainState(**{**dict.fromkeys(TREES), **trees, **run.counts})
    lease.note_provenance(state, run.made_with)
    return state


def _check_fit(
    path: Path, wanted: Mapping[str, Any], reader: Reader, selected: Callable[[str], bool], convert: bool
) -> None:
    """Raise ValueError that lists all differences between the leaves of a state and those of a checkpoint."""
    saved = {**reader.tensors, **reader.ties, **reader.values}
    misfits = [f"{leaf_path} is in the state, and not in the checkpoint" for leaf_path in without(wanted, saved)]
    unexpected = filter(selected, without(saved, wanted))
    misfits += [f"{leaf_path} is in the checkpoint, and not in the state" for leaf_path in unexpected]
    common = subset(wanted, saved).items()
    misfits += filter(None, (_difference(leaf_path, leaf, reader, convert) for leaf_path, leaf in common))
    advice = "Restore into a state of the model and optimizer that it was saved from, or use another directory"
    if all(misfit.startswith("/extra") for misfit in misfits):
        advice = (
            "Restore into a state with the extra that was saved, and change it afterwards: "
            "state = state.replace(extra={**state.extra, key: value}). Later checkpoints then hold it"
        )
    check(not misfits, f"{path} does not fit the state:\n  " + few(misfits, 10, "\n  ") + f"\n{advice}")


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


def _values(reader: Reader, wanted: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors of a checkpoint, or this process's shards of them, in memory that may not be written."""
    about = {leaf_path: reader.about(leaf_path) for leaf_path in wanted}
    return reader.read(
        {
            leaf_path: box_of(wanted[leaf_path]) if isinstance(wanted[leaf_path], Tensor) else whole(entry["shape"])
            for leaf_path, entry in about.items()
            if entry is not None
        }
    )


def _has_memory(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and (is_sharded(leaf) or leaf.layout is torch.strided)


def _placed(
    path: Path,
    leaves: Mapping[str, Any],
    wanted: Mapping[str, Any],
    roots: Mapping[str, str],
    reader: Reader,
    values: Mapping[str, Tensor],
) -> tuple[dict[str, Any], list[tuple[Tensor, Tensor]]]:
    """Leaves of the restored state, and the tensors among them to write over, each with its value.

    A leaf with a root is written over, since the state is bound to a module. Leaves of a state may share a tensor, such
    as `extra={"start": state.params}` before the first step. If they were saved as two, the first of them, which is
    the module's, keeps its memory, and the other gets a new tensor.

    Args:
        roots: for each tensor of a bound state, the path of the first one in the same memory; empty for other states.
        values: the tensors to restore, by path.
    """
    placed = dict(leaves)
    writes: list[tuple[Tensor, Tensor]] = []
    owners: dict[str, str] = {}  # path of a tensor of the checkpoint, by the root that it is written to
    made: dict[Any, Any] = {}  # one new tensor for all ties
    for leaf_path, leaf in wanted.items():
        saved = reader.root(leaf_path)
        if leaf_path not in values:
            placed[leaf_path] = reader.values[leaf_path]
        elif leaf_path in roots and owners.setdefault(roots[leaf_path], saved) == saved:
            # Frozen parameters and masks, which states of pure steps share with the module, are not written.
            if not (leaf_path.startswith(WEIGHTS) and same_value(leaf, values[leaf_path])):
                writes.append((local(leaf) if is_sharded(leaf) else leaf, values[leaf_path]))
        else:
            check(
                leaf_path not in roots or not leaf_path.startswith(WEIGHTS),
                f"{path} cannot be restored into this bound state: {roots.get(leaf_path)} and {leaf_path} are one tensor "
                "in the module, and two in the checkpoint. Restore into a state that is not bound to the module: "
                "ckpt.restore(ll.copy_state(state))",
            )
            placed[leaf_path] = _new_leaf(made, saved, leaf, values[leaf_path])
    for leaf_path, leaf in without(leaves, wanted).items():
        if not leaf_path.startswith(WEIGHTS) and roots.get(leaf_path) in owners:  # it keeps its value
            placed[leaf_path] = leaf.detach().clone().requires_grad_(leaf.requires_grad)
    return placed, writes


def _new_leaf(made: dict[Any, Any], saved: str, like: Any, value: Tensor) -> Any:
    """A new leaf with a value of a checkpoint and the layout of the leaf that it replaces, the same for all ties."""
    like = like if isinstance(like, Tensor) else value
    kind = saved, like.device, like.dtype, is_sharded(like)
    if kind not in made:
        made[kind] = new_like(like)
        own = local(made[kind])
        same = own.dtype == value.dtype
        (words(own) if same else own).copy_(words(value) if same else value)
    return made[kind].detach().requires_grad_(like.requires_grad)


def _write_over(
    template: TrainState, writes: list[tuple[Tensor, Tensor]], restored: Callable[[], TrainState]
) -> TrainState:
    """Copy values into this state's tensors, like a donated step: no interrupt leaves it half done."""
    _interrupts.install()
    written = [leaf for leaf, _ in writes]
    _hold_signals = True
    taken = lease.lease_over("ckpt.restore(state)", written)
    taken.write()
    with torch.no_grad():
        for leaf, value in writes:
            _write(leaf, value)
    new = restored()
    taken.step = new.step
    return new


def _write(tensor: Tensor, values: Tensor) -> None:
    """Copy values into a tensor, each element in memory once: an expanded dimension has only one to write."""
    if 0 in tensor.stride():
        once = tuple(slice(n if step else 1) for n, step in zip(tensor.shape, tensor.stride(), strict=True))
        tensor, values = tensor[once], values[once]
    tensor.copy_(values)
