"""Objects of a raw loop in a checkpoint: those with a `state_dict`, and plain values, by name.

Their tensors are stored like those of a state, and their structure as JSON in the manifest, so that they are restored in
a process whose optimizer has no state yet. In JSON, a list is a list, a plain value stands for itself, and everything
else is an object with one entry, its kind: `{"dict": [[key, value], ...]}`, `{"tensor": [path, strides, requires_grad]}`.
"""

from __future__ import annotations

import math
import sys
import zlib
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import is_dataclass
from functools import partial
from pathlib import Path
from typing import Any

import orjson
import torch
from torch import Tensor, distributed, nn
from torch.nn.parameter import is_lazy

from looplib._core import trees
from looplib._core.checks import check, check_type, few, is_count
from looplib._core.checks import named as named_value
from looplib._core.checksums import checksums
from looplib._core.collective import RankGroup
from looplib._core.mappings import mapped, subset, without
from looplib._core.ranks import is_sharded, local
from looplib._core.records import differences, other_settings
from looplib.checkpoint._capture import RandomStreams
from looplib.checkpoint._format import about, decoded, encoded, in_words, leaves_of, words
from looplib.checkpoint._format import counts_of as counts_of_state
from looplib.checkpoint._read import Reader, read_manifest
from looplib.checkpoint._settings import Settings
from looplib.checkpoint._state_dict import cleaner
from looplib.metrics import Mean, Window
from looplib.types import Optimizer, TrainState

Objects = Mapping[str, Any]
Tensors = dict[trees.Path, Tensor]

_COUNTS = ("step", "epoch", "batch", "samples")  # values of these names are those of a `Checkpoint`
_DEEPEST = 60  # containers within each other; orjson's own limit is 254 in all
_EXAMPLE = '{"model": model, "optimizer": optimizer, "step": step}'


# ---- trees as JSON ----


def _taken(value: Any, path: trees.Path, shards: bool = False) -> tuple[Any, Tensors]:
    """JSON of a tree's structure and plain values, and its tensors by path. `shards` says if some may be DTensors.

    Raises TypeError, with the path, for what a checkpoint cannot store, and for containers that contain themselves.
    """
    where = trees.pointer(path)
    check(len(path) < _DEEPEST, f"{where} has containers within each other, over {_DEEPEST} of them", TypeError)
    if isinstance(value, Tensor):
        kind = "is a DTensor, which is restored only in a module or in an optimizer: keep value.full_tensor()"
        check(shards or not is_sharded(value), f"{where} {kind}", TypeError)
        return {"tensor": [where, _strides(value), value.requires_grad]}, {path: value}
    if (numpy := sys.modules.get("numpy")) is not None and isinstance(value, (numpy.ndarray, numpy.generic)):
        try:
            tensor = torch.from_numpy(numpy.asarray(value))
        except (TypeError, ValueError):
            advice = "which a checkpoint cannot hold: keep numbers of a dtype that torch has"
            raise TypeError(f"{where} is a NumPy array of {value.dtype}, {advice}") from None
        return {"scalar" if isinstance(value, numpy.generic) else "array": where}, {path: tensor}
    if isinstance(value, Mapping):
        names = [_taken(key, (*path, key))[0] for key in value]
        nodes, tensors = _all_taken(value.items(), path, shards)
        kind = type(value).__name__ if type(value) in (OrderedDict, Counter) else "dict"
        return {kind: [*map(list, zip(names, nodes, strict=True))]}, tensors
    if type(value) in (list, tuple, torch.Size):
        nodes, tensors = _all_taken(enumerate(value), path, shards)
        return nodes if type(value) is list else {type(value).__name__: nodes}, tensors
    if isinstance(value, (torch.dtype, torch.device)):
        return {type(value).__name__: str(value).removeprefix("torch.")}, {}
    return _plain(value, where), {}


def _all_taken(items: Any, path: trees.Path, shards: bool) -> tuple[list[Any], Tensors]:
    nodes, tensors = [], Tensors()
    for key, value in items:
        node, more = _taken(value, (*path, key), shards)
        nodes.append(node)
        tensors.update(more)
    return nodes, tensors


def _plain(value: Any, where: str) -> Any:
    """A plain value as JSON has it, or as `encoded` writes it if JSON has no such value."""
    advice = "give it a name of its own in the mapping that you pass"
    check(not _has_state(value), f"{where} is {named_value(value)}, an object with a state: {advice}", TypeError)
    kind = type(value)
    if kind is str:
        check(
            _is_text(value), f"{where} is the text {value!r}, which is no valid Unicode: keep it as bytes", TypeError
        )
        return value
    if (
        kind in (bool, type(None))
        or (kind is int and abs(value) < 1 << 63)
        or (kind is float and math.isfinite(value))
    ):
        return value
    check(
        kind in (int, float, complex, bytes),
        f"{where} is {named_value(value)}, which a checkpoint cannot hold without a template: {_instead_of(value)}",
        TypeError,
    )
    return encoded(where, value)


def _instead_of(value: Any) -> str:
    """Advice, in words: the things to save in place of a value that a checkpoint cannot hold."""
    name = type(value).__name__
    if isinstance(value, Window):
        return "leave it out, log whenever you save, and begin with an empty ll.Window() after a restore"
    if type(value).__module__.startswith("looplib.data"):
        return "leave it out, since it has no state: the counts of your loop say where it continues"
    if isinstance(value, Optimizer):
        return "keep its state, a dict of tensors that optimizer.init(params) begins and each update returns"
    if is_dataclass(value) and not isinstance(value, type):
        return f"keep dataclasses.asdict({name.lower()}), and make the record of it after a restore, {name}(**kept)"
    if isinstance(value, Mean):
        return "keep [mean.total, mean.weight], and make the record of it after a restore, ll.Mean(*kept)"
    return (
        "keep tensors, NumPy arrays, numbers, strings, bytes, None, and dicts, lists and tuples of these, or give it "
        "state_dict and load_state_dict"
    )


def _is_text(text: str) -> bool:
    return text.isascii() or text.encode(errors="replace").decode() == text


def _strides(tensor: Tensor) -> list[int] | None:
    """Strides of a dense tensor in another order of its dimensions, such as channels_last. Otherwise None."""
    if is_sharded(tensor) or tensor.is_contiguous() or tensor.layout is not torch.strided:
        return None
    strides = torch.empty_like(tensor, device="meta").stride()
    return None if strides == torch.empty(tensor.shape, device="meta").stride() else [*strides]


def _original(node: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The inverse of `_taken`, with the tensors by their paths as a pointer."""
    again = partial(_original, tensors=tensors)
    if isinstance(node, list):
        return [*map(again, node)]
    if not isinstance(node, dict):
        return node
    ((kind, content),) = node.items()
    if kind == "tensor":
        return tensors[content[0]]
    if kind in ("array", "scalar"):
        array = tensors[content].numpy()
        return array if kind == "array" else array[()]
    if kind in ("tuple", "Size"):
        return (tuple if kind == "tuple" else torch.Size)(map(again, content))
    if kind == "dtype":
        return getattr(torch, content)
    if kind == "device":
        return torch.device(content)
    if kind in ("dict", "OrderedDict", "Counter"):
        items = {again(key): again(value) for key, value in content}
        return items if kind == "dict" else OrderedDict(items) if kind == "OrderedDict" else Counter(items)
    return decoded(node)


def _tensors_in(node: Any) -> dict[str, list[Any]]:
    """Strides of each tensor in JSON, and if it requires a gradient, by path."""
    if isinstance(node, list):
        return {path: notes for child in node for path, notes in _tensors_in(child).items()}
    if not isinstance(node, dict):
        return {}
    ((kind, content),) = node.items()
    if kind == "tensor":
        return {content[0]: content[1:]}
    if kind in ("array", "scalar"):
        return {content: [None, False]}
    return _tensors_in(content) if isinstance(content, list) else {}


def _nested(tensors: Tensors) -> dict[Any, Any]:
    """A tree with these tensors at their paths."""
    tree: dict[Any, Any] = {}
    for (*above, last), tensor in tensors.items():
        node = tree
        for name in above:
            node = node.setdefault(name, {})
        node[last] = tensor
    return tree


# ---- kinds of objects ----


def _has_state(value: Any) -> bool:
    return isinstance(value, torch.Generator) or hasattr(value, "state_dict") or hasattr(value, "load_state_dict")


def _kind_of(value: Any) -> str:
    if isinstance(value, nn.Module):
        return "module"
    if isinstance(value, torch.optim.Optimizer):
        return "optimizer"
    return "object" if _has_state(value) else "value"


def _class_of(value: Any) -> str:
    """Name of a class, with which a checkpoint says what it was saved from."""
    return f"{type(value).__module__}.{type(value).__qualname__}"


def of_module(call: str) -> str:
    """Advice for a module in place of a state."""
    return f"Of a module in a loop of your own, give all that a resume needs, by name: {call}({_EXAMPLE})"


def check_objects(objects: Objects, call: str) -> None:
    """Raise TypeError or ValueError for what cannot be saved or restored by name, and without a step."""
    for name, value in objects.items():
        check_type("a name is", name, str, f"give objects by name, such as {call}({_EXAMPLE})")
        check(
            not _is_state_dict(value),
            f"{name!r} is a state_dict, which a restore would give back without loading it into anything. Give the object itself, "
            f"such as {call}({_EXAMPLE}), which a restore loads in place",
            TypeError,
        )
        is_state = isinstance(value, TrainState)
        check(not is_state, f"{name!r} is a TrainState, which has all of a run: {call}(state) alone", TypeError)
        if _has_state(value) and not isinstance(value, torch.Generator):
            lacks = [
                method for method in ("state_dict", "load_state_dict") if not callable(getattr(value, method, None))
            ]
            title, advice = f"{name!r} is {named_value(value)}", "give an object that has both, or plain values"
            check(not isinstance(value, type), f"{title}; give an instance of it", TypeError)
            check(not lacks, f"{title}, which has no {few(lacks)}; {advice}", TypeError)
    step = objects.get("step")
    advice = f"give the number of steps made so far, such as {call}({_EXAMPLE})"
    check("step" in objects, f"there is no 'step' among {few(objects)}; {advice}")
    check(is_count(step, 0), f"'step' is {named_value(step)}, {step!r}; {advice}")


def _is_state_dict(value: Any) -> bool:
    """True for what a module's or a torch optimizer's `state_dict()` returns."""
    if not isinstance(value, dict):
        return False
    return hasattr(value, "_metadata") or value.keys() == {"state", "param_groups"}


def counts_of(objects: Objects) -> dict[str, Any]:
    """Counts of a checkpoint: the values of these names, and those of a new run for others."""
    counts = {name: value for name in _COUNTS if is_count(value := objects.get(name, 0), 0)}
    return counts_of_state(TrainState(**counts))


def _state_of(value: Any) -> Any:
    """State of an object, or a value itself. That of a module has the names of the innermost module."""
    if isinstance(value, torch.Generator):
        return value.get_state()
    if isinstance(value, nn.Module):
        clean = cleaner(value)
        return {clean(key): leaf for key, leaf in value.state_dict().items()}
    return value.state_dict() if _has_state(value) else value


def _load(value: Any, state: Any, versions: Mapping[str, Any]) -> None:
    """Give an object its state. `versions` are those that a module notes in its `state_dict`."""
    if isinstance(value, torch.Generator):
        value.set_state(state)
    elif isinstance(value, nn.Module):
        clean, current = cleaner(value), value.state_dict()
        noted: dict[str, Any] = getattr(current, "_metadata", {})
        noted.update({path: {**note, **versions.get(clean(path), {})} for path, note in noted.items()})
        current.update({key: state[clean(key)] for key in current})
        value.load_state_dict(current)
    else:
        value.load_state_dict(state)


# ---- saving ----


def take(objects: Objects, ranks: RankGroup) -> tuple[dict[str, Any], dict[Any, Any]]:
    """Entries of a manifest for objects, by name, and a tree of their tensors. All ranks take the same ones together.

    Values and objects that differ between ranks are taken from each of them. Modules and optimizers are the first
    rank's, and only their tensors may differ, as buffers do.
    """
    names = _parameter_names(objects)

    def taken() -> tuple[dict[str, Any], dict[str, Any], dict[str, Tensors]]:
        states = mapped(_state_of, objects)
        entries, tensors = {}, {}
        for name, value in objects.items():
            kind = _kind_of(value)
            node, tensors[name] = _taken(states[name], ("objects", name), kind in ("module", "optimizer"))
            entries[name] = {"kind": kind, "class": _class_of(value), "state": node}
            if isinstance(value, nn.Module):
                entries[name]["versions"] = _versions_of(value)
            if isinstance(value, torch.optim.Optimizer):
                entries[name]["parameters"] = _parameters_of(value, names)
                _check_shards(name, value, states[name])
        return states, entries, tensors

    states, entries, tensors = ranks.all_or_raise(taken)
    if ranks.is_distributed:
        title = "what is saved differs between ranks, so it is not one run to save:\n  "
        kinds = {name: entry["kind"] for name, entry in entries.items()}
        ranks.check_alike({"the names are": sorted(kinds.items()), **counts_of(objects)}, title)
        shared = [name for name, kind in kinds.items() if kind in ("module", "optimizer")]
        ranks.check_alike(_facts({name: states[name] for name in shared}), title)
        others = without(entries, shared)
        digests = ranks.all_or_raise(lambda: {name: _digest(entry, tensors[name]) for name, entry in others.items()})
        everyone = ranks.gather(digests)
        for name in digests:
            if len({digests[name] for digests in everyone}) > 1:
                node, mine = _taken(states[name], ("objects", name, ranks.rank))
                # As words, since torch does not send tensors of all dtypes.
                by_rank = ranks.gather(
                    (node, {path: (words(tensor).cpu(), tensor.dtype) for path, tensor in mine.items()})
                )
                entries[name] = {**without(entries[name], ("state",)), "ranks": [node for node, _ in by_rank]}
                tensors[name] = {
                    path: tensor.view(dtype) for _, sent in by_rank for path, (tensor, dtype) in sent.items()
                }
    return entries, _nested({path: tensor for of_object in tensors.values() for path, tensor in of_object.items()})


def _versions_of(module: nn.Module) -> dict[str, Any]:
    """Versions of its submodules, as a module notes them in its `state_dict`."""
    clean, noted = cleaner(module), getattr(module.state_dict(), "_metadata", {})
    return {clean(path): {"version": note.get("version")} for path, note in noted.items()}


def _parameters_of(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> list[list[Any]]:
    """Names, as far as a module that is saved with it has them, and shapes of an optimizer's parameters, by group."""
    return [
        [[names.get(id(param), ""), [*param.shape]] for param in group["params"]] for group in optimizer.param_groups
    ]


def _parameter_names(objects: Objects) -> dict[int, str]:
    """Names of the parameters of all modules among these objects, by their ids."""
    return {
        id(parameter): f"{name}/{cleaner(value)(path)}"
        for name, value in objects.items()
        if isinstance(value, nn.Module)
        for path, parameter in value.named_parameters()
    }


def _check_shards(name: str, optimizer: torch.optim.Optimizer, state: Any) -> None:
    """Raise TypeError for sharded state that is not sharded as its parameter, which no other process could restore."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for number, entry in state["state"].items():
        for key, leaf in leaves_of(entry).items():
            if is_sharded(leaf):
                like: Any = params[number]
                alike = is_sharded(like) and (leaf.shape, leaf.placements) == (like.shape, like.placements)
                advice = (
                    "use an optimizer whose state has the shape of the parameter, or train the parameter unsharded"
                )
                title = f"/objects/{name}/state/{number}{key} is not sharded as its parameter is"
                check(alike, f"{title}, so it cannot be restored: {advice}", TypeError)


def _facts(states: Mapping[str, Any]) -> dict[str, Any]:
    """Plain values, and dtypes and shapes of tensors, by path."""
    return {path: about(leaf) if isinstance(leaf, Tensor) else repr(leaf) for path, leaf in leaves_of(states).items()}


def _digest(entry: Mapping[str, Any], tensors: Tensors) -> str:
    kinds = [about(tensor) for tensor in tensors.values()]
    return f"{zlib.crc32(orjson.dumps(entry))} {kinds} {checksums(tensors.values())}"


def changed_since(path: Path, objects: Objects, trees: Mapping[str, Any]) -> list[str]:
    """Names of objects whose parameters, moments or other floating-point tensors differ from those of a checkpoint.

    Buffers and random streams are passed over, because a step that is cut short, as by Ctrl-C, changes them too. Of a
    sharded tensor, the part of this process is compared.
    """
    reader, changed = Reader(path, read_manifest(path)), []
    for name, tree in trees.get("objects", {}).items():
        if isinstance(value := objects[name], nn.Module):
            clean = cleaner(value)
            tree = subset(tree, {clean(key) for key, _ in value.named_parameters(remove_duplicate=False)})
        leaves = leaves_of({"objects": {name: tree}})
        leaves = {leaf_path: leaf for leaf_path, leaf in leaves.items() if leaf.dtype.is_floating_point}
        saved = reader.read(leaves)
        if any(
            reader.tensors[reader.root(leaf_path)] != about(leaves[leaf_path])
            or not torch.equal(words(tensor), words(local(leaves[leaf_path])).cpu())
            for leaf_path, tensor in saved.items()
        ):
            changed.append(name)
    return changed


# ---- restoring ----


def load_objects(
    path: Path, objects: Objects, optional: Collection[str], settings: Settings, ranks: RankGroup
) -> tuple[Callable[[], dict[str, Any]], int, str, str]:
    """Read and verify all that this process needs to restore objects.

    Returns a function that loads them and returns the values; the manifest's checksum; a warning about settings that
    differ from those saved, or ""; and no line to print, which is "".
    """
    manifest = read_manifest(path)
    entries: Any = manifest.get("objects")
    advice = "restore it by state = ckpt.restore(state)"
    check(entries is not None, f"{path} was saved from a state, and not from objects by name: {advice}")
    reader = Reader(path, manifest)
    chosen: dict[str, Any] = {name: _of_rank(entry, ranks) for name, entry in entries.items()}
    kept = {name for name in optional if name not in objects or chosen.get(name) is None}
    misfits = _misfits(without(objects, kept), without(chosen, kept), reader)
    check(not misfits, _refusal(path, misfits, optional))
    nodes: dict[str, Any] = {name: chosen[name] for name in objects if name not in kept}
    notes = {leaf_path: note for node in nodes.values() for leaf_path, note in _tensors_in(node["state"]).items()}
    likes = {
        leaf_path: like
        for name, node in nodes.items()
        for leaf_path, like in _likes(objects[name], node["state"], reader)
    }
    made = _made(reader.read({leaf_path: likes.get(leaf_path) for leaf_path in notes}), notes, likes, reader)
    states = {name: _original(node["state"], made) for name, node in nodes.items()}
    misfits = dict.fromkeys(_misfits_of_states(subset(objects, states), states), "")
    check(not misfits, _refusal(path, misfits, optional))
    changed = differences(manifest["made_with"], settings.described)
    warning = other_settings(path, changed) if changed else ""

    def restored() -> dict[str, Any]:
        loaded: list[str] = []
        for name in sorted(states, key=lambda name: _order(objects[name])):
            if _has_state(objects[name]):
                try:
                    _load(objects[name], states[name], nodes[name].get("versions", {}))
                except Exception as error:
                    message = f"{name!r} fits the checkpoint, and its own load_state_dict failed ({error})"
                    done = f"; loaded before it: {few(loaded)}"
                    raise RuntimeError(f"{message}{done}; start from new objects") from error
                loaded.append(name)
        return {name: value if _has_state(value) else states.get(name, value) for name, value in objects.items()}

    return restored, manifest["crc32"], warning, ""


def _order(value: Any) -> int:
    """Objects whose state only they can check come first, and random streams, which others may draw from, last."""
    if isinstance(value, RandomStreams):
        return 3
    return {"object": 0, "optimizer": 1, "module": 2, "value": 3}[_kind_of(value)]


def _of_rank(entry: dict[str, Any], ranks: RankGroup) -> dict[str, Any] | None:
    """The entry of an object on this rank, or None if it was saved by another number of ranks."""
    if "ranks" not in entry:
        return entry
    world = distributed.get_world_size(ranks.group) if ranks.is_distributed else 1
    return {**entry, "state": entry["ranks"][ranks.rank]} if len(entry["ranks"]) == world else None


def _misfits(objects: Objects, chosen: Mapping[str, Any], reader: Reader) -> dict[str, str]:
    """Differences between objects and those of a checkpoint, in words, each with the name that it is about."""
    misfits = {f"{name} is given, and is not in the checkpoint": name for name in without(objects, chosen)}
    misfits |= {f"{name} is in the checkpoint, and is not given": name for name in without(chosen, objects)}
    for name in subset(objects, chosen):
        if chosen[name] is None:
            misfits[f"{name} was saved for each rank, by a different number of ranks"] = name
        else:
            misfits |= dict.fromkeys(_differences(name, objects[name], chosen[name], objects, reader), "")
    return misfits


def _refusal(path: Path, misfits: Mapping[str, str], optional: Collection[str]) -> str:
    names = [name for name in misfits.values() if name]
    advice = "Give the objects of the run that it was saved from, or use another directory"
    if names:
        names = [*optional, *names]
        listed = ", ".join(map(repr, names)) + "," * (len(names) == 1)
        advice += f". If you mean to restore the others alone: ckpt.restore(..., optional=({listed}))"
    return f"{path} does not fit what is given:\n  {few(misfits, 10, chr(10) + '  ')}\n{advice}"


def _differences(name: str, value: Any, entry: Mapping[str, Any], objects: Objects, reader: Reader) -> list[str]:
    """Differences between an object and its entry in a checkpoint, in words."""
    kind, saved, new = _kind_of(value), _words_of(entry["class"]), _words_of(_class_of(value))
    is_known = kind == "optimizer" or (kind == "object" and _is_torchs(entry["class"], _class_of(value)))
    if kind != entry["kind"] or (is_known and saved != new):
        return [f"{name} is {saved} in the checkpoint, {new} here"]
    if kind == "module":
        return [
            f"{name}: {difference}" for difference in _differences_of_module(_state_of(value), entry["state"], reader)
        ]
    if kind == "optimizer":
        return _differences_of_groups(name, entry["parameters"], _parameters_of(value, _parameter_names(objects)))
    return []


def _is_torchs(*classes: str) -> bool:
    return any(name.startswith("torch.") for name in classes)


def _words_of(name_of_class: str) -> str:
    bare = name_of_class.rpartition(".")[2]
    return f"{'an' if bare[0] in 'AEIOaeio' or bare == 'SGD' else 'a'} {bare}"


def _differences_of_module(new: Mapping[str, Any], state: Any, reader: Reader) -> list[str]:
    """Names that one side alone has, and tensors of another dtype or shape, in words."""
    saved = _children(state)
    misfits = [f"{key} is here, and not in the checkpoint" for key in without(new, saved)]
    misfits += [f"{key} is in the checkpoint, and not here" for key in without(saved, new)]
    for key, value in subset(new, saved).items():
        paths = [*_tensors_in(saved[key])]
        if isinstance(value, Tensor) and not is_lazy(value):
            was = reader.tensors[reader.root(paths[0])] if paths else "no tensor"
            now = about(value)
            if was != now:
                misfits.append(f"{key} is {in_words(was)} in the checkpoint, {in_words(now)} here")
    return misfits


def _differences_of_groups(name: str, saved: list[Any], new: list[Any]) -> list[str]:
    """Groups of an optimizer with other parameters: another number, other shapes, or other names where both have them."""
    sizes = [[*map(len, groups)] for groups in (saved, new)]
    if sizes[0] != sizes[1]:
        return [f"{name} has groups of {sizes[0]} parameters in the checkpoint, of {sizes[1]} here"]
    misfits = []
    for number, groups in enumerate(zip(saved, new, strict=True)):
        for index, (was, now) in enumerate(zip(*groups, strict=True)):
            if was[1] != now[1] or (was[0] and now[0] and was[0] != now[0]):
                title = f"{name}: parameter {index} of group {number}"
                before, after = (f"{param[0]} {tuple(param[1])}".strip() for param in (was, now))
                misfits.append(f"{title} is {before} in the checkpoint, {after} here")
    return misfits


def _misfits_of_states(objects: Objects, states: Objects) -> list[str]:
    """Differences that show in the states of objects whose `load_state_dict` would not see them, in words."""
    misfits = []
    for name, value in objects.items():
        if isinstance(value, RandomStreams):
            misfits += [f"{name} {problem}" for problem in value.misfits(states[name])]
        elif _kind_of(value) == "object" and _is_torchs(_class_of(value)) and hasattr(value, "state_dict"):
            was, now = _keys(states[name]), _keys(value.state_dict())
            if was != now:
                misfits.append(f"{name} keeps {few(was) or 'nothing'} in the checkpoint, {few(now)} here")
    return misfits


def _keys(state: Mapping[str, Any]) -> list[str]:
    """Names of what a scheduler or a scaler of torch's keeps, and of what the schedulers inside it keep."""
    inner = [f"({', '.join(_keys(scheduler))})" for scheduler in state.get("_schedulers", ())]
    return sorted(key for key in state if not key.startswith("_")) + inner


def _children(node: Any) -> dict[Any, Any]:
    """The children of a dict with texts as keys, still as JSON."""
    ((_, items),) = node.items()
    return dict(items)


def _likes(value: Any, state: Any, reader: Reader) -> Iterator[tuple[str, Tensor]]:
    """The sharded tensors of a module or an optimizer's parameters, by paths of the tensors to shard in the same way."""
    if isinstance(value, nn.Module):
        saved = _children(state)
        for key, tensor in _state_of(value).items():
            if isinstance(tensor, Tensor) and is_sharded(tensor):
                yield from dict.fromkeys(_tensors_in(saved[key]), tensor).items()
    if isinstance(value, torch.optim.Optimizer):
        params = [param for group in value.param_groups for param in group["params"]]
        for number, entry in _children(_children(state)["state"]).items():
            for path in _tensors_in(entry):
                shape = reader.tensors[reader.root(path)]["shape"]
                if is_sharded(params[number]) and shape and shape == [*params[number].shape]:
                    yield path, params[number]


def _made(
    values: Mapping[str, Tensor], notes: Mapping[str, Any], likes: Mapping[str, Tensor], reader: Reader
) -> dict[str, Tensor]:
    """New tensors with the values of a checkpoint, on the CPU or sharded: one for all ties."""
    made: dict[Any, Tensor] = {}
    for path, value in values.items():
        strides, requires_grad = notes[path]
        root = reader.root(path), path in likes
        if root not in made:
            if path in likes:
                made[root] = torch.empty_like(likes[path].detach(), dtype=value.dtype)
            elif strides is None:
                made[root] = torch.empty(value.shape, dtype=value.dtype, device="cpu")
            else:
                made[root] = torch.empty_strided(value.shape, strides, dtype=value.dtype, device="cpu")
            words(local(made[root])).copy_(words(value))
        made[path] = made[root].detach().requires_grad_(requires_grad)
    return {path: made[path] for path in values}
