"""Shared memory of leaves: the tensors of a bound state that a restore may write to.

Leaves of a state may share memory, such as `extra={"start": state.params}` before the first step. If they were saved
with different values, they cannot all be written to the same memory, so the later ones get their own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from looplib._core.checks import check
from looplib._core.mappings import without
from looplib.checkpoint._format import local, occupied


class _Block(NamedTuple):
    """Range of bytes in a storage that a tensor occupies."""

    leaf_path: str
    tensor: Tensor
    storage: Any
    low: int
    high: int

    def overlaps(self, other: _Block) -> bool:
        return self.storage == other.storage and self.low < other.high and other.low < self.high


def _block(leaf_path: str, leaf: Any) -> _Block:
    tensor = local(leaf)
    storage = tensor.device, tensor.untyped_storage().data_ptr()
    return _Block(leaf_path, tensor, storage, *occupied(tensor))


class Sharing:
    """Tensors of a bound state that a restore writes to, and those it must not change.

    Attributes:
        written: leaves whose memory receives the saved values, by path. The module's leaves come first and are always
            included; another leaf only if it shares no memory with them, or also shared it when it was saved.
        kept_apart: paths of leaves that are not restored but would change with the memory that is written.
    """

    def __init__(
        self,
        leaves: Mapping[str, Any],
        wanted: Mapping[str, Any],
        entry: Callable[[str], Mapping[str, Any] | None],
        path: Path,
    ) -> None:
        self._entry, self._path = entry, path
        self._blocks: dict[Any, list[_Block]] = {}
        self._disputed: dict[Any, list[_Block]] = {}  # those with weights that were saved with two values
        self.written: dict[str, Tensor] = {}
        self.kept_apart: list[str] = []
        for leaf_path, leaf in wanted.items():
            if isinstance(leaf, Tensor):
                self._add(_block(leaf_path, leaf), leaf)
        for leaf_path, leaf in without(leaves, wanted).items():
            if isinstance(leaf, Tensor) and not _of_module(leaf_path) and self._is_written(leaf_path, leaf):
                self.kept_apart.append(leaf_path)

    def _is_written(self, leaf_path: str, leaf: Tensor) -> bool:
        block = _dense_block(leaf_path, leaf)
        return block is not None and any(map(block.overlaps, self._blocks.get(block.storage, ())))

    def _add(self, block: _Block, leaf: Tensor) -> None:
        others = self._blocks.setdefault(block.storage, [])
        conflict = any(block.overlaps(other) and not self._shared_when_saved(block, other) for other in others)
        of_module = _of_module(block.leaf_path)
        if conflict and of_module:  # the others are weights too, as these come first
            self._disputed[block.storage] = others
        if not conflict or of_module:
            others.append(block)
            self.written[block.leaf_path] = leaf

    def _shared_when_saved(self, block: _Block, other: _Block) -> bool:
        """True if two leaves were placed relative to each other in the saved memory as in this state's."""
        first, second = self._entry(block.leaf_path), self._entry(other.leaf_path)
        if first is None or second is None or first["data"] != second["data"]:
            return False
        if first.get("offset", 0) - second.get("offset", 0) != block.low - other.low:
            return False
        saved_strides = [first.get("stride"), second.get("stride")]
        strides = [list(block.tensor.stride()), list(other.tensor.stride())]
        same_layout = saved_strides[0] == saved_strides[1] and strides[0] == strides[1]
        return saved_strides == strides or (same_layout and block.tensor.shape == other.tensor.shape)

    def check_weights(self, value: Callable[[str], Tensor]) -> None:
        """Raise ValueError if parameters or buffers of the module share elements that were saved with two values."""
        for blocks in self._disputed.values():
            self._check_weights([block for block in blocks if _of_module(block.leaf_path)], value)

    def _check_weights(self, weights: list[_Block], value: Callable[[str], Tensor]) -> None:
        """Write all of them into a copy of their memory, and compare."""
        views = _views(weights)
        saved = {leaf_path: value(leaf_path).to(view.dtype) for leaf_path, view in views.items()}
        for leaf_path, view in views.items():
            write(view, saved[leaf_path])
        changed = [path for path, view in views.items() if not torch.equal(_bits(view), _bits(saved[path]))]
        check(
            not changed,
            f"{self._path} cannot be restored into this bound state: {', '.join(views)} share memory in the module, and "
            f"{', '.join(changed)} would lose the values that the checkpoint has for them. Restore into a state that is "
            "not bound to the module: ckpt.restore(ll.copy_state(state))",
        )


def _views(blocks: list[_Block]) -> dict[str, Tensor]:
    """Tensors that share new memory as these blocks share theirs."""
    base = min(block.low for block in blocks) // 64 * 64
    memory = torch.zeros(max(block.high for block in blocks) - base, dtype=torch.uint8)
    views = {}
    for leaf_path, tensor, _, low, _ in blocks:
        rest = memory[low - base :]
        rest = rest[: len(rest) // tensor.element_size() * tensor.element_size()]
        views[leaf_path] = rest.view(tensor.dtype).as_strided(tensor.shape, tensor.stride())
    return views


def _of_module(leaf_path: str) -> bool:
    return leaf_path.startswith(("/params/", "/buffers/"))


def _dense_block(leaf_path: str, leaf: Any) -> _Block | None:
    try:
        return _block(leaf_path, leaf)
    except RuntimeError:  # sparse tensors have no storage to share
        return None


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def write(tensor: Tensor, values: Tensor) -> None:
    """Copy values into a tensor, each element in memory once: an expanded dimension has only one to write."""
    if 0 in tensor.stride():
        once = tuple(slice(n if step else 1) for n, step in zip(tensor.shape, tensor.stride(), strict=True))
        tensor, values = tensor[once], values[once]
    tensor.copy_(values)
