"""The iterator that `loader(state)` returns."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Any


class Remaining(Iterator[Any]):
    """Remaining batches of an epoch. `close` ends the workers that read them.

    Attributes:
        first: index of the first batch within the epoch.
        ranks: number of ranks among which each batch is divided.
    """

    __slots__ = ("_batches", "close", "first", "ranks")

    def __init__(self, batches: Generator[Any, None, None], first: int, ranks: int) -> None:
        self._batches, self.close = batches, batches.close
        self.first, self.ranks = first, ranks

    def __iter__(self) -> Iterator[Any]:
        return self._batches

    def __next__(self) -> Any:
        return next(self._batches)
