"""Logging window: metrics of several steps, to be logged together."""

from __future__ import annotations

from dataclasses import dataclass

from looplib.metrics._mean import merge
from looplib.types import Metric, Metrics


@dataclass(frozen=True)
class Window:
    """Logging window: the metrics of several steps together, without waiting for the device.

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

    No checkpoint has it, so log where you save, and a run that goes on begins with an empty one:
    `log_now = ll.every_n_steps(50) | save_now`.

    It is a record that never changes, so an interrupt leaves the old one or the new one, and adding again what was
    added is adding it twice. Records wait in it unmerged until there are 64: a step costs a few operations in 64, and
    a window of any length the memory of 64 steps.

    `metrics()` raises ValueError when nothing was added, or when steps differ in their names.
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
        """Those of all steps together, for `ll.compute`."""
        if not self.steps:
            raise ValueError("the window is empty; add the metrics of a step first: window = window.add(metrics)")
        return merge(*self.merged, *self.waiting)

    def __len__(self) -> int:
        return self.steps
