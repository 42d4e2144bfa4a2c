"""Logger wrappers: functions from a logger to a logger.

They take means over steps, select and rename values, and keep a logger's failures or delays away from the loop. `safely`
and `in_background` report and count failures; without them, failures are raised.
"""

from __future__ import annotations

import copy
import math
import queue
import threading
import warnings
from collections.abc import Callable, Collection, Mapping
from typing import Any

from torch import Tensor

from looplib._core.checks import check, check_count, check_number
from looplib._core.mappings import fields_of
from looplib._core.records import check_kind, kinds_of_classes
from looplib.distributed import reduce
from looplib.log._loggers import COUNTS, CodedLogger
from looplib.metrics import Window, compute
from looplib.predicates import Predicate
from looplib.types import Logger, TrainState


def rename(logger: Logger, names: Mapping[str, str] | Callable[[str], str]) -> Logger:
    """Rename values on their way to a logger.

    >>> import looplib as ll
    >>> log = ll.log.rename(ll.console(), {"eval/auc": "eval_auc"})
    >>> log(ll.TrainState(step=5), {"train/loss": 0.5, "eval/auc": 0.75})
    step      5  epoch      0  train/loss 0.5         eval_auc 0.75

    To use the names that transformers' Trainer logs, `loss` and `eval_auc`:

    >>> log = ll.log.rename(ll.console(), lambda name: name.removeprefix("train/").replace("/", "_"))
    >>> log(ll.TrainState(step=5), {"train/loss": 0.5, "eval/auc": 0.75})
    step      5  epoch      0  loss 0.5         eval_auc 0.75

    Args:
        logger: the logger to call.
        names: dict of old name -> new name (the others stay), or a function from the old name to the new one.

    The logger raises ValueError if two values would have the same name.
    """
    check_kind(logger, "rename", "logger")
    new_name = names if callable(names) else lambda name: names.get(name, name)

    def write(state: TrainState, values: Mapping[str, Any]) -> None:
        renamed = {new_name(old): value for old, value in values.items()}
        check(len(renamed) == len(values), f"two of {[*values]} would have one name, as only {[*renamed]} are left")
        logger(state, renamed)

    return CodedLogger(write, f"rename({logger!r}, {names!r})")


def select(logger: Logger, names: Collection[str] | Callable[[str], bool]) -> Logger:
    """Filter values on their way to a logger, which is not called if none are left.

    >>> import looplib as ll
    >>> log = ll.log.select(ll.console(), lambda name: name.startswith("eval/"))
    >>> log(ll.TrainState(step=5), {"train/loss": 0.5})
    >>> log(ll.TrainState(step=9), {"train/loss": 0.5, "eval/auc": 0.75})
    step      9  epoch      0  eval/auc 0.75
    >>> log = ll.log.select(ll.console(), ["train/loss", "eval/auc"])

    Args:
        logger: the logger to call.
        names: list or set of names to keep, or a function `name -> bool`.

    Raises:
        TypeError: `names` is a single string.
    """
    check_kind(logger, "select", "logger")
    several = f"select takes several names, or a predicate, and found the str {names!r}; write [{names!r}]"
    check(not isinstance(names, str), several, TypeError)
    passes: Callable[[str], bool] = names if callable(names) else names.__contains__

    def write(state: TrainState, values: Mapping[str, Any]) -> None:
        if passed := {name: value for name, value in values.items() if passes(name)}:
            logger(state, passed)

    return CodedLogger(write, f"select({logger!r}, {names!r})")


def windowed(logger: Logger, when: Predicate, prefix: str = "") -> Logger:
    """Log means over several steps: a logger to call with the metrics of every step.

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

    Use a `Window` instead to add values of your own to the line, or to save between two lines: a window in `state.extra` is
    part of checkpoints, and this one is not, so a resumed run starts with an empty one.

    Args:
        logger: the logger that gets the means.
        when: predicate that is asked after each step.
        prefix: string put before each name, as for `ll.compute`.

    A name that only some steps of a window have is averaged over these, as by a `Window`. Metrics of a skipped update, which
    are often not finite, count like the others: to leave them out, write `if not state.skipped: log_metrics(state, metrics)`.
    """
    check_kind(logger, "windowed", "logger")
    check_kind(when, "windowed", "predicate")
    window = Window()

    def add(state: TrainState, metrics: Mapping[str, Any]) -> None:
        nonlocal window
        window = window.add(metrics)
        if when(state):
            full, window = window, Window()
            logger(state, compute(reduce(full.metrics()), prefix))

    return CodedLogger(add, f"windowed({logger!r}, {when!r}{f', prefix={prefix!r}' if prefix else ''})")


def every_rank(logger: Logger) -> Logger:
    """Log on every rank instead of only the first.

    >>> import looplib as ll, tempfile
    >>> folder = tempfile.mkdtemp()
    >>> log = ll.log.every_rank(ll.jsonl(f"{folder}/log-{ll.distributed.rank()}.jsonl"))
    >>> log(ll.TrainState(step=5), {"train/loss": 0.5})

    Give each rank its own file. For a logger inside another, write `ll.tee(ll.log.every_rank(...), ...)`.

    Args:
        logger: one of looplib's loggers, such as `jsonl`. Your own functions already write in each process.

    Raises:
        TypeError: `logger` is not a logger that writes only in the first process.
    """
    check_kind(logger, "every_rank", "logger")
    if not (isinstance(logger, CodedLogger) and logger.first_rank):
        raise TypeError(
            f"{logger!r} writes in each process as it is: every_rank is for jsonl, console, tracker and "
            "live_plot themselves, inside of what wraps them"
        )
    return CodedLogger(logger.write, f"every_rank({logger!r})")


def safely(logger: Logger) -> Logger:
    """Fault-tolerant logger: its errors do not stop training. The first one is a warning, and each call is tried again.

    >>> import looplib as ll, warnings
    >>> def server(state, values):
    ...     raise ConnectionError("no route to it")
    >>> log = ll.log.safely(server)
    >>> with warnings.catch_warnings(record=True) as told:
    ...     warnings.simplefilter("always")
    ...     for step in range(3):
    ...         log(ll.TrainState(step=step), {"train/loss": 0.5})
    >>> [str(warning.message) for warning in told]
    ["<function server at ...> failed at step 0: ConnectionError('no route to it'); training continues, ..."]

    Values of failed calls are lost. Interrupts are not errors and are raised. For a slow logger, use `in_background`.

    Args:
        logger: the logger to call.
    """
    check_kind(logger, "safely", "logger")
    warned = False

    def write(state: TrainState, values: Mapping[str, Any]) -> None:
        nonlocal warned
        try:
            logger(state, values)
        except Exception as error:
            if not warned:
                warned = True
                message = (
                    f"{logger!r} failed at step {state.step}: {error!r}; training continues, each later call is tried "
                    "again, and what cannot be written is lost"
                )
                warnings.warn(message, RuntimeWarning, stacklevel=3)

    return CodedLogger(write, f"safely({logger!r})")


def in_background(logger: Logger, max_pending: int = 1000, *, patience: float = 60.0) -> Background:
    """Background logger: pass each call to a thread, so that a slow disk or a dead server never delays the loop.

    >>> import looplib as ll, tempfile
    >>> path = tempfile.mkdtemp() + "/log.jsonl"
    >>> log = ll.log.in_background(ll.jsonl(path))
    >>> log(ll.TrainState(step=5), {"train/loss": 0.5})
    >>> log.flush()
    True
    >>> ll.log.read_jsonl(path)[0]["train/loss"]
    0.5

    Calls reach the inner logger in order, with a copy of the values (tensors are copied to the CPU) and a state that
    has only counts, so that waiting calls keep no parameters in memory.

    Errors do not stop training: the first one is a warning at the next call, later calls are tried again, and
    `flush()` and `close()` warn about how many were lost. Calls made while `max_pending` calls wait are lost too.

    `flush()` waits for all calls so far. `close()` also ends the thread, which the next call starts again. You need
    not close it, because the end of the process does. A forked process, such as a DataLoader worker, does not inherit
    waiting calls.

    Args:
        logger: the logger to call, in one thread. Use `tee` for several.
        max_pending: number of calls that may wait.
        patience: seconds that `flush` and `close` wait at most. A warning says how many calls still wait; they are
            written later if the process keeps running.

    Raises:
        TypeError, ValueError: `max_pending` is not positive, or `patience` is no finite number of at least 0.
    """
    check_kind(logger, "in_background", "logger")
    check_count("max_pending", max_pending, advice="at least one call must be able to wait: give 1 or more")
    advice = "give the seconds to wait for the last calls, 0 or more"
    check_number("patience", patience, lambda seconds: 0 <= seconds < math.inf, advice)
    return Background(logger, max_pending, patience)


class Background:
    """Logger returned by `in_background`, with `flush` and `close`."""

    def __init__(self, logger: Logger, max_pending: int, patience: float) -> None:
        self._logger, self._max_pending, self._patience = logger, max_pending, patience
        self._thread = threading.Thread()
        # Runs before atexit, which closes what the logger works with (a W&B run), like concurrent.futures.
        threading._register_atexit(self.close)  # type: ignore[attr-defined]  # noqa: SLF001

    def _start(self) -> None:
        self._calls: queue.SimpleQueue[Any] = queue.SimpleQueue()  # has no lock that a signal could leave locked
        self._given = self._dropped = self._failed = self._told = 0
        self._reason = ""  # of the first loss
        self._thread = threading.Thread(target=self._work, args=(self._calls,), name=repr(self), daemon=True)
        self._thread.start()

    def __call__(self, state: TrainState, values: Mapping[str, Any]) -> None:
        copied = {name: _copied(value) for name, value in values.items()}
        if not self._thread.is_alive():  # the first call, one after `close`, or one in a forked process
            self._start()
        self._given += 1
        if self._calls.qsize() < self._max_pending:
            self._calls.put((_counts(state), copied))
        else:
            self._dropped += 1
            self._reason = self._reason or f"at step {state.step}, {self._max_pending} calls were waiting"
        if not self._told:
            self._tell_losses()

    def flush(self) -> bool:
        """Wait until all calls so far are written, and warn about those that are lost. False if it waited too long."""
        if not self._thread.is_alive():
            return True
        reached = threading.Event()
        self._calls.put(reached)
        finished = reached.wait(self._patience)
        if not finished:
            waiting = self._calls.qsize()  # without the call that the thread is busy with, and with `reached`
            message = (
                f"{self._logger!r} has not written {waiting} of {self._given} calls after {self._patience} seconds"
            )
            warnings.warn(message, RuntimeWarning, stacklevel=2)
        self._tell_losses()
        return finished

    def close(self) -> None:
        """Flush and end the thread."""
        if self.flush() and self._thread.is_alive():
            self._calls.put(None)
            self._thread.join()

    def __repr__(self) -> str:
        return f"in_background({self._logger!r}, max_pending={self._max_pending})"

    def _work(self, calls: queue.SimpleQueue[Any]) -> None:
        while (call := calls.get()) is not None:
            if isinstance(call, threading.Event):
                call.set()
                continue
            state, values = call
            try:
                self._logger(state, values)
            except BaseException as error:  # interrupts are only raised in the main thread
                self._reason = self._reason or f"at step {state.step} it failed with {error!r}"
                self._failed += 1
            del call, state, values

    def _tell_losses(self) -> None:
        lost = self._dropped + self._failed
        if lost > self._told:
            self._told = lost
            message = f"{self._logger!r} lost {lost} of {self._given} calls; {self._reason}; training continues"
            warnings.warn(message, RuntimeWarning, stacklevel=3)


kinds_of_classes[Background] = "logger"


def _counts(state: TrainState) -> TrainState:
    """The counts of a state, and the record of its run."""
    return TrainState(**fields_of(state, (*COUNTS, "epoch_length", "seed", "run")))


def _copied(value: Any) -> Any:
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else copy.copy(value)
