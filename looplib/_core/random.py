"""Random streams and seeds.

Randomness in looplib never comes from a shared stream that advances: each draw belongs to a position (a step, an
epoch, a sample), and the position is hashed into a seed (`mix`).

torch has one random stream of the CPU for all threads. Steps and reads of samples that may draw seed it and put it back,
so one thread at a time does either: `turn`. A thread that reads ahead thus waits for the forward passes of another one, and
a step for the sample that is being read; the workers of a loader are processes, and wait for nothing. A user's thread
that draws by itself, such as by `torch.rand`, draws from torch's stream wherever that stands.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from looplib._core import torch_private

_MASK = (1 << 64) - 1
_FACTOR = 0xD1342543DE82EF95
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB

_STACK = (
    "the seed and counts are {values}, and not all ints. If the state is a stack, whose seed is a tuple, step all members "
    "with ll.vmap_step(step), or one of them, ll.transforms.unstack_states(stack)[0]"
)

turn = threading.RLock()  # held while torch's streams are another's than the user's


def members_of(seed: int | tuple[int, ...]) -> int:
    """Number of members of a state with this seed, which is that of a stack if it is a tuple, and else 1."""
    return len(seed) if isinstance(seed, tuple) else 1


def mix(*values: int) -> int:
    """Hash any integers into a well-mixed 63-bit seed: equal for equal ones, unrelated for others.

    It is a polynomial in the values, so that their order matters, followed by the finalizer of splitmix64 (Steele,
    Lea and Flood, "Fast splittable pseudorandom number generators", 2014), so that neighboring inputs share nothing,
    in their low 32 bits either.

    >>> mix(0, 1) == mix(0, 1), mix(0, 1) == mix(1, 0)
    (True, False)
    """
    seed = len(values)
    try:
        for value in values:
            seed = (seed * _FACTOR + value + 1) & _MASK
    except TypeError:
        raise TypeError(_STACK.format(values=values)) from None
    seed = ((seed ^ (seed >> 30)) * _FIRST) & _MASK
    seed = ((seed ^ (seed >> 27)) * _SECOND) & _MASK
    return (seed ^ (seed >> 31)) >> 1


@contextmanager
def restored(*generators: torch.Generator) -> Iterator[None]:
    """Restore the states of these random streams at the end of the block."""
    with turn:  # between steps of other threads
        states = [generator.get_state() for generator in generators]
    try:
        yield
    finally:
        with turn:
            for generator, state in zip(generators, states, strict=True):
                generator.set_state(state)


def generators_of(*devices: torch.device) -> tuple[torch.Generator, ...]:
    """The CPU's random generator, and that of each of these devices."""
    generators = [torch.default_generator]
    for device in dict.fromkeys(devices):
        # Each accelerator but MPS has them.
        of_devices = getattr(getattr(torch, device.type, None), "default_generators", None)
        if device.type == "mps":
            generators.append(torch_private.mps_generator())
        elif of_devices:
            generators.append(of_devices[device.index or 0])
    return tuple(generators)


def _after_fork() -> None:
    """Let a child process take turns, whatever a thread of its parent was doing."""
    global turn
    turn = threading.RLock()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_after_fork)
