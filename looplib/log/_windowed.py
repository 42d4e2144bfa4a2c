"""Sink for metrics of steps: means over a window of steps, logged when a predicate says so."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from looplib._core.kinds import check_kind
from looplib.distributed import reduce
from looplib.log._sinks import CodedSink
from looplib.metrics import Window, compute
from looplib.predicates import Predicate
from looplib.types import Sink, TrainState


def windowed(sink: Sink, when: Predicate, prefix: str = "") -> Sink:
    """Log means over several steps: a sink to call with the metrics of every step.

    >>> import looplib as ll
    >>> log_metrics = ll.log.windowed(ll.console(), ll.every_n_steps(2), prefix="train/")
    >>> for step, loss in enumerate([0.9, 0.7, 0.5, 0.3], start=1):
    ...     log_metrics(ll.TrainState(step=step), {"loss": ll.Mean(loss)})
    step      2  epoch      0  train/loss 0.8
    step      4  epoch      0  train/loss 0.4

    In a loop it takes the place of a `Window` and the lines that fill, log and empty it:

        for batch in loader(state):
            state, metrics = train_step(state, batch)
            log_metrics(state, metrics)

    Nothing waits for the device between two lines of the log. On several ranks, all of them call it, and the metrics
    are those of all ranks, as by `ll.distributed.reduce`.

    Use a `Window` instead to add values of your own to the line, or to log before you save: the window is not part of
    checkpoints, so a resumed run starts with an empty one.

    Args:
        sink: the sink that gets the means.
        when: predicate that is asked after each step.
        prefix: string put before each name.

    The sink raises ValueError if the steps of a window have different names.
    """
    check_kind(sink, "windowed", "sink")
    check_kind(when, "windowed", "predicate")
    window = Window()

    def add(state: TrainState, metrics: Mapping[str, Any]) -> None:
        nonlocal window
        window = window.add(metrics)
        if when(state):
            full, window = window, Window()
            sink(state, compute(reduce(full.metrics()), prefix))

    return CodedSink(add, f"windowed({sink!r}, {when!r}{f', prefix={prefix!r}' if prefix else ''})")
