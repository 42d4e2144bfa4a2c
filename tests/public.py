"""The public names of looplib: what the indexes of the rooms list."""

import types
from pathlib import Path

import looplib as ll

ROOT = Path(__file__).parents[1]
ROOMS = {name: value for name, value in vars(ll).items() if isinstance(value, types.ModuleType) and name[0] != "_"}


def public_names():
    """ "optim.ema" -> the function, of every room."""
    return {
        f"{room}.{name}": getattr(module, name)
        for room, module in ROOMS.items()
        for name in module.__all__
        if not isinstance(getattr(module, name), types.ModuleType)
    }
