"""Surroundings of a step: random streams, modules, and state in closures and attributes.

They are recorded before and after a step, which must not change them.
"""

from __future__ import annotations

import dataclasses
import random
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from looplib._core import trees
from looplib._core.checks import few
from looplib._core.closures import Variable, own_attributes, walk
from looplib._core.modules import _generators
from looplib.debug._differences import differences
from looplib.testing._compare import copied, copied_leaf, differing
from looplib.types import TrainState


def _streams(state: TrainState) -> dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]]:
    """Global random streams, as functions that get and set their states."""
    streams: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
        "Python's random": (random.getstate, random.setstate)
    }
    if (numpy := sys.modules.get("numpy")) is not None:
        streams["numpy.random"] = numpy.random.get_state, numpy.random.set_state
    for device in {torch.device("cpu"), *(tensor.device for tensor in state.params.values())}:
        for generator in _generators(device):
            streams[f"torch's random stream on {generator.device}"] = generator.get_state, generator.set_state
    return streams


def stream_positions(state: TrainState) -> dict[str, Any]:
    return {name: copied(get()) for name, (get, _) in _streams(state).items()}


@contextmanager
def streams_kept(state: TrainState) -> Iterator[None]:
    """Restore the random streams, so that a test with this check draws the same numbers as without it."""
    kept = [(put, get()) for get, put in _streams(state).values()]
    try:
        yield
    finally:
        for put, place in kept:
            put(place)


def seed_streams(seed: int) -> None:
    """Seed all global streams with values that no run uses."""
    seed += 20_000_000
    torch.manual_seed(seed)
    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed)


class Surroundings:
    """Everything a step can reach besides its arguments: modules, and state in closures and attributes."""

    def __init__(self, step: Any) -> None:
        self.step = step
        self.fixed, self.memory = self._look()

    def spoiled(self) -> list[str]:
        """Changes that no step may make: to parameters, buffers, gradients and modes of modules."""
        return differing(self.fixed, self._look()[0])

    def hint(self) -> str:
        """Other changes, as a sentence about where the step may keep state."""
        changed = [found.path.removeprefix("/") for found in differences(self.memory, self._look()[1])]
        return f" Besides the state, {few(changed)} changed in these calls." if changed else ""

    def _look(self) -> tuple[dict[str, Any], dict[str, Any]]:
        fixed: dict[str, Any] = {}
        memory: dict[str, Any] = {}
        for variable in walk(self.step, in_whole=_is_searched):
            if isinstance(variable.value, nn.Module):
                _add_module(variable.value, fixed, memory)
            elif name := _name_of(variable):
                memory |= _remembered(name, variable.value)
        return fixed, memory


def _add_module(model: nn.Module, fixed: dict[str, Any], memory: dict[str, Any]) -> None:
    root = type(model).__name__
    for prefix, module in model.named_modules(prefix=root):
        fixed[f"{prefix}.training"] = module.training
        for name in own_attributes(module):
            memory |= _remembered(f"{prefix}.{name}", vars(module)[name])
    for path, tensor in (*model.named_parameters(root), *model.named_buffers(root)):
        if not nn.parameter.is_lazy(tensor):
            about = {"numbers": tensor, "requires_grad": tensor.requires_grad}
            fixed[path] = copied({**about, "grad": tensor.grad if tensor.is_leaf else None})


def _is_searched(value: Any) -> bool:
    """True if all attributes of an object are to be searched, and not only those named in code."""
    if isinstance(value, (type, TrainState)):
        return False
    return dataclasses.is_dataclass(value) or callable(value)


def _name_of(variable: Variable) -> str:
    """Name of a variable in messages; empty for looplib's own, which keep no state of a run."""
    owner = variable.owner
    module = owner.__module__ if isinstance(owner, types.FunctionType) else type(owner).__module__
    if owner is None or isinstance(owner, nn.Module) or module.split(".")[0] in ("looplib", "builtins"):
        return ""
    if isinstance(owner, types.FunctionType):
        return f"{owner.__name__}'s {variable.path}"
    return f"{type(owner).__name__}.{variable.key}"


def _remembered(name: str, value: Any) -> dict[str, Any]:
    """A number, a str or a tensor, or those in a container."""
    members = trees.leaves(value, is_leaf=lambda member: member is not value)
    plain = (bool, int, float, str, Tensor, type(None))
    return {trees.named(path, name): copied_leaf(leaf) for path, leaf in members if isinstance(leaf, plain)}
