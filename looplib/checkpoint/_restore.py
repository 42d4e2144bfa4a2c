"""Checkpoint restoring into the structure of a state.

Everything that this process needs is read and verified before anything is written, so a state is restored completely
or not at all.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from looplib._core import interrupts as _interrupts
from looplib._core import lease
from looplib._core.checks import check, few
from looplib._core.mappings import fields_of, subset, without
from looplib._core.overlap import same_value
from looplib._core.provenance import provenance_of
from looplib._core.ranks import is_sharded
from looplib._core.trees import map_leaves
from looplib.checkpoint._format import WEIGHTS, about, counts_in, in_words, leaves_of, local, trees_of, words
from looplib.checkpoint._left_out import check_left_out
from looplib.checkpoint._read import Reader, read_manifest
from looplib.checkpoint._settings import Run, Settings
from looplib.checkpoint._shards import box_of, full_box, new_like
from looplib.checkpoint._write import same_memory
from looplib.types import COUNTS, TREES, TrainState


def load(
    path: Path, template: TrainState, weights_only: bool, settings: Settings
) -> tuple[Callable[[], TrainState], int, str]:
    """Read and verify all that this process needs to restore a checkpoint into the structure of `template`.

    Returns a function for the restored state, which cannot fail; the manifest's checksum, which shows if all ranks have
    read the same checkpoint; and a warning about settings that differ from those saved, or "".
    """
    manifest, checksum = read_manifest(path)
    reader, tree = Reader(path, manifest), trees_of(template)
    leaves, left_out = leaves_of(tree), manifest["left_out"]
    check_left_out(path, left_out, leaves)
    wanted = {each: leaf for each, leaf in without(leaves, left_out).items() if _is_chosen(each, weights_only)}
    _check_fit(path, wanted, reader, weights_only)
    if weights_only:
        run = Run(fields_of(template, COUNTS), provenance_of(template))
    else:
        run = settings.continued(path, counts_in(manifest), manifest["made_with"], template)
    is_bound = {isinstance(leaf, nn.Parameter) for leaf in template.params.values()} == {True}
    writable = {each: leaf for each, leaf in leaves.items() if isinstance(leaf, Tensor) and 0 not in leaf.stride()}
    roots = same_memory(writable) if is_bound else {}
    restored_leaves, writes = _placed(path, leaves, wanted, roots, reader)
    remaining = iter(restored_leaves.values())
    trees = map_leaves(lambda _: next(remaining), tree)

    def restored() -> TrainState:
        state = TrainState(**{**dict.fromkeys(TREES), **trees, **run.counts})
        lease.note_provenance(state, run.made_with)
        return state

    return functools.partial(_write_over, writes, restored) if writes else restored, checksum, run.warning


def _is_chosen(leaf_path: str, weights_only: bool) -> bool:
    return leaf_path.startswith(WEIGHTS) or not weights_only


def _check_fit(path: Path, wanted: Mapping[str, Any], reader: Reader, weights_only: bool) -> None:
    """Raise ValueError that lists all differences between the leaves of a state and those of a checkpoint."""
    saved = {**reader.tensors, **reader.ties, **reader.values}
    misfits = [f"{leaf_path} is in the state, and not in the checkpoint" for leaf_path in without(wanted, saved)]
    unexpected = [leaf_path for leaf_path in without(saved, wanted) if _is_chosen(leaf_path, weights_only)]
    misfits += [f"{leaf_path} is in the checkpoint, and not in the state" for leaf_path in unexpected]
    common = subset(wanted, saved).items()
    misfits += filter(None, [_difference(leaf_path, leaf, reader) for leaf_path, leaf in common])
    advice = "Restore into a state of the model and optimizer that it was saved from, or use another directory"
    if all(misfit.startswith("/extra") for misfit in misfits):
        advice = (
            "Restore into a state with the extra that was saved, and change it afterwards: "
            "state = state.replace(extra={**state.extra, key: value}). Later checkpoints then hold it"
        )
    check(not misfits, f"{path} does not fit the state:\n  " + few(misfits, 10, "\n  ") + f"\n{advice}")


def _difference(leaf_path: str, leaf: Any, reader: Reader) -> str:
    entry, is_tensor = reader.about(leaf_path), isinstance(leaf, Tensor)
    saved = in_words(entry) if entry else type(reader.values[leaf_path]).__name__
    new = in_words(about(leaf)) if is_tensor else type(leaf).__name__
    # An int may become a float, and a None may be set later.
    fits = saved == new or {saved, new} == {"int", "float"} or ("NoneType" in (saved, new) and not is_tensor)
    return "" if fits else f"{leaf_path} is {saved} in the checkpoint, {new} in the state"


def _placed(
    path: Path,
    leaves: Mapping[str, Any],
    wanted: Mapping[str, Any],
    roots: Mapping[str, str],
    reader: Reader,
) -> tuple[dict[str, Any], list[tuple[Tensor, Tensor]]]:
    """Leaves of the restored state, and the tensors among them to write over, each with its value.

    A leaf with a root is written over, since the state is bound to a module. Leaves of a state may share a tensor, such
    as `extra={"start": state.params}` before the first step. If they were saved as two, the first of them, which is
    the module's, keeps its memory, and the other gets a new tensor.

    Args:
        roots: for each tensor of a bound state, the path of the first one in the same memory; empty for other states.
    """
    # This process's shards of tensors that are sharded here, and whole ones otherwise. This memory may not be written.
    boxes = {
        leaf_path: box_of(leaf) if isinstance(leaf, Tensor) else full_box(entry["shape"])
        for leaf_path, leaf in wanted.items()
        if (entry := reader.about(leaf_path)) is not None
    }
    values = reader.read(boxes)
    placed = dict(leaves)
    writes: list[tuple[Tensor, Tensor]] = []
    made: dict[Any, Any] = {}  # one new tensor for all ties
    for leaf_path, leaf in leaves.items():
        root, is_weight = roots.get(leaf_path), leaf_path.startswith(WEIGHTS)
        saved = reader.root(leaf_path)
        if leaf_path not in wanted:
            if not is_weight and root != leaf_path and root in values:  # it keeps its value
                placed[leaf_path] = leaf.detach().clone().requires_grad_(leaf.requires_grad)
        elif leaf_path not in values:
            placed[leaf_path] = reader.values[leaf_path]
        elif roots and is_weight and same_value(leaf, values[leaf_path]):
            continue  # frozen parameters and masks, which states of pure steps share with the module, are not written
        elif root == leaf_path:
            writes.append((local(leaf) if is_sharded(leaf) else leaf, values[leaf_path]))
        elif root is None or reader.root(root) != saved:
            check(
                not (roots and is_weight),
                f"{path} cannot be restored into this bound state, because the module cannot hold {leaf_path}: it is "
                f"{f'one tensor with {root} there, and another one in the checkpoint' if root else 'expanded there'}. "
                "Restore into a state that is not bound to the module: ckpt.restore(ll.copy_state(state))",
            )
            placed[leaf_path] = _new_leaf(made, saved, leaf, values[leaf_path])
    return placed, writes


def _new_leaf(made: dict[Any, Any], saved: str, like: Any, value: Tensor) -> Any:
    """A new leaf with a value of a checkpoint and the layout of the leaf that it replaces, the same for all ties."""
    like = like if isinstance(like, Tensor) else value
    kind = saved, like.device, is_sharded(like)
    if kind not in made:
        made[kind] = new_like(like)
        words(local(made[kind])).copy_(words(value))
    return made[kind].detach().requires_grad_(like.requires_grad)


def _write_over(writes: list[tuple[Tensor, Tensor]], restored: Callable[[], TrainState]) -> TrainState:
    """Copy values into this state's tensors, like a donated step: no interrupt leaves it half done."""
    _interrupts.install()
    written = [leaf for leaf, _ in writes]
    _hold_signals = True
    taken = lease.lease_over("ckpt.restore(state)", written)
    taken.write()
    with torch.no_grad():
        for leaf, value in writes:
            leaf.copy_(value)
    new = restored()
    taken.step = new.step
    return new
