"""Tensor names: those of a module's `state_dict` and those of a state."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeVar

from torch import nn

from looplib._core import modules as _modules
from looplib._core.misuse import export
from looplib.types import TrainState

R = TypeVar("R")


def check_state(model: nn.Module, state: TrainState) -> None:
    """Raise ValueError for a state of a different module."""
    slots = _modules.members(model)
    _modules.check_names("parameters", state.params, slots.params, model)
    _modules.check_names("buffers", state.buffers, slots.buffers, model)


def lend(model: nn.Module, state: TrainState, body: Callable[[], R]) -> R:
    """Call `body()` while the module holds the state's values."""
    check_state(model, state)
    return _modules.FunctionalModule(model, training=False).run(state.params, state.buffers, 0, body)


def cleaner(model: nn.Module) -> Callable[[str], str]:
    """Make a function that removes what wrappers add to the names in a module's `state_dict`."""
    modules = model.named_modules(remove_duplicate=False)
    return partial(_cleaned, [_parts_of(path) for path, module in modules if _modules.is_parallel(module)])


def _cleaned(parallel: list[list[str]], key: str) -> str:
    parts = _parts_of(key)
    return ".".join(part for i, part in enumerate(parts) if part != "module" or parts[:i] not in parallel)


def _parts_of(path: str) -> list[str]:
    return [part for part in path.split(".") if part not in ("", *_modules.TRANSPARENT)]


def state_names(model: nn.Module) -> dict[str, str]:
    """Map each name in the module's `state_dict` to the tensor's name in a state."""
    clean = cleaner(model)
    names = {
        id(tensor): name for slots in _modules.members(model) for name, tensor in _modules.tensors(slots).items()
    }
    with export(model):
        entries = model.state_dict(keep_vars=True)
    return {clean(key): names[id(entry)] for key, entry in entries.items() if id(entry) in names}
