"""Progress bar: position and length from the state, and the metrics that the loop passes to it.

Metrics are on the device, and reading them waits for the device, so they are read only when tqdm redraws, about ten
times a second.
"""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any, Generic, TypeVar, cast, overload

from torch import Tensor

from looplib._core.checks import check, check_batches, check_optional_count, check_type
from looplib._core.mappings import mapped
from looplib._core.ranks import is_first
from looplib.types import TrainState

T = TypeVar("T")


class progress(Generic[T]):
    """Progress bar (tqdm): epoch, position, time left and the latest metrics, in one bar for a run.

    >>> import looplib as ll
    >>> loader = ll.make_loader(range(6), batch_size=2)
    >>> state, done = ll.TrainState(epoch_length=3), ll.after_epochs(2)
    >>> bar = ll.progress(loader, epochs=2)
    >>> while not done(state):
    ...     for batch in bar(state):
    ...         metrics = {"loss": ll.Mean(0.21168)}  # in a loop: state, metrics = train_step(state, batch)
    ...         bar.show(metrics)
    ...     state = state.replace(epoch=state.epoch + 1)  # as train_step does

    shows, in a terminal or as a widget in a notebook:

        epoch 2/2: 100%|██████████| 6/6 [00:00<00:00, 61.02it/s, loss=0.2117]

    `bar(state)` yields the batches of `loader(state)`. The bar stays visible between epochs, and in a resumed run it
    starts at the state's position. It ends after the last batch of the last epoch, on an error or interrupt, when
    `break` leaves the loop, at the end of a notebook cell, or by `close()`. (Call `close()` before printing to a
    terminal after a run that stopped early.) A finished bar stays in a terminal and disappears from a notebook; pass
    `leave=` to change that.

    `ll.progress(loader(state), state)` is a bar for a single epoch; iterate over it: `for batch in bar`.

    As in tqdm, a batch counts as done when the next one is requested.

    Args:
        batches: the loader, or any function from a state to the batches of its epoch. If you pass a state as well:
            the rest of the epoch, such as `loader(state)`.
        state: for a bar of one epoch: the state at which the batches start.
        epochs: number of epochs in the run. Without it, a run's bar shows no total and no time left. For a run that
            is measured in steps, pass tqdm's `total=steps`.
        desc: text before the bar, instead of "epoch 3/10".
        step: a compiled step. The seconds it spent compiling are shown after the metrics.
        tqdm_options: any other option of tqdm, such as `leave=False`, `mininterval=1.0` (seconds between two
            redraws), or `disable=None` (no bar unless in a terminal).

    `len()` of the bar of an epoch is the number of batches from the state's position to its end.

    Raises:
        TypeError: `batches` is neither a function of the state nor, with a state, iterable; `step` is not callable;
            or `len()` is called for a run or a stream.
    """

    @overload
    def __init__(
        self,
        batches: Callable[[TrainState], Iterable[T]],
        state: None = None,
        *,
        epochs: int | None = None,
        desc: str | None = None,
        step: Callable[..., Any] | None = None,
        **tqdm_options: Any,
    ) -> None: ...

    @overload
    def __init__(
        self,
        batches: Iterable[T],
        state: TrainState,
        *,
        epochs: int | None = None,
        desc: str | None = None,
        step: Callable[..., Any] | None = None,
        **tqdm_options: Any,
    ) -> None: ...

    def __init__(
        self,
        batches: Callable[[TrainState], Iterable[T]] | Iterable[T],
        state: TrainState | None = None,
        *,
        epochs: int | None = None,
        desc: str | None = None,
        step: Callable[..., Any] | None = None,
        **tqdm_options: Any,
    ) -> None:
        check(
            step is None or callable(step),
            f"step is a {type(step).__name__}; give the step that the loop calls, or leave it out",
            TypeError,
        )
        check_optional_count("epochs", epochs, advice="give the number of epochs of the run")
        self._loader: Callable[[TrainState], Iterable[T]] | None = None
        self._epochs, self._desc, self._options = epochs, desc, tqdm_options
        self._text = _Text(step)
        self._bar: Any = None
        self._batches: Iterator[T] = iter(())
        self._left: int | None = None
        self._given = self._between = False
        if state is not None:
            check_batches("progress", batches, "ll.progress(loader(state), state)")
            self._begin(cast(Iterable[T], batches), state)
        elif callable(batches):
            self._loader = batches
        else:
            raise TypeError(
                f"progress takes the loader of a run, and a {type(batches).__name__} is no function of the state; write "
                "bar = ll.progress(loader, epochs=10) and `for batch in bar(state)`, or for a single epoch "
                "ll.progress(loader(state), state)"
            )

    def _begin(self, batches: Iterable[T], state: TrainState) -> None:
        """Start an epoch. In a run, the existing bar continues."""
        length = state.epoch_length
        self._left = None if length is None else length - state.batch
        run_length = (length or 0) if self._loader is not None else 0
        done = state.epoch * run_length + state.batch
        title = self._desc or self._epoch_in_words(state)
        if self._bar is None or self._bar.disable:
            total = length if self._loader is None else run_length * (self._epochs or 0) or None
            self._bar = self._new_bar(title, done, total)
        else:
            if length:
                self._bar.n = self._bar.last_print_n = done
            self._bar.set_description_str(title)
        self._batches = iter(batches)
        self._given = self._between = False

    def _epoch_in_words(self, state: TrainState) -> str:
        return f"epoch {state.epoch + 1}{f'/{self._epochs}' if self._epochs else ''}"

    def _new_bar(self, title: str, done: int, total: int | None) -> Any:
        # With miniters=1 tqdm checks the clock at every batch (about 50 ns) and needs no thread to notice
        # that a loop has become slow.
        options = {"miniters": 1, "disable": not is_first(), "desc": title, "initial": done, "total": total}
        bar = _bar_class()(text=self._text, **(options | self._options))
        if self._loader is not None:
            bar.close_with_the_cell(self.close)
        return bar

    def __call__(self, state: TrainState) -> Iterator[T]:
        """Return the batches of the state's epoch, shown in the run's bar."""
        if self._loader is None:
            raise TypeError(
                "a bar of one epoch is iterated over; for one bar for a run, write ll.progress(loader, epochs=10)"
            )
        self._begin(self._loader(state), state)
        return _Loop(self)

    def __len__(self) -> int:
        check(self._loader is None, "progress of a run has no len()", TypeError)
        over_stream = "progress over a stream has no length: state.epoch_length is None"
        check(self._left is not None, over_stream, TypeError)
        return self._left  # type: ignore[return-value]

    def __iter__(self) -> Iterator[T]:
        advice = "the bar of a run is a function of the state, as the loader: write `for batch in bar(state)`"
        check(self._loader is None, advice, TypeError)
        return _Loop(self)

    def __next__(self) -> T:
        try:
            if self._given:
                self._bar.update(1)
            batch = next(self._batches)
        except BaseException as error:
            if isinstance(error, StopIteration) and self._loader is not None and self._bar.n != self._bar.total:
                self._between = True
                self._bar.refresh()
            else:
                self.close()
            raise
        self._given = True
        return batch

    def show(self, metrics: Mapping[str, Any]) -> None:
        """Show these metrics from the next redraw on, together with earlier ones of different names.

        >>> import looplib as ll
        >>> bar = ll.progress([1], ll.TrainState(epoch_length=1))
        >>> for batch in bar:
        ...     bar.show({"loss": ll.Mean(0.5)})

        Pass the metrics returned by a train step or `ll.evaluate`. Those whose value is a single number are shown.
        They stay on their device until the bar is redrawn, so a call takes less than a microsecond. For a stack
        (`vmap_step`), the bar shows the mean over the members whose value is finite.

        Raises:
            TypeError: `metrics` is not a mapping.
        """
        check_type("bar.show got", metrics, Mapping, "give the metrics that the train step returned")
        self._text.metrics.update(metrics)

    def close(self) -> None:
        """Draw the bar a last time and release the batches, as leaving the loop does."""
        self._batches = iter(())
        if self._bar is not None:
            self._bar.close(finished=self._between)
        self._text.metrics.clear()


class _Loop(Generic[T]):
    """Iterator held by the `for` statement: it is deleted when the loop is left, even if the bar is still referenced."""

    def __init__(self, bar: progress[T]) -> None:
        self._progress = bar
        self._begun = False

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        self._begun = True
        try:
            return next(self._progress)
        except StopIteration:
            self._begun = False  # a run's bar waits for the next epoch
            raise

    def __del__(self) -> None:
        if self._begun:
            self._progress.close()


class _Text:
    """Text behind the bar: the metrics, and the seconds that the step spent compiling."""

    def __init__(self, step: Any) -> None:
        self.metrics: dict[str, Any] = {}  # not read yet
        self._shown: dict[str, str] = {}
        self._compiler = getattr(step, "compiler", None)
        self._compiled = self._seconds()
        self._thread = threading.get_ident()

    def _seconds(self) -> float:
        seconds: float = getattr(self._compiler, "seconds", 0.0)
        return seconds

    def read(self) -> None:
        """Copy the metrics to the CPU.

        This must not happen on another thread (tqdm.write redraws in its caller's), which has a different current
        stream and would read a tensor that is not written yet.
        """
        if self.metrics and threading.get_ident() == self._thread:
            metrics, self.metrics = self.metrics, {}  # only once, even if it fails: closing the bar reads again
            numbers = mapped(_number, metrics)
            self._shown |= {name: f"{name}={number:.4g}" for name, number in numbers.items() if number is not None}

    def behind(self, postfix: str | None) -> str | None:
        spent = self._seconds() - self._compiled
        parts = [*self._shown.values(), postfix, f"compiling took {spent:.0f} s" if spent else None]
        return ", ".join(filter(None, parts)) or None


def _number(metric: Any) -> float | None:
    """Value of a metric with a single number, or for a stack, the mean over the members whose value is finite."""
    value = metric.compute() if hasattr(metric, "compute") else metric
    if not isinstance(value, Tensor):
        return value if isinstance(value, (int, float)) else None
    return _mean_of_finite(value) if value.numel() == max(value.shape, default=1) != 0 else None


def _mean_of_finite(value: Tensor) -> float:
    members = value.detach().cpu().double().flatten()
    finite = members[members.isfinite()]
    return float((finite if len(finite) else members).mean())


class _Output:
    """Output of a notebook cell: its bars in one widget box. The next cell gets a new one."""

    def __init__(self) -> None:
        self._place: tuple[Any, int] | None = None
        self._box: Any = None

    def add(self, widget: Any) -> None:
        from IPython.core.getipython import get_ipython
        from IPython.display import display
        from ipywidgets import VBox  # type: ignore[import-untyped, unused-ignore]

        shell: Any = get_ipython()  # type: ignore[no-untyped-call, unused-ignore]
        cell = (shell, shell.execution_count)
        if cell == self._place:
            self._box.children = (*self._box.children, widget)
        else:
            self._place, self._box = cell, VBox([widget])
            display(self._box)  # type: ignore[no-untyped-call, unused-ignore]

    def at_the_end(self, close: Callable[[], None]) -> None:
        """Call `close` when the cell has finished."""
        events = self._place[0].events  # type: ignore[index]

        def end() -> None:
            events.unregister("post_execute", end)
            close()

        events.register("post_execute", end)

    def remove(self, widget: Any) -> None:
        if self._box is not None:
            self._box.children = tuple(child for child in self._box.children if child is not widget)


# tqdm.auto chooses terminal or notebook, and warns about missing widgets, on import, so import it at first use.
@functools.cache
def _bar_class() -> Any:
    with warnings.catch_warnings():
        # In a notebook without ipywidgets tqdm warns and then draws text bars, which is fine.
        warnings.filterwarnings("ignore", "IProgress not found")
        from tqdm.auto import tqdm
    from tqdm.std import tqdm as tqdm_of_all

    tqdm_of_all.get_lock()  # created here so that all classes share one lock
    of_widgets = hasattr(tqdm, "status_printer") and tqdm.status_printer is not tqdm_of_all.status_printer
    output = _Output()

    class Bar(tqdm):  # type: ignore[misc]
        monitor_interval = 0  # no thread: `progress` gives miniters

        def __init__(self, text: _Text, **options: Any) -> None:
            self._text = text
            shared = of_widgets and options.get("display", True) and not options.get("delay")
            super().__init__(**{"leave": not of_widgets, **options, **({"display": False} if shared else {})})
            self._shared = shared and not self.disable
            if self._shared:
                output.add(self.container)

        # Not in `format_dict` or `display`: tqdm calls these with its lock held, and an error or interrupt
        # while they wait for a device would leave it locked.
        def refresh(self, nolock: bool = False, lock_args: tuple[Any, ...] | None = None) -> Any:
            self._read()
            return super().refresh(nolock=nolock, lock_args=lock_args)

        def close_with_the_cell(self, close: Callable[[], None]) -> None:
            """In a notebook, call `close` when the cell has finished."""
            if self._shared:
                output.at_the_end(close)

        def close(self, finished: bool = False) -> None:
            # A failed device has already raised elsewhere; the bar keeps its last metrics.
            with suppress(RuntimeError):
                self._read()
            super().close()
            shared = getattr(self, "_shared", False)  # missing if tqdm refused its options
            if shared and not self.leave and (finished or not (self.total and self.n < self.total)):
                output.remove(self.container)

        def _read(self) -> None:
            if not getattr(self, "disable", True):
                self._text.read()

        @property
        def format_dict(self) -> dict[str, Any]:
            values: dict[str, Any] = super().format_dict
            return {**values, "postfix": self._text.behind(values["postfix"])}

    return Bar
