"""The public names of looplib: what the indexes of the rooms list."""

import types
from pathlib import Path

import looplib as ll

ROOT = Path(__file__).parents[1]
ROOMS = {name: getattr(ll, name) for name in ll.__all__ if isinstance(getattr(ll, name), types.ModuleType)}


def public_names():
    """ "optim.ema" -> the function, of every room."""
    return {
        f"{room}.{name}": getattr(module, name)
        for room, module in ROOMS.items()
        for name in module.__all__
        if not isinstance(getattr(module, name), types.ModuleType)
    }
