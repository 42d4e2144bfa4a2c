"""Global random streams: seed them for each read and restore them afterwards.

Datasets, samplers and `collate_fn` draw from the global streams of torch (CPU), `random` and numpy. A loader seeds
the three from what is being read, such as (seed, epoch, index), so that draws do not depend on which process reads or
on what it read before.
"""

from __future__ import annotations

import random
import struct
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import string_at
from functools import lru_cache
from typing import Any

import torch

from looplib._core import interrupts as _interrupts
from looplib._core import random as draws

# Words instead of 0 to 3, so that no seed here coincides with one that a step uses for dropout.
ORDER, ITEM, COLLATE, STREAM, MIXTURE = (
    int.from_bytes(word, "big") for word in (b"order", b"item", b"collate", b"stream", b"mixture")
)


def _numpy() -> Any:
    """numpy.random, or None if nobody has imported numpy."""
    return getattr(sys.modules.get("numpy"), "random", None)


def save_streams() -> tuple[Any, ...]:
    """Return the states of the three global streams."""
    numpy = _numpy()
    return torch.get_rng_state(), random.getstate(), numpy and _state_of(numpy)


_copies: dict[bytes, dict[str, Any]] = {}  # the last state of numpy's stream, by its words in memory


def _state_of(numpy: Any) -> Any:
    """The state of numpy's stream.

    numpy copies its 624 words one by one, in 50 us. So the last copy serves again while the words in memory are the
    same. Whether a normal number is kept for the next call is not in them, and only a draw tells.
    """
    _hold_signals = True
    words = _words(numpy)
    if known := _copies.get(words):
        normal = numpy.standard_normal()
        state = known | {"has_gauss": 1, "gauss": normal} if _words(numpy) == words else known
        numpy.set_state(state)
        return state
    state = numpy.get_state(legacy=False)
    if words:
        numbers = state["state"]
        numbers["key"] = numbers["key"].tolist()  # numpy reads its own array in 50 us, and a list in 5
        _copies.clear()
        if words == struct.pack("624Ii", *numbers["key"], numbers["pos"]):  # a later numpy may keep them otherwise
            _copies[words] = state | {"has_gauss": 0, "gauss": 0.0}
    return state


def _words(numpy: Any) -> bytes:
    """The words of a Mersenne Twister and the place of the next one, as they lie in memory."""
    source = numpy.get_bit_generator()
    return string_at(source.ctypes.state_address, 2500) if type(source) is numpy.MT19937 else b""


def restore_streams(saved: tuple[Any, ...]) -> None:
    """Restore what `save_streams` returned."""
    torch.set_rng_state(saved[0])
    random.setstate(saved[1])
    if saved[2] is not None:
        _numpy().set_state(saved[2])


def seed_streams(seed: int) -> None:
    """Seed the three global streams. It takes 7 us, which may be more than reading a sample does."""
    torch.default_generator.manual_seed(seed)  # torch.manual_seed loops over all devices, which takes 100 us
    random.seed(seed)
    if numpy := _numpy():
        numpy.seed(
            seed >> 31
        )  # torch uses the low 32 bits; numpy, also a Mersenne twister, would draw the same words


@contextmanager
def watched_streams() -> Iterator[Callable[[int], bool]]:
    """Yield a function that tells if the streams have been used since they were seeded with its argument.

    `random.random` and numpy's functions are bound in C to generators that nothing can watch, so it compares where the
    streams stand with where the seed puts them. To read a state or torch's seed moves nothing, and a draw can be undone
    with what was read, so the names by which this is done are replaced in the block.
    """
    numpy, uses = _numpy(), list[str]()
    names = {torch.random: "default_generator", random: "getstate"} | ({numpy: "get_state"} if numpy else {})
    originals = {module: getattr(module, name) for module, name in names.items()}
    try:
        for module, name in names.items():
            setattr(module, name, _Noted(originals[module], uses))
        yield lambda seed: bool(uses) or _next() != _due(seed)
    finally:
        _hold_signals = True
        for module, name in names.items():
            setattr(module, name, originals[module])


class _Noted:
    """A function or an object of which each use is noted."""

    def __init__(self, original: Any, uses: list[str]) -> None:
        self._original, self._uses = original, uses

    def __getattr__(self, name: str) -> Any:
        self._uses.append(name)
        return getattr(self._original, name)

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self.__getattr__("__call__")(*args, **options)


def _next() -> tuple[Any, ...]:
    """Position of each stream: the state of torch's, and the next numbers of the others, which it draws."""
    numpy = _numpy()
    return torch.default_generator.get_state().numpy().tobytes(), random.random(), numpy and numpy.random_sample()


@lru_cache(1)
def _due(seed: int) -> tuple[Any, ...]:
    seed_streams(seed)
    return _next()


@contextmanager
def kept_streams() -> Iterator[None]:
    """Restore the global streams at the end of the block. Other threads that read or take steps wait."""
    _interrupts.install()
    with draws.turn:
        saved = save_streams()
        try:
            yield
        finally:
            _hold_signals = True
            restore_streams(saved)
