"""Step timer: throughput, utilization, the time of each part of a step, and the rank that the others wait for.

A step timer wraps the parts of a loop and leaves their results unchanged, so one line adds it and one line removes it. An
accelerator's times are read only when you ask for them; nothing waits for it in between.

Ranks wait for each other while they exchange gradients, within the part called gradients. So that part is as long on a
fast rank as on a slow one, and says nothing about who is slow; the others do.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from statistics import fmean
from typing import Any, TypeVar

import torch

from looplib._core import ranks as _ranks
from looplib._core.checks import check, check_number, check_type, few, separated, warn
from looplib._core.collective import together_with_data
from looplib._core.random import members_of
from looplib._core.records import Made, check_kind, record_of, with_record
from looplib._core.tracing import refuse_in_graph
from looplib._core.trees import map_tensors
from looplib.grads.wrapping import check_grad_fn
from looplib.log._peaks import peak_flops
from looplib.types import GradFn, LossFn, Optimizer, Part, TrainState, TrainStep, check_state

T = TypeVar("T")


_PARTS = ("data", "forward", "gradients", "update", "train_step")
_ALONE = ("data", "forward", "update", "rest")  # in which ranks do not wait for each other


_END = object()

_IN_A_GRAPH = (
    "step_timer has to time a part of a step that is traced into a graph (ll.compile_step, ll.vmap_step, "
    "ll.transforms.differentiable), where the part's Python runs once and not in each step: leave out step_timer.grad_fn, "
    "step_timer.loss_fn and step_timer.optimizer, and time the whole step, "
    "train_step = step_timer.train_step(ll.compile_step(train_step))"
)


def _is_above_0(value: float) -> bool:
    return 0 < value < math.inf


class step_timer:
    """Step timer: the time of a step, split into data, gradients, update, and the rest.

    >>> import looplib as ll, torch
    >>> step_timer = ll.log.step_timer()
    >>> model, optimizer = torch.nn.Linear(2, 1), ll.optimizer(torch.optim.AdamW, lr=1e-3)
    >>> grad_fn = ll.make_grad_fn(model, lambda model, x: model(x).square().mean())
    >>> train_step = ll.make_train_step(step_timer.grad_fn(grad_fn), step_timer.optimizer(optimizer))
    >>> state = ll.init_state(model, optimizer)
    >>> for batch in step_timer.data(torch.ones(3, 4, 2)):
    ...     state, metrics = train_step(state, batch)
    >>> costs = step_timer.read()
    >>> list(costs)
    ['step_seconds', 'data_seconds', 'gradients_seconds', 'update_seconds', 'rest_seconds', 'samples_per_second']
    >>> parts = costs["data_seconds"] + costs["gradients_seconds"] + costs["update_seconds"] + costs["rest_seconds"]
    >>> abs(parts - costs["step_seconds"]) < 1e-9
    True

    You can leave out any part. Its time is then part of the rest, together with logging, evaluation and everything
    else between the first call and `read()`. Wrapped functions return the same values bit for bit, since the step timer
    only reads the clock around them, and states and checkpoints do not know about it.

    The parts of a step that runs as a graph (`compile_step`, `vmap_step`, `differentiable`) cannot be timed: their Python
    runs only while the step is traced. Time the whole step, which gives the same rates and `mfu`:

        train_step = step_timer.train_step(ll.compile_step(train_step))

    The first step takes longer than others, since it builds what all of them use. `step_timer.train_step` leaves it out;
    with the parts, call `read()` after it.

    Args:
        tokens: `tokens(batch)`, number of tokens in a batch as passed to the gradient function, or to the whole step: a
            number, or a tensor with one element, which stays on its device until `read()`.
        flops: number of floating-point operations in one call of the gradient function, as counted by `count_flops`. Give a
            function `flops(batch)` if batches differ in size or length; like `tokens`, it may return a tensor. For a stack,
            `flops` and `tokens` are those of one member.
        peak: operations per second of this process's device, for `mfu`. Defaults to `peak_flops(device)`, in bfloat16; give
            the number for another dtype, or for a device that is not known.
        device: device whose clock to use. Defaults to the current accelerator, or the CPU if there is none. An
            accelerator runs asynchronously, so its times are measured between events in its queue, and the data time
            is the time that it was idle.

    Raises:
        TypeError: `tokens` is not a function, or `flops` neither a number nor a function.
        ValueError: `flops` or `peak` is not above 0 and finite.
        UntraceableError: from the first step, if a part of it is timed and the step runs as a graph.

    Source of `mfu`: model FLOPs utilization, Chowdhery et al., "PaLM", 2022, appendix B.
    """

    def __init__(
        self,
        *,
        tokens: Callable[[Any], Any] | None = None,
        flops: float | Callable[[Any], Any] | None = None,
        peak: float | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        chosen = (
            torch.accelerator.current_accelerator(check_available=True) if device is None else torch.device(device)
        )
        self._device = None if chosen is None or chosen.type == "cpu" else chosen
        check(tokens is None or callable(tokens), f"tokens is {tokens!r}; give a function of the batch", TypeError)
        advice = "give a number above 0, such as"
        if not (flops is None or callable(flops)):
            check_number(
                "flops",
                flops,
                _is_above_0,
                f"{advice} count_flops(grad_fn, state, batch), or a function of the batch",
            )
        if peak is not None:
            check_number("peak", peak, _is_above_0, f"{advice} 312e12 for an A100 in bfloat16")
        self._count_tokens = tokens
        self._count_flops = flops
        self._peak = peak_flops(self._device or "cpu") if peak is None else peak
        self._sizes: list[int] = []  # numbers of samples that batches have had
        self._wrapped: set[str] = set()  # the methods that have wrapped something
        self._restart(None)

    def _restart(self, began: float | None) -> None:
        """Forget all times and counts. They begin at this time, or with the first call."""
        self._began = began
        self._seconds = dict.fromkeys(_PARTS, 0.0)
        self._calls = dict.fromkeys(_PARTS, 0)
        self._events: list[tuple[str, Any, Any]] = []  # of an accelerator, until they are read
        self._samples = 0
        self._tokens: Any = 0
        self._flops: Any = 0

    def data(self, batches: Iterable[T]) -> Iterator[T]:
        """Time data loading: yield the batches unchanged and measure the wait for each.

        >>> import looplib as ll
        >>> list(ll.log.step_timer().data(["a", "b"]))
        ['a', 'b']

        Args:
            batches: any iterable of batches, such as `loader(state)`.

        Raises:
            TypeError: `batches` cannot be iterated over, such as a loader without its state.
        """
        check_type(
            "step_timer.data got", batches, Iterable, "give the batches of an epoch: step_timer.data(loader(state))"
        )
        return self._data(batches)

    def _data(self, batches: Iterable[T]) -> Iterator[T]:
        iterator = iter(batches)
        while (batch := self._time("data", True, next, iterator, _END)) is not _END:
            yield batch

    def grad_fn(self, grad_fn: GradFn) -> GradFn:
        """Time a gradient function, and count its samples.

        Put it around everything that computes the gradients of a step (`accumulate`). If it is inside them,
        the time of the outer functions is in the rest. Raises TypeError if `grad_fn` is not a function.
        """
        grad_fn = check_grad_fn(grad_fn, "step_timer.grad_fn")
        self._wraps("grad_fn")

        @functools.wraps(grad_fn)
        def metered(state: TrainState, batch: Any, *part: Any, **named: Any) -> Any:
            out = self._time("gradients", True, grad_fn, state, batch, *part, **named)
            self._count(batch, out.samples)
            return out

        record = record_of(grad_fn) or Made("grad_fn", "step_timer.grad_fn")
        return with_record(metered, record._replace(microbatches=None))  # accumulate calls it for each

    def _count(self, batch: Any, samples: int, members: int = 1) -> None:
        """Count a batch, which this many members of a stack have computed with."""
        self._samples += members * samples
        if self._count_tokens is not None:
            self._tokens = self._tokens + members * self._count_tokens(batch)
        if self._count_flops is not None:
            self._flops = self._flops + members * self._flops_of(batch, samples)

    def _flops_of(self, batch: Any, samples: int) -> Any:
        """Operations of one call. A number is that of batches of one size."""
        if callable(self._count_flops):
            return self._count_flops(batch)
        if samples not in self._sizes:
            self._sizes.append(samples)
            if len(self._sizes) == 2:
                warn(
                    f"step_timer has one number of flops for batches of {self._sizes[0]} and of {samples} samples, so the "
                    "utilization is not right for one of them: give a function of the batch, flops=lambda batch: ..."
                )
        return self._count_flops

    def loss_fn(self, loss_fn: LossFn) -> LossFn:
        """Time a loss function, the forward pass. `gradients_seconds` is then without it.

        >>> import looplib as ll, torch
        >>> step_timer, model = ll.log.step_timer(), torch.nn.Linear(2, 1)
        >>> grad_fn = ll.make_grad_fn(model, step_timer.loss_fn(lambda model, x: model(x).square().mean()))
        >>> gradients = step_timer.grad_fn(grad_fn)(ll.init_state(model), torch.ones(4, 2))
        >>> list(step_timer.read())[:4]
        ['step_seconds', 'data_seconds', 'forward_seconds', 'gradients_seconds']

        Put it around everything that computes the loss (`autocast`, `recompute`), inside `make_grad_fn`. Raises TypeError
        if `loss_fn` is not a function of a model and a batch.
        """
        check_kind(loss_fn, "step_timer.loss_fn", "loss_fn")
        self._wraps("loss_fn")

        @functools.wraps(loss_fn)
        def metered(model: Any, batch: Any) -> Any:
            return self._time("forward", True, loss_fn, model, batch)

        return metered

    def optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Time an optimizer's update. The structure of its state does not change.

        Raises TypeError if `optimizer` is not an `ll.optimizer(...)`.
        """
        check_kind(optimizer, "step_timer.optimizer", "optimizer")
        self._wraps("optimizer")
        parts = {name: self._timed(part) for name, part in optimizer.parts.items()}
        return replace(optimizer, parts=parts)

    def _timed(self, part: Part) -> Part:
        """A part whose halves are timed. The writing of weights counts the updates."""

        def timed(half: Callable[..., Any] | None, counts: bool) -> Callable[..., Any] | None:
            return half and functools.partial(self._time, "update", counts, half)

        return replace(
            part,
            transform=timed(part.transform, False),
            update_=timed(part.update_, part.role == "weights"),
            for_graphs=part.for_graphs and self._timed(part.for_graphs),  # which refuses
        )

    def train_step(self, train_step: TrainStep) -> TrainStep:
        """Time a whole train step, and count its samples: for steps that run as graphs, whose parts cannot be timed.

        >>> import looplib as ll, torch
        >>> model, optimizer = torch.nn.Linear(2, 1), ll.optimizer(torch.optim.AdamW, lr=1e-3)
        >>> grad_fn = ll.make_grad_fn(model, lambda model, x: model(x).square().mean())
        >>> flops = ll.log.count_flops(grad_fn, ll.init_state(model), torch.ones(4, 2))
        >>> step_timer = ll.log.step_timer(flops=flops, peak=1e11)
        >>> compiled_step = ll.compile_step(ll.make_train_step(grad_fn, optimizer), backend="eager")
        >>> train_step = step_timer.train_step(compiled_step)
        >>> state = ll.init_state(model, optimizer)
        >>> for batch in step_timer.data(torch.ones(3, 4, 2)):
        ...     state, metrics = train_step(state, batch)
        >>> list(step_timer.read())[:4]
        ['step_seconds', 'data_seconds', 'train_step_seconds', 'rest_seconds']

        The time of its first call, in which the step is traced and compiled, is left out, and so is what was timed before
        it. A later batch of a new shape is compiled within the time that `read` reports.

        The samples are those of the returned state (`batch_samples`); if it counts none, there is no
        `samples_per_second`. A step of a stack (`vmap_step`) counts the samples,
        `tokens` and `flops` of one member as many times as there are members; with `own_batches=True`, functions of the
        batch get that of the first member. What members compute once for all of them (frozen parameters that they share)
        counts for each.

        Args:
            train_step: a train step, compiled or not, or a function of your own around one of a single state.

        Raises:
            TypeError: `train_step` is a different function.
            ValueError: this step timer has wrapped parts of a step, whose samples would count twice; or, from a step, a
                function of your own is around that of a stack.
        """
        check_kind(train_step, "step_timer.train_step", "train_step")
        self._wraps("train_step")
        record = record_of(train_step)
        compiler = None if record is None or record.spec is None else record.spec.compiler
        is_first = True

        @functools.wraps(train_step)
        def metered(state: TrainState, batch: Any) -> Any:
            nonlocal is_first
            check_state(state, "step_timer.train_step(train_step)(state, batch)")
            members = members_of(state.seed)
            check(
                compiler is not None or not isinstance(state.seed, tuple),
                "step_timer.train_step got a function around the step of a stack, and does not know whether members have "
                "batches of their own: put it directly around, step_timer.train_step(ll.vmap_step(train_step))",
            )
            out = self._time("train_step", True, train_step, state, batch)
            if is_first:
                self._restart(self._now())
                is_first = False
            else:
                if getattr(compiler, "own_batches", False):
                    batch = map_tensors(lambda tensor: tensor[0], batch)
                self._count(batch, out[0].batch_samples, members)
            return out

        return metered

    def _wraps(self, method: str) -> None:
        """Record that a method wraps something. Raises ValueError if what it times would be timed twice."""
        self._wrapped.add(method)
        parts = [f"step_timer.{name}" for name in ("grad_fn", "loss_fn", "optimizer") if name in self._wrapped]
        check(
            not (parts and "train_step" in self._wrapped),
            f"step_timer.train_step times a whole step, and {few(parts)} of the same timer a part of one, so both would "
            "count twice: leave one out, or make another ll.log.step_timer() for it",
        )

    def read(self, prefix: str = "") -> dict[str, float]:
        """Return the times since the last reading, as floats for a log, and reset. Waits for the accelerator.

        Args:
            prefix: string put before each name, as for `ll.compute`.

        Returns:
            `step_seconds`, the time of a step, and its parts `data_seconds`, `gradients_seconds`, `update_seconds`
                and `rest_seconds`; `forward_seconds` with `step_timer.loss_fn`; `samples_per_second` with `step_timer.grad_fn`,
                and `tokens_per_second` if tokens are counted, both for this process alone. With `flops=` and
                `step_timer.grad_fn`, also `flops_per_second` of this process's device, and `mfu`, model FLOPs utilization:
                their share of the device's peak, from 0 to 1. There is no `mfu` for a device whose peak is not known, such as a
                CPU. A step is an update; without `step_timer.optimizer`, it is a call for gradients, or otherwise a batch. The
                dict is empty if there were no steps. With `step_timer.train_step`, a step is a call of it; it has
                `train_step_seconds` in place of the times of gradients and update, and the same rates.

        Evaluation between two readings counts as rest, and lowers all rates. To leave it out, call `read` before it for the
        log and after it to reset.
        """
        prefix = separated(prefix)
        now = self._now()
        for part, start, end in self._events:
            self._seconds[part] += start.elapsed_time(end) / 1000
        whole = self._calls["train_step"]
        steps = whole or self._calls["update"] or self._calls["gradients"] or self._calls["data"]
        costs: dict[str, float] = {}
        if steps and self._began is not None:
            elapsed = now - self._began
            if self._calls["gradients"]:  # a forward pass is within
                self._seconds["gradients"] -= self._seconds["forward"]
            # An accelerator's clock differs from the CPU's and may be ahead by a rounding error.
            rest = max(0.0, elapsed - sum(self._seconds.values()))
            seconds = {"step": elapsed, **self._seconds, "rest": rest}
            absent = {"gradients", "update"} if whole else {"train_step"}
            if not self._calls["forward"]:
                absent.add("forward")
            costs = {
                f"{prefix}{part}_seconds": total / steps for part, total in seconds.items() if part not in absent
            }
            if whole or self._calls["gradients"]:
                if self._samples:  # which the states of a loop of your own may not count
                    costs[f"{prefix}samples_per_second"] = self._samples / elapsed
                if self._count_tokens is not None:
                    costs[f"{prefix}tokens_per_second"] = float(self._tokens) / elapsed
                if self._count_flops is not None:
                    costs[f"{prefix}flops_per_second"] = rate = float(self._flops) / elapsed
                    if self._peak is not None:
                        costs[f"{prefix}mfu"] = rate / self._peak
        self._restart(now)
        return costs

    def _now(self) -> float:
        """The time, when the accelerator has done its work."""
        if self._device is not None:
            torch.accelerator.synchronize(self._device)
        return time.perf_counter()

    def _time(self, part: str, counts: bool, function: Callable[..., Any], /, *args: Any, **named: Any) -> Any:
        """Call a function and add its time to that of a part, whose calls are counted if `counts`."""
        refuse_in_graph(_IN_A_GRAPH)
        if self._began is None:
            self._began = time.perf_counter()
        start = self._mark()
        try:
            out = function(*args, **named)
            self._calls[part] += counts and out is not _END
            return out
        finally:
            end = self._mark()
            if self._device is None:
                self._seconds[part] += end - start
            else:
                self._events.append((part, start, end))

    def _mark(self) -> Any:
        if self._device is None:
            return time.perf_counter()
        event = torch.Event(self._device, enable_timing=True)
        event.record()
        return event


def slowest_rank(costs: Mapping[str, float]) -> dict[str, Any]:
    """Straggler: the rank that the others wait for, and the part of a step in which it is slow.

    >>> import looplib as ll
    >>> costs = {"data_seconds": 0.02, "forward_seconds": 0.1, "update_seconds": 0.01, "rest_seconds": 0.0}
    >>> ll.log.slowest_rank(costs)  # with one process, nobody waits
    {'slow_rank': 0, 'slow_part': 'data', 'slow_seconds': 0.0}

    All ranks call it with what their meters have read. It compares what each rank does alone: loading, the forward pass
    (with `step_timer.loss_fn`), the update and the rest. The rank whose sum of these is largest is the one that the others
    wait for, while they exchange gradients.

    It cannot tell who is slow where ranks meet within such a part: in a forward pass that gathers weights or sends
    activations (FSDP2, tensor parallelism, SyncBatchNorm, DDP that sends the buffers of BatchNorm), in an update like that of
    Muon on shards, or in the rest (evaluation, `ll.distributed.reduce`; read the step timer before them, and after them to
    reset). A rank that is slow in its backward pass alone is not named. Times are means, so ranks that are slow in turn
    do not show.

    Args:
        costs: dict of seconds as returned by `step_timer.read()`, without a prefix.

    Returns:
        `slow_rank`; `slow_part`, the part in which it is furthest above the mean of the other ranks ("data", "forward",
            "update" or "rest"); and `slow_seconds`, by which it is above them in all of these parts together. The same
            on all ranks, as plain values for a log.

    Raises:
        ValueError: the costs have no such parts, or different ones on different ranks.
    """
    seconds = {part: costs[f"{part}_seconds"] for part in _ALONE if f"{part}_seconds" in costs}
    together_with_data().barrier("slowest_rank")
    ranks = _ranks.gather(seconds)
    check(
        seconds and len({*map(tuple, ranks)}) == 1,
        "slowest_rank compares costs of step_timer.read(), without a prefix and with the same names on all ranks, and found "
        f"the parts {', '.join(map(str, map(list, ranks)))}",
    )
    slowest = max(ranks, key=lambda parts: sum(parts.values()))
    rank = ranks.index(slowest)
    others = [parts for parts in ranks if parts is not slowest] or [slowest]
    above = {part: seconds - fmean(parts[part] for parts in others) for part, seconds in slowest.items()}
    return {"slow_rank": rank, "slow_part": max(above, key=above.__getitem__), "slow_seconds": sum(above.values())}


def memory(*, reset: bool = False, prefix: str = "") -> dict[str, float]:
    """Peak memory of this process in bytes, on the CPU and on the accelerator if there is one.

    >>> import looplib as ll
    >>> ll.log.memory()["host_peak_bytes"] > 1e6
    True

    `host_peak_bytes` is resident memory; it is missing where there is no
    `/proc`. `device_peak_bytes` is the memory given out by
    torch's allocator on the current device. Reading them does not wait for the device.

    Args:
        reset: if True, reset the peaks after reading them, so that each log entry covers its own window. The peaks
            are shared by the process, so everything else that reads them is affected too. The CPU's peak can be reset
            where `/proc/self/clear_refs` is writable; elsewhere it is the peak since the process started.
        prefix: string put before each name, as for `ll.compute`.
    """
    peak = _host_peak()
    peaks = {} if peak is None else {"host_peak_bytes": peak}
    if torch.accelerator.is_available():
        peaks["device_peak_bytes"] = float(torch.accelerator.memory.max_memory_allocated())
        if reset:
            torch.accelerator.memory.reset_peak_memory_stats()
    if reset:
        with suppress(OSError), open("/proc/self/clear_refs", "w") as file:
            file.write("5")
    prefix = separated(prefix)
    return {prefix + name: peak for name, peak in peaks.items()}


def _host_peak() -> float | None:
    with suppress(OSError), open("/proc/self/status") as file:
        for line in file:
            if line.startswith("VmHWM:"):
                return float(line.split()[1]) * 1024
    return None
