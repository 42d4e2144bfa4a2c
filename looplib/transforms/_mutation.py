"""Writes to a donated state, without the intermediate values that nothing needs any more."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def only_live_values_are_kept() -> Iterator[None]:
    """Before a tensor is overwritten, keep only those values computed from it that are used afterwards.

    Inductor computes a value where it is used. Before it overwrites a tensor, it gives memory to each value that has
    been computed from it, the intermediate ones included: about 25 for each parameter of a donated AdamW step, which
    takes most of the time to compile. Values that the graph's interpreter has let go are left out here, about 15.
    """
    from torch._inductor.graph import GraphLowering

    plain = GraphLowering.mark_buffer_mutated

    def mark_buffer_mutated(graph: Any, name: str) -> None:
        if readers := graph.name_to_users.get(name):
            live = {id(value) for value in _flat(graph.env.values())}
            graph.name_to_users[name] = [reader for reader in readers if id(reader) in live]
        plain(graph, name)

    patched: Any = GraphLowering
    patched.mark_buffer_mutated = mark_buffer_mutated
    try:
        yield
    finally:
        patched.mark_buffer_mutated = plain


def _flat(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from _flat(value)
        else:
            yield value
