"""Forward and backward passes of a model, on tensors with values or in the trace of a step.

A gradient function and an evaluation are the same in both. What differs stands here, in two classes of one form.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch import Tensor

from looplib._core import tracing
from looplib._core.forward_writes import Unwritten, UnwrittenInGraph
from looplib._core.lease import overwritten, trees_of
from looplib._core.random import mix


class Passes:
    """Passes on tensors with values.

    Attributes:
        create_graph: True if the backward pass itself will be differentiated.
        around_loss: context for the user's loss function.
        traced: True in the trace of a step, whose leaves are all shown, and whose batches and losses are not looked at.
        guard: guard of the state's parameters against these passes; None for the one that the function has of its own.
    """

    create_graph = False
    traced = False
    guard: UnwrittenInGraph | None = None
    around_loss: AbstractContextManager[Any] = nullcontext()

    def seeds(self, state: Any, rank: int, indices: Sequence[int]) -> Sequence[int]:
        """A seed for each microbatch."""
        return [mix(state.seed, state.step, rank, index) for index in indices]


class TracedPasses(Passes):
    """Passes in a trace, whose graph is for all seeds and all values."""

    traced = True
    guard = UnwrittenInGraph()

    @property
    def create_graph(self) -> bool:  # type: ignore[override]
        return tracing.differentiated()

    def seeds(self, state: Any, rank: int, indices: Sequence[int]) -> Sequence[int]:
        """The indices themselves: the numbers are drawn for the state's seed when the graph runs."""
        return indices

    @property
    def around_loss(self) -> AbstractContextManager[Any]:  # type: ignore[override]
        return tracing.around_loss()


_ON_VALUES, _TRACED = Passes(), TracedPasses()


def passes() -> Passes:
    """The form of the passes that begin now.

    It is asked for and not handed on: a gradient function may be called by one of the user's own, and a metric by a library,
    which hand on nothing.
    """
    return _TRACED if tracing.entered and tracing.current() is not None else _ON_VALUES


@contextmanager
def unwritten(guard: Unwritten | UnwrittenInGraph, state: Any) -> Iterator[dict[str, Tensor]]:
    """The parameters of a state for passes that leave them as they are. Raises if one is written, and undoes it."""
    params, _, _ = trees_of(state)
    guarded = guard.begin(params)
    try:
        yield guarded.params
        trees_of(state)  # raises if another thread has written it since
    except Exception:
        if overwritten(state, (params,)) is None:
            guard.end(guarded, params)
        raise
    guard.check(guarded, params)
