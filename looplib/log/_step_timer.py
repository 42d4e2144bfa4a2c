"""Step timer: throughput, and the time of each part of a step.

A meter stands around the parts that a loop is made of and leaves their results as they are, so one line adds it and
one line removes it. An accelerator is asked for the times when they are read, and never waited for in between.
"""

from __future__ import annotations

import functools
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any, TypeVar

import torch

from looplib._core.checks import check_batches
from looplib._core.kinds import Made, check_kind, made, mark
from looplib.gradients import check_grad_fn
from looplib.types import GradFn, Optimizer, TrainState

T = TypeVar("T")


_PARTS = ("data", "gradients", "update")


_END = object()


class meter:
    """Step timer: the time of a step, in waiting for data, forward and backward pass, update, and the rest.

    >>> import looplib as ll, torch
    >>> meter = ll.log.meter()
    >>> model, optimizer = torch.nn.Linear(2, 1), ll.optimizer(torch.optim.AdamW, lr=1e-3)
    >>> grad_fn = ll.make_grad_fn(model, lambda model, x: model(x).square().mean())
    >>> train_step = ll.make_train_step(meter.grad_fn(grad_fn), meter.optimizer(optimizer))
    >>> state = ll.init_state(model, optimizer)
    >>> for batch in meter.data(torch.ones(3, 4, 2)):
    ...     state, metrics = train_step(state, batch)
    >>> costs = meter.read()
    >>> list(costs)
    ['step_seconds', 'data_seconds', 'gradients_seconds', 'update_seconds', 'rest_seconds', 'samples_per_second']
    >>> parts = costs["data_seconds"] + costs["gradients_seconds"] + costs["update_seconds"] + costs["rest_seconds"]
    >>> abs(parts - costs["step_seconds"]) < 1e-9
    True

    Each part may be left out, and its time is in the rest then, with logging, evaluation and all else between the
    first call and `read()`. What is wrapped gives the same bits, and states and checkpoints know nothing of it.

    Args:
        tokens: `tokens(batch)`, the tokens in a batch as the gradient function is given it: a number, or a tensor of
            one element, which stays on its device until `read()`.
        device: whose clock to read: that of the current accelerator by default, or of the host if there is none. An
            accelerator works behind the host, so its times are those between events in its own queue, and the time
            for data is that for which it had nothing to do.
    """

    def __init__(
        self,
        *,
        tokens: Callable[[Any], Any] | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        given = (
            torch.accelerator.current_accelerator(check_available=True) if device is None else torch.device(device)
        )
        self._device = None if given is None or given.type == "cpu" else given
        self._count_tokens = tokens
        self._began: float | None = None
        self._clear()

    def _clear(self) -> None:
        self._seconds = dict.fromkeys(_PARTS, 0.0)
        self._calls = dict.fromkeys(_PARTS, 0)
        self._waiting: deque[tuple[str, Any, Any]] = deque()
        self._samples = 0
        self._tokens: Any = 0

    def data(self, batches: Iterable[T]) -> Iterator[T]:
        """The batches, unchanged; the time until each is there counts as that for data.

        >>> import looplib as ll
        >>> list(ll.log.meter().data(["a", "b"]))
        ['a', 'b']

        Raises TypeError for what cannot be iterated over, such as a loader that was not given a state.
        """
        check_batches("meter.data", batches, "meter.data(loader(state))")
        return self._data(batches)

    def _data(self, batches: Iterable[T]) -> Iterator[T]:
        iterator = self._time("data", iter, batches)
        while (batch := self._time("data", next, iterator, _END)) is not _END:
            yield batch

    def grad_fn(self, grad_fn: GradFn) -> GradFn:
        """The same function; its time counts as that for gradients, and its examples as samples.

        It stands around all that makes the gradients of a step (`accumulate`, clipping); within them, what they do
        themselves is in the rest. Raises TypeError for what is no function.
        """
        grad_fn = check_grad_fn(grad_fn, "meter.grad_fn")
        metered = functools.wraps(grad_fn)(functools.partial(self._gradients, grad_fn, _one))
        record = made(grad_fn) or Made("grad_fn", "meter.grad_fn")
        many = record.microbatches
        if many is not None:  # accumulate calls this for all microbatches at once
            many = functools.partial(self._gradients, many, _several)
        return mark(metered, replace(record, microbatches=many))

    def _gradients(
        self, function: Any, parts_of: Any, state: TrainState, batch: Any, *part: Any, **named: Any
    ) -> Any:
        out = self._time("gradients", function, state, batch, *part, **named)
        for piece, gradients in parts_of(batch, out):
            self._samples += gradients.samples
            if self._count_tokens is not None:
                self._tokens = self._tokens + self._count_tokens(piece)
        return out

    def optimizer(self, optimizer: Optimizer) -> Optimizer:
        """The same optimizer; the time of its update counts as that for updates. Its state has the same structure.

        Raises TypeError for what is no `ll.optimizer(...)`.
        """
        check_kind(optimizer, "meter.optimizer", "optimizer")
        return replace(optimizer, update=functools.partial(self._time, "update", optimizer.update))

    def read(self, prefix: str = "") -> dict[str, float]:
        """The costs since the last reading, as floats for a log; then begin anew. An accelerator is waited for.

        Returns:
            `step_seconds`, the time of a step, and its parts `data_seconds`, `gradients_seconds`,
            `update_seconds` and `rest_seconds`; `samples_per_second` if there is a `meter.grad_fn`, and
            `tokens_per_second` if tokens are counted, both of this process alone. A step is an update; without
            `meter.optimizer` it is a call for gradients, or else a batch. The dict is empty if there was none.

        Evaluation between two readings counts as rest. To leave it out, read before it for the log, and after it for
        nothing.
        """
        if self._device is not None:
            torch.accelerator.synchronize(self._device)
        self._fold()
        now = time.perf_counter()
        steps = self._calls["update"] or self._calls["gradients"] or self._calls["data"]
        costs: dict[str, float] = {}
        if steps and self._began is not None:
            elapsed = now - self._began
            costs["step_seconds"] = elapsed / steps
            for part, seconds in self._seconds.items():
                costs[f"{part}_seconds"] = seconds / steps
            # An accelerator's clock is not the host's, and may run ahead by a rounding.
            costs["rest_seconds"] = max(0.0, elapsed - sum(self._seconds.values())) / steps
            if self._calls["gradients"]:
                costs["samples_per_second"] = self._samples / elapsed
                if self._count_tokens is not None:
                    costs["tokens_per_second"] = float(self._tokens) / elapsed
        self._began = now
        self._clear()
        return {prefix + name: value for name, value in costs.items()}

    def _time(self, part: str, function: Callable[..., Any], *args: Any, **named: Any) -> Any:
        start = self._mark()
        if self._began is None:
            self._began = time.perf_counter() if self._device is not None else start
        try:
            out = function(*args, **named)
            self._calls[part] += not (out is _END or function is iter)
            return out
        finally:
            end = self._mark()
            if self._device is None:
                self._seconds[part] += end - start
            else:
                self._waiting.append((part, start, end))
                self._fold()

    def _mark(self) -> Any:
        if self._device is None:
            return time.perf_counter()
        event = torch.Event(self._device, enable_timing=True)
        event.record()
        return event

    def _fold(self) -> None:
        """Add up the times that the device has come by, so that none are held for longer than they must."""
        while self._waiting and self._waiting[0][2].query():
            part, start, end = self._waiting.popleft()
            self._seconds[part] += start.elapsed_time(end) / 1000


def _one(batch: Any, out: Any) -> Iterable[tuple[Any, Any]]:
    return ((batch, out),)


def _several(pieces: Any, outs: Any) -> Iterable[tuple[Any, Any]]:
    return zip(pieces, outs, strict=True)
