"""Global random streams: seed them for each read and restore them afterwards.

Datasets, samplers and `collate_fn` draw from the global streams of torch (CPU), `random` and numpy. A loader seeds
the three from what is being read, such as (seed, epoch, index), so that draws do not depend on which process reads or
on what it read before.
"""

from __future__ import annotations

import os
import random
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from looplib._core import draws
from looplib._core import interrupts as _interrupts
from looplib.data import _numpy_stream

# Words instead of 0 to 3, so that no seed here coincides with one that a step uses for dropout.
ORDER, ITEM, COLLATE, STREAM = (int.from_bytes(word, "big") for word in (b"order", b"item", b"collate", b"stream"))


def save_streams() -> tuple[Any, ...]:
    """Return the states of the three global streams."""
    return draws.stream().get_state(), random.getstate(), _numpy_stream.save()


def restore_streams(saved: tuple[Any, ...]) -> None:
    """Restore what `save_streams` returned."""
    draws.stream().set_state(saved[0])
    random.setstate(saved[1])
    if saved[2] is not None:
        _numpy_stream.restore(saved[2])


def seed_streams(seed: int) -> None:
    """Seed the three global streams.

    It takes 1 us for torch, 3.5 for `random` and 1.4 for numpy, which can be several times what reading a sample
    takes. It cannot wait for a first draw: `random.random` and numpy's functions are bound in C to generators that
    nothing can watch. `moves` notices a draw afterwards.
    """
    seed_torch(seed)  # torch.manual_seed loops over all devices, which takes 100 us
    _seed_python(seed)


def seed_torch(seed: int) -> None:
    """Seed torch's stream on the CPU."""
    draws.stream().manual_seed(seed)


def _seed_python(seed: int) -> None:
    random.seed(seed)
    # torch uses the low 32 bits; numpy, also a Mersenne twister, would draw the same words from them.
    _numpy_stream.seed(seed >> 31)


def moves(seed: int) -> Iterator[bool]:
    """Seed `random` and numpy, and return an iterator: its next value is True if either has moved since the last one.

    It draws a number from each, twice at most, and compares it with the number due there. It cannot notice code that
    reads the state of a stream without drawing, or that draws and then restores the state.
    """
    _seed_python(seed)
    due = [_drawn(), _drawn()]
    _seed_python(seed)
    return (_drawn() != drawn for drawn in due)


def _drawn() -> tuple[float, Any]:
    numpy = sys.modules.get("numpy")
    return random.random(), numpy and numpy.random.random_sample()


_reading = threading.RLock()  # of the streams of `random` and numpy, which all threads share


@contextmanager
def kept_streams() -> Iterator[None]:
    """Restore the global streams at the end of the block. Other threads that read wait, and steps do not."""
    _interrupts.install()
    thread = threading.get_ident()
    with _reading, draws.kept():
        saved = save_streams()
        try:
            yield
        finally:
            _interrupts.begin_hold(thread)
            try:
                restore_streams(saved)
            finally:
                _interrupts.end_hold(thread)


def _after_fork() -> None:
    global _reading
    _reading = threading.RLock()


os.register_at_fork(after_in_child=_after_fork)
