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
from functools import cache, lru_cache
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
    return torch.get_rng_state(), random.getstate(), numpy and _numpys_state(numpy)


def _numpys_state(numpy: Any) -> Any:
    """The state of numpy's stream, as numpy's `get_state` returns it.

    That copies the 624 words of a Mersenne Twister one by one, in 50 us, so they are read from where they lie in memory.
    Whether a normal number is kept for the next call is not said there. If one is, a draw returns it and moves nothing.
    """
    twister = numpy.get_bit_generator()
    if type(twister) is not numpy.MT19937 or not _words_lie_in_memory(numpy):
        return numpy.get_state(legacy=False)
    _hold_signals = True
    memory = _memory_of(twister)
    normal = numpy.standard_normal()
    kept = (1, normal) if _memory_of(twister) == memory else (0, 0.0)
    *words, position = struct.unpack("624Ii", memory)
    state = "MT19937", words, position, *kept  # numpy reads a list of words in 5 us, and an array of its own in 50
    numpy.set_state(state)
    return state


def _memory_of(twister: Any) -> bytes:
    return string_at(twister.ctypes.state_address, 2500)


@cache
def _words_lie_in_memory(numpy: Any) -> bool:
    """True if this numpy keeps the words of a Mersenne Twister, and the position in them, as `_numpys_state` reads them."""
    twister = numpy.MT19937(0)
    state = twister.state["state"]
    return _memory_of(twister) == struct.pack("624Ii", *state["key"], state["pos"])


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
        # torch uses the low 32 bits; numpy, also a Mersenne twister, would draw the same words.
        numpy.seed(seed >> 31)


@contextmanager
def watched_streams() -> Iterator[Callable[[int], bool]]:
    """Yield a function that tells if the streams have been used since they were seeded with its argument.

    `random.random` and numpy's functions are bound in C to generators that nothing can watch, so it compares where the
    streams stand with where the seed puts them. To read a state or torch's seed moves nothing, and a draw can be undone
    with what was read, so the names by which this is done are replaced in the block.
    """
    numpy = _numpy()
    names = {torch.random: "default_generator", random: "getstate"} | ({numpy: "get_state"} if numpy else {})
    noted = {module: _Noted(getattr(module, name)) for module, name in names.items()}

    def used_since(seed: int) -> bool:
        return _next_draws() != _first_draws(seed) or any(each.used for each in noted.values())

    try:
        for module, name in names.items():
            setattr(module, name, noted[module])
        yield used_since
    finally:
        _hold_signals = True
        for module, name in names.items():
            setattr(module, name, noted[module].original)


class _Noted:
    """Stands for a function or an object, and notes that it has been used."""

    used = False

    def __init__(self, original: Any) -> None:
        self.original = original

    def __getattr__(self, name: str) -> Any:
        self.used = True
        return getattr(self.original, name)

    def __call__(self, *args: Any, **options: Any) -> Any:
        self.used = True
        return self.original(*args, **options)


def _next_draws() -> tuple[Any, ...]:
    """The next number of each stream, in 53 bits, which tells where it stands."""
    numpy, in_torch = _numpy(), torch.rand((), device="cpu", dtype=torch.float64)
    return in_torch.item(), random.random(), numpy and numpy.random_sample()


@lru_cache(1)  # as long as no item draws, all batches have the same seed
def _first_draws(seed: int) -> tuple[Any, ...]:
    seed_streams(seed)
    return _next_draws()


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
