"""Checkpoint restoring into the structure of a state.

Everything that this process needs is read and verified before anything is written, so a state is restored completely
or not at all.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from looplib._core import interrupts as _interrupts
from looplib._core import lease
from looplib._core.checks import check, few
from looplib._core.copies import is_shared
from looplib._core.mappings import fields_of, mapped, subset, without
from looplib._core.modules import check_materialized
from looplib._core.ranks import is_sharded, local
from looplib._core.trees import map_leaves
from looplib.checkpoint._format import WEIGHTS, about, counts_in, in_words, leaves_of, trees_of, words
from looplib.checkpoint._read import Reader, read_manifest
from looplib.checkpoint._settings import Settings, check_left_out
from looplib.checkpoint._structure import with_saved_shapes
from looplib.checkpoint._write import same_memory
from looplib.optim.averages import averages_in
from looplib.state import same_value
from looplib.types import COUNTS, TREES, TrainState


def load(
    path: Path,
    template: TrainState,
    weights_only: bool,
    optional: Collection[str],
    settings: Settings,
    resized: Collection[str] = (),
) -> tuple[Callable[[], TrainState], int, str, str]:
    """Read and verify all that this process needs to restore a checkpoint into the structure of `template`.

    Parts of the update that one of the two lacks have to be named in `optional`, and leaves whose shape is the checkpoint's
    in `resized`.

    Returns a function for the restored state, which cannot fail; the manifest's checksum, which shows if all ranks have
    read the same checkpoint; a warning about settings that differ from those saved, or ""; and a line to print, or "".
    """
    manifest = read_manifest(path)
    objects = manifest.get("objects", {})
    advice = f"give ckpt.restore(...) a mapping of the objects {few(objects)}"
    check(not objects, f"{path} was saved from objects by name and not from a state: {advice}")
    _check_members(path, counts_in(manifest)["seed"], template.seed)
    reader, structure = Reader(path, manifest), manifest["structure"]
    template = with_saved_shapes(template, structure, reader, resized, weights_only)
    tree = trees_of(template)
    leaves, left_out = leaves_of(tree), manifest["left_out"]
    check_left_out(path, left_out, leaves)
    wanted = {
        leaf_path: leaf
        for leaf_path, leaf in without(leaves, left_out).items()
        if _is_chosen(leaf_path, weights_only)
    }
    wanted = without(wanted, _check_fit(path, wanted, reader, weights_only, optional))
    check_materialized({leaf_path: leaf for leaf_path, leaf in wanted.items() if isinstance(leaf, Tensor)})
    if weights_only:
        counts, run, warning, line = fields_of(template, COUNTS), template.run, _of_averages(template), ""
    else:
        counts, run, warning, line = settings.continued(path, manifest, template)
    values = reader.read(wanted)
    is_bound = {isinstance(leaf, nn.Parameter) for leaf in template.params.values()} == {True}
    kept, writes = _bound(path, leaves, wanted, values, reader) if is_bound else ({}, [])
    remaining = iter({**leaves, **kept, **_new_leaves(without(wanted, kept), values, reader, template)}.values())
    trees = map_leaves(lambda _: next(remaining), tree)

    def restored() -> TrainState:
        return TrainState(**{**dict.fromkeys(TREES), **trees, **counts}, run=run)

    return functools.partial(_write_over, writes, restored) if writes else restored, manifest["crc32"], warning, line


def _check_members(path: Path, saved: Any, here: Any) -> None:
    """Raise ValueError for a stack of another number of members than the saved one, or for a state in place of a stack."""
    before, now = (
        f"a stack of {len(seed)} members" if isinstance(seed, tuple) else "no stack" for seed in (saved, here)
    )
    advice = (
        f"Restore into a stack of {len(saved)}, made as before, and choose among its members, or stack others with them, "
        "afterwards: ll.transforms.unstack_states and stack_states"
        if isinstance(saved, tuple)
        else "Restore into one state, and stack that afterwards: ll.transforms.stack_states([ll.state.fold_in(state, number) "
        "for number in range(4)])"
    )
    check(before == now, f"{path} was saved from {before}, and the state to restore into is {now}. {advice}")


def _is_chosen(leaf_path: str, weights_only: bool) -> bool:
    return leaf_path.startswith(WEIGHTS) or not weights_only


def _of_averages(template: TrainState) -> str:
    """Warning for averages that a restore of the weights alone leaves as they are; empty if a state has none."""
    found = [
        "/".join(path)
        for path, (entry, start) in averages_in(template.opt_state, template.run.optimizer)
        if (
            entry["updates"] >= start
        ).any()  # else it begins with the weights of a later update; one number for each member
    ]
    if not found:
        return ""
    return (
        f"weights_only=True leaves the average of {few(found)} as it is, an average of the weights before the restore, which "
        "ll.eval_state would take. For the checkpoint's average, leave weights_only out; for one that begins at these weights, "
        "write ll.state.fresh(ckpt.restore(ll.init_state(model), weights_only=True), optimizer, seed=0)"
    )


def _check_fit(
    path: Path, wanted: Mapping[str, Any], reader: Reader, weights_only: bool, optional: Collection[str]
) -> Mapping[str, Any]:
    """Leaves that keep their value, since the checkpoint has nothing of their part of the update or entry of `extra`.

    Raises ValueError that lists all differences between the leaves of a state and those of a checkpoint, but for parts and
    entries that are `optional`.
    """
    stored = {**reader.tensors, **reader.ties, **reader.values}
    saved = {leaf_path: entry for leaf_path, entry in stored.items() if _is_chosen(leaf_path, weights_only)}
    entries = {**_lone_entries(wanted, saved), **_lone_entries(saved, wanted)}
    meant = {leaf_path: names for leaf_path, names in entries.items() if {*names} & {*optional}}
    if meant:  # `extra` may be None on one of the two sides
        meant |= dict.fromkeys(leaf_path for leaf_path in (*wanted, *saved) if leaf_path == "/extra")
    kept = subset(wanted, meant)
    wanted, saved = without(wanted, meant), without(saved, meant)
    new, gone = _lone_parts(wanted, saved), _lone_parts(saved, wanted)
    parts = {
        **{
            part: f"{part}, a part of the update, has a state here, and none in the checkpoint"
            for part in new.values()
        },
        **{
            part: f"{part}, a part of the update, has a state in the checkpoint, and none here"
            for part in gone.values()
        },
    }
    misfits = [
        f"{leaf_path} is in the state, and not in the checkpoint"
        for leaf_path in without(without(wanted, saved), new)
    ]
    misfits += [
        f"{leaf_path} is in the checkpoint, and not in the state"
        for leaf_path in without(without(saved, wanted), gone)
    ]
    misfits += filter(None, [_difference(*item, reader) for item in subset(wanted, saved).items()])
    advice = "Restore into a state of the model and optimizer that it was saved from, or use another directory"
    if misfits and all(misfit.startswith("/extra") for misfit in misfits):
        advice = (
            "Restore into a state with the extra that was saved, ll.init_state(..., extra={...}), and change it afterwards: "
            "state = state.with_extra(key=value). Later checkpoints then hold it. A list or a dict whose size changes during "
            "the run is named, ckpt.restore(state, resized=('extra.history',))"
        )
        if entry := next((names[0] for leaf_path, names in entries.items() if leaf_path not in meant), ""):
            advice += f". An entry that is new or gone in the script too: ckpt.restore(state, optional=({entry!r},))"
    advice += _advice_on_shapes(subset(wanted, saved), reader)
    misfits = [*map(_unescaped, misfits)]
    if gone and not new:
        advice += ". For the weights alone: ckpt.restore(ll.init_state(model), weights_only=True)"
    if unnamed := without(parts, optional):
        advice += f". {_ways(unnamed, new, gone, optional)}"
        misfits = [*unnamed.values(), *misfits]
    check(not misfits, f"{path} does not fit the state:\n  {few(misfits, 10, chr(10) + '  ')}\n{advice}")
    return {**new, **kept}


def _lone_entries(leaves: Mapping[str, Any], others: Mapping[str, Any]) -> dict[str, list[str]]:
    """Leaves of `extra` that are not among the others, with the names of what they are in that is not either.

    >>> _lone_entries({"/extra/window/steps": 0}, {"/extra/best": 0})
    {'/extra/window/steps': ['extra.window', 'extra.window.steps']}
    """
    matched = {beginning for other in others for beginning in _beginnings(other, "/extra/")}
    return {
        leaf_path: [_unescaped(name[1:].replace("/", ".")) for name in names]
        for leaf_path in without(leaves, others)
        if (names := [name for name in _beginnings(leaf_path, "/extra/") if name not in matched])
    }


# The parts of a chain are the keys of opt_state; those of a chain in another part are keys of its `inner`, or of a label.
_PART = re.compile(r"/opt_state/((?:[^/]+/inner/|partition/[^/]+/)*[^/]+)")


def _lone_parts(leaves: Mapping[str, Any], others: Mapping[str, Any]) -> dict[str, str]:
    """Leaves of parts of an update that have none among the others, each with the name of its part."""
    lone: dict[str, str] = {}
    if unmatched := without(leaves, others):
        matched = {beginning for other in others for beginning in _beginnings(other)}
        for leaf_path in unmatched:
            root = next((beginning for beginning in _beginnings(leaf_path) if beginning not in matched), "")
            if part := _PART.fullmatch(root):
                lone[leaf_path] = _unescaped(part[1])
    return lone


def _unescaped(text: str) -> str:
    """Names as they are, of those that a JSON pointer escapes."""
    return text.replace("~1", "/").replace("~0", "~")


def _beginnings(leaf_path: str, tree: str = "/opt_state/") -> Iterator[str]:
    """Paths of a leaf of a tree and of what it is in, the outermost first."""
    if leaf_path.startswith(tree):
        ends = [slash.start() for slash in re.finditer("/", leaf_path)][2:]
        yield from (leaf_path[:end] for end in [*ends, len(leaf_path)])


def _ways(
    unnamed: Mapping[str, str], new: Mapping[str, str], gone: Mapping[str, str], optional: Collection[str]
) -> str:
    """The line to write if other parts of the update are meant, and its effect."""
    has_part = {*new.values(), *gone.values()}
    names = [*(name for name in optional if name in has_part), *unnamed]
    listed = ", ".join(map(repr, names)) + "," * (len(names) == 1)
    started, dropped = ([part for part in unnamed if part in parts.values()] for parts in (new, gone))
    effects = [f"{few(started)} will start as in the state"] if started else []
    effects += [f"what {few(dropped)} kept will be dropped"] if dropped else []
    way = f"If other parts are meant: ckpt.restore(state, optional=({listed})); {', and '.join(effects)}"
    if any(f"/{part}/average/" in _unescaped(leaf_path) for leaf_path, part in new.items() if part in started):
        way += ". A new average begins with the state's weights, or with start=1, with those after the next update"
    unknown = [name for name in optional if name not in has_part]
    return f"{way}. Of optional, {few(unknown)} is no part that one of them alone has" if unknown else way


def _advice_on_shapes(leaves: Mapping[str, Any], reader: Reader) -> str:
    """The line to write if leaves may have other shapes than the state's."""
    titles = [
        ".".join(_unescaped(key) for key in leaf_path.split("/")[1:])
        for leaf_path, leaf in leaves.items()
        if isinstance(leaf, Tensor) and not leaf_path.startswith("/opt_state/")
        if (about_saved := reader.tensors.get(reader.root(leaf_path))) and about_saved["shape"] != [*leaf.shape]
    ]
    listed = ", ".join(map(repr, titles[:3])) + ", ..." * (len(titles) > 3) + "," * (len(titles) == 1)
    way = f". If their shapes are to be those of the checkpoint: ckpt.restore(state, resized=({listed}))"
    return way if titles else ""


def _difference(leaf_path: str, leaf: Any, reader: Reader) -> str:
    saved = reader.tensors.get(reader.root(leaf_path)) or type(reader.values[leaf_path]).__name__
    new = about(leaf) if isinstance(leaf, Tensor) else type(leaf).__name__
    # An int may become a float, and a None may be set later.
    fits = saved == new or {str(saved), str(new)} == {"int", "float"}
    if fits or ("NoneType" in (saved, new) and not isinstance(leaf, Tensor)):
        return ""
    return f"{leaf_path} is {in_words(saved)} in the checkpoint, {in_words(new)} in the state"


def _bound(
    path: Path, leaves: Mapping[str, Any], wanted: Mapping[str, Any], values: Mapping[str, Tensor], reader: Reader
) -> tuple[dict[str, Any], list[tuple[Tensor, Tensor]]]:
    """Leaves of a state bound to a module that are no new tensors, and the tensors to write over, each with its value.

    Leaves of a state may share a tensor, such as `extra={"start": state.params}` before the first step. The first of
    them, which is the module's, is written over. If they were saved as two, the other gets a new tensor, and if the other
    is not restored, it keeps its value in a copy.
    """
    writable = {
        leaf_path: leaf for leaf_path, leaf in leaves.items() if isinstance(leaf, Tensor) and 0 not in leaf.stride()
    }
    roots = same_memory(mapped(local, writable))  # for each tensor, the path of the first one in the same memory
    kept = {
        # The module's own stay its own, and the others keep their value in a copy.
        leaf_path: leaf if leaf_path.startswith(WEIGHTS) else leaf.detach().clone().requires_grad_(leaf.requires_grad)
        for leaf_path, leaf in without(leaves, wanted).items()
        if roots.get(leaf_path) in values
    }
    writes: list[tuple[Tensor, Tensor]] = []
    for leaf_path, value in values.items():
        leaf, root, is_weight = leaves[leaf_path], roots.get(leaf_path), leaf_path.startswith(WEIGHTS)
        # Frozen parameters and masks, which states of pure steps share with the module, are not written.
        is_same = is_weight and same_value(leaf, value)
        is_tied = root is not None and reader.root(root) == reader.root(leaf_path)
        if is_same or is_tied:
            kept[leaf_path] = leaf
        elif is_weight:
            raise ValueError(
                f"{path} cannot be restored into this bound state, because the module cannot hold {leaf_path}: it is "
                f"{f'one tensor with {root} there, and another one in the checkpoint' if root else 'expanded there'}. "
                "Restore into a state that is not bound to the module: ckpt.restore(ll.copy_state(state))"
            )
        if root == leaf_path and not is_same:
            writes.append((local(leaf) if is_sharded(leaf) else leaf, value))
    return kept, writes


def _new_leaves(
    wanted: Mapping[str, Any], values: Mapping[str, Tensor], reader: Reader, template: TrainState
) -> dict[str, Any]:
    """Leaves with the values of a checkpoint and the layouts of those that they replace: one new tensor for all ties."""
    made: dict[Any, Tensor] = {}
    of_stack = isinstance(template.seed, tuple)
    leaves = subset(reader.values, wanted)
    for leaf_path, value in subset(values, wanted).items():
        like = wanted[leaf_path] if isinstance(wanted[leaf_path], Tensor) else value
        kind = reader.root(leaf_path), like.device, is_sharded(like)
        if kind not in made:
            # The members of a stack share it if those that were saved did, and if it is frozen.
            rows = slice(1) if of_stack and is_shared(value) and not like.requires_grad else ...
            new = torch.empty_like(like.detach()[rows])
            words(local(new)).copy_(words(value[rows]))
            made[kind] = new if rows is ... else new.expand(value.shape)
        leaves[leaf_path] = made[kind].detach().requires_grad_(like.requires_grad)
    return leaves


def _write_over(writes: list[tuple[Tensor, Tensor]], restored: Callable[[], TrainState]) -> TrainState:
    """Copy values into this state's tensors, like a donated step: no interrupt leaves it half done."""
    _interrupts.install()
    written = [leaf for leaf, _ in writes]
    _interrupts.waits.depth += 1
    try:
        taken = lease.lease_over("ckpt.restore(state)", written)
        taken.write()
        with torch.no_grad():
            for leaf, value in writes:
                leaf.copy_(value)
        new = restored()
        taken.step = new.step
        return new
    finally:
        _interrupts.waits.depth -= 1
