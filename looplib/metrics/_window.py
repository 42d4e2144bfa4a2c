"""Logging window: metrics of several steps, logged together."""

from __future__ import annotations

from dataclasses import dataclass

from looplib.metrics._mean import merge
from looplib.types import Metric, Metrics


@dataclass(frozen=True)
class Window:
    """Logging window: collect the metrics of several steps without waiting for the device.

    >>> import looplib as ll
    >>> window = ll.Window()
    >>> window = window.add({"loss": ll.Mean(6.0, 3)})
    >>> window = window.add({"loss": ll.Mean(2.0, 1)})
    >>> len(window), ll.compute(window.metrics(), prefix="train/")
    (2, {'train/loss': 2.0})

    In a loop:

        window = ll.Window()
        for batch in loader(state):
            state, metrics = train_step(state, batch)
            window = window.add(metrics)
            if log_now(state):
                log(state, ll.compute(window.metrics(), prefix="train/"))
                window = ll.Window()

    A window is not part of checkpoints, so log when you save, and a resumed run starts with an empty window:
    `log_now = ll.every_n_steps(50) | save_now`.

    It is an immutable record, so an interrupt leaves either the old window or the new one. Adding the same metrics
    again counts them twice. Up to 64 records wait unmerged: merging costs a few operations every 64 steps, and a
    window of any length takes the memory of 64 steps.

    `metrics()` raises ValueError if nothing was added, or if steps have different names.
    """

    merged: tuple[Metrics, ...] = ()
    waiting: tuple[Metrics, ...] = ()
    steps: int = 0

    def add(self, metrics: Metrics) -> Window:
        """The window with the metrics of one more step."""
        waiting = (*self.waiting, metrics)
        if len(waiting) == 64:
            return Window((merge(*self.merged, *waiting),), (), self.steps + 1)
        return Window(self.merged, waiting, self.steps + 1)

    def metrics(self) -> dict[str, Metric]:
        """Metrics of all steps together, for `ll.compute`."""
        if not self.steps:
            raise ValueError("the window is empty; add the metrics of a step first: window = window.add(metrics)")
        return merge(*self.merged, *self.waiting)

    def __len__(self) -> int:
        return self.steps
