"""Global random streams: seeded for what is being read, and put back afterwards.

What a dataset, a sampler or a `collate_fn` draws comes from the global streams of torch (CPU), `random` and numpy.
A loader seeds the three from the place that is read, such as (seed, epoch, index), so that the draws do not depend
on which process reads, or on what it read before.
"""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from looplib._core import interrupts as _interrupts

# Words, not 0 to 3, so that no seed here is one that a step draws its dropout from.
ORDER, ITEM, COLLATE, STREAM = (int.from_bytes(word, "big") for word in (b"order", b"item", b"collate", b"stream"))


def save_streams() -> tuple[Any, ...]:
    """The states of the three global streams."""
    numpy = sys.modules.get("numpy")
    return (
        torch.default_generator.get_state(),
        random.getstate(),
        numpy and numpy.random.get_state(legacy=False),
    )


def restore_streams(saved: tuple[Any, ...]) -> None:
    """Put back what `save_streams` returned."""
    torch.default_generator.set_state(saved[0])
    random.setstate(saved[1])
    if saved[2] is not None:
        sys.modules["numpy"].random.set_state(saved[2])


def seed_streams(seed: int) -> None:
    """Seed the three global streams."""
    torch.default_generator.manual_seed(seed)  # torch.manual_seed looks through all devices, at 100 us
    random.seed(seed)
    if numpy := sys.modules.get("numpy"):
        # torch takes the low 32 bits: numpy, a Mersenne twister as well, would draw the same words from them.
        numpy.random.seed(seed >> 31)


@contextmanager
def kept_streams() -> Iterator[None]:
    """Put the global streams back at the end of the block, whatever was drawn or seeded inside."""
    _interrupts.install()
    saved, thread = save_streams(), threading.get_ident()
    try:
        yield
    finally:
        _interrupts.begin_hold(thread)
        try:
            restore_streams(saved)
        finally:
            _interrupts.end_hold(thread)
            _interrupts.deliver()
