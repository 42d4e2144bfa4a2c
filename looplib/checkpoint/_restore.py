"""Checkpoint restoring into the structure of a state.

Everything that this process needs is read and verified before anything is written, so a state is restored completely
or not at all.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from looplib._core import interrupts as _interrupts
from looplib._core import lease
from looplib._core.descriptions import differences
from looplib._core.mappings import fields_of, mapped, subset, without
from looplib._core.overlap import same_value
from looplib._core.provenance import Provenance, other_settings, provenance_of, restored_into
from looplib._core.ranks import is_sharded
from looplib._core.torch_private import pytree
from looplib.checkpoint._describe import counts_in, trees_of
from looplib.checkpoint._fit import check_fit, without_later_entries
from looplib.checkpoint._format import MANIFEST, WEIGHTS, leaves_of, local, sound
from looplib.checkpoint._format_read import Reader, read_document
from looplib.checkpoint._left_out import paths_left_out
from looplib.checkpoint._position import position
from looplib.checkpoint._settings import Settings
from looplib.checkpoint._sharing import Sharing, write
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
    manifest, checksum = read_document(path)
    reader = Reader(path, manifest)
    with sound(path / MANIFEST):
        counts = counts_in(manifest)
    tree = without_later_entries(trees_of(template), reader)
    leaves = leaves_of(tree)
    left_out = paths_left_out(path, manifest, leaves)
    wanted = subset(leaves, set(filter(selected, without(leaves, left_out))))
    check_fit(path, wanted, reader, selected, convert)
    run = _Run(fields_of(template, COUNTS), provenance_of(template))
    if selected.everything:
        made_with = manifest.get("made_with")
        known = made_with if isinstance(made_with, Mapping) else {}  # older checkpoints have none
        run = _continued(path, counts, known, template, settings)
    saved = _Saved(reader, wanted)
    writes: list[tuple[Tensor, Tensor]] = []
    if {isinstance(leaf, nn.Parameter) for leaf in template.params.values()} == {True}:  # bound to a module
        sharing = Sharing(leaves, wanted, saved.entry, path)
        sharing.check_weights(saved.value)
        for leaf_path, leaf in sharing.written.items():
            value = saved.value(leaf_path)
            # Frozen parameters and masks, which states of pure steps share with the module, are not written.
            if not (leaf_path.startswith(WEIGHTS) and same_value(leaf, value)):
                writes.append((_memory(leaf), value))
        # A leaf that is not restored but shares memory with a restored one keeps its value in a copy.
        leaves |= mapped(_copied, subset(leaves, sharing.kept_apart))
        wanted = without(wanted, sharing.written)
    leaves |= {leaf_path: saved.leaf(leaf_path, like) for leaf_path, like in wanted.items()}
    values = iter(leaves.values())
    restored = functools.partial(_restored, pytree.tree_map(lambda _: next(values), tree), run)
    state = functools.partial(_write_over, template, writes, restored) if writes else restored
    return Loaded(state, checksum, run.warning)


def _restored(trees: Mapping[str, Any], run: _Run) -> TrainState:
    state = TrainState(**{**dict.fromkeys(TREES), **trees, **run.counts})
    lease.note_provenance(state, run.made_with)
    return state


def _memory(leaf: Tensor) -> Tensor:
    """The tensor to write. Not detached, unless sharded: the record of who has written a tensor ends with the tensor."""
    return local(leaf) if is_sharded(leaf) else leaf


class _Run(NamedTuple):
    """A restored state without its trees, and the warning about settings that differ from those saved."""

    counts: dict[str, Any]
    made_with: Provenance
    warning: str = ""


def _continued(
    path: Path, counts: dict[str, Any], saved: Mapping[str, Any], template: TrainState, settings: Settings
) -> _Run:
    """The run of a checkpoint, continued with the settings of `template`. `saved` are those of the checkpoint."""
    same_length = counts["epoch_length"] == template.epoch_length
    changed = settings.differences(saved, template)
    changed += differences({"epoch_length": counts["epoch_length"]}, {"epoch_length": template.epoch_length})
    seed = differences({"seed": counts["seed"]}, {"seed": template.seed})
    warning = other_settings(path, changed, seed) if changed or seed else ""
    made_with = restored_into(template, saved, str(path), counts["step"], settings.compares_loader(saved))
    resume = settings.resume(saved, same_length)
    of_saved_run = restored_into(template, saved, str(path), counts["step"], False)
    return _Run(position(path, counts, template, resume, of_saved_run), made_with, warning)


def _copied(leaf: Tensor) -> Tensor:
    return leaf.detach().clone().requires_grad_(leaf.requires_grad)


class _Saved:
    """Saved leaves, read and verified: as values to copy, or as new leaves of a state."""

    def __init__(self, reader: Reader, wanted: Mapping[str, Any]) -> None:
        self._reader = reader
        self._copies: dict[Any, Tensor] = {}  # one for each run of bytes, so that leaves share memory as before
        sharded = {
            leaf_path: leaf
            for leaf_path, leaf in wanted.items()
            if leaf_path in reader.shards or (is_sharded(leaf) and reader.about(leaf_path) is not None)
        }
        reader.verify(reader.tensors.keys() & wanted.keys() - sharded.keys())
        self._shards: dict[str, Tensor] = {}
        if sharded:
            from looplib.checkpoint import _shards  # takes a second or two to import, so only for sharded states

            self._shards = _shards.read(reader, sharded)

    def entry(self, leaf_path: str) -> Mapping[str, Any] | None:
        """Location of an unsharded tensor in the file; None for plain values, and for shards, which share no memory."""
        return None if leaf_path in self._shards else self._reader.tensors.get(leaf_path)

    def value(self, leaf_path: str) -> Tensor:
        """Values of a tensor, or of this process's shard of it, in read-only memory."""
        return self._shards[leaf_path] if leaf_path in self._shards else self._reader.tensor(leaf_path)

    def leaf(self, leaf_path: str, like: Any) -> Any:
        """A leaf in newly allocated memory, with the device and dtype of the leaf it replaces."""
        if self._reader.about(leaf_path) is None:
            return self._reader.values[leaf_path]
        if not isinstance(like, Tensor):
            sharded = self._shards.get(leaf_path)
            return self._reader.tensor(leaf_path, self._copies) if sharded is None else sharded
        if leaf_path in self._shards:
            new = self._shards[leaf_path].to(like.device, like.dtype)
            if is_sharded(like):
                from looplib.checkpoint import _shards

                new = _shards.like(like, new)
        else:
            new = self._reader.tensor(leaf_path, self._copies, like.device).to(like.dtype)
        return new.requires_grad_(like.requires_grad)


def _write_over(
    template: TrainState, writes: list[tuple[Tensor, Tensor]], restored: Callable[[], TrainState]
) -> TrainState:
    """Copy values into this state's tensors, like a donated step: no interrupt leaves it half done."""
    _interrupts.install()
    written = [leaf for leaf, _ in writes]
    lease.wait_for_readers(written)
    thread = threading.get_ident()
    _interrupts.begin_hold(thread)
    try:
        taken = lease.lease_over("ckpt.restore(state)", written)
        taken.write()
        with torch.no_grad():
            for leaf, value in writes:
                write(leaf, value)
        new = restored()
        taken.step = new.step
    finally:
        _interrupts.end_hold(thread)
    return new
