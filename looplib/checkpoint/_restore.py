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
from looplib._core.checks import check
from looplib._core.mappings import fields_of, subset, without
from looplib._core.overlap import same_value
from looplib._core.provenance import provenance_of
from looplib._core.ranks import is_sharded
from looplib._core.torch_private import pytree
from looplib.checkpoint._describe import counts_in, trees_of
from looplib.checkpoint._fit import check_fit
from looplib.checkpoint._format import MANIFEST, WEIGHTS, errors_as_damage, leaves_of, local, words
from looplib.checkpoint._left_out import paths_left_out
from looplib.checkpoint._read import Reader, read_manifest, whole
from looplib.checkpoint._settings import Run, Settings
from looplib.checkpoint._shards import box_of, new_like
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
        checksum: the manifest's checksum, which shows if two ranks have read the same checkpoint.
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
    left_out = paths_left_out(path, manifest, leaves)
    wanted = subset(leaves, set(filter(selected, without(leaves, left_out))))
    check_fit(path, wanted, reader, selected, convert)
    run = Run(fields_of(template, COUNTS), provenance_of(template))
    if selected.everything:
        run = settings.continued(path, counts, manifest.get("made_with"), template)
    values = _values(reader, wanted)
    in_place: dict[str, Tensor] = {}
    if {isinstance(leaf, nn.Parameter) for leaf in template.params.values()} == {True}:  # bound to a module
        in_place, kept_apart = _in_place(path, leaves, wanted, reader)
        leaves |= {
            name: leaves[name].detach().clone().requires_grad_(leaves[name].requires_grad) for name in kept_apart
        }
    new = _New(reader, values)
    leaves |= {leaf_path: new.leaf(leaf_path, like) for leaf_path, like in without(wanted, in_place).items()}
    # Frozen parameters and masks, which states of pure steps share with the module, are not written.
    writes = [
        (local(leaf) if is_sharded(leaf) else leaf, values[leaf_path])
        for leaf_path, leaf in in_place.items()
        if not (leaf_path.startswith(WEIGHTS) and same_value(leaf, values[leaf_path]))
    ]
    restored_leaves = iter(leaves.values())
    restored = functools.partial(_restored, pytree.tree_map(lambda _: next(restored_leaves), tree), run)
    state = functools.partial(_write_over, template, writes, restored) if writes else restored
    return Loaded(state, checksum, run.warning)


def _restored(trees: Mapping[str, Any], run: Run) -> TrainState:
    state = TrainState(**{**dict.fromkeys(TREES), **trees, **run.counts})
    lease.note_provenance(state, run.made_with)
    return state


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


def _in_place(
    path: Path, leaves: Mapping[str, Any], wanted: Mapping[str, Any], reader: Reader
) -> tuple[dict[str, Tensor], list[str]]:
    """Leaves of a bound state that are written over, and paths of those that are not restored and share their memory.

    Leaves of a state may share a tensor, such as `extra={"start": state.params}` before the first step. If they were
    saved as two tensors, the module's leaf keeps the memory, and the other gets memory of its own.
    """
    tensors = {leaf_path: leaf for leaf_path, leaf in leaves.items() if _has_memory(leaf)}
    roots = same_memory(tensors)
    written: dict[str, Tensor] = {}
    owners: dict[str, str] = {}  # by the state's tensor, the checkpoint's
    for leaf_path, leaf in subset(tensors, wanted).items():
        owner = owners.setdefault(roots[leaf_path], reader.root(leaf_path))
        if owner == reader.root(leaf_path):
            written[leaf_path] = leaf
        check(
            owner == reader.root(leaf_path) or not leaf_path.startswith(WEIGHTS),
            f"{path} cannot be restored into this bound state: {roots[leaf_path]} and {leaf_path} are one tensor in the "
            "module, and two in the checkpoint. Restore into a state that is not bound to the module: "
            "ckpt.restore(ll.copy_state(state))",
        )
    rest = without(tensors, wanted)
    return written, [each for each in rest if not each.startswith(WEIGHTS) and roots[each] in owners]


def _has_memory(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and (is_sharded(leaf) or leaf.layout is torch.strided)


class _New:
    """New leaves of a state, with the values of a checkpoint and the layouts of the leaves that they replace."""

    def __init__(self, reader: Reader, values: Mapping[str, Tensor]) -> None:
        self._reader, self._values = reader, values
        self._made: dict[Any, Any] = {}  # one for all ties

    def leaf(self, leaf_path: str, like: Any) -> Any:
        if leaf_path not in self._values:
            return self._reader.values[leaf_path]
        value = self._values[leaf_path]
        like = like if isinstance(like, Tensor) else value
        kind = self._reader.root(leaf_path), like.device, like.dtype, is_sharded(like)
        if kind not in self._made:
            new = new_like(like)
            own = local(new)
            same = own.dtype == value.dtype
            (words(own) if same else own).copy_(words(value) if same else value)
            self._made[kind] = new
        return self._made[kind].detach().requires_grad_(like.requires_grad)


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
