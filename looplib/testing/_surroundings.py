"""Surroundings of a step: random streams and modules, which it must leave unchanged."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from looplib._core.random import generators_of, restored
from looplib.data import random_streams as random_streams
from looplib.data.random_streams import kept_streams, save_streams
from looplib.testing._compare import copied
from looplib.transforms.closures import walk
from looplib.types import TrainState, check_state


def generators_for(state: TrainState) -> tuple[torch.Generator, ...]:
    """torch's random streams on the CPU and on the devices of a state."""
    return generators_of(*(tensor.device for tensor in state.params.values()))


def stream_positions(state: TrainState) -> dict[str, Any]:
    _, python, numpy = save_streams()
    found = {"Python's random": python, "numpy.random": numpy}
    return found | {f"torch's random stream on {each.device}": each.get_state() for each in generators_for(state)}


@contextmanager
def streams_kept(state: TrainState) -> Iterator[None]:
    """Restore the random streams, so that a test with this check draws the same numbers as without it."""
    check_state(state, "ll.testing takes the state that a run begins with")
    with restored(*generators_for(state)), kept_streams():
        yield


def seed_streams(seed: int) -> None:
    """Seed all global streams with values that no run uses."""
    torch.manual_seed(20_000_000 + seed)  # on all devices
    random_streams.seed_streams(20_000_000 + seed)


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
