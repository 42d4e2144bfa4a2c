"""Global random streams: seed them for each read and restore them afterwards.

Datasets, samplers and `collate_fn` draw from the global streams of torch (CPU), `random` and numpy. A loader seeds
the three from what is being read, such as (seed, epoch, index), so that draws do not depend on which process reads or
on what it read before.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from looplib._core import interrupts as _interrupts
from looplib._core import random as draws

# Words instead of 0 to 5, so that no seed here coincides with one that a step uses for dropout.
ORDER, ITEM, COLLATE, STREAM, MIXTURE, BLOCK = (
    int.from_bytes(word, "big") for word in (b"order", b"item", b"collate", b"stream", b"mixture", b"block")
)


def _numpy() -> Any:
    """numpy.random, or None if nobody has imported numpy."""
    return getattr(sys.modules.get("numpy"), "random", None)


def save_streams() -> tuple[Any, ...]:
    """Return the states of the three global streams. It takes 60 us, nearly all of it for numpy's."""
    numpy = _numpy()
    return torch.get_rng_state(), random.getstate(), numpy and numpy.get_state(legacy=False)


def restore_streams(saved: tuple[Any, ...]) -> None:
    """Restore what `save_streams` returned."""
    torch.set_rng_state(saved[0])
    random.setstate(saved[1])
    if saved[2] is not None:
        _numpy().set_state(saved[2])


def seed_streams(seed: int) -> None:
    """Seed the three global streams. It takes some 10 us."""
    torch.default_generator.manual_seed(seed)  # torch.manual_seed loops over all devices, which takes 100 us
    random.seed(seed)
    if numpy := _numpy():
        # torch uses the low 32 bits; numpy, also a Mersenne twister, would draw the same words.
        numpy.seed(seed >> 31)


@contextmanager
def kept_streams() -> Iterator[None]:
    """Restore the global streams at the end of the block. Other threads that read or take steps wait."""
    _interrupts.install()
    with draws.turn:
        saved = save_streams()
        try:
            yield
        finally:
            _interrupts.waits.depth += 1
            try:
                restore_streams(saved)
            finally:
                _interrupts.waits.depth -= 1
