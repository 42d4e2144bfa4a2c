"""What a run costs: time, memory and arithmetic.

A meter stands around the parts that a loop is made of and leaves their results as they are, so one line adds it and
one line removes it. An accelerator is asked for the times when they are read, and never waited for in between.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from looplib._ranks import rank
from looplib.gradients import GradFn
from looplib.metrics import Metric
from looplib.optimizer import Optimizer
from looplib.predicates import Predicate
from looplib.state import TrainState
from looplib.steps import TrainStep

T = TypeVar("T")

_PARTS = ("data", "gradients", "update")
_END = object()


class meter:
    """Where the time of a step goes: to waiting for data, to forward and backward pass, to the update, to the rest.

    >>> import looplib as ll, torch
    >>> meter = ll.meter()
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
        >>> list(ll.meter().data(["a", "b"]))
        ['a', 'b']

        Raises TypeError for what cannot be iterated over, such as a loader that was not given a state.
        """
        if not isinstance(batches, Iterable):
            raise TypeError(
                f"meter.data takes the batches of an epoch, and a {type(batches).__name__} is not iterable; "
                "write meter.data(loader(state))"
            )
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
        if not callable(grad_fn) or isinstance(grad_fn, nn.Module):
            raise TypeError(
                f"meter.grad_fn got a {type(grad_fn).__name__}; give a grad_fn, as ll.make_grad_fn returns"
            )
        metered = functools.wraps(grad_fn)(functools.partial(self._gradients, grad_fn, _one))
        many = getattr(grad_fn, "many", None)
        if many is not None:  # accumulate calls this for all pieces at once
            metered.many = functools.partial(self._gradients, many, _several)  # type: ignore[attr-defined]
        return metered

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
        if not isinstance(optimizer, Optimizer):
            raise TypeError(
                f"meter.optimizer got a {type(optimizer).__name__}; give what ll.optimizer returns, such as "
                "ll.optimizer(torch.optim.AdamW, lr=1e-3)"
            )
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


def memory(*, reset: bool = False, prefix: str = "") -> dict[str, float]:
    """The peak memory of this process, on the host and on the accelerator if there is one, in bytes.

    >>> import looplib as ll
    >>> ll.memory()["host_peak_bytes"] > 1e6
    True

    `host_peak_bytes` is resident memory; `device_peak_bytes` is what torch's allocator had given out on the current
    device. Nothing is waited for.

    Args:
        reset: forget the peaks after reading them, so that each log has that of its own window, and a program's other
            readers of these peaks see the same. The host's can be forgotten on Linux, where `/proc/self/clear_refs`
            may be written; elsewhere it stays that of the process so far.
        prefix: put before each name.

    `host_peak_bytes` is left out on Windows, which tells neither.
    """
    peaks = {}
    host = _host_peak()
    if host is not None:
        peaks[prefix + "host_peak_bytes"] = float(host)
    if torch.accelerator.is_available():
        peaks[prefix + "device_peak_bytes"] = float(torch.accelerator.memory.max_memory_allocated())
        if reset:
            torch.accelerator.memory.reset_peak_memory_stats()
    if reset:
        _forget_host_peak()
    return peaks


def _host_peak() -> int | None:
    try:
        with open("/proc/self/status") as file:
            for line in file:
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    try:
        import resource
    except ImportError:
        return None
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _forget_host_peak() -> None:
    try:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
    except OSError:  # another system, or a container that may not
        pass


def flops(function: Callable[..., Any], *args: Any, **named: Any) -> int:
    """The floating-point operations of one call, by torch's counter: a multiplication with its addition is two.

    >>> import looplib as ll, torch
    >>> model = torch.nn.Linear(20, 10, bias=False)
    >>> grad_fn = ll.make_grad_fn(model, lambda model, x: model(x).square().mean())
    >>> state, batch = ll.init_state(model), torch.ones(8, 20)
    >>> ll.flops(grad_fn, state, batch)  # forward, and backward to the weights: 2 * 8 * 20 * 10 each
    6400

    The function is called once. A gradient function (clipped, accumulated, ...) leaves the state as it was; a train
    step with `donate=True` would spend it. The counter knows matrix products, convolutions and attention, which is
    where the work is, and counts nothing for the rest: an optimizer's update among it. What activation checkpointing
    computes again counts again.

    Args:
        function: what to count.
        args, named: what it is called with.

    Source: `torch.utils.flop_counter.FlopCounterMode`.
    """
    from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop, sdpa_flop

    # torch has no count for its own attention on a CPU, and would leave it out.
    attention = {
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: inspect.unwrap(sdpa_flop),
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: inspect.unwrap(sdpa_backward_flop),
    }
    with FlopCounterMode(display=False, custom_mapping=attention) as counter:
        function(*args, **named)
    return int(counter.get_total_flops())


def utilization(flops: float, seconds: float, peak_flops: float) -> float:
    """The share of a device's peak that a step makes use of (MFU): `flops / seconds / peak_flops`.

    >>> import looplib as ll
    >>> ll.utilization(flops=2e12, seconds=0.01, peak_flops=989e12)  # a step on an H100 in bf16
    0.2022...

    Args:
        flops: operations of a step, from `ll.flops`; those of all ranks, if the peak is that of all.
        seconds: the time of a step, such as `meter.read()["step_seconds"]`.
        peak_flops: operations a second that the device's maker states, for the dtype in use.

    Raises ValueError when `seconds` or `peak_flops` is not above 0.

    Source: Chowdhery et al., "PaLM", 2022, appendix B.
    """
    for name, value in (("seconds", seconds), ("peak_flops", peak_flops)):
        if not value > 0:
            raise ValueError(f"{name} is {value}; give a number above 0")
    return flops / seconds / peak_flops


def profiled(train_step: TrainStep, when: Predicate, directory: str | os.PathLike[str], **options: Any) -> TrainStep:
    """The same step, under `torch.profiler` at chosen steps; a trace is written for each window of them.

    >>> import looplib as ll, os, tempfile, torch
    >>> model, optimizer = torch.nn.Linear(2, 1), ll.optimizer(torch.optim.SGD, lr=0.1)
    >>> grad_fn = ll.make_grad_fn(model, lambda model, x: model(x).square().mean())
    >>> train_step = ll.make_train_step(grad_fn, optimizer)
    >>> directory = tempfile.mkdtemp()
    >>> train_step = ll.profiled(train_step, ll.after_steps(2) & ~ll.after_steps(4), directory)
    >>> state = ll.init_state(model, optimizer)
    >>> for batch in torch.ones(6, 4, 2):
    ...     state, metrics = train_step(state, batch)
    >>> os.listdir(directory)
    ['trace-step2-rank0.json']

    Open the file at https://ui.perfetto.dev or chrome://tracing. The predicate is asked of the state that a step is
    given: `ll.after_steps(2) & ~ll.after_steps(4)` is the third and the fourth step of a run. A window lasts for as
    long as it says yes, with what happens between the steps, and is written when the state that a step returns is out
    of it, when a step fails, or when the program ends. At other steps all that is paid is the predicate.

    Args:
        train_step: from `make_train_step`, wrapped at will.
        when: a predicate, or another pure function of the state.
        directory: where to, made where missing. A file is named by the window's first step, and replaces one of the
            same name.
        options: as `torch.profiler.profile` takes them, such as `record_shapes=True`, `with_stack=True` or
            `profile_memory=True`.

    Raises:
        TypeError: `when` cannot be called, or an option that the profiler does not have (at the first window).
        OSError: the file cannot be written.

    Source: `torch.profiler.profile`.
    """
    if not callable(when):
        raise TypeError(
            f"profiled got a {type(when).__name__} to say when; give a predicate such as ll.every_n_steps(1000)"
        )
    folder = Path(directory).absolute()
    finish: Callable[[], Any] | None = None  # writes the window that is open

    def step(state: TrainState, batch: Any) -> tuple[TrainState, dict[str, Metric]]:
        nonlocal finish
        if not when(state):
            close()
            return train_step(state, batch)
        if finish is None:
            # A profiler has one window here, so there is nothing to accumulate, of which torch 2.11 would warn.
            profiler = torch.profiler.profile(**{"acc_events": True, **options})
            profiler.start()
            path = folder / f"trace-step{state.step}-rank{rank()}.json"
            finish = weakref.finalize(step, _write_trace, profiler, path)
        try:
            with torch.profiler.record_function(f"train_step {state.step}"):
                out = train_step(state, batch)
        except BaseException:
            close()
            raise
        if not when(out[0]):
            close()
        return out

    def close() -> None:
        nonlocal finish
        if finish is not None:
            write, finish = finish, None
            write()

    return step


def _write_trace(profiler: Any, path: Path) -> None:
    profiler.stop()
    path.parent.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(path))
