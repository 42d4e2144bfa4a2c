"""Progress bar: position and length from the state, the loss from the metrics that the loop passes to it.

The loss is on the device, and reading it waits for the device, so it is read only when tqdm redraws, about ten times
a second.
"""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any, Generic, TypeVar

from torch import Tensor

from looplib._core.checks import check_batches, check_type
from looplib._core.ranks import is_first
from looplib.metrics._mean import Mean, compute
from looplib.types import TrainState

T = TypeVar("T")


class progress(Generic[T]):
    """Progress bar (tqdm) around the batches of an epoch: position, rate and loss.

    >>> import looplib as ll
    >>> state = ll.TrainState(epoch=2, batch=1, epoch_length=3)
    >>> bar = ll.progress(["b", "c"], state)
    >>> for batch in bar:
    ...     metrics = {"loss": ll.Mean(0.21168)}  # in a loop: state, metrics = train_step(state, batch)
    ...     bar.show(metrics)

    shows, in a terminal or as a widget in a notebook:

        epoch 3: 100%|██████████| 3/3 [00:00<00:00, 61.02it/s, loss=0.2117]

    Without `bar.show(metrics)` the bar has no loss, and `for batch in ll.progress(loader(state), state)` will do. In a
    notebook the bars of a cell, one for each epoch, are one output of it below each other, since JupyterLab shows no
    more than 50 outputs of a cell and would lose what is printed behind them.

    A batch counts as done when the next one is asked for; one whose loop body was left by `break` or an error
    does not, as in tqdm. The bar ends with the batches, with an error or interrupt, when the loop is left, or
    by `close()`.

    Args:
        batches: what is left of the epoch, such as `loader(state)`.
        state: the state that the batches begin at: `state.batch` of `state.epoch_length` are done (of an
            unknown number for a stream). `state.epoch` is shown counted from 1.
        desc: text before the bar, in place of "epoch 3".
        step: a compiled step; the seconds that it took to compile while the bar was there are shown behind the loss.
        tqdm_options: any other option of tqdm, such as `leave=False`, `mininterval=1.0` (seconds between two
            redraws), or `disable=None` (no bar unless in a terminal).

    `len()` is the number of batches from the state's position to the end of its epoch.

    Raises:
        TypeError: `batches` cannot be iterated over; `step` is no step; `len()` of a stream.
    """

    def __init__(
        self,
        batches: Iterable[T],
        state: TrainState,
        *,
        desc: str | None = None,
        step: Callable[..., Any] | None = None,
        **tqdm_options: Any,
    ) -> None:
        check_batches("progress", batches, "ll.progress(loader(state), state)")
        if step is not None and not callable(step):
            raise TypeError(f"step is a {type(step).__name__}; give the step that the loop calls, or leave it out")
        self._left = None if state.epoch_length is None else state.epoch_length - state.batch
        position = {"initial": state.batch, "total": state.epoch_length}
        # With miniters=1 tqdm checks the clock at every batch (about 50 ns) and needs no thread to notice
        # that a loop has become slow.
        options = {"miniters": 1, "disable": not is_first(), **position, **tqdm_options}
        self._text = _Text(step)
        title = f"epoch {state.epoch + 1}" if desc is None else desc
        self._bar = _bar_class()(text=self._text, desc=title, **options)
        self._batches = iter(batches)
        self._given = False

    def __len__(self) -> int:
        if self._left is None:
            raise TypeError("progress over a stream has no length: state.epoch_length is None")
        return self._left

    def __iter__(self) -> Iterator[T]:
        return _Loop(self)

    def __next__(self) -> T:
        try:
            if self._given:
                self._bar.update(1)
            batch = next(self._batches)
        except BaseException:
            self.close()
            raise
        self._given = True
        return batch

    def show(self, metrics: Mapping[str, Any]) -> None:
        """Show the loss of these metrics from the next redraw on.

        >>> import looplib as ll
        >>> bar = ll.progress([1], ll.TrainState(epoch_length=1))
        >>> for batch in bar:
        ...     bar.show({"loss": ll.Mean(0.5)})

        Pass the metrics that the train step returned for the current batch. They stay on their device until the bar
        is redrawn, so a call takes less than a microsecond. For a stack (`vmap_step`), the bar shows the mean over
        the members whose loss is finite.

        Raises:
            TypeError: `metrics` is not a mapping.
            ValueError: `metrics` has no `loss`.
        """
        check_type("bar.show got", metrics, Mapping, "give the metrics that the train step returned")
        if "loss" not in metrics:
            raise ValueError(f"bar.show shows the loss, and these metrics have {', '.join(metrics) or 'nothing'}")
        self._text.metrics = metrics

    def close(self) -> None:
        """Draw the bar a last time and release the batches, as leaving the loop does."""
        self._batches = iter(())
        self._bar.close()
        self._text.metrics = None


class _Loop(Generic[T]):
    """Iterator held by the `for` statement: it is deleted when the loop is left, even if the bar is still referenced."""

    def __init__(self, bar: progress[T]) -> None:
        self._progress = bar
        self._begun = False

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        self._begun = True
        return next(self._progress)

    def __del__(self) -> None:
        if self._begun:
            self._progress.close()


class _Text:
    """Text behind the bar: the loss, and the seconds that the step spent compiling."""

    def __init__(self, step: Any) -> None:
        self.metrics: Mapping[str, Any] | None = None
        self.loss: str | None = None
        self._compiler = getattr(step, "compiler", None)
        self._compiled = self._seconds()
        self._thread = threading.get_ident()

    def _seconds(self) -> float:
        seconds: float = getattr(self._compiler, "seconds", 0.0)
        return seconds

    def read(self) -> None:
        """Copy the loss to the CPU.

        This must not happen on another thread (tqdm.write redraws in its caller's), which has a different current
        stream and would read a tensor that is not written yet.
        """
        if self.metrics is not None and threading.get_ident() == self._thread:
            metrics, self.metrics = self.metrics, None  # only once, even if it fails: closing the bar reads again
            self.loss = f"loss={_loss_of(metrics):.4g}"

    def behind(self, postfix: str | None) -> str | None:
        spent = self._seconds() - self._compiled
        parts = [self.loss, postfix, f"compiling took {spent:.0f} s" if spent else None]
        return ", ".join(part for part in parts if part) or None


def _loss_of(metrics: Mapping[str, Any]) -> float:
    """The loss, or for a stack, the mean over the members whose loss is finite."""
    loss = metrics["loss"]
    loss = loss.compute() if hasattr(loss, "compute") else loss
    if isinstance(loss, Tensor) and loss.numel() > 1:
        finite = loss[loss.isfinite()]
        loss = (finite if len(finite) else loss).mean()
    return compute({"loss": Mean(loss)})["loss"]


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
        place = (shell, shell.execution_count)
        if place == self._place:
            self._box.children = (*self._box.children, widget)
        else:
            self._place, self._box = place, VBox([widget])
            display(self._box)  # type: ignore[no-untyped-call, unused-ignore]

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
        monitor_interval = 0  # no monitor thread: see miniters above

        def __init__(self, text: _Text, **options: Any) -> None:
            self._text = text
            shared = of_widgets and options.get("display", True) and not options.get("delay")
            super().__init__(**options, **({"display": False} if shared else {}))
            self._shared = shared and not self.disable
            if self._shared:
                output.add(self.container)

        # Not in `format_dict` or `display`: tqdm calls these with its lock held, and an error or interrupt
        # while they wait for a device would leave it locked.
        def refresh(self, nolock: bool = False, lock_args: tuple[Any, ...] | None = None) -> Any:
            self._read()
            return super().refresh(nolock=nolock, lock_args=lock_args)

        def close(self) -> None:
            # A failed device has already raised elsewhere; the bar keeps its last loss.
            with suppress(RuntimeError):
                self._read()
            super().close()
            if getattr(self, "_shared", False) and not self.leave and not (self.total and self.n < self.total):
                output.remove(self.container)

        def _read(self) -> None:
            if not getattr(self, "disable", True):
                self._text.read()

        @property
        def format_dict(self) -> dict[str, Any]:
            values: dict[str, Any] = super().format_dict
            return {**values, "postfix": self._text.behind(values["postfix"])}

    return Bar
