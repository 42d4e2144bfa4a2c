"""Surroundings of a step: random streams and modules, which it must leave unchanged."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from looplib._core.closures import walk
from looplib._core.modules import _generators
from looplib.testing._compare import copied
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


def module_values(step: Any) -> dict[str, Any]:
    """Parameters, buffers, gradients and modes of the modules that a step refers to, by path."""
    values: dict[str, Any] = {}
    for variable in walk(step):
        if isinstance(model := variable.value, nn.Module):
            root = type(model).__name__
            values |= {f"{path}.training": module.training for path, module in model.named_modules(prefix=root)}
            for path, tensor in (*model.named_parameters(root), *model.named_buffers(root)):
                if not nn.parameter.is_lazy(tensor):
                    about = {"numbers": tensor, "requires_grad": tensor.requires_grad}
                    values[path] = copied({**about, "grad": tensor.grad if tensor.is_leaf else None})
    return values
