"""Structure of a state's `extra`, as JSON: it lets a restore make lists, dicts and windows of another size than the state's.

A leaf is "leaf". A container is an object with one entry, its kind: `{"dict": [[name, child], ...]}`. One that only a state
can make again, such as a record of your own, is None.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from looplib._core import trees
from looplib._core.checks import check, few
from looplib._core.copies import is_shared
from looplib._core.patterns import Patterns
from looplib._core.ranks import is_sharded
from looplib.checkpoint._read import Reader
from looplib.metrics import Mean, Window
from looplib.types import TrainState

Path = trees.Path
_LEAF = "leaf"
_KINDS: dict[type, Callable[[list[Any], list[Any]], Any]] = {
    list: lambda names, children: children,
    tuple: lambda names, children: tuple(children),
    dict: lambda names, children: dict(zip(names, children, strict=True)),
    Mean: lambda names, children: Mean(*children),
    Window: lambda names, children: Window(*children),
}
_OF_NAMES = {kind.__name__: make for kind, make in _KINDS.items()}


def structure_of(tree: Any, path: Path) -> Any:
    """Structure of a tree as JSON.

    Raises TypeError for a window that holds other records than `Mean`s: a checkpoint has no code to make them again.
    """
    node = trees.node_of(tree)
    if node is None:
        return _LEAF
    children = {
        name: structure_of(child, (*path, name)) for name, child in zip(node.names, node.children, strict=True)
    }
    plain = all(isinstance(name, (int, str)) and not isinstance(name, bool) for name in children)
    known = plain and type(tree) in _KINDS
    if isinstance(tree, Window):
        others = {
            f"{name} ({type(record).__name__})"
            for metrics in (*tree.merged, *tree.waiting)
            for name, record in metrics.items()
            if type(record) is not Mean
        }
        check(
            not others,
            f"{trees.pointer(path)} is a Window of {few(sorted(others))}, and a checkpoint holds windows of Means alone: add the "
            "others to a window that is not in extra, and log that when you save",
            TypeError,
        )
    return {type(tree).__name__: [[_plain(name), child] for name, child in children.items()]} if known else None


def _plain(name: Any) -> int | str:
    return str(name) if isinstance(name, str) else int(name)


def with_saved_shapes(
    template: TrainState, structure: Any, reader: Reader, resized: Iterable[str], weights_only: bool
) -> TrainState:
    """The state into whose structure a checkpoint is restored: with the shapes and sizes that were saved, where named.

    Args:
        structure: that of the saved `extra`.
        resized: patterns of names, as `CheckpointIO.restore` describes them.
    """
    patterns = Patterns(resized)
    is_named = patterns.match

    def of_saved_shape(leaf: Any, leaf_path: Path) -> Any:
        saved = reader.tensors.get(reader.root(trees.pointer(leaf_path)))
        if not isinstance(leaf, Tensor) or saved is None or saved["shape"] == [*leaf.shape]:
            return leaf
        check(
            not is_sharded(leaf),
            f"{trees.dotted(leaf_path)} is sharded, and keeps its shape: leave it out of resized=",
        )
        shape = saved["shape"]
        if is_shared(leaf):  # by the members of a stack
            return _empty(shape[1:], leaf.dtype, leaf.device, leaf.requires_grad).expand(shape)
        return _empty(shape, leaf.dtype, leaf.device, leaf.requires_grad)

    def grown(node: Any, saved: Any, node_path: Path) -> Any:
        is_window = isinstance(node, Window) and isinstance(saved, Mapping) and Window.__name__ in saved
        if (is_named(node_path) or is_window) and saved is not None:
            return _rebuilt(saved, node, node_path, reader, home)
        inner = trees.node_of(node)
        if inner is None:
            return node
        below = _children(saved)
        return inner.rebuild(
            [grown(child, below.get(name), (*node_path, name)) for name, child in zip(*inner[:2], strict=True)]
        )

    home = next((tensor.device for tensor in template.params.values()), torch.device("cpu"))
    new: dict[str, Any] = {}
    moved: set[Any] = set()  # parameters whose shape is another one, which the optimizer's state follows
    for tree in ("params", "buffers"):
        tensors = getattr(template, tree)
        shaped = {
            name: of_saved_shape(leaf, (tree, name)) if is_named((tree, name)) else leaf
            for name, leaf in tensors.items()
        }
        if names := {name for name, leaf in shaped.items() if leaf is not tensors[name]}:
            new[tree] = shaped
            moved |= names
    if not weights_only:
        leaves = [*trees.leaves(template.opt_state, path=("opt_state",))]
        of_leaves = [
            of_saved_shape(leaf, leaf_path) if is_named(leaf_path) or moved & {*leaf_path} else leaf
            for leaf_path, leaf in leaves
        ]
        if any(leaf is not before for leaf, (_, before) in zip(of_leaves, leaves, strict=True)):
            rest = iter(of_leaves)
            new["opt_state"] = trees.map_leaves(lambda _: next(rest), template.opt_state)
        new["extra"] = grown(template.extra, structure, ("extra",))
    unused = [pattern for pattern in patterns.patterns if pattern not in patterns.used]
    check(
        not unused,
        f"resized names {few([*map(repr, unused)])}, and the state has nothing of that name: give names such as 'params.means', "
        "'extra.history' or 'opt_state.AdamW', or patterns such as 'params.*'",
    )
    return template.replace(**new)


def _rebuilt(saved: Any, node: Any, path: Path, reader: Reader, home: torch.device) -> Any:
    """A tree with the saved structure, of which `node` is the state's. Its tensors have no values yet."""
    leaf_path, inner = trees.pointer(path), trees.node_of(node)
    if saved == _LEAF:
        if leaf_path in reader.values:
            return reader.values[leaf_path]
        about = reader.tensors[reader.root(leaf_path)]
        device, requires_grad = (node.device, node.requires_grad) if isinstance(node, Tensor) else (home, False)
        return _empty(about["shape"], getattr(torch, about["dtype"]), device, requires_grad)
    if saved is None:
        check(
            inner is not None,
            f"the checkpoint has {trees.dotted(path)}, a container that is neither list, tuple nor dict and can be restored only "
            "into a state that has it: name what is in it and grows in resized=, not what it is in",
        )
        return node
    held = {} if inner is None else dict(zip(*inner[:2], strict=True))
    ((kind, children),) = saved.items()
    new = [_rebuilt(child, held.get(name), (*path, name), reader, home) for name, child in children]
    return _OF_NAMES[kind]([name for name, _ in children], new)


def _children(saved: Any) -> dict[Any, Any]:
    if not isinstance(saved, Mapping):
        return {}
    ((_, children),) = saved.items()
    return dict(children)


def _empty(shape: list[int], dtype: torch.dtype, device: torch.device, requires_grad: bool) -> Tensor:
    with torch.inference_mode(False):
        return torch.empty(shape, dtype=dtype, device=device).requires_grad_(requires_grad)
