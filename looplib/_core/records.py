"""Registration of records of trees and counts with torch's pytrees and looplib's."""

from __future__ import annotations

from typing import Any

from looplib._core.mappings import fields_of
from looplib._core.torch_private import pytree
from looplib._core.trees import Attribute, Node, register


def register_record(cls: Any, fields: tuple[str, ...], trees: tuple[str, ...]) -> None:
    """Register a record as a pytree node.

    For torch, its trees are leaves and its counts are structure; for looplib, all fields are leaves. `torch.func` and
    `tree_map` therefore see only tensors, and a comparison sees every field.
    """
    counts = [name for name in fields if name not in trees]
    attributes = [*map(Attribute, fields)]

    def flatten(record: Any) -> tuple[list[Any], Any]:
        # None is a leaf in torch's pytrees, so a missing tree belongs to the structure.
        present = {name: tree for name in trees if (tree := getattr(record, name)) is not None}
        return list(present.values()), (tuple(present), fields_of(record, counts))

    def flatten_with_keys(record: Any) -> tuple[list[Any], Any]:
        children, structure = flatten(record)
        return list(zip(map(pytree.GetAttrKey, structure[0]), children, strict=True)), structure

    def unflatten(children: Any, structure: Any) -> Any:
        names, numbers = structure
        return cls(**{**dict.fromkeys(trees), **dict(zip(names, children, strict=True)), **numbers})

    pytree.register_pytree_node(
        cls,
        flatten,
        unflatten,
        flatten_with_keys_fn=flatten_with_keys,
        serialized_type_name=f"looplib.{cls.__name__}",
    )
    register(cls, lambda record: Node(attributes, [*fields_of(record, fields).values()], lambda values: cls(*values)))


def summary(state: Any, spent: bool) -> str:
    """A state in one line: its position and its size."""
    position = state.batch if state.epoch_length is None else f"{state.batch}/{state.epoch_length}"
    parts = [f"step={state.step}", f"epoch={state.epoch}", f"batch={position}", f"samples={state.samples}"]
    if spent:
        return f"TrainState({', '.join(parts)}, donated)"
    parts += [
        f"{name}={len(tensors)} tensors ({sum(tensor.numel() for tensor in tensors.values()):,} numbers)"
        for name in ("params", "buffers")
        if (tensors := getattr(state, name))
    ]
    parts.append(f"seed={state.seed}")
    if state.extra is not None:
        keys = f" of {', '.join(map(str, state.extra))}" if isinstance(state.extra, dict) else ""
        parts.append(f"extra={type(state.extra).__name__}{keys}")
    return f"TrainState({', '.join(parts)})"
