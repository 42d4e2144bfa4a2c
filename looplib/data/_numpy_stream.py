"""numpy's global random stream: save it, restore it and seed it for each batch.

`numpy.random.get_state` copies 624 words one by one, which takes 25 us, and 8 more for the list that `set_state` reads
best. The words are therefore copied as the bytes they are.
"""

from __future__ import annotations

import struct
import sys
import threading
from ctypes import memmove, string_at
from functools import cache
from typing import Any

from looplib._core import interrupts as _interrupts

_LAYOUT = struct.Struct("624Ii")  # of a Mersenne Twister: its words, and the position of the next one


def save() -> Any:
    """The state of the stream, which is unchanged; None if numpy is not imported."""
    if not (numpy := sys.modules.get("numpy")):
        return None
    source = numpy.random.get_bit_generator() if hasattr(numpy.random, "get_bit_generator") else None  # before 1.24
    if type(source) is not numpy.random.MT19937 or not _layout_is_known():
        return _slow_state(numpy)
    thread = threading.get_ident()
    _interrupts.begin_hold(thread)
    try:
        words = _words(source)
        # Normal numbers are made in pairs, and one is kept for the next call. Only a draw tells if there is one now.
        normal = numpy.random.standard_normal()
        if _words(source) != words:
            numpy.random.standard_normal()  # the other of this pair
            _put(source, words)
            return source, words
        state = _slow_state(numpy) | {"has_gauss": 1, "gauss": normal}
        numpy.random.set_state(state)
        return state
    finally:
        _interrupts.end_hold(thread)


def restore(saved: Any) -> None:
    """Restore what `save` returned."""
    numpy = sys.modules["numpy"]
    if isinstance(saved, dict):
        numpy.random.set_state(saved)
        return
    source, words = saved
    if numpy.random.get_bit_generator() is source:
        numpy.random.seed(0)  # no normal number is kept afterwards
        _put(source, words)
    else:  # numpy refuses this state if the new generator is of another kind
        *key, position = _LAYOUT.unpack(words)
        numpy.random.set_state(("MT19937", key, position, 0, 0.0))


def seed(number: int) -> None:
    """Seed the stream, if numpy is imported."""
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(number)


def _slow_state(numpy: Any) -> dict[str, Any]:
    state: dict[str, Any] = numpy.random.get_state(legacy=False)
    if state["bit_generator"] == "MT19937":
        state["state"]["key"] = state["state"]["key"].tolist()  # numpy reads its own array in 25 us, and a list in 1
    return state


@cache
def _layout_is_known() -> bool:
    """True if the state of a Mersenne Twister lies in memory as this file expects."""
    made = sys.modules["numpy"].random.MT19937(0)
    state = made.state["state"]
    return _LAYOUT.pack(*state["key"].tolist(), state["pos"]) == _words(made)


def _words(source: Any) -> bytes:
    with source.lock:
        return string_at(source.ctypes.state_address, _LAYOUT.size)


def _put(source: Any, words: bytes) -> None:
    with source.lock:
        memmove(source.ctypes.state_address, words, _LAYOUT.size)
